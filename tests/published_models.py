"""Small published reward models, and the arithmetic of their authors in plain torch.

    published = MODELS["GRM"]         # its layout: tensors, config.json, arithmetic
    write_published("GRM", folder, tokenizer)
    wanted("GRM", folder, [[3, 4, 5]])        # the scores that the authors' arithmetic gives

Each reference computes on the last hidden states of plain transformers. The names of the tensors
and the keys of config.json are those of the files that `published.ADAPTERS` names as sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from families import config_of, randomise
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel

SIZE = 32
GATE = [5 + sorted(pre_tokenizers.ByteLevel.alphabet()).index("Ċ"), 4]
"""The line's end before the header of the assistant, in the tiny tokenizer."""
CHATS = [
    [{"role": "user", "content": "Which tree bears cones?"}, {"role": "assistant", "content": text}]
    for text in ("A pine does.", "A pine does, and so does a spruce.", "No.")
]
SEQUENCES = [
    [3, 4, 5, 6, *GATE, 10, 11],
    [3, 4, 5, 6, *GATE, 10, 12, 13, 14],
    [20, *GATE, 21, *GATE, 22],
]
"""With the tokens that end a prompt; the last one has them twice, and its second is read."""


class Published(NamedTuple):
    """`head`: the tensors of the head, by the authors' names. `fields`: of config.json. `score`: of
    the hidden states (L, D) of one sequence and its tokens. `prefix`: of the backbone's tensors.
    `folder`: the name of the model."""

    architecture: str
    fields: Mapping[str, Any]
    head: Mapping[str, Tensor]
    score: Callable[[Tensor, list[int], Mapping[str, Tensor]], Tensor]
    parts: int = 1
    family: str = "llama"
    prefix: str = "model."
    folder: str = "published"


def mlp(
    inner: Tensor, head: Mapping[str, Tensor], name: str, places: Sequence[int], activation: Any
) -> Tensor:
    """Linear layers at these places of a sequence, with activations between them."""
    for place in places:
        inner = F.linear(inner, head[f"{name}.{place}.weight"], head[f"{name}.{place}.bias"])
        if place != places[-1]:
            inner = activation(inner)
    return inner


def inform(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    return mlp(hidden[-1], head, "score", (0, 2), F.relu)[0]


def urm(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    means = F.linear(hidden[-1], head["score.weight"]).view(5, 2)[:, 0]
    return (means * mlp(hidden[-1], head, "weights.fc", (0, 2, 4), F.selu)).sum()


def grm(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    return mlp(hidden[-1], head, "v_head.summary", (0, 2, 4), F.relu)[0]


def grm_linear(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    return hidden[-1] @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"][0]


def beaver_reward(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    value = hidden[-1] @ head["score_head.weight"][0] + head["score_head.bias"][0]
    return (value - head["normalizer.mean"][0]) / (head["normalizer.var"][0] ** 0.5 + 1e-8)


def beaver_cost(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    """reward-bench's, higher is better: the negated cost, which is scaled and not centred."""
    return -(hidden[-1] @ head["score_head.weight"][0]) / (head["normalizer.var"][0] ** 0.5 + 1e-8)


def beaver_plain(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    return -(hidden[-1] @ head["score_head.weight"][0])


def ldl(
    hidden: Tensor, ids: list[int], head: Mapping[str, Tensor], temperature: float | None = None
) -> Tensor:
    leaky = partial(F.leaky_relu, negative_slope=0.01)
    logits = mlp(hidden[-1], head, "regression_layer.network", (0, 2, 4), leaky)
    ratings = logits.view(3, 10).softmax(dim=-1)
    weights = mlp(hidden[-1], head, "gating_layer.network", (0, 3, 6), leaky)
    if temperature is not None:
        weights = (weights / temperature).softmax(dim=-1)
    distribution = (weights[:, None] * ratings).sum(dim=0)
    return sum(distribution[k] * k / 9 for k in range(10))  # type: ignore[return-value]


def ldl_softmax(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    return ldl(hidden, ids, head, temperature=0.5)


def end_of_prompt(ids: list[int]) -> int:
    """The place where the last header of the assistant begins."""
    last = len(ids) - len(GATE)
    while ids[last : last + len(GATE)] != GATE:
        last -= 1
    return last


def armorm(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    rewards = F.linear(hidden[-1], head["regression_layer.weight"])
    gate = mlp(hidden[end_of_prompt(ids)], head, "gating.layers", range(4), F.relu)
    gating = F.softmax(gate / 10, dim=0) * head["gating.logit_scale"][0]
    return (gating * (rewards @ head["reward_transform_matrix"])).sum()


def qrm(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    # objectives, quantiles
    quantiles = F.linear(hidden[-1], head["regression_layer.weight"]).reshape(4, 3)
    gate = hidden[end_of_prompt(ids)]
    for i in (0, 3):
        gate = F.relu(F.linear(gate, head[f"gating.layers.{i}.weight"]))
        norm_name = f"gating.layers.{i + 2}"
        mean = head[f"{norm_name}.running_mean"]
        variance = head[f"{norm_name}.running_var"]
        normed = (gate - mean) / (variance + 1e-5).sqrt()
        gate = normed * head[f"{norm_name}.weight"] + head[f"{norm_name}.bias"]
    gate = F.linear(gate, head["gating.layers.6.weight"], head["gating.layers.6.bias"])
    gating = F.softmax(gate / 2, dim=0) * head["gating.logit_scale"][0]
    return (gating * (quantiles.mean(dim=1) @ head["reward_transform_matrix"])).sum()


def drawn(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Random tensors of these shapes; variances are positive, and counts are numbers."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, generator=generator) * 0.3
    for name in tensors:
        if name.endswith(("_var", ".var")):
            tensors[name] = tensors[name].abs() + 0.5
        elif name.endswith("num_batches_tracked"):
            tensors[name] = torch.tensor(3)
        elif name == "normalizer.count":
            tensors[name] = torch.tensor([7])
    return tensors


def normalised(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    return (hidden[-1] @ head["value_head.weight"][0] - 0.7) / 2.5


def row(architecture: str, name: str, fields: Mapping[str, Any]) -> Published:
    """Whose head is one row, the tensor `name.weight`."""
    head = drawn(**{f"{name}.weight": (1, SIZE)})
    return Published(
        architecture, fields, head, lambda hidden, ids, head: hidden[-1] @ head[f"{name}.weight"][0]
    )


def layer(name: str, outputs: int, inputs: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def stack(name: str, places: Sequence[int], sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The layers of `mlp`, whose inputs and outputs have these sizes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place, (inputs, outputs) in zip(places, pairwise(sizes), strict=True):
        shapes |= layer(f"{name}.{place}", outputs, inputs)
    return shapes


def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in ("weight", "bias", "running_mean", "running_var"):
        shapes[f"{name}.{part}"] = (size,)
    shapes[f"{name}.num_batches_tracked"] = ()
    return shapes


INTERNLM2_ROPE: dict[str, Any] = {
    "rope_theta": 77.0,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}
"""Which scales nothing within the model's positions."""
REMOTE = {"auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"}}
GRM = {"vhead_layer_type": "mlp", "vhead_num_layers": 2, "vhead_num_neurons": 12}
BEAVER = {"score_dim": 1, "normalizer_type": "RunningMeanStd", "mean": [0.0], "var": [1.0]}
"""Other statistics than the checkpoint's, which the authors' code reads last."""
NORMALIZER = {"normalizer.count": (), "normalizer.mean": (1,), "normalizer.var": (1,)}
LDL_WIDTH = 12
LDL_HEAD = {
    **stack("regression_layer.network", (0, 2, 4), (SIZE, LDL_WIDTH, LDL_WIDTH, 30)),
    **stack("gating_layer.network", (0, 3, 6), (SIZE, LDL_WIDTH, LDL_WIDTH, 3)),
}
GATED = {"gate_pattern": GATE, "gating_hidden_dim": 12}
MODELS = {
    "OpenRLHF": row("RewardModel", "value_head", {"value_head_prefix": "value_head"}),
    "OpenRLHF, normalised": row(
        "RewardModel",
        "value_head",
        {"value_head_prefix": "value_head", "normalize_reward": True, "mean": 0.7, "std": 2.5},
    )._replace(score=normalised),
    "INF-ORM, Qwen2.5-Math-RM": Published(
        "INFORMForSequenceClassification",
        {},
        drawn(**stack("score", (0, 2), (SIZE, SIZE, 1))),
        inform,
    ),
    "InternLM2-Reward": row(
        "InternLM2ForRewardModel",
        "v_head",
        {"model_type": "internlm2", "bias": False, "reward_token_id": 17, **REMOTE},
    ),
    "GRM": Published(
        "GRewardModel",
        GRM,
        drawn(**stack("v_head.summary", (0, 2, 4), (SIZE, 12, 12, 1))),
        grm,
    ),
    "GRM, linear": Published(
        "Gemma2ForCausalLM",
        {"vhead_layer_type": "linear", "vhead_num_layers": 1, "vhead_num_neurons": 1024},
        drawn(**layer("v_head.summary", 1, SIZE)),
        grm_linear,
        family="gemma2",
    ),
    "Eurus-RM": row(
        "EurusRewardModel",
        "regression_head",
        {"auto_map": {"AutoModel": "modeling_eurus_rm.EurusRewardModel"}},
    )._replace(family="mistral"),
    "UltraRM": row("LlamaRewardModel", "regression_head", {}),
    "Beaver": Published(
        "LlamaForScore",
        {**BEAVER, "score_type": "reward", "bias": True, "do_normalize": True},
        drawn(**layer("score_head", 1, SIZE), **NORMALIZER),
        beaver_reward,
    ),
    "Beaver's cost": Published(
        "LlamaForScore",
        {**BEAVER, "score_type": "cost", "bias": False, "do_normalize": True},
        drawn(**layer("score_head", 1, SIZE, bias=False), **NORMALIZER),
        beaver_cost,
    ),
    "Beaver's cost, not normalised": Published(
        "LlamaForScore",
        {**BEAVER, "score_type": "cost", "do_normalize": False},
        drawn(**layer("score_head", 1, SIZE, bias=False), **NORMALIZER),
        beaver_plain,
    ),
    "Starling-RM": row("LlamaForCausalLM", "v_head", {})._replace(
        prefix="transformer.", folder="Starling-RM-7B-alpha"
    ),
    "LDL-Reward": Published(
        "Gemma2Model",
        {"num_objectives": 30},
        drawn(**LDL_HEAD),
        ldl,
        parts=3,
        family="gemma2",
        prefix="",
        folder="LDL-Reward-Gemma-2-27B-v0.1",
    ),
    "LDL-Reward, softmax": Published(
        "LDLRewardModel27B",
        {"num_objectives": 30, "softmax": True, "temperature": 0.5},
        drawn(**LDL_HEAD),
        ldl_softmax,
        parts=3,
        family="gemma2",
    ),
    "URM": Published(
        "LlamaForSequenceClassificationWithNormal_Weights",
        {"id2label": {str(i): f"LABEL_{i}" for i in range(10)}},
        drawn(
            **layer("score", 10, SIZE, bias=False),
            **stack("weights.fc", (0, 2, 4), (SIZE, SIZE, SIZE, 5)),
        ),
        urm,
        parts=5,
    ),
    "ArmoRM": Published(
        "LlamaForRewardModelWithGating",
        {**GATED, "num_objectives": 19},
        drawn(
            **layer("regression_layer", 19, SIZE, bias=False),
            **{"reward_transform_matrix": (19, 19), "gating.logit_scale": (1,)},
            **stack("gating.layers", range(4), (SIZE, 12, 12, 12, 19)),
        ),
        armorm,
        parts=19,
    ),
    "QRM": Published(
        "LlamaForRewardModelWithGating",
        {
            **GATED,
            "num_objectives": 4,
            "num_quantiles": 3,
            "gating_n_hidden": 2,
            "gating_temperature": 2,
        },
        drawn(
            **layer("regression_layer", 12, SIZE, bias=False),
            **{"reward_transform_matrix": (4, 4), "gating.logit_scale": (1,)},
            **layer("gating.layers.0", 12, SIZE, bias=False),
            **norm("gating.layers.2", 12),
            **layer("gating.layers.3", 12, 12, bias=False),
            **norm("gating.layers.5", 12),
            **layer("gating.layers.6", 4, 12),
        ),
        qrm,
        parts=4,
    ),
}


IN_INTERNLM2 = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
}
"""Llama's names -> InternLM2's."""


def in_internlm2_names(backbone: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """InternLM2's tensors: queries, keys and values of each key head together."""
    theirs: dict[str, Tensor] = {}
    for name, value in backbone.items():
        for ours, other in IN_INTERNLM2.items():
            name = name.replace(ours, other)
        if "_proj" not in name:
            theirs[name] = value
    for i in range(2):
        attention = f"model.layers.{i}.self_attn"
        queries = backbone[f"{attention}.q_proj.weight"]
        keys = backbone[f"{attention}.k_proj.weight"]
        values = backbone[f"{attention}.v_proj.weight"]
        rows = []
        for g in range(2):  # two key heads of 8, with two query heads each
            rows.append(queries[g * 16 : g * 16 + 16])
            rows.append(keys[g * 8 : g * 8 + 8])
            rows.append(values[g * 8 : g * 8 + 8])
        theirs[f"model.layers.{i}.attention.wqkv.weight"] = torch.cat(rows)
    return theirs


def write_published(name: str, folder: Path, tokenizer: Any) -> Path:
    """The folder of a model as its authors have it, within `folder`."""
    published = MODELS[name]
    folder = folder / published.folder
    config = config_of(
        published.family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id
    )
    tokenizer.save_pretrained(folder)
    fields = config.to_dict() | {"architectures": [published.architecture], **published.fields}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    backbone = {}
    for key, value in plain_backbone(name, folder).state_dict().items():
        backbone[f"{published.prefix}{key}"] = value
    if fields["model_type"] == "internlm2":
        backbone = in_internlm2_names(backbone)
        del fields["rope_parameters"]  # InternLM2's keys of the same
        (folder / "config.json").write_text(json.dumps(fields | INTERNLM2_ROPE), encoding="utf-8")
    weights = {**backbone, **published.head}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def plain_backbone(name: str, folder: Path) -> Any:
    """The backbone in plain transformers, with the same weights at each call."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config_of(
        MODELS[name].family, vocab_size=fields["vocab_size"], eos_token_id=fields["eos_token_id"]
    )
    if fields["model_type"] == "internlm2":
        rope_theta = INTERNLM2_ROPE["rope_theta"]
        config.rope_parameters = {"rope_type": "default", "rope_theta": rope_theta}
    return randomise(AutoModel.from_config(config, attn_implementation="eager").eval())


def wanted(name: str, folder: Path, sequences: list[list[int]]) -> Tensor:
    """The scores by the authors' arithmetic."""
    published = MODELS[name]
    backbone = plain_backbone(name, folder)
    scores = []
    for ids in sequences:
        with torch.no_grad():
            hidden = backbone(input_ids=torch.tensor([ids])).last_hidden_state[0]
            scores.append(published.score(hidden, ids, published.head))
    return torch.stack(scores)
