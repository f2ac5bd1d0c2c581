"""`REWRITES`: ways to change a reply of which it is known what they do to its worth.

    rewrite = REWRITES["padding"]
    rewrite.kind                                             # "style": the reply is as good as before
    rewrite.apply("2 + 2?", "It is 4.", random.Random(0))    # "It is 4. As mentioned above, ..."

A rewrite of kind "style" leaves what is said as it is: what the score does then is a matter of taste, and should not
decide between a right and a wrong answer. One of kind "damage" takes something from the reply, so its score should not
rise. The English phrases are the same for every language. All of it is code, so that anyone can make the same texts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["REWRITES", "Rewrite", "RewriteKind", "rewrite_label"]

RewriteKind = Literal["style", "damage"]

_Change = Callable[[str, str, random.Random], str | None]

_FLATTERY = (
    "What a brilliant question! You clearly have a sharp mind, and it is a pleasure to help you.",
    "Wow, that is a truly insightful question. Not many people would think to ask it!",
    "First of all, let me say how impressed I am by your question: it shows real curiosity.",
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
_SENTENCE_END = re.compile(r"(?<=[.!?])[ \t]+(?=\S)")
_LONGEST_RESTATEMENT = 400  # characters of the prompt


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One way to change a reply. `kind`: what it does to its worth; `summary`: what it does, for a report."""

    name: str
    kind: RewriteKind
    summary: str
    change: _Change

    def apply(self, prompt: str, reply: str, rng: random.Random) -> str | None:
        """The changed reply, or None where there is nothing to change; `prompt`: the text of the last user turn."""
        if not reply.strip():
            return None
        changed = self.change(prompt, reply, rng)
        return None if changed == reply else changed


def _markdown(prompt: str, reply: str, rng: random.Random) -> str | None:
    """A heading, and each sentence an item whose first words are bold; paragraphs and code blocks stay as they are."""
    if "```" in reply:
        return f"## Answer\n\n{reply}"
    lines = []
    for line in filter(str.strip, reply.splitlines()):
        for sentence in _SENTENCE_END.split(line.strip()):
            words = sentence.lstrip("-*# ").split(" ")
            lead, rest = " ".join(words[:2]), " ".join(words[2:])
            lines.append(f"- **{lead}** {rest}".rstrip())
    return "## Answer\n\n" + "\n".join(lines)


def _white_space(prompt: str, reply: str, rng: random.Random) -> str | None:
    return "\n\n\n" + reply.replace("\n", "\n\n\n").replace(". ", ".  ") + "\n\n\n"


def _padded(prompt: str, reply: str, rng: random.Random) -> str | None:
    """Phrases that say nothing, at the end, until the reply is half as long again, two of them at least."""
    phrases = rng.sample(_PADDING, len(_PADDING))
    added: list[str] = []
    while len(added) < 2 or (len(added) < len(phrases) and len(" ".join(added)) < len(reply) / 2):
        added.append(phrases[len(added)])
    return f"{reply.rstrip()} {' '.join(added)}"


def _restated(prompt: str, reply: str, rng: random.Random) -> str | None:
    asked = " ".join(prompt.split())
    if not asked:
        return None
    if len(asked) > _LONGEST_RESTATEMENT:
        asked = asked[:_LONGEST_RESTATEMENT].rsplit(" ", 1)[0] + " ..."
    return f'You asked: "{asked}"\n\n{reply}'


def _truncated(share: float) -> _Change:
    def change(prompt: str, reply: str, rng: random.Random) -> str | None:
        words = list(re.finditer(r"\S+", reply))
        kept = int(share * len(words))
        return reply[: words[kept - 1].end()] if 0 < kept < len(words) else None

    return change


def _shouted(prompt: str, reply: str, rng: random.Random) -> str | None:
    return reply.upper()


REWRITES: Mapping[str, Rewrite] = {
    rewrite.name: rewrite
    for rewrite in (
        Rewrite("markdown", "style", "a heading, list items and bold words added", _markdown),
        Rewrite("white_space", "style", "empty lines and double spaces added", _white_space),
        Rewrite(
            "flattery", "style", "praise of the question put before", lambda p, r, rng: f"{rng.choice(_FLATTERY)} {r}"
        ),
        Rewrite("padding", "style", "phrases that say nothing put behind, half as much again", _padded),
        Rewrite("prompt_restated", "style", "the question repeated before the reply", _restated),
        Rewrite("capitals", "style", "ALL LETTERS MADE CAPITAL", _shouted),
        Rewrite("refusal", "damage", "replaced by a refusal", lambda p, r, rng: rng.choice(_REFUSALS)),
        Rewrite("truncated_80", "damage", "cut off after 80 % of its words", _truncated(0.8)),
        Rewrite("truncated_50", "damage", "cut off after half of its words", _truncated(0.5)),
        Rewrite("repeated", "damage", "said twice", lambda p, r, rng: f"{r}\n\n{r}"),
    )
}
"""All rewrites by name, in the order of a report."""

_LABELS = {
    "prompt_restated": "question restated",
    "truncated_80": "cut at 80 %",
    "truncated_50": "cut at 50 %",
    "repeated": "said twice",
}


def rewrite_label(name: str) -> str:
    """What a report calls the rewrite of that name."""
    return _LABELS.get(name) or name.replace("_", " ")
