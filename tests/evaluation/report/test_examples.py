"""The examples of a report show what the model read."""

from __future__ import annotations

from messages import assistant, user

from treeward.evaluation.report.examples import messages


def test_calls_of_tools_are_shown() -> None:
    call = {"type": "function", "function": {"name": "größe", "arguments": {"of": "Rome"}}}
    shown = messages([user("How large?"), assistant("") | {"tool_calls": [call]}])
    assert [message["role"] for message in shown] == ["user", "assistant"]
    assert shown[0]["text"] == "How large?"
    assert '"name": "größe", "arguments": {"of": "Rome"}' in shown[1]["text"]
