"""Optimise a policy against a reward model: NeMo RL's older command, which is `run_grpo.py` with
another recipe.

python examples/run_grpo_rm.py --config grpo_rm_1B env.reward_model.model_name=results/rm/final
"""

import sys

from treeward.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["grpo", "--config", "grpo_rm_1B", *sys.argv[1:]]))
