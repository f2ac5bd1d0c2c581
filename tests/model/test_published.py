"""Published reward models: small ones, saved as their authors save theirs, and their arithmetic in plain torch.

Each reference computes on the last hidden states of plain transformers; the names of the tensors and the keys of
config.json are those of the files that `published.ADAPTERS` names as sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import causal_model, config_of, randomise, score_error
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSequenceClassification

from treeward.data.rendering import DEFAULT_CHAT_TEMPLATE, Renderer
from treeward.errors import ModelError
from treeward.model.export import export_model
from treeward.model.loading import load_reward_model
from treeward.model.pretrained import load_tokenizer
from treeward.model.published import ARMORM, HELPSTEER2
from treeward.model.reward_model import FeatureBatch
from treeward.scoring.golden import sign_folder
from treeward.scoring.scorer import Scorer
from treeward.training.train import train

SIZE = 32
GATE = [5 + sorted(pre_tokenizers.ByteLevel.alphabet()).index("Ċ"), 4]
"""The line's end before the header of the assistant, in the tiny tokenizer."""
CHATS = [
    [{"role": "user", "content": "Which tree bears cones?"}, {"role": "assistant", "content": text}]
    for text in ("A pine does.", "A pine does, and so does a spruce.", "No.")
]
SEQUENCES = [[3, 4, 5, 6, *GATE, 10, 11], [3, 4, 5, 6, *GATE, 10, 12, 13, 14], [20, *GATE, 21, *GATE, 22]]
"""With the tokens that end a prompt; the last one has them twice, and its second is read."""

Save = Callable[[str], Path]


class Published(NamedTuple):
    """`head`: the tensors of the head, by the authors' names. `fields`: of config.json. `score`: of the hidden states
    (L, D) of one sequence and its tokens."""

    architecture: str
    fields: Mapping[str, Any]
    head: Mapping[str, Tensor]
    score: Callable[[Tensor, list[int], Mapping[str, Tensor]], Tensor]
    parts: int = 1


def linear(name: str) -> Callable[..., Tensor]:
    return lambda hidden, ids, head: hidden[-1] @ head[f"{name}.weight"][0]


def inform(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    inner = F.relu(F.linear(hidden[-1], head["score.0.weight"], head["score.0.bias"]))
    return F.linear(inner, head["score.2.weight"], head["score.2.bias"])[0]


def urm(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    means = F.linear(hidden[-1], head["score.weight"]).view(5, 2)[:, 0]
    weights = hidden[-1]
    for i in (0, 2, 4):
        weights = F.linear(weights, head[f"weights.fc.{i}.weight"], head[f"weights.fc.{i}.bias"])
        weights = F.selu(weights) if i < 4 else weights
    return (means * weights).sum()


def end_of_prompt(ids: list[int]) -> int:
    return max(j for j in range(len(ids) - len(GATE) + 1) if ids[j : j + len(GATE)] == GATE)


def armorm(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    rewards = F.linear(hidden[-1], head["regression_layer.weight"])
    gate = hidden[end_of_prompt(ids)]
    for i in range(4):
        gate = F.linear(gate, head[f"gating.layers.{i}.weight"], head[f"gating.layers.{i}.bias"])
        gate = F.relu(gate) if i < 3 else gate
    gating = F.softmax(gate / 10, dim=0) * head["gating.logit_scale"][0]
    return (gating * (rewards @ head["reward_transform_matrix"])).sum()


def qrm(hidden: Tensor, ids: list[int], head: Mapping[str, Tensor]) -> Tensor:
    quantiles = F.linear(hidden[-1], head["regression_layer.weight"]).reshape(4, 3)  # objectives, quantiles
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
    draw = {name: value.abs() + 0.5 if name.endswith("_var") else value for name, value in draw.items()}
    return draw | {name: torch.tensor(3) for name in draw if name.endswith("num_batches_tracked")}


def layer(name: str, outputs: int, inputs: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}": (size,) for part in ("weight", "bias", "running_mean", "running_var")} | {
        f"{name}.num_batches_tracked": ()
    }


INTERNLM2_ROPE: dict[str, Any] = {"rope_theta": 77.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
"""Which scales nothing within the model's positions."""
REMOTE = {"auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"}}
GATED = {"gate_pattern": GATE, "gating_hidden_dim": 12}
MODELS = {
    "OpenRLHF": Published(
        "RewardModel",
        {"value_head_prefix": "value_head"},
        drawn(**{"value_head.weight": (1, SIZE)}),
        linear("value_head"),
    ),
    "OpenRLHF, normalised": Published(
        "RewardModel",
        {"value_head_prefix": "value_head", "normalize_reward": True, "mean": 0.7, "std": 2.5},
        drawn(**{"value_head.weight": (1, SIZE)}),
        lambda hidden, ids, head: (hidden[-1] @ head["value_head.weight"][0] - 0.7) / 2.5,
    ),
    "INF-ORM, Qwen2.5-Math-RM": Published(
        "INFORMForSequenceClassification",
        {},
        drawn(**layer("score.0", SIZE, SIZE), **layer("score.2", 1, SIZE)),
        inform,
    ),
    "InternLM2-Reward": Published(
        "InternLM2ForRewardModel",
        {"model_type": "internlm2", "bias": False, "reward_token_id": 17, **REMOTE},
        drawn(**{"v_head.weight": (1, SIZE)}),
        linear("v_head"),
    ),
    "URM": Published(
        "LlamaForSequenceClassificationWithNormal_Weights",
        {"id2label": {str(i): f"LABEL_{i}" for i in range(10)}},
        drawn(
            **layer("score", 10, SIZE, bias=False),
            **layer("weights.fc.0", SIZE, SIZE),
            **layer("weights.fc.2", SIZE, SIZE),
            **layer("weights.fc.4", 5, SIZE),
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
            **layer("gating.layers.0", 12, SIZE),
            **layer("gating.layers.1", 12, 12),
            **layer("gating.layers.2", 12, 12),
            **layer("gating.layers.3", 19, 12),
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
            part for g in range(2) for part in (q[g * 16 : g * 16 + 16], k[g * 8 : g * 8 + 8], v[g * 8 : g * 8 + 8])
        ]
        theirs[f"model.layers.{i}.attention.wqkv.weight"] = torch.cat(rows)
    return theirs


@pytest.fixture
def save(tmp_path: Path, tiny_tokenizer: Any) -> Save:
    """A model's folder as its authors have it, and its backbone in plain transformers."""

    def to_folder(name: str) -> Path:
        published, folder = MODELS[name], tmp_path / "published"
        config = config_of("llama", vocab_size=len(tiny_tokenizer), eos_token_id=tiny_tokenizer.eos_token_id)
        tiny_tokenizer.save_pretrained(folder)
        fields = config.to_dict() | {"architectures": [published.architecture], **published.fields}
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        backbone = {f"model.{key}": value for key, value in plain_backbone(folder).state_dict().items()}
        if fields["model_type"] == "internlm2":
            backbone = in_internlm2_names(backbone)
            del fields["rope_parameters"]  # InternLM2's keys of the same
            (folder / "config.json").write_text(json.dumps(fields | INTERNLM2_ROPE), encoding="utf-8")
        save_file({**backbone, **published.head}, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return to_folder


def plain_backbone(folder: Path) -> Any:
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config_of("llama", vocab_size=fields["vocab_size"], eos_token_id=fields["eos_token_id"])
    if fields["model_type"] == "internlm2":
        config.rope_parameters = {"rope_type": "default", "rope_theta": INTERNLM2_ROPE["rope_theta"]}
    return randomise(AutoModel.from_config(config).eval())


def wanted(name: str, folder: Path, sequences: list[list[int]]) -> Tensor:
    published, backbone = MODELS[name], plain_backbone(folder)
    with torch.no_grad():
        hidden = [backbone(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in sequences]
        return torch.stack([published.score(h, ids, published.head) for h, ids in zip(hidden, sequences, strict=True)])


@pytest.mark.parametrize("loaded", ["tree", "rows", "filled"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_authors_arithmetic(name: str, loaded: Any, save: Save) -> None:
    folder = save(name)
    if loaded == "filled":
        model = load_reward_model(folder, on_meta=True).model
        model.fill("cpu")
    else:
        model = load_reward_model(folder, attention=loaded).model
    assert model.layout == ("rows" if loaded == "rows" else "tree") and model.num_heads == MODELS[name].parts
    want = wanted(name, folder, SEQUENCES)
    assert want.std() > 0.01
    alone = torch.cat([model.score_tokens([ids]).sum(dim=1) for ids in SEQUENCES])
    together = model.score_tokens([*SEQUENCES, SEQUENCES[0]]).sum(dim=1)
    assert score_error(alone, want) < 1e-5
    assert score_error(together[:-1], want) < 1e-5 and together[0] == together[-1]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in SEQUENCES], batch_first=True)
    scored = model.score({"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in SEQUENCES])})
    assert score_error(scored["scores"], want) < 1e-5
    features = model.features(model.make_batch([SEQUENCES]))
    assert features.shape == (3, *model.feature_shape) == (3, 2 if model.gate_pattern else 1, SIZE)
    assert score_error(model.heads(FeatureBatch(features)).sum(dim=1), want) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_head_without_its_tensor_is_refused_by_its_name(name: str, save: Save) -> None:
    folder = save(name)
    weights = load_file(folder / "model.safetensors")
    lost = list(MODELS[name].head)[-1]
    del weights[lost]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for head_seed in (None, 3):
        with pytest.raises(ModelError, match=f"without {lost}"):
            load_reward_model(folder, head_seed=head_seed)


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_and_the_export_scores_the_same(name: str, save: Save, tmp_path: Path) -> None:
    folder, exported = save(name), tmp_path / "exported"
    model, tokenizer = load_reward_model(folder, head_seed=5)
    renderer = Renderer(tokenizer)
    optimiser = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=0.01)
    before = model.train()(model.make_batch([SEQUENCES]))
    (-F.logsigmoid(before[0] - before[1])).backward()
    optimiser.step()
    values = model.eval().score_tokens(SEQUENCES)
    after = values.sum(dim=1)
    assert after[0] - after[1] > (before[0] - before[1]).item()
    export_model(model, tokenizer, exported, rendering=renderer.settings)
    contract = sign_folder(exported)
    assert contract.read.plain_transformers == (name in ("OpenRLHF", "InternLM2-Reward"))
    assert contract.dtypes.head == "float32" and [head.weight for head in contract.heads] == [1.0] * model.num_heads
    if contract.read.plain_transformers:
        plain = AutoModelForSequenceClassification.from_pretrained(exported, dtype="float32")
        theirs = [plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in SEQUENCES]
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
    train(tiny_run(*options, "rm.max_num_steps=1", "checkpointing.save_period=1"), show_progress=False)
    outcome = train(tiny_run(*options, "rm.max_num_steps=2"), show_progress=False)
    scorer = Scorer.load(outcome.model_folder)
    assert outcome.step == 2 and scorer.head_names == ARMORM and scorer.head_weights == (1.0,) * 19


def test_internlm2_reads_its_reward_token_after_the_last_message(save: Save) -> None:
    folder = save("InternLM2-Reward")
    scorer = Scorer.load(folder)
    plain = Renderer(load_tokenizer(str(folder.parent / "published")), chat_template=DEFAULT_CHAT_TEMPLATE)
    rows = [[*plain.encode(chat), 17] for chat in CHATS]
    assert [scorer.renderer.encode(chat) for chat in CHATS] == rows
    want = wanted("InternLM2-Reward", folder, rows)
    assert [one.score for one in scorer.score(CHATS)] == pytest.approx(want.tolist(), abs=1e-5)


def test_openrlhf_reads_at_the_end_of_the_text(save: Save) -> None:
    folder = save("OpenRLHF")
    for turn, end in ("message['content'] + eos_token + '\\n'", ""), ("message['content'] + '\\n'", " "):
        (folder / "chat_template.jinja").write_text(f"{{% for message in messages %}}{{{{ {turn} }}}}{{% endfor %}}\n")
        tokenizer = load_reward_model(folder).tokenizer
        first, last = (message["content"] for message in CHATS[0])
        between = tokenizer.eos_token if end == "" else ""
        assert Renderer(tokenizer).render(CHATS[0]) == f"{first}{between}\n{last}{end}{tokenizer.eos_token}"


@pytest.mark.parametrize("name", ["ArmoRM", "QRM"])
def test_a_gated_model_needs_the_end_of_the_prompt(name: str, save: Save) -> None:
    scorer = Scorer.load(save(name), prefix_cache_bytes=2**20)
    scored = scorer.score(CHATS)
    assert [one.score for one in scorer.score(CHATS)] == [one.score for one in scored]  # no prefix is kept
    assert sum(scored[0].heads) == pytest.approx(scored[0].score, abs=1e-6)
    with pytest.raises(ModelError, match="reads where the prompt ends"):
        scorer.score_tokens([[5, 6, 7]])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["Llama-3.1-Nemotron-70B-Reward-HF", "verifier"])
def test_a_token_of_a_language_model_is_a_score(name: str, tied: bool, tiny_tokenizer: Any, tmp_path: Path) -> None:
    lm, folder = causal_model("llama", vocab_size=len(tiny_tokenizer), tie_word_embeddings=tied), tmp_path / name
    yes, no, end = 70, 71, "\nIs it right?"
    words = tiny_tokenizer.convert_ids_to_tokens([no, yes])
    if name == "verifier":
        lm.config.classifier_from_token, lm.config.classifier_prompt = words, end
    lm.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    plain = Renderer(tiny_tokenizer)
    texts = [plain.render(chat) + (end if name == "verifier" else "") for chat in CHATS]
    want = []
    for ids in plain.encode_texts(texts):
        with torch.no_grad():
            logits = lm(input_ids=torch.tensor([ids])).logits[0, -1]
        odds = logits.log_softmax(-1)
        want.append(float(odds[yes] - odds[no] if name == "verifier" else logits[0]))
    scorer = Scorer.load(folder)
    assert [one.score for one in scorer.score(CHATS)] == pytest.approx(want, abs=1e-5)
    export_model(scorer.model, scorer.renderer.tokenizer, tmp_path / "plain", rendering=scorer.renderer.settings)
    assert sign_folder(tmp_path / "plain").read.plain_transformers
    again = Scorer.load(tmp_path / "plain")
    assert [one.score for one in again.score(CHATS)] == pytest.approx(want, abs=1e-5)
    filled = load_reward_model(folder, on_meta=True).model
    filled.fill("cpu")
    assert torch.equal(filled.head.weight, scorer.model.head.weight)


def test_logits_that_are_not_linear_and_unknown_tokens_are_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    lm = causal_model("gemma2", vocab_size=len(tiny_tokenizer), final_logit_softcapping=30.0)
    for tokens, message in (("no", "yes"), "these are no tokens"), ([70, 71], "not linear"):
        lm.config.classifier_from_token = tokens
        lm.save_pretrained(tmp_path)
        tiny_tokenizer.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=message):
            load_reward_model(tmp_path)
