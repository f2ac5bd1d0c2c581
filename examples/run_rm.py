"""Train a reward model: `treeward train` under the name and with the arguments that NeMo RL users know.

python examples/run_rm.py --config rm policy.model_name=Qwen/Qwen2.5-1.5B
"""

import sys
from pathlib import Path

from treeward.cli.main import main

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "rm.yaml"

if __name__ == "__main__":
    arguments = sys.argv[1:]
    named = any(argument.split("=")[0] == "--config" for argument in arguments)
    sys.exit(main(["train", *([] if named else ["--config", str(DEFAULT_CONFIG)]), *arguments]))
