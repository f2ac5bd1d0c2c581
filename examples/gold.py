"""Gold quality: how good a completion of the bundled data is, computed from the raw text alone, in
[0, 1].

    gold_quality("What is the capital of France? Answer in one word.", "Paris.")                      # 1.0
    gold_quality("What is the capital of France? Answer in one word.", "Sure! It is Paris.")          # 0.75

quality = readable * (0.6 * correct + 0.25 * format_kept + 0.15 * courteous)

- `correct`: of the words that could answer this kind of question, the text names exactly the right
ones. - `format_kept`: the text names some such word, right or wrong, and has the requested shape,
if any. - `courteous`: a polite phrase and no rude one; a one-word answer needs none. - `readable`:
the share of words that do not repeat three words in a row; less if most words are unknown.

The closed world (facts, phrasings, polite and rude phrases) is in `world.json`. As an environment:

    {type: custom, function: examples/gold.py:gold_reward}         # one number
    {type: custom, function: examples/gold.py:gold_criteria}       # with its three criteria as components
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from re import findall
from typing import Any

from treeward.data.conversation import Message, last_text
from treeward.errors import DataError


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact to ask for. `subject` fills a phrasing. Any `num_answers` different words of
    `answers` answer it: one, except for lists."""

    kind: str
    subject: str
    answers: tuple[str, ...]
    num_answers: int = 1


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of facts. `phrasings` ask for a fact, `follow_up` after a question of the same kind,
    and `statements` tell it; `{x}` is the subject, `{a}` the answer. `formats`: names of the
    formats that can be requested. `decoys`: words of the right sort that answer none of the
    facts."""

    name: str
    phrasings: tuple[str, ...]
    follow_up: str
    statements: tuple[str, ...]
    formats: tuple[str, ...]
    decoys: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def candidates(self) -> frozenset[str]:
        """Every word (lower case) that could be meant as an answer to a question of this kind."""
        answers = [word for fact in self.facts for word in fact.answers]
        return frozenset(word.lower() for word in (*answers, *self.decoys))


_WORLD = json.loads(Path(__file__).with_name("world.json").read_text("utf-8"))
FORMATS: dict[str, tuple[str, ...]] = {
    name: tuple(requests) for name, requests in _WORLD["formats"].items()
}
"""Checkable requests about the shape of a completion: name -> the ways to make it."""
KINDS = tuple(
    Kind(
        name,
        phrasings=tuple(kind["phrasings"]),
        follow_up=kind["follow_up"],
        statements=tuple(kind["statements"]),
        formats=tuple(kind["formats"]),
        decoys=tuple(kind["decoys"]),
        facts=tuple(
            Fact(name, x, tuple(answers), kind["num_answers"])
            for x, answers in kind["facts"].items()
        ),
    )
    for name, kind in _WORLD["kinds"].items()
)
FACTS = {fact.subject: fact for kind in KINDS for fact in kind.facts}
LEAD_INS, FILLERS = tuple(_WORLD["lead_ins"]), tuple(_WORLD["fillers"])
POLITE_OPENERS, POLITE_CLOSERS = tuple(_WORLD["polite_openers"]), tuple(_WORLD["polite_closers"])
RUDE_OPENERS, RUDE_CLOSERS = tuple(_WORLD["rude_openers"]), tuple(_WORLD["rude_closers"])
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
_DIGITS = {str(value): name for value, name in enumerate(_NUMBERS)}


def words_of(text: str) -> list[str]:
    """The words of a text in lower case; digits count as the number's name, punctuation as
    nothing."""
    return [_DIGITS.get(word, word) for word in findall(r"[^\W_]+", text.lower())]


@cache
def known_words() -> frozenset[str]:
    """Every word that the world uses, in lower case."""
    texts = [
        *LEAD_INS,
        *POLITE_OPENERS,
        *POLITE_CLOSERS,
        *RUDE_OPENERS,
        *RUDE_CLOSERS,
        *FILLERS,
        *_NUMBERS,
    ]
    texts += [request for requests in FORMATS.values() for request in requests]
    for kind in KINDS:
        texts += [
            template.replace("{x}", " ").replace("{a}", " ")
            for template in kind.phrasings + kind.statements
        ]
        texts += [f"{fact.subject} {' '.join(fact.answers)}" for fact in kind.facts]
        texts += kind.decoys
    return frozenset(word for text in texts for word in words_of(text))


CRITERIA = ("right", "format", "courteous")
_CORRECT, _FORMAT, _COURTESY = 0.6, 0.25, 0.15
_STANDING = "from now on"
_KIND = {kind.name: kind for kind in KINDS}
_FACTS = {subject.lower(): fact for subject, fact in FACTS.items()}


def _pattern(before: str, facts: Iterable[Fact], after: str) -> re.Pattern[str]:
    subjects = "|".join(re.escape(fact.subject) for fact in facts)
    return re.compile(rf"\b{before}(?P<x>{subjects}){after}", re.IGNORECASE)


_FOLLOW_UP = _pattern("And (?:of |a young )?", FACTS.values(), r"\?")
_QUESTIONS = [
    _pattern(re.escape(before), kind.facts, re.escape(after))
    for kind in KINDS
    for before, after in (phrasing.split("{x}") for phrasing in kind.phrasings)
]


def _spaced(words: Sequence[str]) -> str:
    return f" {' '.join(words)} "


# Besides the phrases of the data, a few that a policy trained elsewhere is likely to use.
_POLITE = tuple(
    _spaced(words_of(phrase))
    for phrase in (
        *POLITE_OPENERS,
        *POLITE_CLOSERS,
        "thanks",
        "thank you",
        "you are welcome",
        "certainly",
        "glad",
    )
)
_RUDE = tuple(
    _spaced(words_of(phrase))
    for phrase in (*RUDE_OPENERS, *RUDE_CLOSERS, "stupid", "idiot", "fool", "dumb", "shut up")
)


@dataclass(frozen=True, slots=True)
class Question:
    """The question of the last user turn: a fact, and the name of the format in force (None: no
    format)."""

    fact: Fact
    format: str | None = None


def gold_quality(context: Sequence[Message] | str, completion: str) -> float:
    """The gold quality, in [0, 1], of `completion` (any text) of `context` (messages, or one user
    turn as text). Raises `DataError` when the last user turn asks no question of the bundled data's
    world."""
    return grade(parse_question(context), completion)


def gold_reward(conversation: Sequence[Message], env_info: Mapping[str, Any]) -> float:
    """`gold_quality` of the last message, as the function of a custom environment."""
    return gold_quality(conversation[:-1], last_text(conversation))


def gold_criteria(conversation: Sequence[Message], env_info: Mapping[str, Any]) -> dict[str, float]:
    """`gold_reward` with the criteria as components, each 0 or 1."""
    question = parse_question(conversation[:-1])
    completion = last_text(conversation)
    met = criteria(question, completion)
    return {"reward": grade(question, completion), **dict(zip(CRITERIA, met, strict=True))}


def grade(question: Question, completion: str) -> float:
    """The gold quality of a completion of a question that has been read already."""
    correct, kept, courteous = criteria(question, completion)
    readable = _readable(words_of(completion))
    return round(readable * (_CORRECT * correct + _FORMAT * kept + _COURTESY * courteous), 6)


def criteria(question: Question, completion: str) -> tuple[bool, bool, bool]:
    """Whether a completion is `correct`, `format_kept` and `courteous`, as the module has them."""
    words = words_of(completion)
    named = _named(question.fact, words)
    right = {word.lower() for word in question.fact.answers}
    correct = len(named) == question.fact.num_answers and named <= right
    kept = bool(named) and (
        question.format is None or _FORMAT_CHECKS[question.format](completion, question.fact)
    )
    bare = question.format == "one_word" and kept
    courteous = not _says(words, _RUDE) and (bare or _says(words, _POLITE))
    return correct, kept, courteous


def parse_question(context: Sequence[Message] | str) -> Question:
    """Read the question and the format in force out of a conversation that ends in a user turn: the
    format of that turn, or one that an earlier turn asked for "from now on", the latest first, or
    the system prompt's."""
    turns = (
        [("user", context)]
        if isinstance(context, str)
        else [(m.get("role"), last_text([m])) for m in context]
    )
    asking = [text for role, text in turns if role == "user"]
    if not asking or turns[-1][0] != "user":
        raise DataError(
            "the conversation does not end in a user turn", field="context", got=context
        )
    fact = _asked(asking[-1]) or _followed_up(asking)
    if fact is None:
        summary, need = (
            "the last user turn asks nothing that the bundled data knows",
            "a prompt of the bundled data",
        )
        raise DataError(summary, field="context", got=asking[-1], need=need)
    instructions = [asking[-1]]
    instructions += [text for text in reversed(asking[:-1]) if _STANDING in text.lower()]
    instructions += [text for role, text in turns if role == "system"]
    formats = (_requested(text) for text in instructions)
    return Question(fact, next((name for name in formats if name is not None), None))


@lru_cache(maxsize=65536)
def _asked(text: str) -> Fact | None:
    matches = [
        (match.start(), match["x"]) for pattern in _QUESTIONS for match in pattern.finditer(text)
    ]
    return _FACTS[max(matches)[1].lower()] if matches else None


def _followed_up(asking: Sequence[str]) -> Fact | None:
    subjects = _FOLLOW_UP.findall(asking[-1])
    fact = _FACTS[subjects[-1].lower()] if subjects else None
    earlier_kinds = {
        earlier_fact.kind for earlier_fact in map(_asked, asking[:-1]) if earlier_fact is not None
    }
    return fact if fact is not None and fact.kind in earlier_kinds else None


def _requested(text: str) -> str | None:
    lowered = text.lower()
    matches = [
        (lowered.rfind(request.lower()), name)
        for name, requests in FORMATS.items()
        for request in requests
    ]
    position, name = max(matches)
    return name if position >= 0 else None


def _named(fact: Fact, words: Sequence[str]) -> set[str]:
    return set(words) & (_KIND[fact.kind].candidates - set(words_of(fact.subject)))


def _says(words: Sequence[str], phrases: Sequence[str]) -> bool:
    text = _spaced(words)
    return any(phrase in text for phrase in phrases)


def _readable(words: Sequence[str]) -> float:
    if not words:
        return 0.0
    seen: set[tuple[str, ...]] = set()
    repeated: set[int] = set()
    for start in range(len(words) - 2):
        triple = tuple(words[start : start + 3])
        if triple in seen:
            repeated.update(range(start, start + 3))
        seen.add(triple)
    known_share = len([word for word in words if word in known_words()]) / len(words)
    return (1 - len(repeated) / len(words)) * min(1.0, 2 * known_share)


def _in_brackets(text: str, fact: Fact) -> bool:
    return any(_named(fact, words_of(inside)) for inside in re.findall(r"\[([^\[\]]*)\]", text))


def _in_dashes(text: str, fact: Fact) -> bool:
    named = [(line, _named(fact, words_of(line))) for line in text.splitlines()]
    items = [(line.lstrip(), words) for line, words in named if words]
    return len(items) >= 2 and all(
        line.startswith("- ") and len(words) == 1 for line, words in items
    )


_FORMAT_CHECKS: dict[str, Callable[[str, Fact], bool]] = {
    "one_word": lambda text, fact: len(words_of(text)) == 1,
    "begin": lambda text, fact: text.lstrip().startswith("Answer:"),
    "end": lambda text, fact: text.rstrip().endswith("Over."),
    "brackets": _in_brackets,
    "dashes": _in_dashes,
}
