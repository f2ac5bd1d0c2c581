"""Optimise a policy: `treeward grpo` by the command of NeMo RL.

python examples/run_grpo.py --config grpo_rm_1B env.reward_model.model_name=results/rm/final
"""

import sys
from pathlib import Path

from treeward.cli.main import main

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "grpo_math_1B.yaml"

if __name__ == "__main__":
    arguments = sys.argv[1:]
    named = any(argument.split("=")[0] == "--config" for argument in arguments)
    sys.exit(main(["grpo", *([] if named else ["--config", str(DEFAULT_CONFIG)]), *arguments]))
