"""`find`: the smallest layout on which a run fits, tried from one device upwards.

    for trial in find("rm.yaml", [], "h100"):
        print(trial.overrides, trial.reason)        # None: it fits

On each number of devices all that saves memory is tried first. Where that fits, layouts follow that change less of the
configuration, and the first that fits is the answer; where activations are most of it, tensor parallelism is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike

from treeward.config.load import load_run
from treeward.errors import TreewardError
from treeward.planning.plan import Plan, plan
from treeward.planning.runs import RunConfig

_SIZES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
"""Nodes, and devices of each."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A layout: what to add to the command (`overrides`), its plan, and why it does not fit; None where it does."""

    overrides: tuple[str, ...]
    plan: Plan | None
    reason: str | None


def find(
    path: str | PathLike[str], overrides: Sequence[str], gpu: str, *, mean_tokens: int | None = None
) -> Iterator[Trial]:
    """Each trial as soon as it is made; the last one fits, unless none does. Raises as `plan` for the configuration."""

    def attempt(*changes: str) -> Trial:
        try:
            found = plan(load_run(path, [*overrides, *changes]), gpu, mean_tokens=mean_tokens)
        except TreewardError as error:
            return Trial(changes, None, error.summary)
        return Trial(changes, found, None if found.fits else _why_not(found.memory))

    for trial in _trials(attempt, _savers(load_run(path, overrides))):
        yield trial
        if trial.reason is None:
            return


def _trials(attempt: Callable[..., Trial], savers: Sequence[str]) -> Iterator[Trial]:
    for nodes, devices in _SIZES:
        size = (f"cluster.num_nodes={nodes}", f"cluster.gpus_per_node={devices}")
        leanest = attempt(*size, *savers)
        if leanest.reason is None:
            yield from (attempt(*size, *savers[:number]) for number in range(len(savers)))
        elif leanest.plan is not None and 2 * leanest.plan.memory["activations"] > leanest.plan.memory["peak"]:
            cuts = (f"policy.dtensor_cfg.tensor_parallel_size={n}" for n in (2, 4, 8) if n <= devices)
            yield from (attempt(*size, *savers, cut) for cut in cuts)
        yield leanest


def _savers(config: RunConfig) -> list[str]:
    """Overrides that save memory, those that change least first."""
    policy, kind = config.policy, config.policy.optimizer.name.rpartition(".")[2]
    savers = {
        "policy.dtensor_cfg.activation_checkpointing=true": policy.dtensor_cfg.activation_checkpointing is not True,
        "policy.precision=bfloat16": policy.precision == "float32",
        f"policy.optimizer.name=torchao.optim.{kind}8bit": policy.optimizer.name.startswith("torch.optim.Adam"),
    }
    return [override for override, saves in savers.items() if saves]


def _why_not(memory: dict[str, int]) -> str:
    parts = list(memory)[: list(memory).index("peak")]
    most = max(parts, key=memory.__getitem__)
    needs = f"needs {memory['peak'] / 1e9:.1f} GB of {memory['usable'] / 1e9:.1f}"
    return f"{needs}, {memory[most] / 1e9:.1f} of it for {most}"
