"""Published reward models: small ones, saved as their authors save theirs, and their arithmetic in plain torch.

Each reference computes on the last hidden states of plain transformers; the names of the tensors and the keys of
config.json are those of the files that `published.ADAPTERS` names as sources.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import config_of, plain_scores, randomise, score_error, tiny_model
from safetensors.torch import load_file, save_file
from templates import CHATML, byte_bpe
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSequenceClassification

from treeward.data.chat_template import DEFAULT_CHAT_TEMPLATE
from treeward.data.rendering import Renderer
from treeward.errors import DataError, ModelError
from treeward.model import heads as heads_module
from treeward.model.contract import CONTRACT_FILE
from treeward.model.export import export_model
from treeward.model.heads import ARMORM, HELPSTEER2
from treeward.model.loading import load_classifier
from treeward.model.pretrained import load_tokenizer
from treeward.model.published import set_template
from treeward.model.reward_model import FeatureBatch
from treeward.scoring.diagnosis import diagnose
from treeward.scoring.golden import sign_folder
from treeward.scoring.scorer import Scorer
from treeward.training.train import train
from treeward.tree.prefix import MIN_PREFIX_TOKENS, PrefixCache

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

Save = Callable[[str], Path]


class Published(NamedTuple):
    """`head`: the tensors of the head, by the authors' names. `fields`: of config.json. `score`: of the hidden states
    (L, D) of one sequence and its tokens. `prefix`: of the backbone's tensors. `folder`: the name of the model."""

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
        inner = inner if place == places[-1] else activation(inner)
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
    ratings = (
        mlp(hidden[-1], head, "regression_layer.network", (0, 2, 4), leaky)
        .view(3, 10)
        .softmax(dim=-1)
    )
    weights = mlp(hidden[-1], head, "gating_layer.network", (0, 3, 6), leaky)
    weights = weights if temperature is None else (weights / temperature).softmax(dim=-1)
    distribution = (weights[:, None] * ratings).sum(dim=0)
    return sum(distribution[k] * k / 9 for k in range(10))  # type: ignore[return-value]


def ldl_softmax(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    return ldl(hidden, ids, head, temperature=0.5)


def end_of_prompt(ids: list[int]) -> int:
    return max(j for j in range(len(ids) - len(GATE) + 1) if ids[j : j + len(GATE)] == GATE)


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
        mean, variance = (head[f"gating.layers.{i + 2}.running_{name}"] for name in ("mean", "var"))
        normed = (gate - mean) / (variance + 1e-5).sqrt()
        gate = normed * head[f"gating.layers.{i + 2}.weight"] + head[f"gating.layers.{i + 2}.bias"]
    gate = F.linear(gate, head["gating.layers.6.weight"], head["gating.layers.6.bias"])
    gating = F.softmax(gate / 2, dim=0) * head["gating.logit_scale"][0]
    return (gating * (quantiles.mean(dim=1) @ head["reward_transform_matrix"])).sum()


def drawn(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    draw = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    draw = {
        name: value.abs() + 0.5 if name.endswith(("_var", ".var")) else value
        for name, value in draw.items()
    }
    counts = {name: torch.tensor(3) for name in draw if name.endswith("num_batches_tracked")}
    return draw | counts | {name: torch.tensor([7]) for name in draw if name == "normalizer.count"}


def row(architecture: str, name: str, fields: Mapping[str, Any]) -> Published:
    """Whose head is one row, the tensor `name.weight`."""
    head = drawn(**{f"{name}.weight": (1, SIZE)})
    return Published(
        architecture, fields, head, lambda hidden, ids, head: hidden[-1] @ head[f"{name}.weight"][0]
    )


def layer(name: str, outputs: int, inputs: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def stack(name: str, places: Sequence[int], sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The layers of `mlp`, whose inputs and outputs have these sizes."""
    layers = [layer(f"{name}.{place}", sizes[n + 1], sizes[n]) for n, place in enumerate(places)]
    return {key: shape for one in layers for key, shape in one.items()}


def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.{part}": (size,) for part in ("weight", "bias", "running_mean", "running_var")
    } | {f"{name}.num_batches_tracked": ()}


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
    )._replace(score=lambda hidden, ids, head: (hidden[-1] @ head["value_head.weight"][0] - 0.7) / 2.5),
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
        {**GATED, "num_objectives": 4, "num_quantiles": 3, "gating_n_hidden": 2, "gating_temperature": 2},
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
}  # fmt: skip


def in_internlm2_names(backbone: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """InternLM2's tensors: queries, keys and values of each key head together."""
    names = {
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings",
    }  # fmt: skip
    theirs = {}
    for name, value in backbone.items():
        for ours, other in names.items():
            name = name.replace(ours, other)
        if "_proj" not in name:
            theirs[name] = value
    for i in range(2):
        q, k, v = (backbone[f"model.layers.{i}.self_attn.{part}_proj.weight"] for part in "qkv")
        rows = [
            part
            for g in range(2)
            for part in (q[g * 16 : g * 16 + 16], k[g * 8 : g * 8 + 8], v[g * 8 : g * 8 + 8])
        ]
        theirs[f"model.layers.{i}.attention.wqkv.weight"] = torch.cat(rows)
    return theirs


@pytest.fixture
def save(tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Save:
    """A model's folder as its authors have it, and its backbone in plain transformers."""
    # 4096, which no key of config.json says
    monkeypatch.setattr(heads_module, "LDL_WIDTH", LDL_WIDTH)

    def to_folder(name: str) -> Path:
        published, folder = MODELS[name], tmp_path / MODELS[name].folder
        config = config_of(
            published.family,
            vocab_size=len(tiny_tokenizer),
            eos_token_id=tiny_tokenizer.eos_token_id,
        )
        tiny_tokenizer.save_pretrained(folder)
        fields = config.to_dict() | {"architectures": [published.architecture], **published.fields}
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        backbone = plain_backbone(name, folder).state_dict()
        backbone = {f"{published.prefix}{key}": value for key, value in backbone.items()}
        if fields["model_type"] == "internlm2":
            backbone = in_internlm2_names(backbone)
            del fields["rope_parameters"]  # InternLM2's keys of the same
            (folder / "config.json").write_text(
                json.dumps(fields | INTERNLM2_ROPE), encoding="utf-8"
            )
        save_file(
            {**backbone, **published.head}, folder / "model.safetensors", metadata={"format": "pt"}
        )
        return folder

    return to_folder


def plain_backbone(name: str, folder: Path) -> Any:
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config_of(
        MODELS[name].family, vocab_size=fields["vocab_size"], eos_token_id=fields["eos_token_id"]
    )
    if fields["model_type"] == "internlm2":
        config.rope_parameters = {
            "rope_type": "default",
            "rope_theta": INTERNLM2_ROPE["rope_theta"],
        }
    return randomise(AutoModel.from_config(config, attn_implementation="eager").eval())


def wanted(name: str, folder: Path, sequences: list[list[int]]) -> Tensor:
    published, backbone = MODELS[name], plain_backbone(name, folder)
    with torch.no_grad():
        hidden = [backbone(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in sequences]
        return torch.stack(
            [
                published.score(h, ids, published.head)
                for h, ids in zip(hidden, sequences, strict=True)
            ]
        )


@pytest.mark.parametrize("loaded", ["tree", "rows", "filled"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_authors_arithmetic(name: str, loaded: Any, save: Save) -> None:
    folder = save(name)
    if loaded == "filled":
        model = load_classifier(folder, on_meta=True).model
        model.fill("cpu")
    else:
        model = load_classifier(folder, attention=loaded).model
    assert (
        model.layout == ("rows" if loaded == "rows" else "tree")
        and model.num_heads == MODELS[name].parts
    )
    want = wanted(name, folder, SEQUENCES)
    assert want.std() > 0.01
    alone = torch.cat([model.score_tokens([ids]).sum(dim=1) for ids in SEQUENCES])
    together = model.score_tokens([*SEQUENCES, SEQUENCES[0]]).sum(dim=1)
    assert score_error(alone, want) < 1e-5
    assert score_error(together[:-1], want) < 1e-5 and together[0] == together[-1]
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in SEQUENCES], batch_first=True
    )
    scored = model.score(
        {"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in SEQUENCES])}
    )
    assert score_error(scored["scores"], want) < 1e-5
    features = model.features(model.make_batch([SEQUENCES]))
    assert (
        features.shape
        == (3, *model.feature_shape)
        == (3, 2 if hasattr(model.head, "gate_pattern") else 1, SIZE)
    )
    assert score_error(model.heads(FeatureBatch(features)).sum(dim=1), want) < 1e-5
    assert model.heads(model.pack_one_token()).shape == (1, model.num_heads)


@pytest.mark.parametrize("name", MODELS)
def test_a_cached_beginning_ends_before_what_the_head_reads(name: str, save: Save) -> None:
    """A gate reads the end of the prompt, whose hidden state no cache of keys and values has."""
    folder = save(name)
    model = load_classifier(folder).model
    long = [1 + i % 7 for i in range(MIN_PREFIX_TOKENS)]
    sequences = [long + ids for ids in SEQUENCES]
    want = wanted(name, folder, sequences)
    cache = PrefixCache(max_bytes=10**8)
    lengths = [len(ids) - 1 for ids in sequences]
    for _ in range(2):
        values = model.score_tokens(sequences, cache=cache, prompt_lengths=lengths)
        assert score_error(values.sum(dim=1), want) < 1e-5
    assert cache.num_reused_tokens >= len(sequences) * MIN_PREFIX_TOKENS


@pytest.mark.parametrize("name", MODELS)
def test_a_head_without_its_tensor_is_refused_by_its_name(name: str, save: Save) -> None:
    folder = save(name)
    weights = load_file(folder / "model.safetensors")
    lost = list(MODELS[name].head)[-1]
    del weights[lost]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for head_seed in (None, 3):
        with pytest.raises(ModelError, match=f"without {lost}"):
            load_classifier(folder, head_seed=head_seed)


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_and_the_export_scores_the_same(
    name: str, save: Save, tmp_path: Path
) -> None:
    folder, exported = save(name), tmp_path / "exported"
    model, tokenizer = load_classifier(folder, head_seed=5)
    renderer = Renderer(tokenizer)
    optimiser = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=0.01)
    before = model.train()(model.make_batch([SEQUENCES]))
    (-F.logsigmoid(before[0] - before[1])).backward()
    optimiser.step()
    values = model.eval().score_tokens(SEQUENCES)
    after = values.sum(dim=1)
    assert after[0] - after[1] > (before[0] - before[1]).item()
    export_model(model, tokenizer, exported, chat_template=renderer.chat_template)
    contract = sign_folder(exported)
    head = model.hf.score
    assert contract.read.plain_transformers == (
        isinstance(head, torch.nn.Linear) and head.bias is None
    )
    assert (
        contract.dtypes.head == "float32"
        and [head.weight for head in contract.heads] == [1.0] * model.num_heads
    )
    if contract.read.plain_transformers:
        classifier = AutoModelForSequenceClassification.from_pretrained(exported, dtype="float32")
        theirs = [
            classifier(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            for ids in SEQUENCES
        ]
        assert score_error(torch.stack(theirs), values) < 1e-5
    else:
        assert MODELS[name].head.keys() <= load_file(exported / "model.safetensors").keys()
    scorer = Scorer.load(exported)  # which replays the contract
    assert score_error(scorer.model.score_tokens(SEQUENCES), values) < 1e-5
    want = [float(model.score_tokens([renderer.encode(chat)]).sum()) for chat in CHATS]
    assert [one.score for one in scorer.score(CHATS)] == pytest.approx(want, abs=1e-5, rel=1e-5)
    assert (scorer.head_names == HELPSTEER2) == (name == "URM")


@pytest.mark.slow
def test_a_run_goes_on_from_a_gated_model_in_parts_of_its_groups(save: Save, tiny_run: Any) -> None:
    """A step has groups larger than the budget, a checkpoint is resumed, and the export keeps the heads' names."""
    own = [f"policy.model_name={save('ArmoRM')}", "~policy.model_config", "~policy.tokenizer"]
    options = [*own, "policy.train_micro_batch_tokens=64", "rm.val_batches=1", "rm.val_period=3"]
    train(
        tiny_run(*options, "rm.max_num_steps=1", "checkpointing.save_period=1"), show_progress=False
    )
    outcome = train(tiny_run(*options, "rm.max_num_steps=2"), show_progress=False)
    scorer = Scorer.load(outcome.model_folder)
    assert outcome.step == 2 and scorer.head_names == ARMORM and scorer.head_weights == (1.0,) * 19


def test_internlm2_reads_its_reward_token_after_the_last_message(save: Save) -> None:
    folder = save("InternLM2-Reward")
    scorer = Scorer.load(folder)
    plain = Renderer(
        load_tokenizer(str(folder.parent / "published")), chat_template=DEFAULT_CHAT_TEMPLATE
    )
    rows = [[*plain.encode(chat), 17] for chat in CHATS]
    assert [scorer.renderer.encode(chat) for chat in CHATS] == rows
    want = wanted("InternLM2-Reward", folder, rows)
    assert [one.score for one in scorer.score(CHATS)] == pytest.approx(want.tolist(), abs=1e-5)


def test_openrlhf_reads_at_the_end_of_the_text(save: Save) -> None:
    folder = save("OpenRLHF")
    for turn, end in (
        ("message['content'] + eos_token + '\\n'", ""),
        ("message['content'] + '\\n'", " "),
    ):
        (folder / "chat_template.jinja").write_text(
            f"{{% for message in messages %}}{{{{ {turn} }}}}{{% endfor %}}\n"
        )
        tokenizer = load_classifier(folder).tokenizer
        first, last = (message["content"] for message in CHATS[0])
        between = tokenizer.eos_token if end == "" else ""
        assert (
            Renderer(tokenizer).render(CHATS[0])
            == f"{first}{between}\n{last}{end}{tokenizer.eos_token}"
        )


QUESTION, OTHER_QUESTION = "Which tree bears cones?", "And which one acorns?"
TEXTS = {
    "Eurus-RM": (
        f"[INST] {QUESTION} [/INST] A pine.",
        "{eos}",
        f"[INST] {OTHER_QUESTION} [/INST] An oak.",
        "",
    ),
    "UltraRM": (
        f"Human: {QUESTION}\nAssistant: A pine.",
        "\n",
        f"Human: {OTHER_QUESTION}\nAssistant: An oak.",
        "",
    ),
    "Beaver": (
        f"BEGINNING OF CONVERSATION: USER: {QUESTION} ASSISTANT:A pine.",
        "{eos}",
        f"USER: {OTHER_QUESTION} ASSISTANT:An oak.",
        "{eos}",
    ),
    "Starling-RM": (
        f"<s>[INST] {QUESTION} {{eos}} [/INST] A pine.",
        "{eos}",
        f"<s>[INST] {OTHER_QUESTION} {{eos}} [/INST] An oak.",
        "{eos}",
    ),
}
"""Two turns as the authors write them: the first, the text between, the second, the end."""


@pytest.mark.parametrize("name", TEXTS)
def test_a_tokenizer_without_a_template_gets_that_of_the_authors(
    name: str, save: Save, tmp_path: Path
) -> None:
    folder, (first, between, second, end) = save(name), TEXTS[name]
    owned = load_classifier(folder).tokenizer
    assert owned.chat_template == DEFAULT_CHAT_TEMPLATE
    (folder / "chat_template.jinja").unlink()
    scorer = Scorer.load(folder)
    renderer = scorer.renderer
    renderer.tokenizer.bos_token = "<s>"
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "A pine."}]
    longer = [
        *chat,
        {"role": "user", "content": OTHER_QUESTION},
        {"role": "assistant", "content": "An oak."},
    ]
    eos = renderer.tokenizer.eos_token
    assert renderer.render(chat) == (first + end).format(eos=eos)
    assert renderer.render(longer) == (first + between + second + end).format(eos=eos)
    with pytest.raises(DataError, match="knows no role system"):
        renderer.render([{"role": "system", "content": "Be brief."}, *chat])
    ids = [renderer.encode(one) for one in (chat, longer)]
    assert [one.score for one in scorer.score([chat, longer])] == pytest.approx(
        wanted(name, folder, ids).tolist(), abs=1e-5
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Eurus-RM", {"regression_head.bias": torch.ones(1)}, r"does not use(?s:.*)score\.bias"),
        (
            "Eurus-RM",
            {"regression_head.weight": torch.ones(2, SIZE)},
            r"do not have the shapes(?s:.*)\(2, 32\)",
        ),
        (
            "Beaver's cost",
            {"score_head.bias": torch.ones(1)},
            r"does not use(?s:.*)score\.value\.bias",
        ),
        ("GRM, linear", {"v_head.summary.0.weight": torch.ones(12, SIZE)}, "does not use"),
    ],
)
def test_a_known_class_with_another_head_is_refused(
    name: str, changes: Any, message: str, save: Save
) -> None:
    file = save(name) / "model.safetensors"
    save_file({**load_file(file), **changes}, file, metadata={"format": "pt"})
    for options in ({}, {"head_seed": 3, "on_meta": True}):
        with pytest.raises(ModelError, match=message):
            load_classifier(file.parent, **options).model.fill("cpu")


def test_the_newer_grm_are_plain_classifiers(tiny_tokenizer: Any, tmp_path: Path) -> None:
    folder, model = (
        tmp_path / "GRM-Llama3.2-3B-rewardmodel-ft",
        tiny_model("llama", vocab_size=len(tiny_tokenizer)),
    )
    vars(model.config).update(GRM)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    loaded = load_classifier(folder).model
    assert torch.equal(loaded.head.weight, model.score.weight)


CLASSIFIER, WRITTEN = "LlamaForSequenceClassification", "{{ bos_token }}" + CHATML


@pytest.mark.parametrize(
    ("fields", "name", "template", "number"),
    [
        ({"architectures": [CLASSIFIER]}, "Llama-3.1-Tulu-3-8B-RM", CHATML, 0),
        ({"architectures": [CLASSIFIER]}, "Skywork-Reward-V2-Llama-3.1-8B", WRITTEN, 1),
        ({"architectures": [CLASSIFIER], **GRM}, "GRM-Llama3.2-3B-rewardmodel-ft", WRITTEN, 2),
        ({"architectures": ["GRewardModel"]}, "GRM", WRITTEN, 2),
        ({"architectures": [f"{CLASSIFIER}WithNormal_Weights"]}, "URM-LLaMa-3.1-8B", WRITTEN, 2),
        ({"architectures": ["RewardModel"]}, "Llama-3-8b-rm-mixture", WRITTEN, 1),
        ({"architectures": ["EurusRewardModel"]}, "Eurus-RM-7b", None, 1),
        ({"architectures": ["LlamaForCausalLM"]}, "Starling-RM-7B-alpha", None, 2),
        ({"architectures": ["LlamaForCausalLM"]}, "Llama-3.1-Tulu-3-8B-SFT", CHATML, None),
    ],
)
def test_conversations_have_the_bos_of_the_authors_code(
    fields: dict[str, Any], name: str, template: str | None, number: int | None
) -> None:
    tokenizer = copy.deepcopy(byte_bpe(bos="<s>", adds_bos=True))
    tokenizer.chat_template = template
    set_template(tokenizer, fields, name)
    assert tokenizer.init_kwargs.get("num_bos") == number
    ids = Renderer(tokenizer).encode(CHATS[0])
    # a new model gets one
    assert ids.count(tokenizer.bos_token_id) == (1 if number is None else number)


def test_a_classifier_without_bos_is_scored_signed_and_trained_on_as_it_was_trained(
    tmp_path: Path,
) -> None:
    tokenizer = copy.deepcopy(byte_bpe(bos="<s>", adds_bos=True))
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.chat_template = CHATML
    hf = tiny_model(
        "llama", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=2
    )
    hf.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in CHATS]
    want = plain_scores(hf, rows).tolist()
    for contract in (None, sign_folder(tmp_path)):
        scorer = Scorer.load(tmp_path)
        assert [one.score for one in scorer.score(CHATS)] == pytest.approx(want, abs=1e-5)
        assert contract is None or (contract.rendering.num_bos, contract.rendering.frame) == (
            0,
            "none",
        )
    added = Scorer.load(tmp_path, tokenizer={"num_bos": 1})
    bos = [[tokenizer.bos_token_id, *ids] for ids in rows]
    assert [one.score for one in added.score(CHATS)] == pytest.approx(
        plain_scores(hf, bos).tolist(), abs=1e-5
    )
    assert (
        contract is not None
        and diagnose(contract, [x.mistakes["two_bos"] for x in contract.golden]).part == "tokens"
    )
    tokenizer.init_kwargs["num_bos"] = 1  # a key of tokenizer_config.json
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / CONTRACT_FILE).unlink()
    assert Scorer.load(tmp_path).renderer.encode(CHATS[0]) == bos[0]


@pytest.mark.parametrize("name", ["ArmoRM", "QRM"])
def test_a_gated_model_needs_the_end_of_the_prompt(name: str, save: Save) -> None:
    scorer = Scorer.load(save(name), prefix_cache_bytes=2**20)
    scored = scorer.score(CHATS)
    # no prefix is kept
    assert [one.score for one in scorer.score(CHATS)] == [one.score for one in scored]
    assert sum(scored[0].heads) == pytest.approx(scored[0].score, abs=1e-6)
    with pytest.raises(ModelError, match="reads where the prompt ends"):
        scorer.model.score_tokens([[5, 6, 7]])
