"""An environment as a reward function of TRL; `tests/compat/test_trl.py` trains with one."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from environments.conftest import Lengths
from messages import assistant, chat, user
from templates import TEMPLATES, family_renderer, template_source

from treeward.environments.trl import as_trl


def test_conversations_and_their_columns() -> None:
    environment = Lengths()
    rewards = as_trl(environment)(
        prompts=[[user("a")], [user("b")]],
        completions=[[assistant("four")], [assistant("three")]],
        completion_ids=[[1], [2]],
        minus=[1.0, 2.0],
        empty=[None, "x"],
        trainer_state=object(),
        log_extra=lambda *_: None,
        log_metric=lambda *_: None,
        environments=[object(), object()],
    )
    assert rewards == [3.0, 3.0]
    assert environment.seen == [
        (chat("a", "four"), {"minus": 1.0}),
        (chat("b", "three"), {"minus": 2.0, "empty": "x"}),
    ]


@pytest.mark.skipif(not TEMPLATES, reason="trl, which carries the templates, is not installed")
def test_a_completion_begins_with_what_its_prompt_has_opened() -> None:
    tokenizer = copy.deepcopy(family_renderer("qwen3_5_think").tokenizer)
    tokenizer.chat_template = template_source("qwen3_5_think")
    question = [user("2 + 2?")]
    read = {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}

    def seen(prompt: Any, completion: Any, **keys: Any) -> Any:
        environment = Lengths()
        as_trl(environment, policy_tokenizer=tokenizer, **keys)([prompt], [completion])
        [(conversation, _)] = environment.seen
        return conversation[-1]

    assert seen(question, [assistant("Four.</think>4")])["content"] == "<think>\nFour.</think>4"
    assert seen(question, [read]) == read
    assert seen("2 + 2?", "Four.</think>4")["content"] == "Four.</think>4"
    silent = {"policy_template_kwargs": {"enable_thinking": False}}
    assert seen(question, [assistant("4")], **silent)["content"] == "<think>\n\n</think>\n\n4"


def test_what_has_no_reward_is_none_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    reward = as_trl(Lengths(), name="mine")
    logged: dict[str, float] = {}
    with caplog.at_level(logging.WARNING):
        values = reward(
            ["a"] * 4, ["x", "fail", "xxx", "fail"], minus=[0.5] * 4, log_metric=logged.__setitem__
        )
    assert values == [0.5, None, 2.5, None]
    assert logged == {"mine/failed": 0.5, "mine/raw_mean": 2.0}
    assert [r.getMessage() for r in caplog.records] == [
        "lengths: 2 of 4 samples have no reward; the first: sample 1: it says fail"
    ]
