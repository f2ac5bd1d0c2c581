"""Train a reward model: `treeward train` under the name and with the arguments that NeMo RL users
know.

python examples/run_rm.py --config rm policy.model_name=Qwen/Qwen2.5-1.5B
"""

import sys

from treeward.cli.main import main

if __name__ == "__main__":
    # Of two --config the last counts: the recipe is for who names none.
    sys.exit(main(["train", "--config", "rm", *sys.argv[1:]]))
