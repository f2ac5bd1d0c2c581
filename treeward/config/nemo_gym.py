"""`NemoGymConfig`: the server's section of a NeMo Gym configuration, which becomes a `ServerConfig`.

    reward_model_server:
      resources_servers:
        reward_model: {entrypoint: app.py, domain: rlhf, model_path: results/rm/final, batch_size: 8}

NeMo Gym's own keys of the section are known and have no effect; `host` and `port` are those that it gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from treeward.config.base import Strict
from treeward.config.ensemble import EnsembleConfig
from treeward.config.load import load_section
from treeward.config.reward_shaping import LengthPenaltyConfig, RewardShapingConfig, ShapingOrContract
from treeward.config.server import ServerConfig
from treeward.errors import ConfigError

__all__ = ["NemoGymConfig"]

_GYMS_OWN = "it is NeMo Gym's own"
_DEADLINE_SECONDS = 600  # NeMo Gym waits for ever, and a rollout that is given up is made again
_TOKENS_OF_A_CONVERSATION = 2048
_TOKENS_OF_A_CUSTOM_ONE = 512  # what `serving.custom_reward` takes a conversation for, whatever its length

_Paths = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda paths: (paths,) if isinstance(paths, str) else paths),
    Field(min_length=1),
]
_Ensemble = Annotated[
    EnsembleConfig, BeforeValidator(lambda given: {"method": given} if isinstance(given, str) else given)
]
_SHORTHANDS = ("normalize_rewards", "reward_mean", "reward_std", "reward_clip", "length_penalty")


class NemoGymConfig(Strict):
    """What a reward model resources server is told."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        key: _GYMS_OWN
        for key in (
            *("entrypoint", "domain", "verified", "verified_url", "description", "value", "name", "datasets"),
            *("expose_tools_over_mcp", "license", "skills"),
        )
    } | {"num_workers": "one process batches the requests of all agents together"}

    model_path: _Paths
    """Folder or hub name of a reward model, or a list of them, which are scored as an ensemble."""
    ensemble: _Ensemble | None = None
    """How several models become one score: mean, worst, uncertainty, or a section. None: mean, where there are
    several."""
    reward_class: str | None = None
    """A reward of your own, as `my_module:MyReward`: a class that is made with `model_path` and has
    `score(prompt, response) -> float`, or `score_batch(prompts, responses) -> list[float]`."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... None: a GPU where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the backbone's weights; the head is float32."""
    batch_size: PositiveInt | None = None
    """Conversations of `max_length` tokens (2048 where that is None) that one forward pass has room for: of shorter
    ones, and of those that share a prompt, it takes more. None: the server's `batch_tokens`."""
    max_length: PositiveInt | None = None
    """Most tokens of a conversation. None: as in training."""
    truncation: Literal["drop", "truncate_left", "error"] | None = None
    """What becomes of longer ones: no reward, or the oldest messages cut. None: as in training."""
    trust_remote_code: bool = False
    """Run Python code that the model brings."""
    check_contract: bool = True
    """Refuse to serve a model that does not keep its scoring contract."""

    normalize_rewards: bool = False
    """Subtract a mean and divide by a standard deviation, and clip."""
    reward_mean: float | None = None
    """The mean. None: that of the model's contract."""
    reward_std: PositiveFloat | None = None
    """The standard deviation. None: that of the model's contract."""
    reward_clip: PositiveFloat | None = 5.0
    """Normalised rewards are clipped to +- this many standard deviations. None: no limit."""
    length_penalty: LengthPenaltyConfig | None = None
    """A deduction for long replies: `coefficient` for each character above `threshold`."""
    shaping: ShapingOrContract | None = None
    """A whole `reward_shaping` section instead of the keys above, or `contract` for that of the model's contract."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port to listen on."""
    server: dict[str, Any] = Field(default_factory=dict)
    """Other keys of the server's configuration, as `{deadline_seconds: 60, max_queued: 1000}`; `deadline_seconds` is
    600 if it is left out, for NeMo Gym itself waits for ever."""

    @property
    def server_config(self) -> ServerConfig:
        """The configuration of the server that answers. Raises `ConfigError` for keys of `server` that it has not."""
        model: dict[str, Any] = {
            "name": "reward_model",
            "shaping": self._shaping,
            "device": self.device,
            "dtype": self.dtype,
            "max_length": self.max_length,
            "truncation": self.truncation,
            "trust_remote_code": self.trust_remote_code,
            "check_contract": self.check_contract,
            "reward_class": self.reward_class,
        }
        if self._is_ensemble:
            ensemble = self.ensemble or EnsembleConfig()
            members = {"model": self.model_path[0]} if ensemble.over == "heads" else {"models": self.model_path}
            model |= {**members, "ensemble": ensemble.model_dump()}
        else:
            model["model"] = self.model_path[0]
        values: dict[str, Any] = {
            "models": [model],
            "host": self.host,
            "port": self.port,
            "deadline_seconds": _DEADLINE_SECONDS,
        }
        if self.batch_size is not None:
            tokens = self.max_length or _TOKENS_OF_A_CONVERSATION
            values["batch_tokens"] = self.batch_size * (
                tokens if self.reward_class is None else _TOKENS_OF_A_CUSTOM_ONE
            )
        return load_section(ServerConfig, values | self.server, where="server")

    @property
    def _is_ensemble(self) -> bool:
        return len(self.model_path) > 1 or self.ensemble is not None

    @property
    def _shaping(self) -> dict[str, Any] | str | None:
        if self.shaping is not None:
            return self.shaping if isinstance(self.shaping, str) else self.shaping.model_dump()
        if not self.normalize_rewards and self.length_penalty is None:
            return None
        return {
            "normalize_rewards": self.normalize_rewards,
            "reward_mean": self.reward_mean,
            "reward_std": self.reward_std,
            "reward_clip": self.reward_clip,
            "length_penalty": None if self.length_penalty is None else self.length_penalty.model_dump(),
        }

    @model_validator(mode="after")
    def _one_shaping(self) -> NemoGymConfig:
        given = [key for key in _SHORTHANDS if key in self.model_fields_set]
        if self.shaping is not None and given:
            raise ConfigError(
                "rewards are shaped in two ways",
                field=given[0],
                got=f"{', '.join(given)} beside shaping",
                need="one of them",
                fix="write it into the shaping section",
            )
        if isinstance(self.shaping, RewardShapingConfig) and self.shaping.running:
            raise ConfigError(
                "with running statistics a rollout that is verified again would have another reward",
                field="shaping.running",
                got="true",
                need="constants: reward_mean and reward_std, or those of the model's contract",
            )
        if (self.reward_mean is None) != (self.reward_std is None):
            raise ConfigError(
                "reward_mean and reward_std belong together",
                field="reward_std" if self.reward_std is None else "reward_mean",
                got="null",
                need="both of them, or neither for those of the model's contract",
            )
        return self

    @model_validator(mode="after")
    def _one_kind_of_model(self) -> NemoGymConfig:
        if self.reward_class is not None and self._is_ensemble:
            raise ConfigError(
                "a reward class is one model",
                field="model_path",
                got=f"{len(self.model_path)} models" if len(self.model_path) > 1 else "an ensemble",
                need="one model_path, which the class is given",
            )
        taken = sorted({"models", "host", "port"} & self.server.keys())
        if taken or (self.batch_size is not None and "batch_tokens" in self.server):
            key = taken[0] if taken else "batch_tokens"
            raise ConfigError(
                "the server's configuration is given this key elsewhere",
                field=f"server.{key}",
                got=self.server[key],
                need="model_path, host, port and batch_size of the section itself",
            )
        return self
