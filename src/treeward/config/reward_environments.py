"""`env`: the environments of a run by name, and the sections of each kind.

    reward_model: {model_name: results/rm/final, precision: bfloat16, resources: {gpus_per_node: 2}}
    math:  {type: rules, rule: math}
    judge: {model: some-model, base_url: "http://127.0.0.1:8000/v1", api_key_env: null}
    mixed: {type: hybrid, mode: fallback, members: {math: {type: rules, rule: math}, judge: {...}}}

The kind of a section is its name unless it has `type`; a kind with a dot is the path of a class,
which checks its own keys. `treeward/environments/registry.py` constructs the environments.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    NonPositiveFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from treeward.config.base import Strict, TextOrTexts, one_error, problems_of
from treeward.config.policy import (
    ResourcesConfig,
    RewardModelConfig,
    ScoringPrecision,
    ShardingConfig,
)
from treeward.config.scoring import ScoringConfig
from treeward.errors import ConfigError


class ScoringDTensorConfig(ShardingConfig):
    """How the model is sharded, and what is moved to save memory."""

    cpu_offload: bool = False
    """Keep the weights in the CPU's memory and move them to the GPU for each step only. It is for a
    model in the environment's process: replicas keep theirs on their GPUs."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that a replica of the model is sharded over, all of one node: for a model that does not
    fit into one."""

    def check(self) -> None:
        if self.cpu_offload and self.tensor_parallel_size > 1:
            need = "one of the two: cpu_offload is for a model on one GPU"
            raise self.error("cpu_offload tensor_parallel_size", need)


class RewardModelEnvironmentConfig(ScoringConfig):
    """A reward model as the environment of an RL loop. Its model may also be the address of a
    `treeward serve`, as `http://host:8000`."""

    served_model: str | None = None
    """Which model of the server at `model_name`, by its name there. None: its first."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of the server at `model_name`. None: it asks
    for none."""
    reward_model_cfg: RewardModelConfig = RewardModelConfig()
    batch_size: PositiveInt | None = None
    """Most conversations in one forward pass. None: only `batch_tokens` limits it."""
    batch_tokens: PositiveInt | None = None
    """Most tokens in one forward pass, counted after sharing prefixes. None: 4096, unless
    `batch_size` is given."""
    resources: ResourcesConfig = ResourcesConfig()
    max_retries: NonNegativeInt = 3
    """Further attempts of a prompt's completions whose replica died or took too long."""
    worker_timeout_seconds: PositiveFloat | None = None
    """Time limit of a prompt's completions in replicas, or of a step at a server. None: no limit in
    replicas, 600 at a server."""
    dtensor_cfg: ScoringDTensorConfig = ScoringDTensorConfig()

    @property
    def url(self) -> str | None:
        """The address of the server that scores; None for a model that is loaded."""
        return server_address(self.models[0])

    @property
    def num_workers(self) -> int:
        """Replicas of the model that are loaded: one for each `tensor_parallel_size` GPUs, or one
        for each node."""
        if self.url:
            return 0  # the server has its own
        # At least one, because a CPU has no GPUs to count replicas by.
        per_node = self.resources.gpus_per_node // self.dtensor_cfg.tensor_parallel_size
        return max(per_node, 1) * self.resources.num_nodes

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas, where the machines have any."""
        if not self.resources.gpus_per_node:
            return 0
        return self.num_workers * self.dtensor_cfg.tensor_parallel_size

    @property
    def needs_ray(self) -> bool:
        """Whether the replicas are more than one process can be."""
        return self.num_workers > 1 or (not self.url and self.dtensor_cfg.tensor_parallel_size > 1)

    def check(self) -> None:
        super().check()
        if self.resources.gpus_per_node % self.dtensor_cfg.tensor_parallel_size != 0:
            need = "GPUs of each node that are a multiple of tensor_parallel_size"
            raise self.error("resources.gpus_per_node dtensor_cfg.tensor_parallel_size", need)
        if any(re.fullmatch(r"[\w.-]+:\d+/?", name) for name in self.models):
            raise self.error("models", "http:// before the address of a server")
        needs_server = self.served_model or self.token_env or any(map(server_address, self.models))
        if needs_server and (self.url is None or len(self.models) > 1):
            need = "the address of a server as the only model_name"
            raise self.error("models served_model token_env", need)
        # A request cannot change the settings of a server.
        changes_score = self.has_other_score or self.shaping is not None
        if self.url is not None and (changes_score or self.tokenizer.rendering):
            keys = "models head_weights ensemble tokenizer shaping"
            need = "a model alone: its server is started with the others, as models of its "
            need += "configuration"
            raise self.error(keys, need)


class RuleEnvironmentConfig(Strict):
    """Rewards by a rule: the answer in a completion equals the ground truth, matches a pattern, or
    is mathematically the same."""

    rule: Literal["exact_match", "regex", "math", "dapo"]
    """The answer is a ground truth (`exact_match`), has a pattern (`regex`), is mathematically
    equal (`math`), or stands behind the last `Answer:` and is equal as text in the normal form of
    Minerva and DAPO (`dapo`)."""
    answer_key: Annotated[TextOrTexts, Field(min_length=1)] = ("ground_truth", "expected_answer")
    """The keys of `env_infos` with the ground truth (for `regex`, patterns); the first that a
    sample has counts."""
    extract: str | None = None
    """A regular expression that finds the answer; without a match it is wrong. None: the whole
    completion."""
    pattern: str | None = None
    """With `regex`: the pattern to find in the answer, in the syntax of the package `regex`; needs
    no ground truth."""
    ignore_case: bool = False
    """Ignore case in `exact_match` and `regex`."""
    strip_reasoning: bool | None = None
    """Take off the reasoning (`<think>...</think>`) before the rule reads the completion. A
    completion that was cut off within its reasoning has no answer. None: false for `regex`, which
    may ask for a form; true for the others."""
    timeout_seconds: PositiveFloat = 5.0
    """Time limit of a pattern or of algebra for one sample; beyond it the sample has no reward."""
    workers: PositiveInt = 2
    """Processes of the rule `math`."""

    def check(self) -> None:
        if self.pattern is not None and self.rule != "regex":
            raise self.error(
                "pattern rule", "rule: regex; extract finds the answer for the other rules"
            )
        if self.strips_reasoning and "think>" in (self.extract or ""):
            need = "strip_reasoning: false, or an extract without <think>: the reasoning is taken "
            need += "off before extract"
            raise self.error("extract strip_reasoning", need)

    @property
    def strips_reasoning(self) -> bool:
        """`strip_reasoning`, or what the rule does by default."""
        if self.strip_reasoning is None:
            return self.rule != "regex"
        return self.strip_reasoning


class MathEnvironmentConfig(RuleEnvironmentConfig):
    """The rule math under the keys of NeMo RL: `env.math: {num_workers: 8, math_verify_impl:
    hf_math_verify}`."""

    rule: Literal["math", "dapo"] = "math"
    """Mathematical equality with the ground truth (`math`), or the text behind the last `Answer:`
    (`dapo`)."""


class MathMultiRewardConfig(Strict):
    """Three rewards of an answer that is asked for in tags, as NeMo RL's `env.math_multi_reward`
    gives them: whether it is correct, whether it is a whole number, and the form."""

    answer_key: Annotated[TextOrTexts, Field(min_length=1)] = ("ground_truth", "expected_answer")
    """The keys of `env_infos` with the ground truth; the first that a sample has counts."""


Aggregation = Literal["weighted", "signed", "absolute", "categories", "mean", "min", "max"]
RUBRIC_KEYS = ("rubric", "rubrics", "rubric_items", "criteria", "rubric_json")
"""The columns in which data sets have a rubric."""

JUDGE_FILE = "judge_contract.json"
"""In the folder of a model that was trained to judge: its prompt, and golden questions."""


class JudgePromptConfig(Strict):
    """What a judge is asked. A policy that learns to judge keeps this in its contract, for its
    use."""

    mode: Literal["rating", "pairwise", "equivalence", "criterion", "rubric"] = "rating"
    """`rating`: for a number. `pairwise`: which of two is better. `equivalence`: whether two
    answers are the same. `criterion`: whether something is true of the completion. `rubric`: for a
    number, by a list of criteria."""
    verdict: Literal["label", "scores"] = "label"
    """The form of a pairwise verdict. `label`: `[[A]]`, `[[B]]`, or `[[C]]` for a tie. `scores`:
    the JSON of generative reward models, `{"score_1": 4, "score_2": 3, "ranking": 2}`: how good
    each is, from 1 to 5, and from 1 (the first is much better) to 6 (the second is)."""
    template: str | None = None
    """The prompt of the judge, with the placeholders `{conversation}` and `{completion}`, or
    `{completion_a}` and `{completion_b}`; for a rubric also `{criterion}`, or `{rubric}`. None: the
    built-in prompt."""
    system_prompt: str | None = None
    """The system prompt of the judge. None: the built-in one, which forbids to obey the text
    between the tags."""
    lowest_rating: float = 1.0
    """A lower rating is not a verdict."""
    highest_rating: float = 9.0
    """A higher rating is not a verdict. At most 9 with `use_logprobs` and for a policy that learns
    to judge: the probabilities are of one digit."""
    temperature: float | None = 0.0
    """Temperature of the judge. None: not sent, for models that refuse it; in the process 1."""

    @property
    def is_rated(self) -> bool:
        """Whether the verdict is a number of the scale."""
        return self.mode in ("rating", "rubric")

    @property
    def placeholders(self) -> list[str]:
        """What the prompt must have, where the texts to judge go."""
        if self.mode == "rating":
            return ["{completion}"]
        if self.mode in ("criterion", "rubric"):
            return ["{completion}", f"{{{self.mode}}}"]
        return ["{completion_a}", "{completion_b}"]

    def check(self) -> None:
        if self.verdict == "scores" and self.mode != "pairwise":
            raise self.error("verdict mode", "verdict: scores with mode: pairwise alone")
        places = self.placeholders
        if self.template is not None and any(place not in self.template for place in places):
            need = f"{' and '.join(places)} in the template, where the texts to judge go"
            raise self.error("template mode", need)
        if self.lowest_rating >= self.highest_rating:
            raise self.error("lowest_rating highest_rating", "lowest_rating below highest_rating")


class JudgeModelConfig(JudgePromptConfig):
    """The language model that judges: behind an OpenAI-compatible endpoint (needs the extra
    `judge`), or in the process."""

    base_url: str | None = None
    """The endpoint without `/chat/completions`, as `https://api.openai.com/v1`. None: the model
    runs in the process."""
    model: str
    """The name of the model at that endpoint; in the process, its folder or hub name."""
    device: str | None = None
    """Of a model in the process: cpu, cuda, cuda:1. None: a GPU if any."""
    dtype: ScoringPrecision = "bfloat16"
    """Number format of a model in the process."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable that holds the key; the key itself never stands in a configuration.
    None: no key."""
    use_logprobs: bool = False
    """A verdict counts by its expected value: from the endpoint's log-probabilities, where it gives
    them; in the process from the probability of each verdict as the whole message: nothing is
    written."""
    max_tokens: PositiveInt | None = 1024
    """Longest message of the judge, in tokens; a truncated message is not a verdict. None: not
    sent; in the process 1024."""
    extra_body: dict[str, Any] = {}
    """Further fields of the request to an endpoint, as `{max_completion_tokens: 1024}`."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the judge's chat template, as `{enable_thinking: false}`; of an endpoint, a
    field of the request."""
    structured_output: bool = False
    """Hold an endpoint to JSON with an explanation and a verdict (`response_format` of OpenAI's
    API, which vLLM and SGLang have too), for models that forget the verdict's form."""
    max_concurrency: PositiveInt = 16
    """Most requests at a time."""
    timeout_seconds: PositiveFloat = 60.0
    """Timeout of one attempt at a request."""
    max_retries: NonNegativeInt = 4
    """Further attempts of a request after 408, 409, 429, 5xx, timeouts and broken connections."""

    def check(self) -> None:
        super().check()
        # The probabilities are those of one token, and a tokenizer has one for each digit.
        # Two whole numbers at least: the probability of a single one says nothing.
        has_digits = self.lowest_rating >= 0 and self.highest_rating <= 9
        has_digits &= math.ceil(self.lowest_rating) < math.floor(self.highest_rating)
        if self.use_logprobs and self.is_rated and not has_digits:
            need = "ratings of one digit, as lowest_rating: 1 and highest_rating: 9: one token's "
            need += "probabilities"
            raise self.error("highest_rating use_logprobs", need)
        if self.structured_output and self.base_url is None:
            need = "an endpoint (base_url); a model in this process has use_logprobs: true"
            raise self.error("structured_output base_url", need)
        if self.extra_body and self.base_url is None:
            need = "an endpoint (base_url); a model in this process gets no request"
            raise self.error("extra_body base_url", need)
        # An endpoint gives the alternatives of each token, and a verdict of scores has three.
        is_remote = self.base_url is not None
        if self.use_logprobs and self.verdict == "scores" and is_remote:
            need = "use_logprobs: false at an endpoint, or a model in this process (no base_url)"
            raise self.error("verdict use_logprobs base_url", need)


class TrainedJudgeConfig(JudgeModelConfig):
    """A judge that may have been trained: the contract in its folder says how it is asked."""

    @model_validator(mode="before")
    @classmethod
    def _ask_as_trained(cls, raw: Any) -> Any:
        """A model's folder with a judge's contract says how it is asked, where the section does
        not."""
        if not isinstance(raw, Mapping):
            return raw
        contract = Path(str(raw.get("model"))).expanduser() / JUDGE_FILE
        if not contract.is_file():
            return raw
        try:
            trained = json.loads(contract.read_text("utf-8"))
        except ValueError:  # of half a file, of JSON or of UTF-8
            trained = None
        if not isinstance(trained, Mapping) or not isinstance(trained.get("prompt"), Mapping):
            raise ConfigError(
                "the judge's contract is damaged",
                field="model",
                got=str(contract),
                need="the prompt that the judge was trained with",
                fix="export the judge again",
            )
        values: dict[str, Any] = dict(trained["prompt"])
        # An earlier version could ask a question several times, and its contracts have this key.
        values.pop("num_samples", None)
        # Before there were others, each pairwise verdict was a label.
        values.setdefault("verdict", "label")
        values["chat_template_kwargs"] = trained.get("chat_template_kwargs", {})
        return {**values, **raw}


class JudgeEnvironmentConfig(TrainedJudgeConfig):
    """Rewards by a language model, behind an OpenAI-compatible endpoint (needs the extra `judge`)
    or in the process."""

    mode: Literal["rating", "pairwise", "equivalence"] = "rating"
    """`rating`: a number, scaled to 0 to 1. `pairwise`: against references, else against
    neighbouring completions; win 1, tie 0.5, loss 0. `equivalence`: 1 where the final answer is
    that of a reference, else 0."""
    reference_key: str = "reference_answers"
    """The key of `env_infos` with the reference completion, or with a list of them: `pairwise`
    averages, and for `equivalence` one is enough."""

    def check(self) -> None:
        super().check()
        if self.use_logprobs and self.mode == "equivalence":
            raise self.error("mode use_logprobs", "mode: rating or pairwise")


class RubricEnvironmentConfig(JudgeModelConfig):
    """Rewards by a rubric: the data brings criteria, and a language model says of each whether the
    completion meets it."""

    mode: Literal["criterion", "rubric"] = "criterion"
    """`criterion`: one question for each criterion, and `aggregation` makes the reward. `rubric`:
    one question with all of them, whose answer is a rating."""
    aggregation: Aggregation = "weighted"
    """From the criteria to the reward. `weighted`: the weights that are met, over the positive
    ones (HealthBench). `signed`: over all weights (NeMo Gym's multichallenge). `absolute`: over
    their absolute values (open-instruct). `categories`: 1, 0.7, 0.3 and 0.9 for essential,
    important, optional and pitfall (Rubrics as Rewards). `mean`, `min`, `max`: without weights."""
    rubric_key: Annotated[TextOrTexts, Field(min_length=1)] = RUBRIC_KEYS
    """The keys of `env_infos` with the rubric; the first that a sample has counts."""
    least_weight: float = Field(default=0.5, ge=0.0, le=1.0)
    """A criterion without a verdict is left out. The share of the weights that the others must have
    at least; with less there is no reward."""
    clip: bool = False
    """Cut the reward to 0 to 1: with negative weights it may be below 0."""


class PreferenceVerdictConfig(JudgePromptConfig):
    """Rewards of a policy that learns to judge: its prompts are questions about comparisons, and 1
    is the reward of the verdict that the label gives, 0 that of any other. With `verdict: scores`
    the reward is how far the numbers are from those of the label, with a minus."""

    mode: Literal["pairwise", "rating"] = "pairwise"
    """`pairwise`: which of two completions is better, in both orders. `rating`: a number for each
    of the two, which is right if it is above (or below) those that the other one got in the same
    step."""
    no_verdict: NonPositiveFloat | None = None
    """The reward of a message without a verdict, or one that was cut. None: -1, and -10 with
    `verdict: scores`."""
    helpfulness: str | None = None
    """With `verdict: scores`: the grade of a completion that the scores are to equal, a key of the
    completions, or `score`, the rating of those that have one. None, and for rows without it: the
    ranking alone is learnt."""
    lowest_helpfulness: float = 1.0
    """The grade of the data that is the score 1; each point more is a score more. 0 for
    HelpSteer2's grades from 0 to 4."""

    @property
    def reward_of_no_verdict(self) -> float:
        """The reward of a message without a verdict."""
        if self.no_verdict is not None:
            return self.no_verdict
        return -10.0 if self.verdict == "scores" else -1.0

    def check(self) -> None:
        super().check()
        if self.helpfulness is not None and self.verdict != "scores":
            raise self.error("helpfulness verdict", "verdict: scores, which has scores to learn")
        if not 0 <= self.lowest_rating < self.highest_rating <= 9:
            raise self.error("lowest_rating highest_rating", "ratings of one digit, from 0 to 9")


class CustomEnvironmentConfig(Strict):
    """Rewards by your own Python function or class."""

    function: str
    """`package.module:name`, `package.module.name` or `path/to/file.py:name`; a function, or a
    class, which is constructed once with `kwargs` and called by its `score`, `predict` or
    `__call__`."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of the function, or those of the class's constructor."""


class HybridMember(Strict):
    """One member of a hybrid: its weight, and its own keys beside it."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = True
    """False leaves the member out."""
    weight: float = 1.0
    """With `weighted`: factor of its reward."""

    @property
    def section(self) -> dict[str, Any]:
        """The environment's own section."""
        return dict(self.model_extra or {})


class HybridEnvironmentConfig(Strict):
    """Several environments whose rewards become one."""

    members: dict[str, HybridMember] = Field(min_length=1)
    """The environments by name, in order."""
    mode: Literal["weighted", "fallback"] = "weighted"
    """The sum of weight times reward, where all members give one (`weighted`), or the reward of the
    first member for which a sample neither fails nor is wrong (`fallback`)."""

    @property
    def enabled_members(self) -> dict[str, HybridMember]:
        """The members that reward."""
        return {name: member for name, member in self.members.items() if member.enabled}

    def check(self) -> None:
        if not self.enabled_members:
            raise self.error("members", "a member that is enabled")
        for name, member in self.members.items():
            if self.mode == "fallback" and "weight" in member.model_fields_set:
                need = "no weights in mode fallback"
                raise ConfigError(
                    "a member of mode fallback has a weight, which would have no effect",
                    field=f"members.{name}.weight",
                    got=member.weight,
                    need=need,
                )


class EnvironmentKind(NamedTuple):
    """A kind of environment: the schema of its section, and the path of its class, imported when
    one is made."""

    section: type[Strict]
    path: str


_HERE = "treeward.environments"
ENVIRONMENTS: Mapping[str, EnvironmentKind] = {
    "reward_model": EnvironmentKind(
        RewardModelEnvironmentConfig, f"{_HERE}.reward_model.RewardModelEnvironment"
    ),
    "rules": EnvironmentKind(RuleEnvironmentConfig, f"{_HERE}.rules.RuleEnvironment"),
    "math": EnvironmentKind(MathEnvironmentConfig, f"{_HERE}.rules.MathEnvironment"),
    "math_multi_reward": EnvironmentKind(
        MathMultiRewardConfig, f"{_HERE}.math_multi_reward.MathMultiRewardEnvironment"
    ),
    "judge": EnvironmentKind(JudgeEnvironmentConfig, f"{_HERE}.judge.JudgeEnvironment"),
    "preference_verdict": EnvironmentKind(
        PreferenceVerdictConfig, f"{_HERE}.preference_verdict.PreferenceVerdictEnvironment"
    ),
    "rubric": EnvironmentKind(RubricEnvironmentConfig, f"{_HERE}.rubric.RubricEnvironment"),
    "custom": EnvironmentKind(CustomEnvironmentConfig, f"{_HERE}.custom.CustomEnvironment"),
    "hybrid": EnvironmentKind(HybridEnvironmentConfig, f"{_HERE}.hybrid.HybridEnvironment"),
}
"""The kinds of environments by name."""

READ_COMPLETION_ALONE = frozenset({"rules", "math", "math_multi_reward"})
"""The kinds whose rewards do not depend on the prompt."""


def server_address(model: str) -> str | None:
    """The address of a `treeward serve` that stands in the place of a model's name; None for any
    other name."""
    if not model.startswith(("http://", "https://")):
        return None
    # Clients of OpenAI's API write the version, which is no part of our routes' addresses.
    return model.removesuffix("/").removesuffix("/v1")


def is_enabled(section: Any) -> bool:
    """Whether the environment of a section is switched on."""
    return not isinstance(section, Mapping) or section.get("enabled", True) is not False


def environment_sections(
    env: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The name, kind and keys of each enabled section of `env`, and of members of hybrids, as
    `mixed.members.math`.

    Raises `ConfigError`, its `field` relative to `env`, for a section that is not a mapping.
    """
    for name, section in env.items():
        if not isinstance(section, Mapping):
            summary = "the section of an environment is not a mapping"
            raise ConfigError(summary, field=f"{prefix}{name}", got=section, need="its keys")
        if not is_enabled(section):
            continue
        # These say whether and what it is; the sections of the kinds do not know them.
        keys = {key: value for key, value in section.items() if key not in ("enabled", "type")}
        kind = str(section.get("type") or name)
        yield f"{prefix}{name}", kind, keys
        if kind == "hybrid" and isinstance(keys.get("members"), Mapping):
            members: dict[str, Any] = {}
            for key, member in keys["members"].items():
                checked = HybridMember.model_validate(member)
                if checked.enabled:
                    members[key] = checked.section
            yield from environment_sections(members, f"{prefix}{name}.members.")


def check_environments(env: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, its `field` relative to `env`, for a section that its environment would
    refuse.

    A section with `enabled: false` may hold anything, and so may one whose kind is the dotted path
    of a class.
    """
    for name, kind, keys in environment_sections(env):
        known = ENVIRONMENTS.get(kind)
        if known is not None:
            try:
                known.section.model_validate(keys)
            except ValidationError as error:
                problems = []
                for problem in problems_of(error, known.section):
                    field = f"{name}.{problem.field}" if problem.field else name
                    problems.append(problem.but(where=name, field=field))
                raise one_error(problems, name) from None
        elif "." not in kind:
            # The name of a section is its kind, unless it has a `type`.
            field = name if name.split(".")[-1] == kind else f"{name}.type"
            need = f"one of {', '.join(ENVIRONMENTS)}, or the dotted path of a class; as `type` "
            need += "under another name"
            summary = "there is no such kind of environment"
            raise ConfigError.unknown(summary, kind, ENVIRONMENTS, field=field, need=need)
