"""`NemoGymConfig`: the server's section of a NeMo Gym configuration, which becomes a `ServerConfig`.

    reward_model_server:
      resources_servers:
        reward_model: {entrypoint: app.py, domain: rlhf, model_path: results/rm/final, batch_size: 8}

NeMo Gym's own keys of the section are known and have no effect; `host` and `port` are those that it gives. The keys of
`shaping` (`normalize_rewards`, `reward_mean`, `length_penalty`, ...) may stand beside the others instead; there
`reward_mean` is 0 and `reward_std` is 1 by default, as on NeMo Gym's page.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, PositiveInt, model_validator
from yaml import YAMLError

from treeward.config.load import load_section
from treeward.config.scoring import RewardShapingConfig
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.errors import ConfigError

_DEADLINE_SECONDS = 600  # NeMo Gym waits without a limit, and repeats a rollout that is given up
_MAX_LENGTH = 2048  # of the page, for a model whose scoring contract does not say
_CONSTANTS = {"reward_mean": 0.0, "reward_std": 1.0}


def handed_over() -> tuple[str, DictConfig]:
    """What NeMo Gym gives a server in the environment: the name of its section, and the section in the merged whole.

    Raises `ConfigError`.
    """
    name = os.environ.get("NEMO_GYM_CONFIG_PATH", "")
    try:
        [(implementation, section)] = OmegaConf.select(_merged(), f"{name}.resources_servers").items()
    except (OmegaConfBaseException, YAMLError, ValueError, AttributeError) as error:
        raise ConfigError(
            "NeMo Gym has given no configuration of this server",
            where="NEMO_GYM_CONFIG_DICT, NEMO_GYM_CONFIG_PATH",
            got=f"{type(error).__name__}: {error}",
            need=f"YAML with one server in {name or 'NAME'}.resources_servers",
            fix="use ng_run, or treeward serve MODEL without NeMo Gym",
        ) from error
    return f"{name}.resources_servers.{implementation}", section


def model_server_url(name: str) -> str:
    """The address of one of NeMo Gym's model servers, for OpenAI's API. Raises `ConfigError`."""
    servers = OmegaConf.select(_merged(), f"{name}.responses_api_models") or {}
    for server in servers.values():
        return f"http://{server.host}:{server.port}/v1"
    need = "the name of a server in NAME.responses_api_models of the configuration"
    raise ConfigError("there is no such model server", field="judge_model_server.name", got=name, need=need)


def _merged() -> DictConfig:
    return cast(DictConfig, OmegaConf.create(os.environ.get("NEMO_GYM_CONFIG_DICT", "")))


class NemoGymConfig(ServedModelConfig):
    """The configuration of a reward model resources server. Several models are an ensemble, by default `mean`."""

    other_forms: ClassVar[tuple[str, ...]] = (
        *("normalize_rewards", "reward_mean", "reward_std", "reward_clip", "length_penalty"),
        "preference_score",
    )

    name: str = "reward_model"
    """Name of the model in requests."""
    batch_size: PositiveInt = 8
    """Conversations of `max_length` tokens (or 2048) in one forward pass."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port to listen on."""
    running: bool = False
    """Normalise by the mean and standard deviation of all rewards so far."""
    server: dict[str, Any] = Field(default_factory=dict)
    """Other keys of the server's configuration, as `{max_queued: 1000}`; `deadline_seconds` is 600 by default."""

    @model_validator(mode="before")
    @classmethod
    def _gather_shaping(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        models = next((raw[key] for key in ("models", "model", "model_name", "model_path") if key in raw), ())
        if isinstance(models, Sequence) and not isinstance(models, str) and len(models) > 1:
            raw = {"ensemble": "mean", **raw}
        forms = {key: raw[key] for key in cls.other_forms if key in raw}
        shaping, others = raw.get("shaping"), {key: value for key, value in raw.items() if key not in forms}
        if forms and shaping is not None:
            need = "all of it in the shaping section"
            raise ConfigError("rewards are shaped in two ways", field=next(iter(forms)), got=forms, need=need)
        if not forms:
            return raw
        section = RewardShapingConfig.model_validate({**_CONSTANTS, **forms})
        is_on = section.normalize_rewards or section.preference_score or section.length_penalty
        return {**others, "shaping": section if is_on else None}

    @property
    def server_config(self) -> ServerConfig:
        """The configuration of the server."""
        longest = self.default_max_length or _MAX_LENGTH
        section = self.model_dump(include=set(ServedModelConfig.model_fields)) | {"default_max_length": longest}
        values: dict[str, Any] = {"models": [section], "host": self.host, "port": self.port}
        if "batch_size" in self.model_fields_set or "batch_tokens" not in self.server:
            values["batch_tokens"] = self.batch_size * (self.max_length or longest)
        values["running"] = self.running
        values = {"deadline_seconds": _DEADLINE_SECONDS} | values | self.server
        return load_section(ServerConfig, values, where="server")

    def check(self) -> None:
        if self.running and isinstance(self.shaping, RewardShapingConfig) and self.shaping.normalize_rewards:
            raise self.error("running", "running statistics, or normalize_rewards with constants: one of them")
        assert self.server_config  # raises for what the server would refuse
