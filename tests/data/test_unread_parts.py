"""What a chat template leaves out of conversations is said once, and nothing else is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from messages import assistant, user
from templates import family_renderer

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def said(caplog: pytest.LogCaptureFixture, family: str, *conversations: list[Any]) -> list[str]:
    """The warnings while a family's template renders the conversations, each of them twice."""
    renderer = family_renderer(family)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for number, messages in enumerate([*conversations, *conversations], 1):
            renderer.render(messages, where=f"rows.jsonl:{number}")
    return [record.getMessage() for record in caplog.records]


def test_keys_that_the_template_does_not_name(caplog: pytest.LogCaptureFixture) -> None:
    calling = assistant("Let me look.") | {"tool_calls": [CALL]}
    thinking = assistant("Rain.") | {"reasoning_content": "It says so.", "weight": 1, "name": ""}
    messages = [user("Rain in Rome?"), calling, thinking]
    assert said(caplog, "llama3", messages) == [
        "rows.jsonl:1: the chat template ignores tool_calls of messages.",
        "rows.jsonl:1: the chat template ignores reasoning_content of messages.",
    ]
    assert said(caplog, "qwen3", messages) == []


def test_messages_whose_text_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    result = {"role": "tool", "content": 'Showers, "all" day.', "name": "weather"}
    calling = assistant("Let me look.") | {"tool_calls": [CALL]}
    looked_up = [user("Rain in Rome?"), calling, result, assistant("Yes.")]
    leaves_out = "the chat template leaves out the text of a message of the role"
    assert said(caplog, "phi3", looked_up) == [
        "rows.jsonl:1: the chat template ignores tool_calls of messages.",
        f"rows.jsonl:1: {leaves_out} tool.",
    ]
    assert said(caplog, "llama3_1", looked_up) == [
        f"rows.jsonl:1: {leaves_out} assistant beside its calls of tools."
    ]
    late = [user("Hi."), assistant("Hello."), {"role": "system", "content": "Be brief."}]
    first = [late[2], *late[:2]]
    assert said(caplog, "gptoss", first, [*late, user("Who?"), assistant("I.")]) == [
        f"rows.jsonl:2: {leaves_out} system."
    ]
    # Templates write a result as JSON, and leave out the reasoning of earlier turns by design.
    thought = assistant("<think>Rain?</think>Let me look.") | {"tool_calls": [CALL]}
    for family in ("qwen3", "qwen2_5", "glm4moe"):
        assert said(caplog, family, [user("Rain?"), thought, result, assistant("Yes.")]) == []


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "deepseekv3", "cohere2", "gptoss"])
def test_a_developer_message_reaches_the_model(family: str) -> None:
    """Most templates know only `system`, and leave a developer message out without a word."""
    renderer = family_renderer(family)
    messages = [{"role": "developer", "content": "Be brief."}, user("Hi."), assistant("Hello.")]
    assert "Be brief." in renderer.render(messages)
