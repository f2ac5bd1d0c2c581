"""The model card: what was trained on what, how good it is, and how to use it, as README.md of the exported folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from treeward.tables import Column, markdown_table
from treeward.training.choice import Choice
from treeward.training.setup import Run

__all__ = ["model_card", "result_columns", "result_rows"]

_COLUMNS = [
    Column("set", title="validation set"),
    Column("comparisons"),
    Column("accuracy", format=".3f"),
    Column("loss", format=".4f"),
    Column("reward_margin", title="margin", format=".2f"),
    Column("chosen_rewards", title="chosen", format=".2f"),
    Column("rejected_rewards", title="rejected", format=".2f"),
]


_LENGTH_COLUMNS = [
    Column("set", title="validation set"),
    Column("accuracy_longer_right", title="better answer longer", format=".3f"),
    Column("accuracy_shorter_right", title="better answer shorter", format=".3f"),
    Column("length_controlled_accuracy", title="mean of both (length-controlled)", format=".3f"),
]


def result_columns(choice: Choice | None) -> list[Column]:
    """The columns of a results table: what every run has, and the metric that chose the checkpoint."""
    if choice is None or choice.metric in {column.key for column in _COLUMNS}:
        return _COLUMNS
    return [*_COLUMNS[:3], Column(choice.metric, title=choice.metric.replace("_", " "), format=".3f"), *_COLUMNS[3:]]


def result_rows(sizes: Mapping[str, int], validation: Mapping[str, Mapping[str, float]]) -> list[dict[str, object]]:
    """The rows of a results table. `sizes`: how many comparisons of each set were measured."""
    return [{"set": name, "comparisons": sizes.get(name), **means} for name, means in validation.items()]


def model_card(run: Run, step: int, validation: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown with the metadata block that the hub reads."""
    config = run.config
    base = config.policy.model_name
    if base is not None and Path(base).is_dir():
        base, on_hub = Path(base).resolve().name, False  # a card is for others: no paths of this machine
    else:
        on_hub = base is not None
    data = "\n".join(f"- {name}: {dataset.counts.summary()}" for name, dataset in run.training_sets.items())
    head = ["---", "library_name: transformers", "tags: [reward-model, treeward]"]
    head += [f"base_model: {base}"] if on_hub else []
    results = "This checkpoint was not validated."
    if validation:
        results = "\n\n".join(_results(run, validation))
    return "\n".join(
        [
            *head,
            "---",
            "",
            "# Reward model",
            "",
            f"A Bradley-Terry reward model: {base or 'a model trained from scratch'}, {step} optimiser steps of "
            f"{config.policy.train_global_batch_size} comparisons in {config.policy.precision}, trained with treeward.",
            "A higher score is better; only differences of scores of answers to the same prompt have a meaning: "
            "P(a is preferred to b) = sigmoid(score(a) - score(b)).",
            "",
            "## Results",
            "",
            results,
            "",
            "## Training data",
            "",
            data,
            "",
            "## Use",
            "",
            "```bash",
            "treeward score THIS_FOLDER --data conversations.jsonl --output scores.jsonl",
            "```",
            "",
            "With plain transformers, `AutoModelForSequenceClassification.from_pretrained(THIS_FOLDER)` gives the same "
            "score as its one logit; render conversations with the tokenizer's chat template and tokenize the text "
            "with `add_special_tokens=False`.",
            "",
        ]
    )


def _results(run: Run, validation: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Tables and sentences: the numbers, what makes them too good, and what length does."""
    rows, choice = result_rows(run.validation_sizes, validation), run.choice
    parts = [markdown_table(rows, result_columns(choice))]
    if choice is not None and choice.among_several and any(choice.metric in means for means in validation.values()):
        parts.append(
            f"The checkpoint is the best of {choice.num_checkpoints} by {choice.metric} on {', '.join(choice.sets)}: "
            "it was chosen on these comparisons, so on new data expect lower numbers."
        )
    for name, count in run.num_trained_on.items():
        if count:
            size = run.validation_sizes[name]
            parts.append(f"{count:,} of {size:,} comparisons of {name} are in the training data too, word for word.")
    if any("length_controlled_accuracy" in means for means in validation.values()):
        parts += ["Accuracy by which answer is the longer:", markdown_table(rows, _LENGTH_COLUMNS)]
    return parts
