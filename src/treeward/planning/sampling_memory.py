"""The memory of a policy that samples completions, by arithmetic that anyone can check by hand.

    shape = SamplingShape.of(config)
    memory = sampling_memory(model, shape, itemsize=2, on_cpu=False)
    memory.keys_and_values, memory.states, memory.prompts

A process samples S completions of up to C tokens at once, to P prompts of up to L tokens. With b
bytes a number, g key-value heads of e numbers, and K taps of a convolution over D channels, the
layers hold

    attention            2 b g e (S C + P L)   keys and values; those of a prompt are there once
    convolution          b S D (K - 1)         its last inputs
    gated delta rule     4 S h q v             the state of each completion, in float32
    Mamba 2              4 S h p n
    Mamba 1              4 S m n

with the letters of `recurrent_memory.py`. A model that cannot share prefixes has transformers'
cache: 2 b g e S (C + L), and K inputs of a convolution. On a GPU trees have two copies of the
inputs and states while a CUDA graph is recorded: the pass before it would change them.

Before the first token the prompts are read, some at a time on trees, and at once as rows, layer by
layer and without gradients (`memory.py`); their keys, values and states stay. Then completions get
theirs: keys and values of the prompts are there twice, and the states of prompts and completions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treeward.config.grpo_run import GRPORunConfig
from treeward.model.policy_model import PolicyModel
from treeward.planning.memory import find_mixers, layer_shapes
from treeward.rl.sampling import PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class SamplingShape:
    """`rows`, `prompts`, `prompt_tokens`, `new_tokens`: S, P, L and C of the formula, in the worst
    case: of a step or of a validation, and of prompts that leave the completions just the tokens
    that they may have. `longest_prompt`: more tokens, where prompts may leave less."""

    rows: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    longest_prompt: int

    @classmethod
    def of(cls, config: GRPORunConfig) -> SamplingShape:
        """Of one process of a run."""
        longest = config.policy.max_total_sequence_length
        new_tokens = min(config.max_new_tokens, longest)
        rows = config.policy.generation.batch_size
        prompts = _most_prompts(rows, config.grpo.num_generations_per_prompt)
        # A validation has few completions of each prompt, and so more prompts at once than a step.
        if config.data.validation:
            validated = _most_prompts(rows, config.grpo.num_val_generations)
            prompts = max(prompts, min(validated, config.grpo.most_val_prompts or validated))
        return cls(
            rows=rows,
            prompts=prompts,
            prompt_tokens=longest - new_tokens,
            new_tokens=new_tokens,
            longest_prompt=config.max_prompt_length,
        )


def _most_prompts(rows: int, num_completions: int) -> int:
    """The most prompts of which a batch of `rows` has completions."""
    # A batch goes on where the one before it has ended, which may be within a prompt's completions:
    # at most so many of them came before.
    latest_start = num_completions - math.gcd(rows, num_completions)
    return math.ceil((latest_start + rows) / num_completions)


@dataclass(frozen=True, slots=True)
class SamplingMemory:
    """Bytes. `keys_and_values`, `states`: of the completions at their last tokens, and of their
    prompts. `prompts`: the most before the first token, when neither is there."""

    keys_and_values: int
    states: int
    prompts: int


def sampling_memory(
    model: PolicyModel, shape: SamplingShape, *, itemsize: int, on_cpu: bool, tensor_size: int = 1
) -> SamplingMemory:
    """What each of `tensor_size` processes that share the layers' heads holds."""
    on_trees = model.layout == "tree"
    layers = layer_shapes(model, on_cpu=on_cpu)
    numbers_of_token = 0
    most_of_layer = 0
    for layer in layers:
        numbers_of_token += 2 * layer.key_value_heads * layer.head_size
        of_layer = layer.bytes_without_gradients(itemsize, tensor_size, on_cpu=on_cpu)
        most_of_layer = max(most_of_layer, itemsize * layer.hidden + of_layer)
    of_token = itemsize * numbers_of_token // tensor_size
    # Tensor parallelism leaves the mixers whole.
    of_state = 0
    for mixer in find_mixers(model, on_cpu=on_cpu):
        if mixer is not None:
            of_state += mixer.state_bytes(itemsize, on_trees=on_trees)

    num_kept = shape.prompts * shape.prompt_tokens
    num_read = shape.prompts * shape.longest_prompt
    if on_trees:
        num_tokens = num_kept + shape.rows * shape.new_tokens
        # A prompt that is longer than the limit is read by itself, and whole.
        num_at_once = min(num_read, max(PROMPT_TOKENS, shape.longest_prompt))
        num_states = shape.rows if on_cpu else 2 * shape.rows
    else:
        num_tokens = shape.rows * (shape.prompt_tokens + shape.new_tokens)
        num_at_once = num_read
        num_states = shape.rows
    of_prompts = of_token * num_read + of_state * shape.prompts
    reading = most_of_layer * num_at_once
    copying = of_token * num_read + of_state * shape.rows
    return SamplingMemory(
        keys_and_values=of_token * num_tokens,
        states=of_state * num_states,
        prompts=of_prompts + max(reading, copying),
    )
