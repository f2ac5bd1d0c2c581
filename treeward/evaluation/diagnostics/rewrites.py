"""`REWRITES`: ways to change a completion with a known effect on its quality.

    rewrite = REWRITES["padding"]
    rewrite.kind                                             # "style": the completion is as good as before
    rewrite.apply("2 + 2?", "It is 4.", random.Random(0))    # "It is 4. As mentioned above, ..."

A rewrite of kind "style" keeps the content, so it should not decide between a right and a wrong completion. One of kind
"damage" takes something away, so the score should not rise. The English phrases are the same for every language.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["REWRITES", "Rewrite"]

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
    """One way to change a completion. `label` and `summary`: for a report; `kind`: what it does to the quality."""

    label: str
    kind: Literal["style", "damage"]
    summary: str
    change: _Change

    def apply(self, prompt: str, completion: str, rng: random.Random) -> str | None:
        """The changed text, or None where there is nothing to change; `prompt`: the text of the last user turn."""
        if not completion.strip():
            return None
        changed = self.change(prompt, completion, rng)
        return None if changed == completion else changed


def _markdown(prompt: str, text: str, rng: random.Random) -> str | None:
    """A heading, and each sentence an item whose first words are bold; paragraphs and code blocks stay as they are."""
    if "```" in text:
        return f"## Answer\n\n{text}"
    lines = []
    for line in filter(str.strip, text.splitlines()):
        for sentence in _SENTENCE_END.split(line.strip()):
            words = sentence.lstrip("-*# ").split(" ")
            lead, rest = " ".join(words[:2]), " ".join(words[2:])
            lines.append(f"- **{lead}** {rest}".rstrip())
    return "## Answer\n\n" + "\n".join(lines)


def _padded(prompt: str, text: str, rng: random.Random) -> str | None:
    """Phrases that say nothing, at the end, until the text is half as long again, two of them at least."""
    phrases = rng.sample(_PADDING, len(_PADDING))
    added: list[str] = []
    while len(added) < 2 or (len(added) < len(phrases) and len(" ".join(added)) < len(text) / 2):
        added.append(phrases[len(added)])
    return f"{text.rstrip()} {' '.join(added)}"


def _restated(prompt: str, text: str, rng: random.Random) -> str | None:
    asked = " ".join(prompt.split())
    if not asked:
        return None
    if len(asked) > _LONGEST_RESTATEMENT:
        asked = asked[:_LONGEST_RESTATEMENT].rsplit(" ", 1)[0] + " ..."
    return f'You asked: "{asked}"\n\n{text}'


def _truncated(share: float) -> _Change:
    def change(prompt: str, text: str, rng: random.Random) -> str | None:
        words = list(re.finditer(r"\S+", text))
        kept = int(share * len(words))
        return text[: words[kept - 1].end()] if 0 < kept < len(words) else None

    return change


REWRITES: Mapping[str, Rewrite] = {
    "markdown": Rewrite("markdown", "style", "a heading, list items and bold words added", _markdown),
    "white_space": Rewrite("white space", "style", "empty lines and double spaces added",
        lambda prompt, text, rng: "\n\n\n" + text.replace("\n", "\n\n\n").replace(". ", ".  ") + "\n\n\n"),
    "flattery": Rewrite("flattery", "style", "praise of the question put before",
        lambda prompt, text, rng: f"{rng.choice(_FLATTERY)} {text}"),
    "padding": Rewrite("padding", "style", "phrases that say nothing put behind, half as much again", _padded),
    "prompt_restated": Rewrite("question restated", "style", "the question repeated first", _restated),
    "capitals": Rewrite("capitals", "style", "ALL LETTERS MADE CAPITAL", lambda prompt, text, rng: text.upper()),
    "refusal": Rewrite("refusal", "damage", "replaced by a refusal",
        lambda prompt, text, rng: rng.choice(_REFUSALS)),
    "truncated_80": Rewrite("cut at 80 %", "damage", "cut off after 80 % of its words", _truncated(0.8)),
    "truncated_50": Rewrite("cut at 50 %", "damage", "cut off after half of its words", _truncated(0.5)),
    "repeated": Rewrite("said twice", "damage", "said twice", lambda prompt, text, rng: f"{text}\n\n{text}"),
}  # fmt: skip
"""All rewrites by name, in the order of a report."""
