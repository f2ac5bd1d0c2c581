"""`NemoGymConfig`: the server's section of a NeMo Gym configuration, which becomes a `ServerConfig`.

    reward_model_server:
      resources_servers:
        reward_model: {entrypoint: app.py, domain: rlhf, model_path: results/rm/final, batch_size: 8}

NeMo Gym's own keys of the section are known and have no effect; `host` and `port` are those that it gives.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from treeward.config.ensemble import EnsembleConfig
from treeward.config.load import load_section
from treeward.config.reward_shaping import LengthPenaltyConfig, RewardShapingConfig
from treeward.config.server import HostedModelConfig, Models, ServerConfig
from treeward.errors import ConfigError

__all__ = ["NemoGymConfig"]

_DEADLINE_SECONDS = 600  # NeMo Gym waits without a limit, and repeats a rollout that is given up
_TOKENS_OF_A_CONVERSATION = 2048
_TOKENS_OF_A_CUSTOM_ONE = 512  # the size of a conversation in `serving.custom_reward`, whatever its length
_SHORTHANDS = ("normalize_rewards", "reward_mean", "reward_std", "reward_clip", "length_penalty")

_Ensemble = Annotated[
    EnsembleConfig, BeforeValidator(lambda given: {"method": given} if isinstance(given, str) else given)
]


class NemoGymConfig(HostedModelConfig):
    """The configuration of a reward model resources server."""

    model_path: Models
    """Folder or hub name of a reward model, or a list of them, which are scored as an ensemble."""
    ensemble: _Ensemble | None = None
    """How the scores of several models are combined: mean, worst, uncertainty, or a section. None: mean."""
    batch_size: PositiveInt | None = None
    """Conversations of `max_length` tokens (2048 if that is null) in one forward pass; more if they are shorter or
    share a prompt. None: the server's `batch_tokens`."""

    normalize_rewards: bool = False
    """Subtract a mean and divide by a standard deviation, and clip."""
    reward_mean: float | None = None
    """The mean. None: from the model's contract."""
    reward_std: PositiveFloat | None = None
    """The standard deviation. None: from the model's contract."""
    reward_clip: PositiveFloat | None = 5.0
    """Normalised rewards are clipped to +- this many standard deviations. None: no limit."""
    length_penalty: LengthPenaltyConfig | None = None
    """A deduction for long completions: `coefficient` for each character above `threshold`."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port to listen on."""
    server: dict[str, Any] = Field(default_factory=dict)
    """Other keys of the server's configuration, as `{deadline_seconds: 60, max_queued: 1000}`; `deadline_seconds` is
    600 by default, because NeMo Gym itself has no time limit."""

    @property
    def server_config(self) -> ServerConfig:
        """The configuration of the server. Raises `ConfigError` for unknown keys of `server`."""
        model = self.model_dump(include=set(HostedModelConfig.model_fields)) | {"name": "reward_model"}
        if self.shaping is None and (self.normalize_rewards or self.length_penalty is not None):
            model["shaping"] = self.model_dump(include=set(_SHORTHANDS))
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
            tokens = _TOKENS_OF_A_CUSTOM_ONE if self.reward_class else self.max_length or _TOKENS_OF_A_CONVERSATION
            values["batch_tokens"] = self.batch_size * tokens
        return load_section(ServerConfig, values | self.server, where="server")

    @property
    def _is_ensemble(self) -> bool:
        return len(self.model_path) > 1 or self.ensemble is not None

    def check(self) -> None:
        self.check_pair("reward_mean", "reward_std", need="both of them, or neither for those of the model's contract")
        given = [key for key in _SHORTHANDS if key in self.model_fields_set]
        is_twice = self.shaping is not None and given
        keys = f"{(given or ['shaping'])[0]} shaping"
        self.refuse(is_twice, "rewards are shaped in two ways", keys, need="all of it in the shaping section")
        self.refuse(
            isinstance(self.shaping, RewardShapingConfig) and self.shaping.running,
            "with running statistics a rollout that is verified again would have another reward",
            "shaping.running",
            need="constants: reward_mean and reward_std, or those of the model's contract",
        )
        are_several, need = self.reward_class is not None and self._is_ensemble, "one model_path, without ensemble"
        self.refuse(are_several, "a reward class serves one model", "model_path ensemble", need=need)
        taken = {"models", "host", "port"} | ({"batch_tokens"} if self.batch_size is not None else set())
        for key in sorted(taken & self.server.keys()):
            raise ConfigError(
                "this key of the server is set elsewhere",
                field=f"server.{key}",
                got=self.server[key],
                need="model_path, host, port and batch_size of the section itself",
            )
