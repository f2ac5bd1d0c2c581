"""`AskedJudge`: the model of a judge's section, in this process or at an endpoint.

    judge = AskedJudge(config)
    judge.ask(questions)        # a `Verdict` for each, or a `NoVerdict` with the reason
    judge.cost                  # requests, tokens and seconds of all of them

A judge without a verdict on its first few questions stops the run: it would have none on the
others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from treeward.config.reward_environments import JudgeModelConfig
from treeward.data.conversation import Message
from treeward.errors import ModelError
from treeward.scoring.judge_endpoint import EndpointJudge
from treeward.scoring.judge_local import LocalJudge
from treeward.scoring.score import Cost
from treeward.scoring.verdicts import NoVerdict, Verdict

_FIRST_QUESTIONS = 4


class AskedJudge:
    """Raises `ConfigError` if the package openai or the key is missing, and `ModelError` for a
    model that cannot be loaded."""

    def __init__(self, config: JudgeModelConfig) -> None:
        self.config = config
        self._judge: LocalJudge | EndpointJudge
        if config.base_url is None:
            self._judge = LocalJudge(config)
        else:
            self._judge = EndpointJudge(config)
        self._first_answers: list[Verdict | NoVerdict] = []

    @property
    def cost(self) -> Cost:
        """Requests, tokens and seconds of all questions."""
        return self._judge.cost

    def ask(self, questions: Sequence[Sequence[Message]]) -> list[Verdict | NoVerdict]:
        """The answer to each question, in order.

        Raises `ModelError` if an endpoint refuses the key or the model, and where none of the first
        questions has a verdict.
        """
        before = time.perf_counter()
        # They may come in several calls, as of a server that is asked one by one.
        num_first = _FIRST_QUESTIONS - len(self._first_answers)
        answers: list[Verdict | NoVerdict] = []
        if num_first > 0:
            answers = self._judge.ask(questions[:num_first])
            self._first_answers += answers
            self._check_first()
        answers += self._judge.ask(questions[len(answers) :])
        self._judge.cost += Cost(seconds=time.perf_counter() - before)
        return answers

    def _check_first(self) -> None:
        if len(self._first_answers) < _FIRST_QUESTIONS:
            return
        reasons = []
        for answer in self._first_answers:
            if isinstance(answer, NoVerdict) and not answer.is_temporary:
                reasons.append(answer)
        if len(reasons) < _FIRST_QUESTIONS:
            return
        self._first_answers = []  # whoever asks again is told again
        fix = (
            "take a larger model; or use_logprobs: true, which compares the probabilities of "
            "the verdicts; or structured_output: true, which holds an endpoint to the form"
        )
        if reasons[0].text is None:  # the server has refused the request
            fix = "send only settings that the server knows (null: not sent), and shorter prompts"
        raise ModelError(
            f"{reasons[0].reason}: none on its first {_FIRST_QUESTIONS} questions",
            where=self.config.model,
            field="model max_tokens use_logprobs",
            got=reasons[0].text or reasons[0].reason,
            fix=fix,
        )
