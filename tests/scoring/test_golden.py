"""The contract that is made of a model: true of it, and made without a trace."""

from __future__ import annotations

import copy
import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DENSE, plain_scores, tiny_model
from signed import signed
from transformers import AutoTokenizer

from treeward.errors import ModelError
from treeward.model.contract import CONTRACT_FILE, read_contract, text_sha256
from treeward.model.loading import load_classifier
from treeward.model.reward_model import RewardModel
from treeward.model.stored import StoredModel, sha256_of
from treeward.scoring.golden import hash_all, sign_exported, sign_folder, tokenizer_sha256
from treeward.scoring.golden_conversations import GOLDEN_CONVERSATIONS
from treeward.scoring.scorer import Scorer
from treeward.scoring.verification import verify
from treeward.tree import attention

BOS_TEMPLATE = "{{ '<|system|>' }}{% for m in messages %}{{ m.role + ': ' + m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("family", ["gemma2", "bert"])
def test_golden_scores_are_those_of_plain_rows(
    family: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model, renderer, contract = signed(tmp_path, tiny_tokenizer, tiny_model(family))
    assert contract == read_contract(tmp_path)
    # The template names no tools.
    assert [example.name for example in contract.golden] == [
        name for name in GOLDEN_CONVERSATIONS if name != "tools"
    ]
    for example in contract.golden:
        assert renderer.encode(example.messages) == example.token_ids and example.heads == [
            example.score
        ]
    with torch.no_grad():
        want = plain_scores(model.hf, [example.token_ids for example in contract.golden]).tolist()
    assert [example.score for example in contract.golden] == pytest.approx(want, abs=1e-5)
    assert contract.read.plain_transformers
    assert contract.read.position == ("pooled" if family == "bert" else "last token")
    assert (
        verify(tmp_path, device="cpu").equal
        and verify(tmp_path, device="cpu", dtype=torch.bfloat16).equal
    )


def test_the_limit_of_the_training_is_not_that_of_scoring(
    tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, contract = signed(tmp_path, tiny_tokenizer, tiny_model("llama"), max_length=60)
    assert (contract.rendering.max_length, contract.rendering.trained_length) == (None, 60)
    long = [{"role": "user", "content": "word " * 90}, {"role": "assistant", "content": "Yes."}]
    scorer = Scorer.load(tmp_path, device="cpu")
    want = plain_scores(model.hf, [scorer.renderer.encode(long)]).tolist()
    with caplog.at_level("WARNING", logger="treeward"):
        scores = [scorer.score([long])[0] for _ in range(2)]
    assert [score.score for score in scores] == pytest.approx(want * 2, abs=1e-5) and scores[
        0
    ].num_tokens > 60
    assert caplog.text.count("was trained with at most 60") == 1
    refused = Scorer.load(tmp_path, device="cpu", max_length=60).score([long], on_error="mask")[0]
    assert refused.score is None and "at most 60" in str(refused.error)
    again = sign_folder(tmp_path, like=contract)
    assert again.rendering == contract.rendering
    cutting = {"max_length": 60, "truncation": "truncate_left"}  # as the model has learnt them
    _, _, contract = signed(tmp_path / "cutting", tiny_tokenizer, tiny_model("llama"), **cutting)
    assert contract.rendering.max_length == 60


RENDERING = {
    "max_length": 200,
    "truncation": "truncate_left",
    "chat_template_kwargs": {"tone": "!"},
}


@pytest.fixture
def signed_folder(tiny_tokenizer: Any, tmp_path: Path) -> Any:
    """A model, its renderer and its contract, which lies in `tmp_path`."""
    return signed(tmp_path, tiny_tokenizer, tiny_model("llama"), **RENDERING)


def test_the_contract_says_how_conversations_are_rendered(
    signed_folder: Any, tmp_path: Path
) -> None:
    _, renderer, contract = signed_folder
    template = (tmp_path / "chat_template.jinja").read_text(encoding="utf-8")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    rendering = contract.rendering
    assert rendering.chat_template_sha256 == text_sha256(template)
    assert rendering.model_dump(include=set(RENDERING)) == RENDERING
    assert rendering.pad_token_id == config["pad_token_id"]
    assert rendering.eos_token_id == renderer.tokenizer.eos_token_id


def test_the_contract_says_what_the_model_is(signed_folder: Any, tmp_path: Path) -> None:
    model, _, contract = signed_folder
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert contract.read.token == "eos"
    assert contract.problem_type == config["problem_type"] == "regression"
    dtypes = contract.dtypes
    assert {dtypes.weights, dtypes.head, dtypes.compute} == {"float32"}
    assert contract.weights.architecture == "LlamaForSequenceClassification"
    assert contract.weights.num_parameters == sum(p.numel() for p in model.parameters())


def test_golden_conversations_fit_the_length(signed_folder: Any) -> None:
    _, _, contract = signed_folder
    names = {example.name for example in contract.golden}
    assert "long completion" not in names  # it has more than 200 tokens
    assert all(len(example.token_ids) <= 200 for example in contract.golden)


def test_every_tensor_is_hashed(signed_folder: Any, tmp_path: Path) -> None:
    model, _, contract = signed_folder
    hashes = {tensor.name: sha256_of([tensor]) for tensor in StoredModel(tmp_path).tensors}
    assert hashes.keys() == model.hf.state_dict().keys()
    assert len(set(hashes.values())) == len(hashes)
    assert contract.weights.tensors == {name: digest[:12] for name, digest in hashes.items()}


def test_of_a_checkpoint_the_head_alone_is_hashed(signed_folder: Any, tmp_path: Path) -> None:
    model, renderer, contract = signed_folder
    signed_again = sign_exported(tmp_path, model=model, renderer=renderer, is_checkpoint=True)
    weights = signed_again.weights
    assert weights.sha256 is None
    assert weights.tensors == {}
    assert weights.head_sha256 == contract.weights.head_sha256


def test_the_tokenizers_hash_survives_saving_and_use(signed_folder: Any, tmp_path: Path) -> None:
    _, renderer, contract = signed_folder
    want = contract.rendering.tokenizer_sha256
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    # a call that leaves padding behind
    loaded(["a", "a longer text"], padding=True, truncation=True, max_length=4)
    assert tokenizer_sha256(loaded) == want
    assert tokenizer_sha256(renderer.tokenizer) == want
    loaded.add_tokens(["quux"])
    assert tokenizer_sha256(loaded) != want


def test_a_frame_and_its_mistakes(tiny_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.bos_token = "<|system|>"
    bos = tokenizer.bos_token_id
    hf = tiny_model("llama", bos_token_id=bos)
    _, _, contract = signed(tmp_path, tokenizer, hf, chat_template=BOS_TEMPLATE)
    assert contract.rendering.frame == "bos" and contract.rendering.bos_token_id == bos
    for example in contract.golden:
        rows = [[bos, *example.token_ids], example.token_ids[1:], example.token_ids[:-1]]
        with torch.no_grad():
            want = plain_scores(hf, rows).tolist()
        got = [example.mistakes[mistake] for mistake in ("two_bos", "no_bos", "read_before_end")]
        assert got == pytest.approx(want, abs=1e-5)


def test_golden_conversations_that_the_template_refuses_are_left_out(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    refusing = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('no system') }}{% endif %}"
        + BOS_TEMPLATE
    )
    _, _, contract = signed(tmp_path, tiny_tokenizer, tiny_model("llama"), chat_template=refusing)
    assert {example.messages[0]["role"] for example in contract.golden} == {"user"}


def test_a_template_that_refuses_every_golden_conversation_is_told(
    tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = "{{ raise_exception('nothing fits') }}"
    _, _, contract = signed(tmp_path, tiny_tokenizer, tiny_model("llama"), chat_template=refusing)
    assert contract.golden == [] and "refuses every golden conversation" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_tolerances_hold_for_every_way_to_compute(
    family: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """float32: packed, alone, as dense trees. bfloat16: weights and arithmetic. The rounded weights
    are the signed."""
    model, renderer, contract = signed(tmp_path, tiny_tokenizer, tiny_model(family))
    rows = [example.token_ids for example in contract.golden]
    golden = torch.tensor([example.score for example in contract.golden])
    alone = torch.cat([model.score_tokens([row])[:, 0] for row in rows])
    model.tree_attention = DENSE
    dense = model.score_tokens(rows)[:, 0]
    model.tree_attention = attention.TREE
    for scores in (alone, dense):
        assert float((scores - golden).abs().max()) <= contract.tolerance.float32 / 4
    rounded = load_classifier(tmp_path, dtype=torch.bfloat16).model.score_tokens(rows)[:, 0]
    off = float((rounded - golden).abs().max())
    assert 20 * contract.tolerance.float32 < off <= contract.tolerance.bfloat16

    _, _, small = signed(tmp_path / "small", renderer.tokenizer, model.hf, dtype=torch.bfloat16)
    assert (small.dtypes.weights, small.dtypes.head) == ("bfloat16", "float32")
    of_rounded = load_classifier(tmp_path / "small", dtype=torch.float32).model.score_tokens(rows)[
        :, 0
    ]
    in_file = torch.tensor([example.score for example in small.golden])
    assert torch.allclose(in_file, of_rounded, atol=1e-6)
    assert (
        small.tolerance.bfloat16
        > float((in_file - golden).abs().max())
        > 10 * small.tolerance.float32
    )


def test_golden_scores_do_not_depend_on_settings_of_products_nor_the_model_in_memory(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """A bfloat16 model is signed in float32 where it is, under TF32 and AMX: all stays as it
    was."""
    backends: Any = torch.backends
    seen: list[tuple[str, ...]] = []

    def note(*_: Any) -> None:
        parts = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv)
        seen.append(
            (torch.get_float32_matmul_precision(), *(part.fp32_precision for part in parts))
        )

    result = []
    for precision in ("highest", "medium"):
        hf = tiny_model("llama")
        RewardModel(hf).cast(torch.bfloat16)
        hf.register_forward_pre_hook(note)
        hf.base_model.register_forward_pre_hook(note)
        torch.set_float32_matmul_precision(precision)
        try:
            # as at the start: products follow `torch.backends.fp32_precision`
            if precision == "highest":
                backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"
            note()
            folder = tmp_path / precision
            model, _, contract = signed(folder, tiny_tokenizer, hf, dtype=torch.bfloat16)
            note()
        finally:
            torch.set_float32_matmul_precision("highest")
        assert seen[0] == seen[-1] and seen[0][0] == precision
        assert set(chain.from_iterable(seen[1:-1])) == {"highest", "ieee"}
        seen.clear()
        assert {p.dtype for p in model.weights()} == {torch.bfloat16}
        assert contract.dtypes.weights == contract.dtypes.config == "bfloat16"
        result.append(contract)
    assert result[0].golden == result[1].golden and result[0].tolerance == result[1].tolerance
    assert sign_folder(tmp_path / "medium").golden == result[1].golden  # loaded in float32


def test_weights_that_give_no_score(
    tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are refused; of a checkpoint, whose next step has the better message, the other
    conversations are kept."""
    model, renderer, first = signed(tmp_path, tiny_tokenizer, tiny_model("llama"))
    *others, long = first.golden
    rare = min(set(long.token_ids).difference(*(example.token_ids for example in others)))
    with torch.no_grad():
        model.hf.get_input_embeddings().weight[rare] = torch.inf
    before = (tmp_path / CONTRACT_FILE).read_bytes()
    with pytest.raises(ModelError, match="not finite(?s:.*)golden conversation 'long completion'"):
        sign_exported(tmp_path, model=model, renderer=renderer)
    assert (tmp_path / CONTRACT_FILE).read_bytes() == before
    contract = sign_exported(tmp_path, model=model, renderer=renderer, is_checkpoint=True)
    assert [one.score for one in contract.golden] == pytest.approx(
        [one.score for one in others], abs=1e-5
    )
    assert "no finite score to 1 of 10" in caplog.text
    with pytest.raises(ModelError, match="no finite score(?s:.*)long completion"):
        hash_all(tmp_path, renderer, None)
