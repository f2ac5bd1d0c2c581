"""The spread of a model: fitted by the path of a score, spread_folder, loaded, verified, and refused
where it would be of another model."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_model
from messages import chat, edit_json
from safetensors.torch import load_file, save_file
from signed import add_spread, contract_of, short_comparisons, signed
from transformers import AutoModelForSequenceClassification

from treeward.config.scoring import ScoringConfig
from treeward.data.preference import Preference
from treeward.errors import DataError, ModelError
from treeward.evaluation.results import score_examples, scored_from_row, to_row
from treeward.losses import ranked_pairs
from treeward.model.contract import CONTRACT_FILE, ESTIMATE_MEANING, HeadContract
from treeward.model.heads import Features
from treeward.model.reward_model import RewardModel
from treeward.scoring.identity import scorer_identity
from treeward.scoring.laplace import Curvature
from treeward.scoring.score import Score
from treeward.scoring.scorer import Scorer
from treeward.scoring.spread import fit_spread, margin_spreads
from treeward.scoring.verification import verify

NAMES = ("train.jsonl", "held_out.jsonl")
CONTEXT = [{"role": "user", "content": "What is two plus two?"}]
COMPLETIONS = ["Four.", "It is four.", "Five, of course!"]


@pytest.fixture(scope="module")
def data() -> tuple[list[Preference], list[Preference]]:
    """What the shared model was fitted to: fewer comparisons than its 32 features need, so that the
    prior counts."""
    return short_comparisons("validation", 60), short_comparisons("length_controlled", 30)


@pytest.fixture
def folder(spread_folder: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(spread_folder, tmp_path / "model"))


def features_of(scorer: Scorer, preference: Preference) -> np.ndarray:
    """The score and the features of each completion, each read alone."""
    _, num_features = scorer.model.feature_shape
    rows = []
    with scorer.model.reading(Features(num_features)):
        for conversation in preference.conversations:
            rows.append(scorer.model.read_tokens([scorer.renderer.encode(conversation)])[0])
    return torch.stack(rows).double().numpy()


def test_a_spread_is_the_closed_form_on_the_features_of_a_score(
    spread_folder: Path, data: tuple[list[Preference], list[Preference]]
) -> None:
    scorer = Scorer.load(spread_folder, device="cpu")
    spread = contract_of(spread_folder).spread
    assert spread is not None
    read = [features_of(scorer, preference) for preference in data[0]]
    # The features are what the head reads: the same bits make the score.
    for rows, preference in zip(read[:5], data[0][:5], strict=True):
        scores = [score.score for score in scorer.score(preference.conversations)]
        assert scores == pytest.approx(rows[:, 0], abs=1e-6)
        with torch.no_grad():
            values = scorer.model.head_values(torch.tensor(rows[:, 1:], dtype=torch.float32))
        assert values[:, 0].tolist() == rows[:, 0].tolist()

    curvature = Curvature(read[0].shape[1] - 1)
    for rows, preference in zip(read, data[0], strict=True):
        pairs = ranked_pairs([preference.ranks])
        better, worse = pairs.better_P.numpy(), pairs.worse_P.numpy()
        differences = (rows[better, 1:] - rows[worse, 1:]).astype(np.float32)
        margins = rows[better, 0] - rows[worse, 0]
        curvature.add(differences, margins, pairs.weight_P.double().numpy())
    assert spread.num_pairs == curvature.num_pairs
    posterior = curvature.posterior(spread.penalty)
    mean = np.concatenate(read)[:, 1:].mean(axis=0)
    held_out = data[1][3]
    rows = features_of(scorer, held_out)
    want = posterior.spreads((rows[:, 1:] - mean).astype(np.float32))
    got = [score.spread for score in scorer.score(held_out.conversations)]
    assert got == pytest.approx(want, rel=1e-3)
    # Of a margin it is the distance of the two, in which what they share cancels.
    texts = [list(completion.messages) for completion in held_out.completions]
    margins_CC = margin_spreads(scorer, list(held_out.context), texts)
    want_margin = posterior.spreads((rows[:1, 1:] - rows[1:2, 1:]).astype(np.float32))
    assert margins_CC[0, 1] == pytest.approx(want_margin[0], rel=1e-3)
    assert margins_CC[0, 0] == 0.0 and np.array_equal(margins_CC, margins_CC.T)


def test_a_spread_leaves_the_bits_of_the_score_alone(spread_folder: Path, tmp_path: Path) -> None:
    without = Path(shutil.copytree(spread_folder, tmp_path / "without"))
    contract = contract_of(spread_folder)
    edit_json(without / CONTRACT_FILE, spread=None)
    chats = [chat("What is two plus two?", text) for text in COMPLETIONS]
    with_spread = Scorer.load(spread_folder, device="cpu").score(chats)
    plain = Scorer.load(without, device="cpu")
    assert [s.score for s in with_spread] == [s.score for s in plain.score(chats)]
    assert [s.spread for s in plain.score(chats)] == [None] * 3 and not plain.has_spread
    # Nor is it part of what the contract calls the scores; kept rows have it, so they differ.
    assert contract.scores_sha256 == contract_of(without).scores_sha256
    names = [scorer_identity(Scorer.load(f, device="cpu"), "m") for f in (spread_folder, without)]
    assert names[0] != names[1]


def test_trees_rows_and_single_conversations_have_one_spread(spread_folder: Path) -> None:
    scorer = Scorer.load(spread_folder, device="cpu")
    together = scorer.score_completions(CONTEXT, COMPLETIONS)
    alone = [scorer.score_completions(CONTEXT, [text])[0] for text in COMPLETIONS]
    rows = RewardModel(scorer.model.hf, layout="rows")
    rows.beside = scorer.model.beside
    in_rows = Scorer(rows, scorer.renderer, contract=scorer.contract)
    padded = in_rows.score_completions(CONTEXT, COMPLETIONS)
    cached = Scorer.load(spread_folder, device="cpu", prefix_cache_bytes=10**7)
    cached.score_completions(CONTEXT, COMPLETIONS[:1])
    kept = cached.score_completions(CONTEXT, COMPLETIONS)
    want = [score.spread for score in together]
    assert None not in want and min(want) > 0
    for others in (alone, padded, kept):
        assert [score.spread for score in others] == pytest.approx(want, rel=1e-4)
    # Identical completions tie exactly, also in rows of their own.
    twins = in_rows.score_completions(CONTEXT, [COMPLETIONS[0]] * 3)
    assert len({(score.score, score.spread) for score in twins}) == 1
    # What NeMo RL and others read of the model is the score alone.
    ids = torch.tensor([scorer.renderer.encode(chat("2 + 2?", "4"))])
    data = {"input_ids": ids, "input_lengths": torch.tensor([ids.shape[1]])}
    assert scorer.model.score(data)["scores"].shape == (1,)
    assert scorer.model.score_tokens(ids.tolist()).shape == (1, 1)


def test_the_folder_still_loads_with_plain_transformers(spread_folder: Path) -> None:
    plain = AutoModelForSequenceClassification.from_pretrained(spread_folder, dtype="float32")
    contract = contract_of(spread_folder)
    example = contract.golden[0]
    with torch.no_grad():
        logits = plain(torch.tensor([example.token_ids])).logits
    assert float(logits) == pytest.approx(example.score, abs=1e-5)
    # Programs that load every file of safetensors beside the weights find the weights alone.
    assert [path.name for path in spread_folder.glob("*.safetensors")] == ["model.safetensors"]
    assert contract.spread is not None
    size = (spread_folder / contract.spread.file).stat().st_size
    assert 32 * 33 * 4 < size < 32 * 33 * 4 + 400


def test_verify_compares_golden_spreads(folder: Path) -> None:
    result = verify(folder, device="cpu")
    assert result.equal and "spreads equal" in result.checks[-1].summary
    half = verify(folder, device="cpu", dtype=torch.bfloat16)
    assert half.equal
    contract = json.loads((folder / CONTRACT_FILE).read_text())
    contract["golden"][2]["spread"] *= 1.01
    edit_json(folder / CONTRACT_FILE, golden=contract["golden"])
    changed = verify(folder, device="cpu")
    assert changed.first_difference is not None and changed.first_difference.part == "spread"
    with pytest.raises(ModelError, match="spread"):
        Scorer.load(folder, device="cpu")


def test_what_is_damaged_or_of_another_model_is_named(folder: Path) -> None:
    spread = contract_of(folder).spread
    assert spread is not None
    path = folder / spread.file
    content = path.read_bytes()

    def refused() -> str:
        difference = verify(folder, device="cpu").first_difference
        assert difference is not None and difference.part == "spread"
        with pytest.raises(ModelError) as caught:
            Scorer.load(folder, device="cpu")
        assert path.name in str(caught.value) or CONTRACT_FILE in str(caught.value)
        return f"{difference.summary} {caught.value}"

    path.write_bytes(content[:-4] + b"oops")
    assert "damaged" in refused()
    path.unlink()
    assert "missing" in refused()
    path.write_bytes(content)
    assert verify(folder, device="cpu").equal
    # Of a head that was changed since, whose contract was written by hand.
    fields = spread.model_dump(mode="json") | {"head_sha256": "0" * 64}
    edit_json(folder / CONTRACT_FILE, spread=fields)
    assert "was changed" in refused() and "another head" in refused()


def test_weights_that_change_take_the_spread_with_them(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = tensors["score.weight"] * 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checks = {check.part: check for check in verify(folder, device="cpu").checks}
    assert checks["spread"].state == "differs" and "after the spread" in checks["spread"].summary
    with pytest.raises(ModelError):
        Scorer.load(folder, device="cpu")


def test_other_head_weights_have_no_spread(folder: Path) -> None:
    section = ScoringConfig(models=(str(folder),), head_weights=(2.0,))
    [score] = Scorer.load(section, device="cpu").score_completions(CONTEXT, COMPLETIONS[:1])
    assert score.spread is None


def test_a_second_fit_replaces_the_first(folder: Path) -> None:
    before = contract_of(folder).spread
    add_spread(folder, num_trained_on=30)
    after = contract_of(folder).spread
    assert before is not None and after is not None and after.file != before.file
    assert [path.name for path in (folder / "spread").iterdir()] == [Path(after.file).name]
    assert verify(folder, device="cpu").equal


def test_a_model_that_cannot_have_one_is_told(
    tiny_tokenizer: Any,
    data: tuple[list[Preference], list[Preference]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    heads = [HeadContract(name=name, meaning=ESTIMATE_MEANING, weight=0.5) for name in "ab"]
    hf = tiny_model("llama", num_labels=2)
    signed(tmp_path / "two", copy.deepcopy(tiny_tokenizer), hf, heads=heads, max_length=256)
    two = Scorer.load(tmp_path / "two", device="cpu")
    with pytest.raises(ModelError, match="its heads have a spread already"):
        fit_spread(two, *data, names=NAMES)
    # Their spread of a margin is the deviation of the heads' differences.
    values = np.array([score.heads for score in two.score_completions(CONTEXT, COMPLETIONS)])
    want = np.std(values[0] - values[1])
    assert margin_spreads(two, CONTEXT, COMPLETIONS)[0, 1] == pytest.approx(want, abs=1e-6)
    signed(tmp_path / "one", tiny_tokenizer, tiny_model("llama"), max_length=256)
    one = Scorer.load(tmp_path / "one", device="cpu")
    with pytest.raises(ModelError, match="no spread"):
        margin_spreads(one, CONTEXT, COMPLETIONS)
    with pytest.raises(DataError, match="those that the model was trained on"):
        fit_spread(one, data[0], data[0], names=NAMES)
    with pytest.raises(DataError, match="too few"):
        fit_spread(one, data[0], data[1][:1], names=NAMES)
    with caplog.at_level(logging.WARNING, logger="treeward"):
        fit_spread(one, data[0], data[0][:20], names=NAMES)
    assert "prompts that the model was trained on" in caplog.text
    with pytest.raises(ModelError, match="float32"):
        half = Scorer.load(tmp_path / "one", device="cpu", dtype="bfloat16")
        fit_spread(half, *data, names=NAMES)


def test_completions_that_cannot_be_scored_are_counted(
    spread_folder: Path,
    data: tuple[list[Preference], list[Preference]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    lengths = [score.num_tokens for score in scores_of(spread_folder, data[0])]
    limit = sorted(lengths)[-10]
    num_left_out = sum(length > limit for length in lengths)
    assert num_left_out > 0
    short = Scorer.load(spread_folder, device="cpu", max_length=limit, check_contract=False)
    with caplog.at_level(logging.WARNING, logger="treeward"):
        fitted = fit_spread(short, *data, names=NAMES)
    assert fitted.trained_on.num_failed == num_left_out
    words = f"train.jsonl: {num_left_out} of {len(lengths)} completions have no score"
    assert words in caplog.text and "too long to score" in caplog.text
    tiny = Scorer.load(spread_folder, device="cpu", max_length=2, check_contract=False)
    with pytest.raises(DataError, match=r"too few(?s:.*)too long to score"):
        fit_spread(tiny, *data, names=NAMES)


def scores_of(folder: Path, preferences: list[Preference]) -> list[Score]:
    conversations = []
    for preference in preferences:
        conversations += preference.conversations
    return Scorer.load(folder, device="cpu").score(conversations)


def test_an_encoder_has_a_spread(tiny_tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    signed(folder, tiny_tokenizer, tiny_model("bert"), max_length=128)
    plain = [
        score.score
        for score in Scorer.load(folder, device="cpu").score_completions(CONTEXT, COMPLETIONS)
    ]
    add_spread(folder)
    again = Scorer.load(folder, device="cpu").score_completions(CONTEXT, COMPLETIONS)
    assert [score.score for score in again] == plain
    assert all(score.spread is not None and score.spread > 0 for score in again)


@pytest.fixture(scope="module")
def encoder_folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "model"
    signed(folder, tiny_tokenizer, tiny_model("bert"), max_length=128)
    add_spread(folder)
    return folder


def test_parts_of_an_encoders_batch_keep_their_spreads(encoder_folder: Path) -> None:
    # On a CPU with two threads two parts of the batch go through the head at the same time.
    scorer = Scorer.load(encoder_folder, device="cpu")
    chats = [chat(f"What is {i} and {i}?", "It is " + "four " * (i % 20)) for i in range(80)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        want = [score.spread for score in scorer.score(chats)]
        torch.set_num_threads(2)
        for _ in range(5):
            assert [score.spread for score in scorer.score(chats)] == pytest.approx(want, rel=1e-3)
    finally:
        torch.set_num_threads(before)


def test_a_broken_conversation_of_an_encoder_fails_alone(encoder_folder: Path) -> None:
    scorer = Scorer.load(encoder_folder, device="cpu")
    [token] = scorer.renderer.tokenizer.encode("Z", add_special_tokens=False)
    with torch.no_grad():
        scorer.model.hf.get_input_embeddings().weight[token] = float("nan")
    broken, whole = scorer.score([chat("2 + 2?", "Z"), chat("2 + 2?", "4")], on_error="mask")
    assert broken.score is None and broken.error is not None and "not finite" in broken.error
    assert whole.spread is not None and whole.spread > 0


def test_an_evaluation_keeps_the_spreads(
    spread_folder: Path, data: tuple[list[Preference], list[Preference]]
) -> None:
    scorer = Scorer.load(spread_folder, device="cpu")
    [example, *_] = score_examples(scorer, data[1][:2], at_once=2)
    want = [score.spread for score in scorer.score(data[1][0].conversations)]
    assert list(example.spreads) == pytest.approx(want, rel=1e-5)
    row = json.loads(json.dumps(to_row(example)))
    assert row["spreads"] == pytest.approx(want, rel=1e-5)
    assert scored_from_row(row, "examples.jsonl:1").spreads == example.spreads
