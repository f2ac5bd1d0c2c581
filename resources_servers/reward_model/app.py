"""The reward model resources server of NeMo Gym: treeward's server, with the section that Gym hands
over.

    gym env start --config resources_servers/reward_model/configs/reward_model.yaml --config ...
    NEMO_GYM_CONFIG_PATH=reward_model_server NEMO_GYM_CONFIG_DICT="$(cat merged.yaml)" python app.py    # what it runs

The instance's section of the merged configuration says where to listen and what to load
(`NemoGymConfig`):

    reward_model_server:
      resources_servers:
        reward_model: {entrypoint: app.py, domain: rlhf, model_path: results/rm/final, batch_size: 8}

NeMo Gym's own keys of the section are known and have no effect; `host` and `port` are those that it
gives. The keys of `shaping` (`normalize_rewards`, `reward_mean`, `length_penalty`, ...) may stand
beside the others instead; there `reward_mean` is 0 and `reward_std` is 1 by default, as on NeMo
Gym's page. NeMo Gym takes any response as a sign that the server is up, so nothing listens until
the model is loaded and verified.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from treeward.compat.nemo_gym import OWN_KEYS, handed_over
from treeward.config.load import load_section
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.errors import ConfigError, TreewardError
from treeward.progress import configure_logging
from treeward.serving.run import serve

_NAMES_OF_MODELS = ("models", "model", "model_name", "model_path")
_SHAPING_KEYS = (
    "normalize_rewards",
    "reward_mean",
    "reward_std",
    "reward_clip",
    "length_penalty",
    "preference_score",
)
_DEADLINE_SECONDS = 600  # NeMo Gym waits without a limit, and repeats a rollout that is given up
_MAX_LENGTH = 2048  # of NeMo Gym's page, for a model whose scoring contract does not say
# The defaults of NeMo Gym's page.
_NORMALIZATION = {"normalize_rewards": False, "reward_mean": 0.0, "reward_std": 1.0}
_PLAIN_MEAN = {
    "method": "mean",
    "standardize": False,
}  # of NeMo Gym's page, "Average multiple reward models"

logger = logging.getLogger("treeward.reward_model")


class NemoGymConfig(ServedModelConfig):
    """The configuration of a reward model resources server. Several models without an `ensemble`
    are averaged."""

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
    """Other keys of the server's configuration, as `{max_queued: 1000}`; `deadline_seconds` is 600
    by default."""

    @property
    def server_config(self) -> ServerConfig:
        """The configuration of the server."""
        longest = self.default_max_length or _MAX_LENGTH
        section = self.model_dump(include=set(ServedModelConfig.model_fields)) | {
            "default_max_length": longest
        }
        values: dict[str, Any] = {"models": [section], "host": self.host, "port": self.port}
        if "batch_size" in self.model_fields_set or "batch_tokens" not in self.server:
            values["batch_tokens"] = self.batch_size * (self.max_length or longest)
        values["running"] = self.running
        values = {"deadline_seconds": _DEADLINE_SECONDS} | values | self.server
        return load_section(ServerConfig, values, where="server")

    def check(self) -> None:
        if self.running and self.shaping is not None and self.shaping.normalize_rewards:
            raise self.error(
                "running", "running statistics, or normalize_rewards with constants: one of them"
            )
        assert self.server_config  # raises for what the server would refuse


def main() -> int:
    """Serve until a signal; the exit code, 2 for a mistake in the configuration."""
    try:
        configure_logging()
        return serve(gym_config().server_config)
    except TreewardError as error:
        sys.stderr.write(f"reward_model: {error}\n")
        return 2


def gym_config() -> NemoGymConfig:
    """This server's section of the configuration that NeMo Gym hands over in the environment.
    Raises `ConfigError`."""
    where, section = handed_over()
    config = checked(section, where)
    if len(config.models) > 1 and "ensemble" not in section:
        logger.warning(
            "The scores of %d models are averaged as they are, so a model with a wider scale counts for more. "
            "`ensemble: mean` brings them to one scale first, by the calibration of each (treeward calibrate).",
            len(config.models),
        )
    return config


def checked(section: Mapping[str, Any], where: str) -> NemoGymConfig:
    """NeMo Gym's section, checked. Raises `ConfigError`, its place `where`."""
    return load_section(NemoGymConfig, _native(section, where), where=where)


def _native(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    """NeMo Gym's section in our form: without its own keys, and with the flat keys of `shaping` in
    their section.

    Raises `ConfigError`, its place `where`, for rewards that are shaped in two ways.
    """
    values = {key: value for key, value in section.items() if key not in OWN_KEYS}
    models = next((values[key] for key in _NAMES_OF_MODELS if key in values), ())
    if isinstance(models, Sequence) and not isinstance(models, str) and len(models) > 1:
        values = {"ensemble": _PLAIN_MEAN, **values}
    flat = {key: values.pop(key) for key in _SHAPING_KEYS if key in values}
    if not flat:
        return values
    if values.get("shaping") is not None:
        need = "all of it in the shaping section"
        summary = "rewards are shaped in two ways"
        raise ConfigError(summary, where=where, field=next(iter(flat)), got=flat, need=need)
    shaping = {**_NORMALIZATION, **flat}
    is_on = any(
        shaping.get(key) for key in ("normalize_rewards", "preference_score", "length_penalty")
    )
    values["shaping"] = shaping if is_on else None
    return values


if __name__ == "__main__":
    sys.exit(main())
