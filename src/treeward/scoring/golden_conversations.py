"""The golden conversations: each holds something that goes wrong somewhere.

    GOLDEN_CONVERSATIONS["greeting"]     # messages, by what is special about them

`golden.py` signs their scores in a model's contract, and `verify` replays them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from treeward.data.conversation import Conversation, Message


def _chat(*texts: str, system: str | None = None) -> Conversation:
    """Messages of user and assistant in turn."""
    messages: list[Message] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for role, text in zip(cycle(("user", "assistant")), texts, strict=False):
        messages.append({"role": role, "content": text})
    return Conversation(messages)


_CALL = {
    "id": "tide00001",
    "type": "function",
    "function": {"name": "next_tide", "arguments": {"port": "Brest"}},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "next_tide",
        "description": "When the next high water is.",
        "parameters": {
            "type": "object",
            "properties": {"port": {"type": "string"}},
            "required": ["port"],
        },
    },
}


_TIDES = """\
Tides come from the way the pull of the Moon, and less so of the Sun, changes across the Earth. \
On the side that faces the Moon the water is drawn a little more strongly than the ground below \
it; on the far side a little less. So there are two bulges, and the Earth turns beneath them once \
a day, which is why most coasts see two high waters in about twenty-five hours: the extra hour is \
the distance that the Moon has gone on in the meantime.

1. At new and full moon the Sun helps, and the range is large (spring tide).
2. At half moon it pulls across, and the range is small (neap tide)."""

GOLDEN_CONVERSATIONS: Mapping[str, Conversation] = {
    "question": _chat("Which river flows through Prague?", "The Vltava flows through Prague."),
    "same question, another completion": _chat(
        "Which river flows through Prague?",
        "I would rather not say.",
    ),
    "greeting": _chat("Hi", "Hello!"),
    "system message": _chat(
        "Where is my parcel?",
        "I'll look it up.",
        system="You work for a post office. Be brief.",
    ),
    "several turns": _chat(
        "Name a prime above 90.",
        "97.",
        "And the next one?",
        "101.",
        "Are you sure?",
        "Yes: 99 is 9 times 11.",
    ),
    "beyond ASCII": _chat(
        "Übersetze „наука“ – 谢谢! 🙏🏽",
        # The accent is a character of its own, which normalisation would merge with the letter.
        "„Wissenschaft“ – e\u0301tude, علم, विज्ञान 👩‍🔬",
    ),
    "code": _chat(
        "Sum a list.",
        # Tabs, and spaces after a tab.
        "```python\ndef total(xs):\n\tn = 0\n\tfor x in xs:\n\t    n += x\n\treturn n\n```",
    ),
    "white space at the end": _chat("Tell me a colour. ", "Blue  \n\n"),
    "one character": _chat("Is that so?", "."),
    "long completion": _chat("Why are there two tides a day?", _TIDES),
    "tools": Conversation(
        [
            {"role": "user", "content": "When is high water in Brest?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "tide00001", "name": "next_tide", "content": "14:20"},
            {"role": "assistant", "content": "At 14:20."},
        ],
        tools=[_TOOL],
    ),
}
"""Conversations by what is special about them."""
