"""`facts_of`: what a first run's choices depend on, read from the model's config.json, the data and
the machine.

    values = named_values("some/model", "pairs.csv", None)
    facts = facts_of(load_file(RewardModelRunConfig, None, values=values))
    facts.parameters, facts.comparisons
"""

from __future__ import annotations

import torch

# It imports transformers quietly, and comes before modules that do not.
import treeward.model  # noqa: F401
from treeward.config.first_run import RunFacts
from treeward.config.run import RewardModelRunConfig
from treeward.data.datasets import open_dataset, recognised
from treeward.data.step_datasets import open_step_dataset, recognised_steps
from treeward.errors import DataError
from treeward.planning.bare_models import bare_reward_model


def facts_of(config: RewardModelRunConfig) -> RunFacts:
    """The facts of a run of one pretrained model on one set of data; the data is read once, no
    weights are.

    Raises a `TreewardError` for a model or data that the run would refuse.
    """
    with torch.device("meta"):
        model = bare_reward_model(config.policy)
    learns_steps = config.policy.reward_model_cfg.learns_steps
    recognise = recognised_steps if learns_steps else recognised
    datasets = []
    for dataset in (*config.training_sets, *config.validation_sets):
        if dataset.part == "validation":
            continue  # it is read from the same files as the training part
        datasets.append(dataset.model_copy(update={"part": None, "split_validation_size": 0.0}))
    formats = [recognise(dataset) for dataset in datasets]
    data_keys: dict[str, str] = {}
    # The name stands in one key for all files, so it is chosen only where it fits all of them.
    # Else each file is recognised by itself.
    if len({dataset.dataset_name for dataset in formats}) == 1:
        data_keys["dataset_name"] = formats[0].dataset_name
    sources = formats[: len(config.training_sets)]
    comparisons = 0
    for dataset in sources:
        if learns_steps:
            # The rows of a problem are one tree, which is what a step has a number of.
            problems = {problem.context_key for problem, _ in open_step_dataset(dataset)}
            comparisons += len(problems)
        else:
            comparisons += sum(1 for _ in open_dataset(dataset))
    if comparisons == 0:
        raise DataError("there is no comparison in the data", where=str(sources[0].data_path))
    return RunFacts(
        parameters=model.hf.num_parameters(),
        positions=model.max_positions,
        has_bfloat16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        data_keys=data_keys,
        comparisons=comparisons,
    )
