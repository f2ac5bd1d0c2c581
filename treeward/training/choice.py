"""`Choice`: by which metric, and among how many checkpoints, the exported model was chosen.

    choice = choice_of(config, total_steps=72)
    choice.num_checkpoints, choice.sets          # 6, ("default",)
    choice.caveat                                # what a reader of its numbers on these sets must know

The best of several has been lucky as well as good: where the numbers are of the set that chose, they are too high on
average, the more the smaller the set is and the more checkpoints there were.
"""

from __future__ import annotations

from dataclasses import dataclass

from treeward.config.run import RewardModelRunConfig

__all__ = ["Choice", "choice_of"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How a checkpoint is chosen.

    `name`: the metric as the configuration spells it; `metric`: of each of the validation sets `sets`, pooled if they
    are several. `num_checkpoints`: how many have been measured by it when the run is done.
    """

    name: str
    metric: str
    sets: tuple[str, ...]
    num_checkpoints: int

    @property
    def among_several(self) -> bool:
        """Whether there are checkpoints to choose among."""
        return self.num_checkpoints > 1

    @property
    def caveat(self) -> str:
        """One sentence on the numbers of the sets that chose."""
        return (
            f"The checkpoint was chosen on these examples, the best of {self.num_checkpoints} by {self.metric}: on new "
            "data expect lower numbers."
        )


def choice_of(config: RewardModelRunConfig, total_steps: int) -> Choice | None:
    """How a run of `total_steps` chooses; None where no metric ranks its checkpoints."""
    key = config.ranking_metric
    if key is None:
        return None
    saved, validated = config.checkpointing.save_period, config.rm.val_period
    steps = {total_steps, *(range(saved, total_steps + 1, saved) if saved else ())}
    num = sum(
        bool((validated and step % validated == 0) or (config.rm.val_at_end and step == total_steps)) for step in steps
    )
    sets = config.validation_names if key.validation is None else (key.validation,)
    return Choice(str(config.checkpointing.metric_name), key.metric, tuple(sets), num)
