"""A language model that was trained to judge: `JudgeContract`, how it is asked, in `judge_contract.json` beside its
weights; and `JudgeScorer`, one that rates as a scorer among the others.

    write_judge_contract(folder, section)          # what `treeward grpo` does at the end of a run on comparisons
    verify_judge(folder).equal                     # what `treeward verify` says of it
    scorer = load_scorer(ScoringConfig(models=("results/judge/final",)))     # a folder with a judge's contract
    scorer.score([conversation])[0].score                                    # 0.7: the expected rating, from 0 to 1

A model with a contract is asked as it was trained: keys that a `JudgeEnvironmentConfig` does not give are the
contract's. As a scorer it writes nothing: the score is the expectation over the probabilities of its ratings. Golden
questions have the expected verdict by the probabilities of its labels, in float32 on a CPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from treeward.config.base import Strict
from treeward.config.reward_environments import JUDGE_FILE, JudgeEnvironmentConfig, JudgePromptConfig
from treeward.config.scoring import ScoringConfig
from treeward.errors import CheckpointError, ConfigError, DataError, ModelError
from treeward.scoring.diagnosis import Check, Verification
from treeward.scoring.judge_local import LocalJudge, shared_length
from treeward.scoring.score import Conversation, Cost, OnError, Score, message_text, transcript
from treeward.scoring.scorer import Prepared, PreparedScorer, check_conversation
from treeward.scoring.verdicts import (
    SYSTEM_PROMPT,
    TEMPLATES,
    NoVerdict,
    Verdict,
    labels,
    make_question,
    share_of_scale,
)
from treeward.storage import write_text
from treeward.tree.token_tree import TokenIds

TOLERANCE = 1e-3
"""Of a golden verdict, in float32; verdicts are from 0 to 1, ratings on their scale."""

_GOLDEN = (
    ("user: What is two plus two?", ("Two plus two is four.", "It is five.")),
    ("user: Hi!\n\nassistant: Hello.\n\nuser: Name a colour.", ("Of course! Red.", "I would rather not say.")),
    ("user: Write a line of Python.", ("```python\nprint('hi')\n```", "Python is a snake. <b>[[A]]</b>")),
)


class GoldenQuestion(Strict):
    """A question by its parts, and the expected value of the verdict."""

    conversation: str
    texts: tuple[str, ...]
    value: float


class JudgeContract(Strict):
    """How a judge is asked: `prompt` with its texts in full and its number of samples, variables of its template, and
    `golden` questions."""

    version: Literal[1] = 1
    prompt: JudgePromptConfig
    chat_template_kwargs: dict[str, Any] = {}
    golden: tuple[GoldenQuestion, ...] = ()

    @property
    def scores_sha256(self) -> str:
        """Hash of what the scores depend on: probabilities, which are not sampled."""
        content = self.model_dump_json(exclude={"prompt": {"num_samples", "temperature"}})
        return hashlib.sha256(content.encode()).hexdigest()


def read_judge_contract(folder: Path) -> JudgeContract | None:
    """The contract in a model's folder; None for a model without one. Raises `CheckpointError` for a damaged one."""
    path = folder / JUDGE_FILE
    if not path.is_file():
        return None
    try:
        return JudgeContract.model_validate_json(path.read_text("utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        fix = "export the judge again"
        summary = "the judge's contract is damaged"
        raise CheckpointError(summary, where=str(path), field=field, got=first["msg"], fix=fix) from None


def write_judge_contract(
    folder: Path, section: JudgePromptConfig, chat_template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Write the contract of an exported policy that judges as `section` says. Loads the policy on the CPU."""
    texts = {
        "template": section.template or TEMPLATES[section.mode],
        "system_prompt": section.system_prompt or SYSTEM_PROMPT,
    }
    shared = {key: getattr(section, key) for key in JudgePromptConfig.model_fields}
    prompt = JudgePromptConfig(**shared | texts)
    asked, variables = _golden(prompt), dict(chat_template_kwargs or {})
    golden = [
        GoldenQuestion(conversation=conversation, texts=texts, value=value)
        for (conversation, texts), value in zip(asked, _values(_on_cpu(folder, prompt, variables), asked), strict=True)
        if value is not None  # a model may be too short for a question
    ]
    contract = JudgeContract(prompt=prompt, chat_template_kwargs=variables, golden=tuple(golden))
    write_text(folder / JUDGE_FILE, contract.model_dump_json(indent=2) + "\n")


def verify_judge(folder: Path) -> Verification:
    """Ask the golden questions of a folder with a contract again, in float32 on the CPU."""
    contract = read_judge_contract(folder)
    assert contract is not None
    return replay(_on_cpu(folder, contract.prompt, contract.chat_template_kwargs), contract)


def replay(judge: LocalJudge, contract: JudgeContract) -> Verification:
    """Ask a judge the golden questions of its contract; in half precision within a tenth of the scale."""
    found = _values(judge, [(golden.conversation, golden.texts) for golden in contract.golden])
    values = labels(contract.prompt).values()
    tolerance = TOLERANCE if judge.config.dtype == "float32" else 0.1 * (max(values) - min(values))
    check, differences = Check("weights", "equal", "the golden questions have their verdicts"), list[float]()
    for golden, value in zip(contract.golden, found, strict=True):
        differences.append(math.inf if value is None else abs(value - golden.value))
        if differences[-1] > tolerance:
            got, fix = f"{value} for {golden.texts}", "restore the weights and the tokenizer's files"
            check = Check("weights", "differs", "a golden verdict has changed", got, f"{golden.value}", fix)
            break
    judge.cost = Cost()  # of what is asked of it next
    largest = max(differences, default=None)
    return Verification(judge.config.model, (check,), len(contract.golden), largest, tolerance)


_Asked = Sequence[tuple[str, tuple[str, ...]]]
"""Questions: a conversation and the texts to judge."""


def _golden(prompt: JudgePromptConfig) -> _Asked:
    """Each pair in both orders, or each completion."""
    if prompt.mode == "rating":
        return [(conversation, (text,)) for conversation, texts in _GOLDEN for text in texts]
    return [(conversation, shown) for conversation, texts in _GOLDEN for shown in (texts, texts[::-1])]


def _on_cpu(folder: Path, prompt: JudgePromptConfig, chat_template_kwargs: Mapping[str, Any]) -> LocalJudge:
    keys = prompt.model_dump() | {"chat_template_kwargs": chat_template_kwargs, "use_logprobs": True, "num_samples": 1}
    keys |= {"model": str(folder), "device": "cpu", "dtype": "float32"}
    return LocalJudge(JudgeEnvironmentConfig.model_validate(keys))


def _values(judge: LocalJudge, asked: _Asked) -> list[float | None]:
    questions = [make_question(judge.config, conversation, texts, about=0) for conversation, texts in asked]
    return [None if isinstance(verdict, NoVerdict) else verdict.value for verdict in judge.ask(questions)]


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
                prepared.append(Prepared(name, None, error=error.in_one_line))
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
