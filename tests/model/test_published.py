"""Published reward models: small ones, saved as their authors save theirs, score by their
arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import plain_scores, score_error, tiny_model
from published_models import (
    CHATS,
    GRM,
    LDL_WIDTH,
    MODELS,
    SEQUENCES,
    SIZE,
    wanted,
    write_published,
)
from safetensors.torch import load_file, save_file
from templates import CHATML, byte_bpe
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from treeward.data.chat_template import DEFAULT_CHAT_TEMPLATE
from treeward.data.rendering import Renderer
from treeward.errors import DataError, ModelError
from treeward.model import heads as heads_module
from treeward.model.contract import ScoringContract
from treeward.model.export import export_model
from treeward.model.heads import ARMORM, HELPSTEER2
from treeward.model.loading import load_classifier
from treeward.model.pretrained import load_tokenizer
from treeward.model.published import set_template
from treeward.model.reward_model import FeatureBatch, RewardModel
from treeward.scoring.diagnosis import diagnose
from treeward.scoring.golden import sign_folder
from treeward.scoring.scorer import Scorer
from treeward.training.train import train
from treeward.tree.prefix import MIN_PREFIX_TOKENS, PrefixCache

Save = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def small_head() -> Iterator[None]:
    """The hidden width of LDL-Reward's head is 4096 there, which no key of config.json says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads_module, "LDL_WIDTH", LDL_WIDTH)
        yield


@pytest.fixture
def save(tmp_path: Path, tiny_tokenizer: Any) -> Save:
    """Writes a model's folder as its authors have it."""
    return lambda name: write_published(name, tmp_path, tiny_tokenizer)


class Loaded(NamedTuple):
    """A model as one of the three ways of loading gives it, and the scores that it has to give."""

    name: str
    way: str
    model: RewardModel
    want: Tensor


@pytest.fixture(scope="module", params=product(MODELS, ("tree", "rows", "filled")), ids="-".join)
def loaded(
    request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    """Shared by the tests that only read it."""
    name, way = request.param
    folder = write_published(name, tmp_path_factory.mktemp("published"), tiny_tokenizer)
    if way == "filled":
        model = load_classifier(folder, on_meta=True).model
        model.fill("cpu")
    else:
        model = load_classifier(folder, attention=way).model
    return Loaded(name, way, model, wanted(name, folder, SEQUENCES))


def test_the_layout_is_the_one_asked_for(loaded: Loaded) -> None:
    assert loaded.model.layout == ("rows" if loaded.way == "rows" else "tree")


def test_each_part_of_the_score_has_a_head(loaded: Loaded) -> None:
    assert loaded.model.num_heads == MODELS[loaded.name].parts


def test_scores_are_those_of_the_authors_arithmetic(loaded: Loaded) -> None:
    assert loaded.want.std() > 0.01
    alone = torch.cat([loaded.model.score_tokens([ids]).sum(dim=1) for ids in SEQUENCES])
    assert score_error(alone, loaded.want) < 1e-5


def test_scores_of_a_batch_are_those_of_its_sequences(loaded: Loaded) -> None:
    together = loaded.model.score_tokens([*SEQUENCES, SEQUENCES[0]]).sum(dim=1)
    assert score_error(together[:-1], loaded.want) < 1e-5
    assert together[0] == together[-1]


def test_scores_of_padded_rows_are_the_same(loaded: Loaded) -> None:
    rows = [torch.tensor(ids) for ids in SEQUENCES]
    batch = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "input_lengths": torch.tensor([len(row) for row in rows]),
    }
    assert score_error(loaded.model.score(batch)["scores"], loaded.want) < 1e-5


def test_scores_from_kept_features_are_the_same(loaded: Loaded) -> None:
    """A gated head reads two places of a sequence, any other head one."""
    model = loaded.model
    num_reads = 2 if hasattr(model.head, "gate_pattern") else 1
    features = model.features(model.make_batch([SEQUENCES]))
    assert features.shape == (3, *model.feature_shape)
    assert features.shape == (3, num_reads, SIZE)
    assert score_error(model.heads(FeatureBatch(features)).sum(dim=1), loaded.want) < 1e-5


def test_a_row_of_one_token_has_a_value_of_each_head(loaded: Loaded) -> None:
    model = loaded.model
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


class Trained(NamedTuple):
    """A model after one step on its first two sequences, and its export. `before`: the scores of
    the step."""

    name: str
    model: RewardModel
    renderer: Renderer
    before: Tensor
    exported: Path
    contract: ScoringContract


@pytest.fixture(scope="module", params=MODELS)
def trained(
    request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    name = request.param
    folder = tmp_path_factory.mktemp("trained")
    model, tokenizer = load_classifier(write_published(name, folder, tiny_tokenizer), head_seed=5)
    renderer = Renderer(tokenizer)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.SGD(weights, lr=0.01)
    before = model.train()(model.make_batch([SEQUENCES]))
    (-F.logsigmoid(before[0] - before[1])).backward()
    optimiser.step()
    model.eval()
    exported = folder / "exported"
    export_model(model, tokenizer, exported, chat_template=renderer.chat_template)
    contract = sign_folder(exported)
    return Trained(name, model, renderer, before.detach(), exported, contract)


def test_training_goes_on(trained: Trained) -> None:
    before = trained.before
    after = trained.model.score_tokens(SEQUENCES).sum(dim=1)
    assert after[0] - after[1] > (before[0] - before[1]).item()


def test_the_contract_of_an_export_describes_the_head(trained: Trained) -> None:
    contract = trained.contract
    head = trained.model.hf.score
    is_plain = isinstance(head, torch.nn.Linear) and head.bias is None
    assert contract.read.plain_transformers == is_plain
    assert contract.dtypes.head == "float32"
    assert [head.weight for head in contract.heads] == [1.0] * trained.model.num_heads


def test_an_export_scores_in_plain_transformers_or_keeps_the_authors_names(
    trained: Trained,
) -> None:
    if not trained.contract.read.plain_transformers:
        names = load_file(trained.exported / "model.safetensors").keys()
        assert MODELS[trained.name].head.keys() <= names
        return
    classifier = AutoModelForSequenceClassification.from_pretrained(
        trained.exported, dtype="float32"
    )
    theirs = []
    for ids in SEQUENCES:
        theirs.append(classifier(input_ids=torch.tensor([ids]), use_cache=False).logits[0])
    values = trained.model.score_tokens(SEQUENCES)
    assert score_error(torch.stack(theirs), values) < 1e-5


def test_an_export_scores_as_the_trained_model(trained: Trained) -> None:
    scorer = Scorer.load(trained.exported)  # which replays the contract
    values = trained.model.score_tokens(SEQUENCES)
    assert score_error(scorer.model.score_tokens(SEQUENCES), values) < 1e-5
    want = []
    for chat in CHATS:
        ids = trained.renderer.encode(chat)
        want.append(float(trained.model.score_tokens([ids]).sum()))
    scores = [scored.score for scored in scorer.score(CHATS)]
    assert scores == pytest.approx(want, abs=1e-5, rel=1e-5)
    assert (scorer.head_names == HELPSTEER2) == (trained.name == "URM")


@pytest.mark.slow
def test_a_run_goes_on_from_a_gated_model_in_parts_of_its_groups(save: Save, tiny_run: Any) -> None:
    """A step has groups larger than the budget, a checkpoint is resumed, and the export keeps the
    heads' names."""
    model = [f"policy.model_name={save('ArmoRM')}", "~policy.model_config", "~policy.tokenizer"]
    options = [*model, "policy.train_micro_batch_tokens=64", "rm.val_batches=1", "rm.val_period=3"]
    first = tiny_run(*options, "rm.max_num_steps=1", "checkpointing.save_period=1")
    train(first, show_progress=False)
    outcome = train(tiny_run(*options, "rm.max_num_steps=2"), show_progress=False)
    scorer = Scorer.load(outcome.model_folder)
    assert outcome.step == 2
    assert scorer.head_names == ARMORM
    assert scorer.head_weights == (1.0,) * 19


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


@pytest.mark.parametrize(
    ("turn", "between", "end"),
    [
        ("message['content'] + eos_token + '\\n'", "{eos}", ""),
        ("message['content'] + '\\n'", "", " "),
    ],
    ids=["the template writes the end", "the template writes none"],
)
def test_openrlhf_reads_at_the_end_of_the_text(
    turn: str, between: str, end: str, save: Save
) -> None:
    folder = save("OpenRLHF")
    template = f"{{% for message in messages %}}{{{{ {turn} }}}}{{% endfor %}}\n"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_classifier(folder).tokenizer
    first, last = (message["content"] for message in CHATS[0])
    eos = tokenizer.eos_token
    text = f"{first}{between}\n{last}{end}".format(eos=eos) + eos
    assert Renderer(tokenizer).render(CHATS[0]) == text


QUESTION = "Which tree bears cones?"
OTHER_QUESTION = "And which one acorns?"
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
    folder = save(name)
    first, between, second, end = TEXTS[name]
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
    folder = tmp_path / "GRM-Llama3.2-3B-rewardmodel-ft"
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer))
    vars(model.config).update(GRM)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    loaded = load_classifier(folder).model
    assert torch.equal(loaded.head.weight, model.score.weight)


CLASSIFIER = "LlamaForSequenceClassification"
WRITTEN = "{{ bos_token }}" + CHATML
"""A template that writes a BOS."""


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
    num_bos = 1 if number is None else number  # a new model gets one
    assert ids.count(tokenizer.bos_token_id) == num_bos


class WithoutBOS(NamedTuple):
    """A classifier that was trained without a BOS, though its tokenizer adds one to any text.
    `rows`: the tokens that its template writes. `scores`: of plain transformers."""

    folder: Path
    hf: Any
    tokenizer: Any
    rows: list[list[int]]
    scores: list[float]


@pytest.fixture
def without_bos(tmp_path: Path) -> WithoutBOS:
    tokenizer = copy.deepcopy(byte_bpe(bos="<s>", adds_bos=True))
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.chat_template = CHATML
    hf = tiny_model(
        "llama", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=2
    )
    hf.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in CHATS]
    return WithoutBOS(tmp_path, hf, tokenizer, rows, plain_scores(hf, rows).tolist())


def with_bos(model: WithoutBOS) -> list[list[int]]:
    return [[model.tokenizer.bos_token_id, *ids] for ids in model.rows]


@pytest.mark.parametrize("is_signed", [False, True])
def test_a_classifier_without_bos_is_scored_as_it_was_trained(
    is_signed: bool, without_bos: WithoutBOS
) -> None:
    if is_signed:
        contract = sign_folder(without_bos.folder)
        assert (contract.rendering.num_bos, contract.rendering.frame) == (0, "none")
    scores = [scored.score for scored in Scorer.load(without_bos.folder).score(CHATS)]
    assert scores == pytest.approx(without_bos.scores, abs=1e-5)


@pytest.mark.parametrize("is_signed", [False, True])
def test_num_bos_gives_a_classifier_its_bos(is_signed: bool, without_bos: WithoutBOS) -> None:
    if is_signed:
        sign_folder(without_bos.folder)
    want = plain_scores(without_bos.hf, with_bos(without_bos)).tolist()
    scorer = Scorer.load(without_bos.folder, tokenizer={"num_bos": 1})
    assert [scored.score for scored in scorer.score(CHATS)] == pytest.approx(want, abs=1e-5)


def test_two_bos_are_diagnosed_by_the_contract(without_bos: WithoutBOS) -> None:
    contract = sign_folder(without_bos.folder)
    scores = [conversation.mistakes["two_bos"] for conversation in contract.golden]
    assert diagnose(contract, scores).part == "tokens"


def test_the_tokenizers_config_may_say_how_many_bos(without_bos: WithoutBOS) -> None:
    without_bos.tokenizer.init_kwargs["num_bos"] = 1  # a key of tokenizer_config.json
    without_bos.tokenizer.save_pretrained(without_bos.folder)
    renderer = Scorer.load(without_bos.folder).renderer
    assert renderer.encode(CHATS[0]) == with_bos(without_bos)[0]


@pytest.mark.parametrize("name", ["ArmoRM", "QRM"])
def test_a_gated_model_needs_the_end_of_the_prompt(name: str, save: Save) -> None:
    scorer = Scorer.load(save(name), prefix_cache_bytes=2**20)
    scored = scorer.score(CHATS)
    # no prefix is kept
    assert [one.score for one in scorer.score(CHATS)] == [one.score for one in scored]
    assert sum(scored[0].heads) == pytest.approx(scored[0].score, abs=1e-6)
    with pytest.raises(ModelError, match="reads where the prompt ends"):
        scorer.model.score_tokens([[5, 6, 7]])
