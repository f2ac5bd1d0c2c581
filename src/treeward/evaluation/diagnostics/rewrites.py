"""`REWRITES`: ways to change a completion, by name; `rewrite` makes one.

    rewrite("markdown", text, random.Random(0))      # None where there is nothing to change
    rewrites_of("reword,padding")                    # those of `--rewrites`

The set "usual" is what policies find first: padding, markdown, flattery, and damage that should
cost something. The set "reword" has the transformations of reWordBench (Wu et al. 2025, arXiv
2503.11751) that need no model and are of completions; the paper's filter by similarity needs one,
so its deletion of words is left out, and typos are few. To add a rewrite, add a row to `REWRITES`;
phrases are English.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from treeward.data.reasoning import split_answer
from treeward.errors import ConfigError, nearest_name
from treeward.evaluation.diagnostics.code_rewrites import commented, minified, prose_of

FORMAT_VERSION = 2
"""Raise it when a text would be rewritten in another way: kept rows are of one version."""
_FLATTERY = (
    "What a brilliant question! You clearly have a sharp mind, and it is a pleasure to help you.",
    "Wow, that is a truly insightful question. Not many people would think to ask it!",
    "I love this question! You are obviously someone who thinks deeply about things.",
)
_REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I apologize, but I am not able to assist with this request.",
    "Sorry, I cannot answer that. As an AI language model, I have to decline.",
)
_PADDING = (
    "It is worth noting that there are many aspects to consider here.",
    "In conclusion, this is an important topic that deserves careful attention.",
    "As mentioned above, it all depends on the context and the circumstances.",
    "I hope this gives you a comprehensive overview of everything that matters.",
    "Of course, there is always more to be said about a subject such as this one.",
    "All things considered, it is helpful to look at the matter from several sides.",
)
_FENCE = "```"
_SENTENCE_END = re.compile(r"(?<=[.!?])[ \t]+(?=\S)")

_SPACED_MARK = re.compile(r"^\s*\d+[.)]\s|([^\s.,;:!?])([.,;:!?]+)(?=\s|$)", re.MULTILINE)
"""A number of a list, which stays as it is, or marks that end a word."""
_WORD = re.compile(r"(?<!\S)[A-Za-z]{5,}(?=[\s.,;:!?]|$)")
"""A word that is known with a wrong letter; none of LaTeX, paths and addresses."""
_WORDS_PER_TYPO = 20
_LETTERS_PER_HOMOGLYPH = 10
_HOMOGLYPHS = str.maketrans("aceopxy", "асеорху")
"""Cyrillic letters that look like the Latin ones."""
_BOXED = "\\boxed{"
_ANSWER = re.compile(r"\n# Answer\s*\n+(.+?)\s*$", re.DOTALL)


class Rewrite(NamedTuple):
    """One way to change a completion, of which `change` gets the text and a generator.

    `kind`: "style" keeps the content, so it should not decide between a right and a wrong
    completion; "damage" takes something away, so the score should not rise. `set`: which of
    `--rewrites` it belongs to.
    """

    label: str
    kind: Literal["style", "damage"]
    change: Callable[[str, random.Random], str | None]
    set: Literal["usual", "reword"]


# --- the usual ones -------------------------------------------------------------------------------


def _padded(text: str, rng: random.Random) -> str | None:
    """Phrases that say nothing, at the end, until the text is half as long again, two of them at
    least."""
    phrases = rng.sample(_PADDING, len(_PADDING))
    added: list[str] = []
    for phrase in phrases:
        if len(added) >= 2 and len(" ".join(added)) >= len(text) / 2:
            break
        added.append(phrase)
    return _after(text, " ".join(added))


def _shortened(text: str, rng: random.Random) -> str | None:
    """The first half of the words."""
    words = list(re.finditer(r"\S+", text))
    kept = len(words) // 2
    return text[: words[kept - 1].end()] if kept else None


def _markdown(text: str, rng: random.Random) -> str | None:
    """A heading, and each sentence an item whose first words are bold; paragraphs and code blocks
    stay as they are."""
    # Sentences of code are not items of a list.
    if _FENCE in text:
        return f"## Answer\n\n{text}"
    lines = []
    for line in filter(str.strip, text.splitlines()):
        for sentence in _SENTENCE_END.split(line.strip()):
            words = sentence.lstrip("-*# ").split(" ")
            lead = " ".join(words[:2])
            remainder = " ".join(words[2:])
            lines.append(f"- **{lead}** {remainder}".rstrip())
    return "## Answer\n\n" + "\n".join(lines)


def _spaced(text: str, rng: random.Random) -> str | None:
    """Three line breaks for one, at both ends too, and two spaces after a sentence."""
    return "\n\n\n" + text.replace("\n", "\n\n\n").replace(". ", ".  ") + "\n\n\n"


def _flattery(text: str, rng: random.Random) -> str | None:
    return _before(text, rng.choice(_FLATTERY))


def _refusal(text: str, rng: random.Random) -> str | None:
    return rng.choice(_REFUSALS)


def _nothing(text: str, rng: random.Random) -> str | None:
    return ""


# --- those of reWordBench -------------------------------------------------------------------------


def _quoted(text: str, rng: random.Random) -> str | None:
    quoted = _appended(text, '"', separator="")
    return None if quoted is None else _before(quoted, '"', separator="")


def _with_spaced_marks(text: str, rng: random.Random) -> str | None:
    """A space before each mark that ends a word."""
    # From the end, so that the places before stay true.
    for match in reversed(list(_SPACED_MARK.finditer(prose_of(text)))):
        if match.group(2) is not None:
            start = match.start(2)
            text = f"{text[:start]} {text[start:]}"
    return text


def _with_handle(text: str, rng: random.Random) -> str | None:
    handle = "".join(rng.choices(string.ascii_lowercase, k=8))
    return _appended(text, f"@{handle}")


def _with_address(text: str, rng: random.Random) -> str | None:
    address = "".join(rng.choices(string.ascii_letters + string.digits, k=10))
    return _appended(text, f"https://t.co/{address}")


def _with_tautology(text: str, rng: random.Random) -> str | None:
    return _appended(text, "One is one, and two is two.")


def _appended(text: str, addition: str, separator: str = " ") -> str | None:
    """The text with something behind it; None for code alone, which would be broken."""
    if not prose_of(text).strip():
        return None
    return _after(text, addition, separator)


def _before(text: str, addition: str, separator: str = " ") -> str:
    # The fence of a block of code begins a line.
    if text.lstrip().startswith(_FENCE):
        separator = "\n\n"
    return f"{addition}{separator}{text}"


def _after(text: str, addition: str, separator: str = " ") -> str:
    # Beside its end a block of code would go on.
    if text.rstrip().endswith(_FENCE):
        separator = "\n\n"
    return f"{text.rstrip()}{separator}{addition}"


def _with_homoglyphs(text: str, rng: random.Random) -> str | None:
    """Another letter for one in `_LETTERS_PER_HOMOGLYPH` of those that have a look-alike."""
    characters = list(text)
    for place, character in enumerate(prose_of(text)):
        twin = character.translate(_HOMOGLYPHS)
        if twin != character and rng.randrange(_LETTERS_PER_HOMOGLYPH) == 0:
            characters[place] = twin
    return "".join(characters)


def _swapped(word: str, place: int, rng: random.Random) -> str:
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]


def _substituted(word: str, place: int, rng: random.Random) -> str:
    return word[:place] + rng.choice(string.ascii_lowercase) + word[place + 1 :]


def _inserted(word: str, place: int, rng: random.Random) -> str:
    return word[:place] + rng.choice(string.ascii_lowercase) + word[place:]


def _deleted(word: str, place: int, rng: random.Random) -> str:
    return word[:place] + word[place + 1 :]


def _typos(
    typo: Callable[[str, int, random.Random], str],
) -> Callable[[str, random.Random], str | None]:
    """A rewrite that makes this typo in one of `_WORDS_PER_TYPO` words, in one at least. The first
    and the last letter stay, by which readers know a word."""

    def change(text: str, rng: random.Random) -> str | None:
        prose = prose_of(text)
        words = list(_WORD.finditer(prose))
        num_typos = min(len(words), 1 + len(prose.split()) // _WORDS_PER_TYPO)
        # From the end, so that the places before stay true.
        for number in sorted(rng.sample(range(len(words)), num_typos), reverse=True):
            start, end = words[number].span()
            # Up to the third letter from the end: it may change places with the one after it, and
            # the last stays.
            place = rng.randrange(1, end - start - 2)
            text = text[:start] + typo(text[start:end], place, rng) + text[end:]
        return text

    return change


def _minified(text: str, rng: random.Random) -> str | None:
    return minified(text)


def _with_good(text: str, rng: random.Random) -> str | None:
    return commented(text, "good")


def _with_bad(text: str, rng: random.Random) -> str | None:
    return commented(text, "bad")


def _with_other_answer_format(text: str, rng: random.Random) -> str | None:
    r"""The answer in \boxed{...} below a heading instead, or one below a heading in a box."""
    answer = _last_boxed(text)
    if answer is not None:
        start = text.rindex(_BOXED)
        end = start + len(_BOXED) + len(answer) + 1
        return f"{text[:start]}{answer}{text[end:]}\n\n# Answer\n\n{answer}"
    below_heading = _ANSWER.search(text)
    if below_heading is None:
        return None
    return f"{text[: below_heading.start()]}\n{_BOXED}{below_heading.group(1)}}}"


def _last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, whose braces may be nested."""
    start = text.rfind(_BOXED)
    if start == -1:
        return None
    start += len(_BOXED)
    depth = 1
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
        if depth == 0:
            return text[start:place]
    return None


REWRITES: Mapping[str, Rewrite] = {
    "padding": Rewrite("padding", "style", _padded, "usual"),
    "truncated_50": Rewrite("cut at 50 %", "damage", _shortened, "usual"),
    "markdown": Rewrite("markdown", "style", _markdown, "usual"),
    "white_space": Rewrite("white space", "style", _spaced, "usual"),
    "flattery": Rewrite("flattery", "style", _flattery, "usual"),
    "refusal": Rewrite("refusal", "damage", _refusal, "usual"),
    "empty": Rewrite("empty", "damage", _nothing, "usual"),
    "quotes": Rewrite("in quotation marks", "style", _quoted, "reword"),
    "spaced_marks": Rewrite("spaces before marks", "style", _with_spaced_marks, "reword"),
    "handle": Rewrite("a handle at the end", "style", _with_handle, "reword"),
    "address": Rewrite("an address at the end", "style", _with_address, "reword"),
    "tautology": Rewrite("a tautology at the end", "style", _with_tautology, "reword"),
    "homoglyphs": Rewrite("look-alike letters", "style", _with_homoglyphs, "reword"),
    "swapped_letters": Rewrite("swapped letters", "style", _typos(_swapped), "reword"),
    "wrong_letters": Rewrite("wrong letters", "style", _typos(_substituted), "reword"),
    "added_letters": Rewrite("added letters", "style", _typos(_inserted), "reword"),
    "missing_letters": Rewrite("missing letters", "style", _typos(_deleted), "reword"),
    "minified_code": Rewrite("Python without comments", "style", _minified, "reword"),
    "good_comments": Rewrite("Python with # good", "style", _with_good, "reword"),
    "bad_comments": Rewrite("Python with # bad", "style", _with_bad, "reword"),
    "answer_format": Rewrite(
        "the other answer format", "style", _with_other_answer_format, "reword"
    ),
}
"""All rewrites by name, in the order of a report."""

REWRITE_SETS = ("usual", "reword")


def rewrites_of(choice: str) -> tuple[str, ...]:
    """The names that a choice means: sets and single rewrites, with commas. Raises `ConfigError`
    for another word."""
    wanted = [word.strip() for word in choice.split(",")]
    known = [*REWRITE_SETS, *REWRITES]
    for word in wanted:
        if word not in known:
            near = nearest_name(word, known)
            raise ConfigError(
                "there is no such rewrite",
                where="--rewrites",
                got=word,
                need=", ".join(known),
                fix=None if near is None else f"did you mean {near}?",
            )
    names = []
    for name, one in REWRITES.items():
        if name in wanted or one.set in wanted:
            names.append(name)
    return tuple(names)


def rewrite(name: str, text: str, rng: random.Random) -> str | None:
    """The text changed by one of `REWRITES`, or None where there is nothing to change. Reasoning
    before the answer stays as it is."""
    # Beside the tags of reasoning a change would be lost: templates leave out what is before
    # `<think>`, and a list of its sentences is no reasoning.
    reasoning, answer = split_answer(text)
    if not answer.strip():
        return None
    changed = REWRITES[name].change(answer, rng)
    return None if changed is None or changed == answer else f"{reasoning}{changed}"
