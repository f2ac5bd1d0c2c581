"""What each process of tests/parallel/test_sharding.py computes: a sharded model against the whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from families import causal_model, tiny_model
from torch import Tensor, nn

from treeward.config.policy import LoraConfig, ShardingConfig
from treeward.losses import bradley_terry, ranked_pairs
from treeward.model.lora import add_adapters
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel
from treeward.model.shards import whole
from treeward.model.wrapped import WrappedModel
from treeward.parallel.mesh import Mesh, make_mesh
from treeward.parallel.sharding import clip_grad_norm_, shard

Groups = list[list[list[int]]]
PROMPT = list(range(5, 17))
# unequal in size, and of three processes or more the last ones have none
GROUPS: Groups = [
    [[*PROMPT, 30, 31, 32], [*PROMPT, 40], [*PROMPT, 50, 51]],
    [[7, 8, 9, 60, 61], [7, 8, 9, 62]],
    [[*range(70, 100)], [*range(70, 90), 3, 4]],
    [[9, 9, 11], [9, 9, 12, 13, 14, 15, 16]],
]
EMPTY: Groups = [[[0, 0]]]  # computed so that every exchange has its part


def _share(mesh: Mesh) -> Groups:
    return {0: GROUPS[:3], 1: GROUPS[3:]}.get(mesh.data_rank, [])


def _rewards(model: Any, groups: Groups) -> tuple[Tensor, Tensor]:
    """The scores, and the loss, which is divided by the number of all groups."""
    scores_S = model(model.make_batch(groups or EMPTY))[: sum(map(len, groups))]
    pairs = ranked_pairs([list(range(len(group))) for group in groups])
    return scores_S, bradley_terry(scores_S, pairs) / len(GROUPS)


def _log_probs(model: Any, groups: Groups) -> tuple[Tensor, Tensor]:
    found = model.log_probs(groups or EMPTY, [[2 if groups else 1] * len(group) for group in groups or EMPTY])
    values_S = found.values_SL.sum(dim=1)[: sum(map(len, groups))]
    return values_S, values_S.square().sum() / len(GROUPS)


def _reward_model(family: str, layout: Any = "tree", **changes: Any) -> Callable[[], WrappedModel]:
    return lambda: RewardModel(tiny_model(family, **changes), layout=layout)


def _policy(family: str, **changes: Any) -> Callable[[], WrappedModel]:
    return lambda: PolicyModel(causal_model(family, **changes))


def _recomputed(make: Callable[[], WrappedModel]) -> Callable[[], WrappedModel]:
    def made() -> WrappedModel:
        model = make()
        model.recompute_activations()
        return model

    return made


def _adapted(make: Callable[[], WrappedModel]) -> Callable[[], WrappedModel]:
    def made() -> WrappedModel:
        model = make()
        add_adapters(model, LoraConfig(enabled=True, dim=4), seed=1)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.02, generator=torch.Generator().manual_seed(len(name)))
        return model

    return made


KINDS: dict[str, Callable[[], WrappedModel]] = {
    "reward model": _reward_model("qwen3"),
    "tied policy": _policy("llama", tie_word_embeddings=True),
    "rows": _reward_model("gptj", "rows"),
    "encoder": _reward_model("bert", "encoder"),
    "experts": _reward_model("mixtral"),
    "recomputed": _recomputed(_reward_model("llama")),
    "recomputed policy": _recomputed(_policy("qwen3")),
    "adapted reward model": _adapted(_reward_model("llama")),
    "adapted policy": _adapted(_policy("llama", tie_word_embeddings=True)),
}


def compare(kinds: list[str], replicate: int, cpu_offload: bool = False) -> dict[str, dict[str, float]]:
    """By kind, how far the sharded model is from the whole one: the largest differences relative to the largest value.

    Before the first step and after it, so what was gathered before is gathered anew.
    """
    mesh = make_mesh(ShardingConfig(dp_replicate_size=replicate))
    found = {}
    for kind in kinds:
        plain, sharded = KINDS[kind]().train(), KINDS[kind]().train()
        shard(sharded, mesh, dtype=torch.float32, cpu_offload=cpu_offload)
        values = _rewards if isinstance(plain, RewardModel) else _log_probs
        if isinstance(sharded, RewardModel):  # as a validation does, before the first gradient
            sharded.score_tokens([[1, 2, 3]])
        optimizers = [
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=10.0) for model in (plain, sharded)
        ]
        errors = dict.fromkeys(("values", "gradients", "norm", "clipped"), 0.0)
        for _ in range(2):
            (want, loss), (got, own_loss) = values(plain, GROUPS), values(sharded, _share(mesh))
            loss.backward()
            own_loss.backward()
            first = 0 if mesh.data_rank == 0 else 7
            errors["values"] = max(errors["values"], _off(got, want[first : first + len(got)]))
            errors["gradients"] = max(errors["gradients"], _gradients_off(sharded, plain))
            most = 1e-3
            norms = [clip_grad_norm_(model.parameters(), most) for model in (sharded, plain)]
            errors["norm"] = max(errors["norm"], abs(norms[0] / norms[1] - 1))
            errors["clipped"] = max(errors["clipped"], _gradients_off(sharded, plain))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found[kind] = errors
    return found


def _off(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().abs().max() / want.detach().abs().max().clamp_min(1.0)) if len(got) else 0.0


def _gradients_off(sharded: nn.Module, plain: nn.Module) -> float:
    """Relative to the largest of a weight, or a hundredth of the largest of all."""
    want = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    got = {name: whole(weight.grad) for name, weight in sharded.named_parameters() if weight.grad is not None}
    assert want.keys() <= got.keys()
    floor = 1e-2 * max(float(one.abs().max()) for one in want.values())
    worst = max(float((got[name] - one).abs().max()) / max(float(one.abs().max()), floor) for name, one in want.items())
    return max(worst, *(float(got[name].abs().max()) for name in got.keys() - want.keys()), 0.0)


def in_bfloat16() -> dict[str, Any]:
    """Of a model that computes in bfloat16: its dtypes, and how far it is from one whose weights are bfloat16."""
    mesh = make_mesh(ShardingConfig())
    plain, sharded = KINDS["reward model"](), KINDS["reward model"]()
    plain.cast(torch.bfloat16)
    shard(sharded, mesh, dtype=torch.bfloat16)
    (want, loss), (got, own_loss) = _rewards(plain, GROUPS), _rewards(sharded, _share(mesh))
    loss.backward()
    own_loss.backward()
    first = 0 if mesh.data_rank == 0 else 7
    return {
        "held": sorted({str(weight.dtype) for weight in sharded.parameters()}),
        "gradients": sorted({str(weight.grad.dtype) for weight in sharded.parameters() if weight.grad is not None}),
        "scores": [str(got.dtype), _off(got, want[first : first + len(got)])],
        "off": _gradients_off(sharded, plain),
    }


def everything() -> dict[str, Any]:
    """All kinds over two processes, in the memory of the host too, and in bfloat16."""
    offloaded = compare(["reward model"], 1, cpu_offload=True)
    return {
        "float32": compare(list(KINDS), 1) | {"offloaded": offloaded["reward model"]},
        "bfloat16": in_bfloat16(),
    }
