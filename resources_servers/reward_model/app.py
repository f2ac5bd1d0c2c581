"""The reward model resources server of NeMo Gym: treeward's server, with the section that Gym hands over.

ng_run "+config_paths=[resources_servers/reward_model/configs/reward_model.yaml, ...]"
"""

from __future__ import annotations

import sys

from treeward.serving.nemo_gym_app import main

if __name__ == "__main__":
    sys.exit(main())
