#!/bin/bash
# A small reward model on the bundled data, 20 steps: no download, a minute on a CPU or one GPU.
# Further arguments are overrides: bash scripts/train/debug/reward_modeling.sh rm.max_num_steps=50
cd "$(dirname "$0")/../../.." || exit
PATH="$PATH:$PWD/.venv/bin"  # where `make` and uv put it
exec treeward train --config quickstart rm.max_num_steps=20 \
    checkpointing.checkpoint_dir=results/debug logger.log_dir=logs/debug "$@"
