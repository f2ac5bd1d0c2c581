"""The closed world of the bundled data: facts, the ways to ask for them, and the phrases around a completion.

    FACTS["France"]        # Fact("capital", "France", ("Paris",))

A `Fact` is one thing that can be asked, a `Kind` a family of facts with its phrasings. All of them are spelt out in
`bundled/world.json`, in a fixed order: the generator drew from these tables, and `gold` reads questions back with them.
No two sentences share three words in a row, and no dressing contains a word that could be an answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from re import findall


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that can be asked.

    `subject` is what fills a phrasing. `answers` are the words that may be given, `num_answers` of them: one, except
    for lists, where any `num_answers` different members will do.
    """

    kind: str
    subject: str
    answers: tuple[str, ...]
    num_answers: int = 1


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of facts.

    `phrasings` ask for a fact and `follow_up` asks for one after a question of the same kind; `{x}` is the subject.
    `statements` tell it; `{a}` is the answer. `formats` are the names of the formats that can be asked for. `decoys`
    are words of the right sort that answer none of the facts.
    """

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


_WORLD = json.loads((Path(__file__).parents[1] / "bundled" / "world.json").read_text("utf-8"))
FORMATS: dict[str, tuple[str, ...]] = {name: tuple(requests) for name, requests in _WORLD["formats"].items()}
"""Checkable requests about the shape of a completion: name -> the ways to make it."""
KINDS = tuple(
    Kind(
        name,
        phrasings=tuple(given["phrasings"]),
        follow_up=given["follow_up"],
        statements=tuple(given["statements"]),
        formats=tuple(given["formats"]),
        decoys=tuple(given["decoys"]),
        facts=tuple(Fact(name, x, tuple(answers), given["num_answers"]) for x, answers in given["facts"].items()),
    )
    for name, given in _WORLD["kinds"].items()
)
FACTS = {fact.subject: fact for kind in KINDS for fact in kind.facts}
LEAD_INS, FILLERS = tuple(_WORLD["lead_ins"]), tuple(_WORLD["fillers"])
POLITE_OPENERS, POLITE_CLOSERS = tuple(_WORLD["polite_openers"]), tuple(_WORLD["polite_closers"])
RUDE_OPENERS, RUDE_CLOSERS = tuple(_WORLD["rude_openers"]), tuple(_WORLD["rude_closers"])
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
_DIGITS = {str(value): name for value, name in enumerate(_NUMBERS)}


def words_of(text: str) -> list[str]:
    """The words of a text in lower case; digits count as the number's name, punctuation as nothing."""
    return [_DIGITS.get(word, word) for word in findall(r"[^\W_]+", text.lower())]


@cache
def known_words() -> frozenset[str]:
    """Every word that the world uses, in lower case."""
    texts = [*LEAD_INS, *POLITE_OPENERS, *POLITE_CLOSERS, *RUDE_OPENERS, *RUDE_CLOSERS, *FILLERS, *_NUMBERS]
    texts += [request for requests in FORMATS.values() for request in requests]
    for kind in KINDS:
        texts += [template.replace("{x}", " ").replace("{a}", " ") for template in kind.phrasings + kind.statements]
        texts += [f"{fact.subject} {' '.join(fact.answers)}" for fact in kind.facts]
        texts += kind.decoys
    return frozenset(word for text in texts for word in words_of(text))
