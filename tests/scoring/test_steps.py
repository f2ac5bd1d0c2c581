"""A process reward model gives each step of a completion its probability, by the arithmetic of its
authors' page."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import config_of, randomise
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForTokenClassification

from treeward.cli.main import main
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import ConfigError, DataError, ModelError
from treeward.model.contract import read_contract
from treeward.model.loading import load_classifier
from treeward.scoring.scorer import Scorer
from treeward.scoring.steps import Steps

MARK, SIZE = "<extra_0>", 32
STEPS = ("There are 18 pink flamingos.", "They paint 6 of them white.", "So 12 are pink.")
QUESTION = {"role": "user", "content": "How many are pink?"}
CHAT = [QUESTION, {"role": "assistant", "content": "\n\n".join(STEPS)}]


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Any) -> Any:
    own = copy.deepcopy(tiny_tokenizer)
    own.add_special_tokens({"additional_special_tokens": [MARK]})
    return own


@pytest.fixture(scope="module")
def published(
    tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """A small Qwen2.5-Math-PRM in a folder as its authors have it, its backbone and its head."""
    folder = tmp_path_factory.mktemp("prm")
    tokenizer.save_pretrained(folder)
    config = config_of("qwen2", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    backbone: Any = randomise(AutoModel.from_config(config, attn_implementation="eager").eval())
    draw = torch.Generator().manual_seed(5)
    shapes = {"0.weight": (SIZE, SIZE), "0.bias": (SIZE,), "2.weight": (2, SIZE), "2.bias": (2,)}
    head = {
        f"score.{name}": torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()
    }
    fields = config.to_dict() | {"architectures": ["Qwen2ForProcessRewardModel"]}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    weights = {f"model.{name}": value for name, value in backbone.state_dict().items()}
    save_file({**weights, **head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, backbone, head


def expected(
    published: Any, tokenizer: Any, steps: tuple[str, ...] = STEPS
) -> tuple[list[float], int]:
    """The probabilities of the steps of the whole text, and its tokens up to the last mark."""
    _, backbone, head = published
    completion = {"role": "assistant", "content": MARK.join(steps) + MARK}
    ids = tokenizer.apply_chat_template(
        [QUESTION, completion], return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        hidden = backbone(input_ids=ids).last_hidden_state[0]
    inner = F.relu(F.linear(hidden, head["score.0.weight"], head["score.0.bias"]))
    values = F.linear(inner, head["score.2.weight"], head["score.2.bias"]).softmax(dim=-1)[:, 1]
    marks = (ids[0] == tokenizer.convert_tokens_to_ids(MARK)).nonzero().flatten()
    return values[marks].tolist(), int(marks[-1]) + 1


@pytest.mark.parametrize(
    ("how", "want"), [(None, 0.9 * 0.2 * 0.6), ("product", 0.108), ("min", 0.2), ("last", 0.6)]
)
def test_what_makes_a_score_of_steps(how: Any, want: float) -> None:
    given = (0.9, 0.2, 0.6)
    score, probabilities = Steps(MARK, how).score([math.log(p / (1 - p)) for p in given])
    assert score == pytest.approx(want)
    assert probabilities == pytest.approx(given)


def test_every_step_is_read_in_one_pass(published: Any, tokenizer: Any) -> None:
    scorer, (want, num_tokens) = Scorer.load(published[0]), expected(published, tokenizer)
    assert len(want) == 3 and max(want) - min(want) > 0.05
    scorer.model.num_computed_tokens = scorer.model.num_row_tokens = 0
    [score] = scorer.score([CHAT])
    assert score.steps == pytest.approx(want, abs=1e-5) and score.score == pytest.approx(
        math.prod(want), abs=1e-5
    )
    assert scorer.model.num_computed_tokens == scorer.model.num_row_tokens == num_tokens
    # Marks of its own part the steps; what stands after the last is read too, and none elsewhere
    # counts.
    context = [{"role": "user", "content": f"How many{MARK} are pink?"}]
    marked = [*context, {"role": "assistant", "content": MARK.join(STEPS)}]
    fewer = [QUESTION, {"role": "assistant", "content": STEPS[0]}]
    both = scorer.score([fewer, marked])
    assert both[0].steps == pytest.approx(expected(published, tokenizer, STEPS[:1])[0], abs=1e-5)
    assert both[1].steps == pytest.approx(want, abs=1e-5)


def test_a_model_of_trl_needs_its_separator_alone(tokenizer: Any, tmp_path: Path) -> None:
    """A token classifier as plain transformers saves it, with `step_token` in its config.json."""
    folder = tmp_path / "trl"
    config = config_of(
        "qwen2", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, num_labels=2
    )
    plain: Any = randomise(AutoModelForTokenClassification.from_config(config).eval())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="step_token"):
        Scorer.load(folder)
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(fields | {"step_token": MARK}), "utf-8")
    text = "".join(f"{step}{MARK}" for step in STEPS)
    ids = tokenizer.apply_chat_template(
        [QUESTION, {"role": "assistant", "content": text}], return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        probabilities = plain(input_ids=ids).logits[0].softmax(dim=-1)[:, 1]
    want = probabilities[ids[0] == tokenizer.convert_tokens_to_ids(MARK)].tolist()
    [score] = Scorer.load(folder).score([CHAT])
    assert len(want) == 3 and score.steps == pytest.approx(want, abs=1e-5)
    assert score.score == pytest.approx(math.prod(want), abs=1e-5)


def test_white_space_around_a_step_changes_nothing(published: Any, tokenizer: Any) -> None:
    """Steps have none in training: tokens that the model has never read would be others."""
    scorer = Scorer.load(published[0])
    want, _ = expected(published, tokenizer)
    texts = [separator.join(STEPS) for separator in ("\n\n", " \n\n", "\n \n  ", "\r\n\r\n")]
    texts += [separator.join(STEPS) for separator in (MARK, f"{MARK}\n", f" {MARK} ")]
    texts += [f"\n{text}\n" for text in texts]
    chats = [[QUESTION, {"role": "assistant", "content": text}] for text in texts]
    for text, score in zip(texts, scorer.score(chats), strict=True):
        assert score.steps == pytest.approx(want, abs=1e-5), text


def test_a_cached_prompt_changes_no_step(published: Any, tokenizer: Any) -> None:
    scorer = Scorer.load(published[0], prefix_cache_bytes=10**8)
    question = {"role": "user", "content": "How many of these are pink? " * 20}
    chats = [
        [question, {"role": "assistant", "content": "\n\n".join(STEPS[:n])}] for n in (1, 2, 3)
    ]
    want = Scorer.load(published[0]).score(chats)
    assert scorer.prefix_cache is not None
    for chat, plain in zip(chats, want, strict=True):
        [score] = scorer.score([chat])
        assert score.steps == pytest.approx(plain.steps, abs=1e-5)
    assert scorer.prefix_cache.num_reused_tokens > 0


def test_the_least_step_and_rows_of_a_file(published: Any, tokenizer: Any, tmp_path: Path) -> None:
    want, _ = expected(published, tokenizer)
    assert Scorer.load(published[0], head_weights="min").score([CHAT])[0].score == pytest.approx(
        min(want), abs=1e-5
    )
    data = tmp_path / "rows.jsonl"
    output = tmp_path / "scores.jsonl"
    data.write_text(json.dumps({"messages": CHAT}) + "\n", encoding="utf-8")
    command = [
        "score",
        str(published[0]),
        "--data",
        str(data),
        "--output",
        str(output),
        "--head-weights",
        "min",
    ]
    assert main(command) == 0
    row = json.loads(output.read_text("utf-8"))
    assert row["score"] == pytest.approx(min(want), abs=1e-5)
    assert row["step_probabilities"] == pytest.approx(want, abs=1e-5)


def test_a_contract_says_what_makes_a_score_of_steps(
    published: Any, tokenizer: Any, tmp_path: Path
) -> None:
    want, _ = expected(published, tokenizer)
    folder = str(shutil.copytree(published[0], tmp_path / "prm"))
    write = ["verify", folder, "--write", "--force", "--head-weights"]
    assert main([*write, "min"]) == 0
    assert Scorer.load(folder).score([CHAT])[0].score == pytest.approx(min(want), abs=1e-5)
    # A later contract keeps it.
    assert main(["verify", folder, "--write", "--force"]) == 0
    contract = read_contract(folder)
    assert contract is not None and contract.steps is not None
    assert (contract.steps.score, len(contract.heads)) == ("min", 1)
    assert main([*write, "0.5"]) == 2


def test_what_has_no_steps_is_refused(published: Any, tokenizer: Any, model_folder: Path) -> None:
    scorer = Scorer.load(published[0])
    [score] = scorer.score_prepared(scorer.prepare_texts(["a text without a mark"]))
    assert score.score is None and "no step" in str(score.error)
    with pytest.raises(DataError, match="steps are read in text only"):
        scorer.score([[QUESTION, {"role": "assistant", "content": [{"type": "image"}]}]])
    with pytest.raises(ModelError, match="and the model has heads"):
        Scorer.load(model_folder, head_weights="min")
    with pytest.raises(ModelError, match="have no weights"):
        Scorer.load(published[0], head_weights="mean")
    environment = RewardModelEnvironment({"model_name": str(published[0]), "precision": "float32"})
    assert environment.step([CHAT], [{}]).rewards.tolist() == pytest.approx(
        [scorer.score([CHAT])[0].score], abs=1e-6
    )
    with pytest.raises(ConfigError, match="has not one value"):
        environment.preprocess_data([CHAT])
    with pytest.raises(ConfigError, match="have no model with one value"):
        _ = environment.reward_model_policy
    with pytest.raises(ModelError, match="a value for each step"):
        load_classifier(published[0], head_seed=0)
    with pytest.raises(ModelError, match="a head of its own"):
        load_classifier(published[0], head_seed=0, step_token=MARK)


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        ("<think>One.\n\nTwo.</think>\n\nThree.", "2 marks for 3 steps"),
        ("<think>One.</think>\n\nTwo.", "leaves out the text of a step"),
        ("Zero.\n\nTwo.", None),
    ],
)
def test_a_step_that_the_template_leaves_out_is_no_score(
    published: Any, tmp_path: Path, completion: str, error: str | None
) -> None:
    """DeepSeek's templates write what follows the reasoning alone: the mark of a step within it
    would be read without the step, or not at all."""
    folder = Path(shutil.copytree(published[0], tmp_path / "deepseek"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
    (folder / "chat_template.jinja").write_text(template + "{% endfor %}", "utf-8")
    scorer = Scorer.load(folder)
    chat = [QUESTION, {"role": "assistant", "content": completion}]
    [score] = scorer.score([chat], on_error="mask")
    if error is None:
        assert score.steps is not None and len(score.steps) == 2
        return
    assert score.score is None and error in str(score.error)
    with pytest.raises(DataError, match=error):
        scorer.score([chat])


def test_reasoning_in_its_own_field_has_steps(published: Any) -> None:
    """As servers with a parser of reasoning have it: the score is that of the whole text."""
    apart = {"content": STEPS[2], "reasoning_content": "\n\n".join(STEPS[:2])}
    within = {"content": f"<think>\n{apart['reasoning_content']}\n</think>\n\n{STEPS[2]}"}
    chats = [[QUESTION, {"role": "assistant", **message}] for message in (apart, within)]
    scores = Scorer.load(published[0]).score(chats)
    assert scores[0].steps == scores[1].steps and len(scores[0].steps) == 3


TOOL_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.tool_calls }}{{ m.content }}{% endfor %}"


def test_a_call_of_a_tool_may_have_no_text(published: Any, tmp_path: Path) -> None:
    """As OpenAI's API has it."""
    folder = Path(shutil.copytree(published[0], tmp_path / "calls"))
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE, "utf-8")
    function = {"name": "f", "arguments": "{}"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    answer = {"role": "tool", "content": "18"}
    [score] = Scorer.load(folder).score([[QUESTION, called, answer, CHAT[1]]])
    assert len(score.steps) == len(STEPS)


def test_a_mark_in_a_call_of_a_tool_is_no_step(published: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(published[0], tmp_path / "calls"))
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE, "utf-8")
    function = {"name": "f", "arguments": {"x": MARK}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    [score] = Scorer.load(folder).score([[QUESTION, called, CHAT[1]]], on_error="mask")
    assert score.score is None and "4 marks for 3 steps" in str(score.error)


def test_a_contract_of_steps_is_signed_and_replayed(
    published: Any, tokenizer: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(published[0], tmp_path / "signed"))
    assert main(["verify", str(folder), "--write"]) == 0
    contract = read_contract(folder)
    assert contract is not None and contract.steps is not None
    assert (contract.steps.token, contract.steps.score) == (MARK, "product")
    assert contract.read.position == "step marks"
    by_name = {example.name: example for example in contract.golden}
    assert len(by_name["long completion"].heads) > 1
    assert main(["verify", str(folder)]) == 0
    want, _ = expected(published, tokenizer)
    assert Scorer.load(folder).score([CHAT])[0].steps == pytest.approx(want, abs=1e-5)
