"""`JudgeScorer`: a language model that was trained to rate completions, as a scorer among the others.

    scorer = load_scorer(ScoringConfig(models=("results/judge/final",)))     # a folder with a judge's contract
    scorer.score([conversation])[0].score                                    # 0.7: the expected rating, from 0 to 1

It is asked as it was trained, and writes nothing: the score is the expectation over the probabilities of its ratings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treeward.config.reward_environments import JudgeEnvironmentConfig
from treeward.config.scoring import ScoringConfig
from treeward.errors import ConfigError, DataError, ModelError
from treeward.scoring.judge_contract import JudgeContract, read_judge_contract, replay
from treeward.scoring.judge_local import LocalJudge, shared_length
from treeward.scoring.score import Conversation, OnError, Score, message_text, transcript
from treeward.scoring.scorer import Prepared, PreparedScorer, check_conversation, one_line
from treeward.scoring.verdicts import NoVerdict, Verdict, make_question, share_of_scale
from treeward.tree.token_tree import TokenIds


class JudgeScorer(PreparedScorer):
    """Scores conversations with a judge that rates."""

    prefix_cache = None
    head_names: tuple[str, ...] = ()

    def __init__(self, judge: LocalJudge, contract: JudgeContract) -> None:
        self.judge, self.contract = judge, contract
        self.model, self.renderer = judge.policy, judge.renderer
        self._num_row_tokens = 0

    @classmethod
    def load(
        cls,
        config: ScoringConfig,
        *,
        device: Any = None,
        batch_tokens: int | None = None,
        max_sequences: int | None = None,
        **_: Any,  # the size of a cache of prompts, which a judge has not
    ) -> JudgeScorer:
        """Load a folder with a judge's contract. Raises `ConfigError` for a judge that compares, and for settings of a
        reward model; `ModelError` where a golden question has another verdict than in the contract."""
        [name], tokenizer = config.models, config.tokenizer
        contract = read_judge_contract(Path(name))
        assert contract is not None, "a judge's folder"
        if contract.prompt.mode != "rating":
            got, fix = f"mode: {contract.prompt.mode}", "ask it as an environment of type judge: by pairs"
            raise ConfigError("a judge that compares has no score of a conversation", where=name, got=got, fix=fix)
        for field, value, usual in (
            ("head_weights", config.head_weights, (None,)),
            ("ensemble", config.ensemble, (None,)),
            ("truncation", config.truncation, (None, "drop")),
            ("tokenizer.name", tokenizer.name, (None, name)),
            ("tokenizer.chat_template", tokenizer.chat_template, (None,)),
            ("tokenizer.chat_template_kwargs", tokenizer.chat_template_kwargs, (None, {})),
        ):
            if value not in usual:
                need = "a judge as it was trained: its contract says how it is asked"
                raise ConfigError("this is for reward models", where=name, field=field, got=value, need=need)
        keys = {"model": name, "device": device and str(device), "dtype": config.dtype, "use_logprobs": True}
        section = JudgeEnvironmentConfig.model_validate(keys)
        judge = LocalJudge(section, batch_tokens=batch_tokens, max_questions=max_sequences)
        check = replay(judge, contract).first_difference if config.check_contract else None
        if check is not None:
            summary = f"the judge does not keep its contract: {check.summary}"
            raise ModelError(summary, where=name, got=check.got, need=check.need, fix=check.fix)
        limits = [limit for limit in (config.max_length, judge.renderer.max_length) if limit is not None]
        judge.renderer.max_length = min(limits, default=None)  # now: a golden question may be longer
        return cls(judge, contract)

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
        prepared = []
        for conversation, name in zip(conversations, names, strict=True):
            try:
                prepared.append(self._prepare(conversation, name))
            except DataError as error:
                if on_error == "raise":
                    raise
                prepared.append(Prepared(name, None, error=one_line(error)))
        return prepared

    def _prepare(self, conversation: Conversation, name: str) -> Prepared:
        messages = check_conversation(conversation, name)
        texts = [message_text(message) for message in messages]
        if None in texts:
            got = messages[texts.index(None)]
            raise DataError("a judge reads text only", where=name, field="messages", got=got, need="a text as content")
        question = make_question(self.judge.config, transcript(messages[:-1]), [str(texts[-1])], about=0)
        prompt = self.judge.prompt(question.messages)
        if isinstance(prompt, DataError):
            return Prepared(name, None, error=prompt.summary)
        rows = [np.asarray(row, dtype=np.int32) for row in self.judge.rows(prompt)]
        shared = shared_length(rows)
        ends = tuple(Prepared(name, row[shared:].copy()) for row in rows)
        return Prepared(name, rows[0], len(rows[0]), prompt_length=shared, members=ends)

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        error = "a judge reads messages, not rendered text: send messages"
        return [Prepared(f"text {i}", None, error=error) for i in range(len(texts))]

    def score_prepared(self, prepared: Sequence[Prepared], *, on_error: OnError = "raise") -> list[Score]:
        verdicts = iter(self.judge.expected(map(self._rows, (item for item in prepared if item.ids is not None))))
        scores = []
        for item in prepared:
            verdict = NoVerdict(str(item.error)) if item.ids is None else next(verdicts)
            if isinstance(verdict, Verdict):
                scores.append(Score(share_of_scale(verdict.value, self.judge.config), item.num_tokens))
                continue
            if item.ids is not None and on_error == "raise":
                raise ModelError(verdict.reason, where=item.name)
            scores.append(Score(None, item.num_tokens, error=verdict.reason))
        return scores

    def _rows(self, item: Prepared) -> list[TokenIds]:
        """The tokens of a question with each rating."""
        assert item.ids is not None, "what has an error is not scored"
        begins = item.ids[: item.prompt_length]
        rows: list[TokenIds] = [np.concatenate([begins, end.ids]) for end in item.members if end.ids is not None]
        self._num_row_tokens += sum(map(len, rows))
        return rows
