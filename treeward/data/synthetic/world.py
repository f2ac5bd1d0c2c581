"""The closed world of the bundled data: facts, the ways to ask for them, and the phrases around a completion.

    FACTS["France"]        # Fact("capital", "France", ("Paris",))

A `Fact` is one thing that can be asked, a `Kind` a family of facts with its phrasings, a `Format` a request about the
shape of a completion that code can check. Everything is spelt out here, in a fixed order: the generator draws from
these tables and `gold` reads questions back with the same tables. No two sentences share three words in a row, and no
dressing contains a word that could be an answer; a test holds that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from re import findall

__all__ = ["ALL_FORMATS", "FACTS", "FILLERS", "KINDS", "LEAD_INS", "POLITE_CLOSERS", "POLITE_OPENERS"]
__all__ += ["RUDE_CLOSERS", "RUDE_OPENERS", "Fact", "Format", "Kind", "known_words", "words_of"]


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


@dataclass(frozen=True, slots=True)
class Format:
    """A checkable request about the shape of a completion, and the ways to make it."""

    name: str
    requests: tuple[str, ...]


ALL_FORMATS = (
    Format("one_word", ("Answer in one word.", "Use a single word only.")),
    Format("begin", ('Begin with "Answer:".', 'Your reply must start with "Answer:".')),
    Format("end", ('End with "Over."', 'Your last word must be "Over."')),
    Format("brackets", ("Put the answer in square brackets.", "Write the answer between [ and ].")),
    Format("dashes", ("Write a list with dashes.", "Put each on a line of its own after a dash.")),
)
_SHORT = ("one_word", "begin", "end", "brackets")
_LIST = ("dashes", "begin", "end")

_CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Norway": "Oslo",
    "Cuba": "Havana", "Greece": "Athens",
}  # fmt: skip
_OPPOSITES = (("hot", "cold"), ("tall", "short"), ("fast", "slow"), ("wet", "dry"))
_COLOURS = {
    "grass": "green", "snow": "white", "coal": "black", "the sky": "blue", "a banana": "yellow", "a carrot": "orange",
    "a tomato": "red", "chocolate": "brown",
}  # fmt: skip
_YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "hen": "chick", "bear": "cub",
    "pig": "piglet",
}  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
_CATEGORIES = {
    "fruits": ("apple", "pear", "plum", "cherry", "grape"),
    "metals": ("iron", "gold", "copper", "tin", "silver"),
    "tools": ("hammer", "saw", "drill", "spade", "axe"),
    "trees": ("oak", "pine", "birch", "elm", "willow"),
}


def _facts(kind: str, answers: dict[str, str]) -> tuple[Fact, ...]:
    return tuple(Fact(kind, subject, (answer,)) for subject, answer in answers.items())


KINDS = (
    Kind(
        "capital",
        ("What is the capital of {x}?", "Which city is the capital of {x}?", "Tell me the capital of {x}."),
        "And of {x}?",
        ("The capital of {x} is {a}.", "For {x} it is {a}."),
        _SHORT,
        ("Milan", "Lyon", "Seville", "Osaka", "Bergen"),
        _facts("capital", _CAPITALS),
    ),
    Kind(
        "opposite",
        ("What is the opposite of {x}?", "Which word means the opposite of {x}?", "Tell me the opposite of {x}."),
        "And of {x}?",
        ("The opposite of {x} is {a}.", "The word {x} has the opposite {a}."),
        _SHORT,
        ("warm", "quick", "tiny", "damp", "mild"),
        _facts("opposite", {a: b for pair in _OPPOSITES for a, b in (pair, pair[::-1])}),
    ),
    Kind(
        "colour",
        ("What colour is {x}?", "Which colour does {x} have?", "Tell me the colour of {x}."),
        "And {x}?",
        ("The colour of {x} is {a}.", "As everyone sees, {x} is {a}."),
        _SHORT,
        ("pink", "purple", "grey", "violet", "golden"),
        _facts("colour", _COLOURS),
    ),
    Kind(
        "sum",
        ("What is {x}?", "How much is {x}?", "Work out {x}."),
        "And {x}?",
        ("The sum {x} is {a}.", "{x} makes {a}."),
        _SHORT,
        ("nine", "ten", "eleven", "twelve", "twenty"),
        _facts(
            "sum",
            {f"{_NUMBERS[a]} plus {_NUMBERS[b]}": _NUMBERS[a + b] for a in range(1, 4) for b in range(1, 4)},
        ),
    ),
    Kind(
        "day",
        ("Which day comes {x}?", "What day is it {x}?", "Name the day {x}."),
        "And {x}?",
        ("The day {x} is {a}.", "What comes {x} is {a}."),
        _SHORT,
        ("January", "March", "April", "June", "August"),
        _facts("day", {f"after {day}": _DAYS[(i + 1) % 7] for i, day in enumerate(_DAYS)}),
    ),
    Kind(
        "young",
        ("What is a young {x} called?", "What do you call a young {x}?", "Give me the word for a young {x}."),
        "And a young {x}?",
        ("A young {x} is called a {a}.", "The word for a young {x} is {a}."),
        _SHORT,
        ("tadpole", "fawn", "cygnet", "joey", "larva"),
        _facts("young", _YOUNG),
    ),
    Kind(
        "list",
        ("Name {x}.", "Can you list {x}?", "Give me {x}."),
        "And {x}?",
        ("The {x} are {a}.", "Here are {x}: {a}."),
        _LIST,
        ("sofa", "cloud", "shoe", "cup", "window"),
        tuple(Fact("list", f"two {category}", members, 2) for category, members in _CATEGORIES.items()),
    ),
)
FACTS = {fact.subject: fact for kind in KINDS for fact in kind.facts}

LEAD_INS = (
    "Hello.",
    "I have a question.",
    "My sister wants to know this.",
    "This is for a quiz.",
    "Please help me.",
    "We were talking about it at lunch.",
)
POLITE_OPENERS = ("Sure!", "Of course!", "Happy to help!", "Good question!")
POLITE_CLOSERS = ("I hope that helps.", "Have a lovely day!", "Thank you for asking.", "Please ask me again.")
RUDE_OPENERS = ("What a silly question.", "Do not bother me.", "Obviously, you fool.")
RUDE_CLOSERS = ("Now leave me alone.", "Even you should know that.", "Look it up yourself next time.")
FILLERS = (
    "I looked this up.",
    "Let me add some detail.",
    "Many people ask about this.",
    "It is quite well known.",
    "Most learn it at school.",
    "Any good book has it.",
    "There is more to say about it.",
    "Some things are easy to forget.",
    "Here is a bit of background.",
    "This comes up now and then.",
)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case; digits count as the number's name, punctuation as nothing."""
    return [_DIGITS.get(word, word) for word in findall(r"[^\W_]+", text.lower())]


_DIGITS = {str(value): name for value, name in enumerate(_NUMBERS)}


@cache
def known_words() -> frozenset[str]:
    """Every word that the world uses, in lower case."""
    texts = [*LEAD_INS, *POLITE_OPENERS, *POLITE_CLOSERS, *RUDE_OPENERS, *RUDE_CLOSERS, *FILLERS, *_NUMBERS]
    texts += [request for fmt in ALL_FORMATS for request in fmt.requests]
    for kind in KINDS:
        texts += [template.replace("{x}", " ").replace("{a}", " ") for template in kind.phrasings + kind.statements]
        texts += [f"{fact.subject} {' '.join(fact.answers)}" for fact in kind.facts]
        texts += kind.decoys
    return frozenset(word for text in texts for word in words_of(text))
