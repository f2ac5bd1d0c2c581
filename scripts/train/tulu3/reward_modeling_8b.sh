#!/bin/bash
# The recipe of allenai/Llama-3.1-Tulu-3-8B-RM: one epoch over the preference mixture of Tulu 3, from the hub.
#
# Needs one GPU with more than 140 GB: one process trains, and 8 billion float32 weights with their gradients and AdamW's
# two moments are 128 GB. The authors have 8 nodes. This has not been run at this size: the tests run it with a small
# model and rows in the same schema. Their own script allows 4096 tokens: policy.max_total_sequence_length=4096.
# Further arguments are overrides. With hub.push_to_hub=true the model is uploaded, as open-instruct does by default.
cd "$(dirname "$0")/../../.." || exit
PATH="$PATH:$PWD/.venv/bin"  # where `make` and uv put it
exec treeward train --config rm_tulu3_8b "$@"
