"""`JudgeScorer`: a language model that was trained to rate completions, as a scorer among the others.

    scorer = load_scorer(ScoringConfig(models=("results/judge/final",)))     # a folder with a judge's contract
    scorer.score([conversation])[0].score                                    # 0.7: the expected rating, from 0 to 1

It is asked as it was trained, and writes nothing: the score is the expectation over the probabilities of its ratings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from treeward.config.reward_environments import JudgeEnvironmentConfig
from treeward.config.scoring import ScoringConfig
from treeward.errors import ConfigError, DataError, ModelError
from treeward.scoring.judge_contract import JudgeContract, read_judge_contract, replay
from treeward.scoring.judge_local import LocalJudge
from treeward.scoring.score import NO_COMPLETION, Conversation, OnError, Score, completion_text, transcript
from treeward.scoring.scorer import Prepared, PreparedScorer
from treeward.scoring.verdicts import NoVerdict, make_question, share_of_scale

_QUESTIONS_AT_ONCE = 8


class JudgeScorer(PreparedScorer):
    """Scores conversations with a judge that rates. `max_length`: most tokens of a question with its rating."""

    prefix_cache = None
    head_names: tuple[str, ...] = ()

    def __init__(self, judge: LocalJudge, contract: JudgeContract, max_length: int | None = None) -> None:
        self.judge, self.contract, self.max_length = judge, contract, max_length
        self.model, self.renderer = judge.policy, judge.renderer
        self._num_row_tokens = 0

    @classmethod
    def load(cls, config: ScoringConfig, *, device: Any = None, **_: Any) -> JudgeScorer:
        """Load a folder with a judge's contract. Raises `ConfigError` for a judge that compares, and for settings of a
        reward model; `ModelError` where a golden question has another verdict than in the contract."""
        [name] = config.models
        contract = read_judge_contract(Path(name))
        assert contract is not None, "a judge's folder"
        if contract.prompt.mode != "rating":
            got, fix = f"mode: {contract.prompt.mode}", "ask it as an environment of type judge: by pairs"
            raise ConfigError("a judge that compares has no score of a conversation", where=name, got=got, fix=fix)
        has_template = config.tokenizer.chat_template or config.tokenizer.chat_template_kwargs
        if config.has_other_score or has_template or config.truncation not in (None, "drop"):
            need = "a judge as it was trained: its contract says how it is asked"
            raise ConfigError("a judge has no heads and no other template, and cuts nothing", where=name, need=need)
        keys = {"model": name, "device": device and str(device), "dtype": config.dtype, "use_logprobs": True}
        judge = LocalJudge(JudgeEnvironmentConfig.model_validate(contract.prompt.model_dump() | keys))
        if config.check_contract:
            result = replay(judge, contract)
            if (check := result.first_difference) is not None:
                raise ModelError(f"the judge does not keep its contract: {check.summary}", where=name, got=check.got)
        return cls(judge, contract, config.max_length)

    @property
    def members(self) -> Any:  # type: ignore[override]
        return (self,)

    @property
    def num_computed_tokens(self) -> int:
        return self.judge.cost.num_prompt_tokens

    @property
    def num_row_tokens(self) -> int:
        return self._num_row_tokens

    def prepare(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Prepared]:
        names = where or [f"conversation {i}" for i in range(len(conversations))]
        prepared = list(map(self._prepare, conversations, names))
        wrong = next((item for item in prepared if item.error == NO_COMPLETION), None)
        if wrong is not None and on_error == "raise":
            raise DataError(NO_COMPLETION, where=wrong.name)
        return prepared

    def _prepare(self, conversation: Conversation, name: str) -> Prepared:
        text = completion_text(conversation)
        if text is None:
            return Prepared(name, None, error=NO_COMPLETION)
        question = make_question(self.judge.config, transcript(conversation[:-1]), [text], about=0)
        prompt = self.judge.prompt(question.messages)
        if isinstance(prompt, DataError):
            return Prepared(name, None, error=prompt.summary)
        rows = [np.asarray(row, dtype=np.int32) for row in self.judge.rows(prompt)]
        if self.max_length is not None and len(rows[0]) > self.max_length:
            error = f"the question has {len(rows[0])} tokens, more than max_length {self.max_length}"
            return Prepared(name, None, len(rows[0]), error=error)
        members = tuple(Prepared(name, row, len(row)) for row in rows)
        return replace(members[0], members=members)

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        error = "a judge reads messages, not rendered text: send messages"
        return [Prepared(f"text {i}", None, error=error) for i in range(len(texts))]

    def score_prepared(self, prepared: Sequence[Prepared], *, on_error: OnError = "raise") -> list[Score]:
        questions = [[member.ids for member in item.members if member.ids is not None] for item in prepared]
        asked = [rows for rows in questions if rows]
        verdicts = iter(
            verdict
            for start in range(0, len(asked), _QUESTIONS_AT_ONCE)
            for verdict in self.judge.expected(asked[start : start + _QUESTIONS_AT_ONCE])
        )
        scores = []
        for item in prepared:
            if item.ids is None:
                scores.append(Score(None, item.num_tokens, error=item.error))
                continue
            verdict, self._num_row_tokens = next(verdicts), self._num_row_tokens + item.num_tokens
            if isinstance(verdict, NoVerdict):
                if on_error == "raise":
                    raise ModelError(verdict.reason, where=item.name)
                scores.append(Score(None, item.num_tokens, error=verdict.reason))
                continue
            scores.append(Score(share_of_scale(verdict.value, self.judge.config), item.num_tokens))
        return scores
