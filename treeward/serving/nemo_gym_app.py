"""`main`: the reward model resources server that NeMo Gym starts; `resources_servers/reward_model/app.py` calls it.

    NEMO_GYM_CONFIG_PATH=reward_model_server NEMO_GYM_CONFIG_DICT="$(cat merged.yaml)" python app.py

The instance's section of the merged configuration says where to listen and what to load (`NemoGymConfig`). NeMo Gym
takes any response as a sign that the server is up, so nothing listens until the model is loaded and verified.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from treeward.config.load import load_section
from treeward.config.nemo_gym import NemoGymConfig
from treeward.errors import ConfigError, TreewardError
from treeward.serving import logs
from treeward.serving.run import serve

_DICT, _NAME = "NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_PATH"


def main() -> int:
    """Serve until a signal; the exit code, 2 for a mistake in the configuration."""
    try:
        config = gym_config()
        server = config.server_config
        logs.configure(server.log_format)
        return serve(server)
    except TreewardError as error:
        sys.stderr.write(f"reward_model: {error}\n")
        return 2


def gym_config() -> NemoGymConfig:
    """This server's section of the configuration that NeMo Gym hands over in the environment. Raises `ConfigError`."""
    name = _variable(_NAME)
    try:
        merged = OmegaConf.create(_variable(_DICT))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError("the configuration cannot be read", where=_DICT, got=str(error), need="YAML") from error
    instance: Any = merged.get(name) if isinstance(merged, DictConfig) else None
    servers = instance.get("resources_servers") if isinstance(instance, DictConfig) else None
    if not isinstance(servers, DictConfig) or len(servers) != 1:
        raise ConfigError(
            "there is no such resources server",
            where=_DICT,
            field=name,
            got=sorted(map(str, merged)) if isinstance(merged, DictConfig) else type(merged).__name__,
            need=f"{name}.resources_servers with one server",
        )
    implementation = next(iter(servers))
    where = f"{name}.resources_servers.{implementation!s}"
    return load_section(NemoGymConfig, servers[implementation], where=where)


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(
            "NeMo Gym has not started this server",
            where=name,
            got="the environment variable is not set",
            need="the merged configuration, and the instance's name in it",
            fix="use ng_run, or treeward serve MODEL without NeMo Gym",
        )
    return value
