#!/bin/bash
# The recipe of allenai/Llama-3.1-Tulu-3-8B-RM: one epoch over the preference mixture of Tulu 3, from the hub.
#
# Needs one GPU of 80 GB and 90 GB of the host's memory, by arithmetic: bfloat16 weights, whose float32 masters and the
# optimiser's states lie on the host. The authors have 8 nodes. This has not been run at this size: the tests run it with
# a small model and rows in the same schema. Their own script allows 4096 tokens: --max_token_length 4096.
# Further arguments are options of open-instruct's reward_modeling.py, or treeward's overrides. With --push_to_hub the
# model is uploaded, as open-instruct does by default.
cd "$(dirname "$0")/../../.." || exit
PATH="${VIRTUAL_ENV:-$PWD/.venv}/bin:$PATH"  # an active environment, or what `make env` made
exec python -m treeward.cli.open_instruct --config rm_tulu3_8b "$@"
