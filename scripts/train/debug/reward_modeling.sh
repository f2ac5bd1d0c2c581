#!/bin/bash
# A small reward model on the bundled data, 20 steps: no download, half a minute on a CPU.
# Further arguments are options of open-instruct's reward_modeling.py, as --learning_rate 3e-4, or treeward's overrides,
# as rm.max_num_steps=50.
cd "$(dirname "$0")/../../.." || exit
PATH="${VIRTUAL_ENV:-$PWD/.venv}/bin:$PATH"  # an active environment, or what `make env` made
exec python -m treeward.cli.open_instruct --config quickstart rm.max_num_steps=20 \
    checkpointing.checkpoint_dir=results/debug logger.log_dir=logs/debug "$@"
