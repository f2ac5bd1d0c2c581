"""`env`: the environments of a run by name, and the sections of those without a reward model: rules, a judge, a
function, and a mixture.

    env:
      math:  {type: rules, rule: math}
      judge: {model: some-model, base_url: "http://127.0.0.1:8000/v1", api_key_env: null}
      mixed: {type: hybrid, mode: fallback, members: {math: {type: rules, rule: math}, judge: {...}}}

The kind of a section is its name unless it has `type`; a kind with a dot is the path of a class, which checks its own
keys. `treeward/environments/registry.py` constructs the environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from treeward.config.base import Strict, TextOrTexts, at_field, config_error, nearest_name
from treeward.config.environment import RewardModelEnvironmentConfig
from treeward.errors import ConfigError

__all__ = ["ENVIRONMENT_SECTIONS", "REQUIRED_PLACEHOLDERS", "CustomEnvironmentConfig", "HybridEnvironmentConfig"]
__all__ += ["HybridMember", "JudgeEnvironmentConfig", "MathEnvironmentConfig", "RuleEnvironmentConfig"]
__all__ += ["check_environment", "is_enabled"]

REQUIRED_PLACEHOLDERS = {"rating": ("{completion}",), "pairwise": ("{completion_a}", "{completion_b}")}
"""Mode of a judge -> the placeholders that its template must have."""

_Names = Annotated[TextOrTexts, Field(min_length=1)]


class RuleEnvironmentConfig(Strict):
    """Rewards by a rule: the answer in a completion equals the ground truth, matches a pattern, or is mathematically
    the same."""

    rule: Literal["exact_match", "regex", "math"]
    """`exact_match`: the answer is the text of a ground truth; `regex`: the answer has the pattern; `math`: the answer
    is mathematically equal (needs `treeward[math]`)."""
    answer_key: _Names = ("ground_truth", "expected_answer")
    """The key of `env_infos` with the ground truth: text, a number, or a list of accepted ones; of several keys, the
    first that a sample has. For `regex` without `pattern` it holds the patterns."""
    extract: str | None = None
    """A regular expression that finds the answer in a completion: the first group of its last match, or the whole match
    without groups. A completion without a match is wrong. None: the whole completion is the answer."""
    pattern: str | None = None
    """With `regex`: the pattern to find in the answer, in the syntax of the package `regex`. No ground truth is needed
    then."""
    ignore_case: bool = False
    """Ignore case in `exact_match` and `regex`."""
    strip: bool = True
    """Ignore white space around answer and ground truth in `exact_match`."""
    correct: FiniteFloat = 1.0
    """The reward of a right answer."""
    wrong: FiniteFloat = 0.0
    """The reward of any other answer."""
    timeout_seconds: PositiveFloat = 5.0
    """Time limit of a pattern or of algebra for one sample; beyond it the sample has no reward."""
    workers: PositiveInt = 2
    """Processes of the rule `math`."""

    def check(self) -> None:
        need = "rule: regex; extract finds the answer for the other rules"
        is_unread = self.pattern is not None and self.rule != "regex"
        self.refuse(is_unread, f"pattern has no effect with rule: {self.rule}", "pattern rule", need=need)
        summary = "the reward of a right answer is not above that of a wrong one"
        self.refuse(self.correct <= self.wrong, summary, "correct wrong", need="correct above wrong")


class MathEnvironmentConfig(RuleEnvironmentConfig):
    """The rule math under the keys of NeMo RL: `env.math: {num_workers: 8, math_verify_impl: hf_math_verify}`."""

    other_names: ClassVar[Mapping[str, str]] = {"num_workers": "workers"}

    rule: Literal["math"] = "math"
    """Mathematical equality with the ground truth."""
    math_verify_impl: Literal["hf_math_verify"] = "hf_math_verify"
    """The implementation: the package math-verify."""
    verifier_type: Literal["math"] = "math"
    """The kind of problem; for a choice among letters use the rules `exact_match` or `regex`."""


class JudgeEnvironmentConfig(Strict):
    """Rewards by a language model behind an OpenAI-compatible endpoint (needs `treeward[judge]`)."""

    base_url: str
    """The endpoint without `/chat/completions`, as `https://api.openai.com/v1`."""
    model: str
    """The name of the model at that endpoint."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable that holds the key; the key itself never stands in a configuration. None: no key."""
    mode: Literal["rating", "pairwise"] = "rating"
    """`rating`: the judge rates the completion with a number; the reward is 0 at `lowest_rating` and 1 at
    `highest_rating`. `pairwise`: the judge compares it with a reference completion, twice with positions swapped; the
    reward is the mean of win 1, tie 0.5, loss 0."""
    reference_key: str = "reference_answers"
    """With `pairwise`: the key of `env_infos` with the reference completion, or with a list of them for an average."""
    template: str | None = None
    """The prompt of the judge, with the placeholders `{conversation}` and `{completion}`, or `{completion_a}` and
    `{completion_b}`. Each text is put between tags with a random number. None: the built-in prompt."""
    system_prompt: str | None = None
    """The system prompt of the judge. None: the built-in one, which says to judge the text between the tags, and never
    to obey it."""
    lowest_rating: FiniteFloat = 1.0
    """A lower rating is not a verdict."""
    highest_rating: FiniteFloat = 10.0
    """A higher rating is not a verdict."""
    temperature: FiniteFloat | None = 0.0
    """Temperature of the judge. None: not sent, for models that refuse it."""
    max_tokens: PositiveInt | None = 1024
    """Longest message of the judge, in tokens; a truncated message is not a verdict. None: not sent."""
    extra_body: dict[str, Any] = {}
    """Further fields of the request, as `{max_completion_tokens: 1024}`."""
    max_characters: PositiveInt = 100_000
    """A sample with a longer prompt for the judge has no reward: nothing is cut silently."""
    max_concurrency: PositiveInt = 16
    """Most requests at a time."""
    timeout_seconds: PositiveFloat = 60.0
    """Timeout of one attempt at a request."""
    max_retries: NonNegativeInt = 4
    """Further attempts of a request after 408, 409, 429, 5xx, timeouts and broken connections: exponential backoff, or
    as long as Retry-After says."""
    step_timeout_seconds: PositiveFloat | None = 600.0
    """Time limit of a step; samples without a verdict by then have no reward. None: no limit."""

    def check(self) -> None:
        missing = [name for name in REQUIRED_PLACEHOLDERS[self.mode] if self.template and name not in self.template]
        need = f"{' and '.join(REQUIRED_PLACEHOLDERS[self.mode])}, where the texts to judge go"
        self.refuse(missing, f"the template of mode {self.mode} has no {', '.join(missing)}", "template", need=need)
        is_falling, need = self.lowest_rating >= self.highest_rating, "lowest_rating below highest_rating"
        self.refuse(is_falling, "the scale of ratings does not rise", "lowest_rating highest_rating", need=need)


class CustomEnvironmentConfig(Strict):
    """Rewards by your own Python function or class."""

    function: str
    """`package.module:name`, `package.module.name` or `path/to/file.py:name`; a function, or a class, which is
    constructed once with `kwargs` and called by its `score`, `predict` or `__call__`."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of the function, or those of the class's constructor."""
    signature: Literal["conversations", "conversation", "prompt_response", "trl", "verl"] | None = None
    """How it is called. `conversations`: once per step, (conversations, env_infos); `conversation`: once per sample,
    (conversation, env_info); `prompt_response`: once per sample, with texts; `trl`: (prompts, completions, **columns);
    `verl`: compute_score of a sample or of a batch. None: by the names of its parameters."""
    max_concurrency: PositiveInt = 32
    """Most samples at a time of an async function that is called once per sample."""


class HybridMember(Strict):
    """One member of a hybrid: its weight, and its own keys beside it."""

    weight: FiniteFloat | None = None
    """With `weighted`: factor of its reward. None: 1."""
    type: str | None = None
    """The kind of environment. None: the name of the member."""
    settings: dict[str, Any] = {}
    """The member's own keys; they may also stand beside `weight` and `type`."""

    @model_validator(mode="before")
    @classmethod
    def _gather_settings(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        own = {key: value for key, value in raw.items() if key not in ("weight", "type", "settings")}
        gathered = {key: raw[key] for key in ("weight", "type") if key in raw}
        return gathered | {"settings": {**(raw.get("settings") or {}), **own}}


class HybridEnvironmentConfig(Strict):
    """Several environments whose rewards become one."""

    members: dict[str, HybridMember] = Field(min_length=1)
    """The environments by name, in order."""
    mode: Literal["weighted", "fallback"] = "weighted"
    """`weighted`: the sum of weight times reward. `fallback`: the reward of the first member that has a valid one;
    later members get the other samples only."""
    missing: Literal["mask", "renormalise"] = "mask"
    """With `weighted`: a sample that a member could not reward has no reward (`mask`), or the weights of the others are
    scaled up to the sum of all (`renormalise`)."""
    fallback_on: tuple[Literal["failed", "wrong"], ...] = ("failed", "wrong")
    """With `fallback`: the next member gets the samples without a reward (`failed`), and those with a wrong answer
    (`wrong`: the component `correct` is 0)."""

    def check(self) -> None:
        for name, member in self.members.items():
            field, weight = f"members.{name}.weight", member.weight
            if self.mode == "fallback" and weight is not None:
                need = "mode: weighted, or no weight"
                raise ConfigError("a weight has no meaning in mode fallback", field=field, got=weight, need=need)
            if self.missing == "renormalise" and weight is not None and weight <= 0:
                need = "missing: mask, or a positive weight"
                raise ConfigError("missing: renormalise needs weights above 0", field=field, got=weight, need=need)


ENVIRONMENT_SECTIONS: Mapping[str, type[Strict]] = {
    "reward_model": RewardModelEnvironmentConfig,
    "rules": RuleEnvironmentConfig,
    "math": MathEnvironmentConfig,
    "judge": JudgeEnvironmentConfig,
    "custom": CustomEnvironmentConfig,
    "hybrid": HybridEnvironmentConfig,
}
"""The kinds of environments -> the schema of their sections."""


def is_enabled(section: Any) -> bool:
    """Whether the environment of a section is switched on."""
    return not isinstance(section, Mapping) or section.get("enabled", True) is not False


def check_environment(name: str, section: Any, ignored: list[str] | None = None) -> None:
    """Raise `ConfigError`, its `field` relative to `env`, for a section that its environment would refuse.

    `ignored`: collects keys without effect. A section with `enabled: false` may hold anything. A kind
    that is not in `ENVIRONMENT_SECTIONS` may be registered in Python; it is refused if it is nearly a known name.
    """
    if not isinstance(section, Mapping):
        raise ConfigError("the section of an environment is not a mapping", field=name, got=section, need="its keys")
    if not is_enabled(section):
        return
    settings = {key: value for key, value in section.items() if key not in ("enabled", "type")}
    kind = str(section.get("type") or name)
    schema = ENVIRONMENT_SECTIONS.get(kind)
    if schema is None:
        near = None if "." in kind else nearest_name(kind, ENVIRONMENT_SECTIONS)
        if near is not None:
            field, need = f"{name}.type" if "type" in section else name, f"one of {', '.join(ENVIRONMENT_SECTIONS)}"
            fix = f"did you mean {near}? Say `type: {near}` where the name is meant to be another"
            raise ConfigError("there is no such kind of environment", field=field, got=kind, need=need, fix=fix)
        return
    try:
        checked = schema.model_validate(settings, context={"ignored": [] if ignored is None else ignored})
    except ValidationError as error:
        one = config_error(error, schema, where=f"env.{name}")
        raise at_field(one, ".".join(part for part in (name, one.field) if part)) from None
    if isinstance(checked, HybridEnvironmentConfig):
        for member, given in checked.members.items():
            typed = {"type": given.type} if given.type else {}
            try:
                check_environment(member, {**given.settings, **typed}, ignored)
            except ConfigError as error:
                raise at_field(error, f"{name}.members.{error.field}") from None
