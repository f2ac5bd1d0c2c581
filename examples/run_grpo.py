"""Optimise a policy: `treeward grpo` by the command of NeMo RL.

python examples/run_grpo.py --config grpo_rm_1B env.reward_model.model_name=results/rm/final
"""

import sys

from treeward.cli.main import main

if __name__ == "__main__":
    # Of two --config the last counts: the recipe is for who names none.
    sys.exit(main(["grpo", "--config", "grpo_math_1B", *sys.argv[1:]]))
