"""The reward model resources server of NeMo Gym: treeward's server, with the section that Gym hands over.

    ng_run "+config_paths=[resources_servers/reward_model/configs/reward_model.yaml, ...]"
    NEMO_GYM_CONFIG_PATH=reward_model_server NEMO_GYM_CONFIG_DICT="$(cat merged.yaml)" python app.py    # what it runs

The instance's section of the merged configuration says where to listen and what to load (`NemoGymConfig`). NeMo Gym
takes any response as a sign that the server is up, so nothing listens until the model is loaded and verified.
"""

from __future__ import annotations

import sys

from treeward.config.load import load_section
from treeward.config.nemo_gym import NemoGymConfig, handed_over
from treeward.errors import TreewardError
from treeward.progress import configure_logging
from treeward.serving.run import serve


def main() -> int:
    """Serve until a signal; the exit code, 2 for a mistake in the configuration."""
    try:
        configure_logging()
        return serve(gym_config().server_config)
    except TreewardError as error:
        sys.stderr.write(f"reward_model: {error}\n")
        return 2


def gym_config() -> NemoGymConfig:
    """This server's section of the configuration that NeMo Gym hands over in the environment. Raises `ConfigError`."""
    where, section = handed_over()
    return load_section(NemoGymConfig, section, where=where)


if __name__ == "__main__":
    sys.exit(main())
