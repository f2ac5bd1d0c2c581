"""A policy that learns to judge: both orders of a comparison are drawn together, share a tree, and
teach a rule."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_run import assert_same_run
from messages import write_jsonl
from sampled import Recorded

from treeward.data.prompt_sets import FAMILY
from treeward.environments.preference_verdict import LABEL
from treeward.errors import ConfigError, DataError
from treeward.model.export import export_model
from treeward.model.policy_model import PolicyModel
from treeward.rl.generation import CompletionGroup, Prompt, SampledCompletion
from treeward.rl.grpo import grpo
from treeward.rl.rollouts import collect
from treeward.rl.setup import GRPOSetup
from treeward.rl.update import PolicyUpdater
from treeward.training.tracking import read_metrics

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from imitation import imitate

Make = Callable[..., Any]

THINGS = (
    "rain",
    "snow",
    "the moon",
    "a river",
    "bread",
    "sand",
    "music",
    "ice",
    "an owl",
    "wood",
    "salt",
    "wind",
)
TEMPLATE = "{completion_a} {completion_b} [[A]] or [[B]]?"
ACCURACY = "validation/preference_verdict_env/component/accuracy"


def comparisons(folder: Path, name: str, count: int, *, shuffled: bool = False) -> str:
    """Rows whose better completion says yes; `shuffled`: or no, at random."""
    draw = random.Random(name)
    rows = []
    for _ in range(count):
        texts = [f"{word}, {draw.choice(THINGS)}." for word in ("Yes", "No")]
        if shuffled and draw.random() < 0.5:
            texts.reverse()
        rows.append(
            {"prompt": f"Is it {draw.choice(THINGS)}?", "chosen": texts[0], "rejected": texts[1]}
        )
    return write_jsonl(folder / name, *rows)


@pytest.fixture
def tiny_grpo(tiny_grpo: Make, tmp_path: Path) -> Make:
    """The tiny configuration, as a judge of comparisons."""

    def make(*options: str, shuffled: bool = False) -> Any:
        files = {
            "train": comparisons(tmp_path, "pairs.jsonl", 200, shuffled=shuffled),
            "validation": comparisons(tmp_path, "other_pairs.jsonl", 24),
        }
        data = {name: {"dataset_name": "auto", "data_path": file} for name, file in files.items()}
        env = {"preference_verdict": {"template": TEMPLATE, "system_prompt": "Judge."}}
        sizes = ["policy.max_total_sequence_length=256"]
        if "~policy.model_config" not in options:
            sizes.append("policy.model_config.max_position_embeddings=512")
        return tiny_grpo(
            f"data={json.dumps(data)}", f"env={json.dumps(env)}", "~env.planted", *sizes, *options
        )

    return make


def test_both_orders_of_a_comparison_are_drawn_together_and_left_out_together(opened: Make) -> None:
    run = opened("grpo.max_val_samples=10")
    for step in range(120):  # beyond an epoch of 100 steps
        drawn = [run.prompts.prompts[i].info for i in run.order.take(4 * step, 4)]
        for one, other in zip(drawn[::2], drawn[1::2], strict=True):
            assert one[FAMILY] == other[FAMILY] and {one[LABEL], other[LABEL]} == {"A", "B"}
    assert run.order.rows_per_epoch == 400 and len(run.validation) == 10
    groups = collect(run, step=0, drawn=0).groups
    families = [group.prompt.info[FAMILY] for group in groups]
    assert families[::2] == families[1::2]
    longest = max(map(len, run.prompts.token_ids))
    fewer = opened(f"data.max_input_seq_length={longest - 1}")
    assert (
        len(fewer.prompts) % 2 == 0
        and fewer.prompts.counts["too_long"] == 400 - len(fewer.prompts) > 0
    )
    assert len({prompt.info[FAMILY] for prompt in fewer.prompts.prompts}) == len(fewer.prompts) / 2


def test_what_cannot_be_judged_together_is_refused(opened: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an even number"):
        opened("grpo.num_prompts_per_step=3", "policy.train_global_batch_size=null")
    path = tmp_path / "chat.jsonl"
    path.write_text('{"prompt": "Hi"}\n', encoding="utf-8")
    chat = f"{{dataset_name: PromptDataset, data_path: {path}, env_name: planted}}"
    pairs = f"{{data_path: {tmp_path}/pairs.jsonl, env_name: preference_verdict}}"
    with pytest.raises(ConfigError, match="cannot be mixed"):
        opened(
            f"data.train=[{pairs}, {chat}]", "+env.planted={type: custom, function: planted.vowels}"
        )
    path.write_text('{"prompt": "Hi", "chosen": "Ho."}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"chat\.jsonl:1"):
        opened(f"data.train={{data_path: {path}}}")


def test_both_orders_share_a_tree_and_the_gradient_is_that_of_two(policy: PolicyModel) -> None:
    """With one beginning of 40 tokens and ends of 10, two prompts of 4 completions take the tokens
    of one tree."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 60, (count,), generator=draw).tolist())

    beginning = tokens(40)
    groups = []
    for _ in range(2):
        completions = tuple(SampledCompletion((g, *tokens(2)), "", False) for g in range(61, 65))
        groups.append(
            CompletionGroup(Prompt((), {FAMILY: "one"}), beginning + tokens(10), completions)
        )
    apart = [replace(group, prompt=Prompt(())) for group in groups]
    advantages_PG = torch.randn(2, 4, generator=draw)
    found = []
    for chosen in (groups, apart):
        model = copy.deepcopy(policy)
        optimizer = Recorded(model.hf)
        metrics = PolicyUpdater(model, optimizer, max_grad_norm=None, micro_batch_tokens=100).learn(
            chosen, advantages_PG, torch.ones(2, 4, dtype=torch.bool)
        )
        found.append((metrics.computed_tokens, metrics.row_tokens, optimizer.gradients[0]))
    (together, rows, one), (separate, _, other) = found
    assert (rows, separate, together) == (2 * 4 * 53, 2 * (40 + 10 + 4 * 3), 40 + 2 * (10 + 4 * 3))
    assert float((one - other).abs().max()) < 1e-6 * float(other.abs().max()) + 1e-7


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(
    tiny_grpo: Make, tmp_path: Path
) -> None:
    for name, lengths in (("stopped", (2, 4)), ("whole", (4,))):
        folders = (
            f"checkpointing.checkpoint_dir={tmp_path}/{name}/checkpoints",
            f"logger.log_dir={tmp_path}/{name}/logs",
        )
        for steps in lengths:
            grpo(
                tiny_grpo(*folders, f"grpo.max_num_steps={steps}", "grpo.val_at_end=false"),
                show_progress=False,
            )
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    metrics = (tmp_path / "whole" / "logs" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "position_bias" in metrics or "no_verdict" in metrics


def taught(folder: Path, run: GRPOSetup) -> Path:
    """The run's policy, after it has learnt to write verdicts, of which seven of ten are right."""
    draw = random.Random(0)
    end = run.tokenizer.eos_token_id
    groups = []
    for prompt, token_ids in zip(run.prompts.prompts, run.prompts.token_ids, strict=True):
        label = (
            str(prompt.info[LABEL])
            if draw.random() < 0.7
            else "AB".replace(str(prompt.info[LABEL]), "")
        )
        [verdict] = run.renderer.encode_texts([f"[[{label}]]"])
        groups.append([(token_ids.tolist(), [*verdict, end])])
    imitate(run.policy, groups, epochs=20, groups_per_step=16)
    export_model(
        run.policy, run.tokenizer, folder / "taught", chat_template=run.renderer.chat_template
    )
    return folder / "taught"


@pytest.mark.slow
def test_a_planted_rule_is_learnt_and_shuffled_labels_are_not(
    tiny_grpo: Make, opened: Make, tmp_path: Path
) -> None:
    start = taught(tmp_path, opened())
    options = [
        f"policy.model_name={start}", "~policy.model_config", "~policy.tokenizer",
        "grpo.max_num_steps=24",
        "grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=8",
        "grpo.max_val_samples=48",
        "grpo.val_at_start=true", "grpo.val_period=24", "policy.train_micro_batch_tokens=4096",
        "policy.optimizer.kwargs.lr=3e-3", "loss_fn.reference_policy_kl_penalty=0.0",
        "checkpointing.save_period=100",
    ]  # fmt: skip
    curves = []
    for shuffled in (False, True):
        folder = tmp_path / f"shuffled_{shuffled}"
        folders = (
            f"checkpointing.checkpoint_dir={folder}/checkpoints",
            f"logger.log_dir={folder}/logs",
        )
        grpo(tiny_grpo(*options, *folders, shuffled=shuffled), show_progress=False)
        curves.append(
            [
                line[ACCURACY]
                for line in read_metrics(folder / "logs" / "metrics.jsonl")
                if ACCURACY in line
            ]
        )
    (before, learnt), (same, not_learnt) = curves
    assert before == same and 0.5 < before < 0.8 and learnt > 0.9 and not_learnt < 0.8
