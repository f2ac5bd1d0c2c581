"""The reward model resources server of NeMo Gym: treeward's server, with the section that Gym hands over.

    ng_run "+config_paths=[resources_servers/reward_model/configs/reward_model.yaml, ...]"
    NEMO_GYM_CONFIG_PATH=reward_model_server NEMO_GYM_CONFIG_DICT="$(cat merged.yaml)" python app.py    # what it runs

The instance's section of the merged configuration says where to listen and what to load (`NemoGymConfig`). NeMo Gym
takes any response as a sign that the server is up, so nothing listens until the model is loaded and verified.
"""

from __future__ import annotations

import os
import sys

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from treeward.config.load import load_section
from treeward.config.nemo_gym import NemoGymConfig
from treeward.errors import ConfigError, TreewardError
from treeward.serving import logs
from treeward.serving.run import serve


def main() -> int:
    """Serve until a signal; the exit code, 2 for a mistake in the configuration."""
    try:
        server = gym_config().server_config
        logs.configure(server.log_format)
        return serve(server)
    except TreewardError as error:
        sys.stderr.write(f"reward_model: {error}\n")
        return 2


def gym_config() -> NemoGymConfig:
    """This server's section of the configuration that NeMo Gym hands over in the environment. Raises `ConfigError`."""
    name = os.environ.get("NEMO_GYM_CONFIG_PATH", "")
    try:
        merged = OmegaConf.create(os.environ.get("NEMO_GYM_CONFIG_DICT", ""))
        [(implementation, section)] = OmegaConf.select(merged, f"{name}.resources_servers").items()
    except (OmegaConfBaseException, YAMLError, ValueError, AttributeError) as error:
        raise ConfigError(
            "NeMo Gym has given no configuration of this server",
            where="NEMO_GYM_CONFIG_DICT, NEMO_GYM_CONFIG_PATH",
            got=f"{type(error).__name__}: {error}",
            need=f"YAML with one server in {name or 'NAME'}.resources_servers",
            fix="use ng_run, or treeward serve MODEL without NeMo Gym",
        ) from error
    return load_section(NemoGymConfig, section, where=f"{name}.resources_servers.{implementation}")


if __name__ == "__main__":
    sys.exit(main())
