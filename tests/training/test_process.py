"""A process reward model learns a planted rule of steps; merged steps equal separate rows; its
export gives plain transformers' probabilities, and is scored, verified and resumed like any other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_run import killed_before_step
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification, AutoTokenizer

from treeward.cli.main import main
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import ConfigError, DataError
from treeward.losses import Heads
from treeward.model.contract import read_contract
from treeward.scoring.scorer import Scorer
from treeward.step_losses import StepSums, labelled_steps, step_cross_entropy
from treeward.training.prefetch import BatchPreparer
from treeward.training.setup import set_up
from treeward.training.tracking import read_metrics
from treeward.training.train import ProcessRun, RewardModelRun, train

PROCESS = "policy.reward_model_cfg.reward_model_type=process"
MARK = "<|step|>"
GOOD = ("sun", "moon", "star", "sky")
BAD = ("mud", "rust", "dust", "ash")


def rows(num: int, *, seed: int, shuffled: bool = False) -> list[dict[str, Any]]:
    """Four solutions of each problem: a step of good words is right, one with a bad word wrong. Two
    of them begin alike."""
    generator = random.Random(seed)

    def step() -> tuple[str, bool]:
        is_right = generator.random() < 0.6
        words = generator.choices(GOOD, k=3)
        if not is_right:
            words[generator.randrange(3)] = generator.choice(BAD)
        return " ".join(words), is_right

    made = []
    for n in range(num):
        first = step()
        for k in range(4):
            steps = [first if k < 2 else step(), step(), step()]
            labels = [is_right for _, is_right in steps]
            if shuffled:
                labels = [generator.random() < 0.6 for _ in steps]
            texts = [text for text, _ in steps]
            made.append({"prompt": f"Say {n}.", "completions": texts, "labels": labels})
    return made


@pytest.fixture
def step_run(tiny_run: Callable[..., Any], write_rows: Callable[..., Path]) -> Callable[..., Any]:
    """The configuration of a run on the planted rule; overrides as on the command line."""

    def make(*more: str, train_rows: Any = None, steps: int = 6) -> Any:
        train_path = write_rows("train.jsonl", train_rows or rows(48, seed=0))
        held_out = write_rows("held_out.jsonl", rows(12, seed=1))
        return tiny_run(
            PROCESS,
            f"data.train=[{{data_path: {train_path}}}]",
            f"data.validation=[{{data_path: {held_out}, name: held_out}}]",
            f"rm={{max_num_steps: {steps}, max_num_epochs: 100, val_period: 0, val_batches: null}}",
            "policy.optimizer.kwargs.lr=3.0e-3",
            *more,
        )

    return make


def test_a_planted_rule_is_learnt_scored_and_verified(
    step_run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = train(step_run(steps=48), show_progress=False)
    metrics = outcome.validation["held_out"]
    assert metrics["accuracy"] > 0.95 and metrics["first_error_accuracy"] > 0.85
    assert metrics["processbench_f1"] > 0.85
    folder = outcome.model_folder
    assert folder is not None
    contract = read_contract(folder)
    assert contract is not None and contract.steps is not None
    mark = contract.steps.token
    assert contract.read.position == "step marks"
    assert contract.steps.score == "product" and len(contract.golden) >= 8
    assert all(mark in example.messages[-1]["content"] for example in contract.golden)
    assert main(["verify", str(folder)]) == 0

    # Plain transformers gives the probabilities of the same steps at the marks.
    texts = ["sun moon star", "sun mud sky", "sky sky sun"]
    chat = [
        {"role": "user", "content": "Say 3."},
        {"role": "assistant", "content": "".join(f"{text}{mark}" for text in texts)},
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert plain.config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        logits = plain(input_ids=ids).logits[0]
    at_marks = ids[0] == tokenizer.convert_tokens_to_ids(mark)
    want = F.softmax(logits[at_marks], dim=-1)[:, 1].tolist()
    unmarked = [chat[0], {"role": "assistant", "content": "\n\n".join(texts)}]
    for conversation in (chat, unmarked):
        [score] = Scorer.load(folder).score([conversation])
        assert score.steps == pytest.approx(want, abs=1e-5)
        assert score.score == pytest.approx(want[0] * want[1] * want[2], abs=1e-5)
    assert want[0] > 0.8 and want[1] < 0.2
    for how, value in (("min", min(want)), ("last", want[-1])):
        [score] = Scorer.load(folder, head_weights=how).score([chat])
        assert score.score == pytest.approx(value, abs=1e-5)
    environment = RewardModelEnvironment({"model_name": str(folder), "precision": "float32"})
    rewards = environment.step([unmarked], [{}]).rewards.tolist()
    assert rewards == pytest.approx([want[0] * want[1] * want[2]], abs=1e-5)
    # ProcessBench's suite, on solutions of the same rule.
    bench = tmp_path / "processbench.jsonl"
    with bench.open("w", encoding="utf-8") as file:
        for i, row in enumerate(rows(8, seed=3)):
            first_error = -1
            if False in row["labels"]:
                first_error = row["labels"].index(False)
            solution = {"id": f"planted-{i}", "problem": row["prompt"], "label": first_error}
            file.write(json.dumps({**solution, "steps": row["completions"]}) + "\n")
    output = tmp_path / "evaluation"
    command = ["eval", str(folder), "--suite", f"processbench={bench}", "--output", str(output)]
    assert main(command) == 0
    [file_of_results] = output.rglob("results.json")
    results = json.loads(file_of_results.read_text("utf-8"))
    assert "processbench" in json.dumps(results) and "F1" in json.dumps(results)
    card = (folder / "README.md").read_text("utf-8")
    assert "AutoModelForTokenClassification" in card and "steps" in card
    # The same file as it was validated on has the same numbers.
    again = tmp_path / "again"
    held_out = str(tmp_path / "held_out.jsonl")
    assert main(["eval", str(folder), "--data", held_out, "--output", str(again)]) == 0
    [file_of_results] = again.rglob("results.json")
    # The page has each step's probability, and no charts of pairs, of which there are none.
    page = (again / "report.html").read_text("utf-8")
    assert "probability of each step" in page and "which completion is longer" not in page
    [suite] = json.loads(file_of_results.read_text("utf-8"))["results"]
    found = {part["name"]: part["value"] for part in (suite["headline"], *suite["sections"])}
    assert found == {
        "accuracy by step": pytest.approx(metrics["accuracy"]),
        "first error": pytest.approx(metrics["first_error_accuracy"]),
        "ProcessBench F1": pytest.approx(metrics["processbench_f1"]),
    }


@pytest.mark.slow
def test_shuffled_labels_are_not_learnt(step_run: Callable[..., Any]) -> None:
    config = step_run(train_rows=rows(48, seed=0, shuffled=True), steps=24)
    metrics = train(config, show_progress=False).validation["held_out"]
    assert metrics["accuracy"] < 0.75


def test_the_contract_says_how_the_score_is_made(step_run: Callable[..., Any]) -> None:
    config = step_run("policy.reward_model_cfg.step_score=min", steps=1)
    folder = train(config, show_progress=False).model_folder
    assert folder is not None
    scorer = Scorer.load(folder)
    [score] = scorer.score(
        [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n\nc"}]]
    )
    assert score.steps is not None and score.score == min(score.steps)


def gradients(run: RewardModelRun) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the whole data as one step, and its gradients."""
    batches = BatchPreparer(run.setup).step(1)
    sums = run.new_sums()
    for micro_batch in batches.micro_batches:
        run.backward(micro_batch, batches.num_units, sums)
    grads = {}
    for name, weight in run.model.hf.named_parameters():
        if weight.grad is not None:
            grads[name] = weight.grad.clone()
    return sums.read().means()["loss"], grads


@pytest.mark.parametrize("max_tokens", [4096, 96])
def test_merged_steps_equal_separate_rows(
    step_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """Three problems, each with two solutions that begin alike and one that comes twice; as trees,
    as padded rows, in parts, and as a problem for each solution."""
    solutions = rows(3, seed=2)
    for row in solutions[:2]:
        row["labels"] = [0.9, *row["labels"][1:]]  # a soft label, which nothing cuts to 0
    solutions.append(solutions[-1] | {"labels": [True, False, True]})
    budget = f"policy.train_micro_batch_tokens={max_tokens}"
    size = "policy.train_global_batch_size=64"
    tree = ProcessRun(set_up(step_run(budget, size, train_rows=solutions)))
    counts = tree.setup.training_sets["train.jsonl"].counts
    assert (counts.kept, counts.step_copies) == (3, 39) and counts.steps < 37
    losses = [gradients(tree)]
    row_run = ProcessRun(
        set_up(step_run(budget, size, "policy.attention=rows", train_rows=solutions))
    )
    losses.append(gradients(row_run))
    # The same rows as problems of their own, each of one solution.
    monkeypatch.setattr(
        "treeward.data.step_encoding.merged_problems", lambda problems: list(problems)
    )
    cache = f"data.cache_dir={tree.setup.cache_dir}/separate"
    separate = ProcessRun(set_up(step_run(budget, size, cache, train_rows=solutions)))
    assert separate.setup.training_sets["train.jsonl"].counts.kept == len(solutions)
    losses.append(gradients(separate))
    for run in (tree, row_run, separate):
        run.close()
    (loss, want), *others = losses
    for other_loss, grads in others:
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert grads.keys() == want.keys() and len(grads) > 10
        for name, grad in grads.items():
            assert torch.allclose(grad, want[name], atol=1e-5, rtol=0), name


def plain_gradients(
    folder: Path, solutions: list[dict[str, Any]], *, max_length: int, last_step_only: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the solutions as rows of their own, by plain transformers in float64, and its
    gradients. A step whose mark lies beyond `max_length` is not learnt."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    mark_id = tokenizer.convert_tokens_to_ids(MARK)
    losses = []
    for row in solutions:
        text = "".join(f"{step}{MARK}" for step in row["completions"])
        chat = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": text},
        ]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        marks = [i for i, token in enumerate(ids) if token == mark_id]
        assert len(marks) == len(row["labels"])
        log_p = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        learnt = [i for i, label in enumerate(row["labels"]) if label is not None]
        if last_step_only:
            learnt = learnt[-1:]
        for i in learnt:
            if marks[i] < max_length:
                label = float(row["labels"][i])
                wrong, right = log_p[marks[i]]
                losses.append(-label * right - (1 - label) * wrong)
    loss = torch.stack(losses).mean()
    loss.backward()
    grads = {}
    for name, weight in plain.named_parameters():
        if weight.grad is not None:
            grads[name] = weight.grad
    return float(loss.detach()), grads


@pytest.mark.parametrize("max_length", [512, 17])
@pytest.mark.parametrize("last_step_only", [False, True])
def test_trees_learn_what_plain_rows_learn(
    step_run: Callable[..., Any], tmp_path: Path, last_step_only: bool, max_length: int
) -> None:
    """Hard, soft and missing labels, copies with other labels, solutions that are the beginning of
    others, and a length that cuts some: gradients of plain transformers in float64."""
    solutions = rows(8, seed=4)
    draw = random.Random(4)
    for row in solutions[::3]:
        row["labels"] = [draw.choice([0.3, 0.9, None]), *row["labels"][1:]]
    for row in solutions[1::4]:
        row["labels"] = [*row["labels"][:2], None]
    # Of each second problem one solution has one step more, and another one a step less.
    for row in solutions[2::8]:
        longer = {"completions": [*row["completions"], "sky"], "labels": [*row["labels"], False]}
        shorter = {"completions": row["completions"][:2], "labels": [False, True]}
        solutions += [row | longer, row | shorter, row | {"labels": [True, False, True]}]
    folder = train(step_run(train_rows=solutions, steps=2), show_progress=False).model_folder
    assert folder is not None
    again = step_run(
        f"checkpointing.checkpoint_dir={tmp_path}/again",
        "~policy.model_config",
        "~policy.tokenizer.vocab_size",
        f"+policy.model_name={folder}",
        "policy.train_global_batch_size=64",
        f"policy.max_total_sequence_length={max_length}",
        f"rm.loss.last_step_only={str(last_step_only).lower()}",
        train_rows=solutions,
    )
    run = ProcessRun(set_up(again))
    loss, grads = gradients(run)
    num_cut = run.setup.training_sets["train.jsonl"].counts.steps_too_long
    run.close()
    assert (num_cut > 0) == (max_length < 512)
    want_loss, want = plain_gradients(
        folder, solutions, max_length=max_length, last_step_only=last_step_only
    )
    assert loss == pytest.approx(want_loss, abs=1e-5)
    assert grads.keys() == want.keys() and len(grads) > 10
    for name, grad in grads.items():
        assert torch.allclose(grad.double(), want[name], atol=1e-5, rtol=0), name


def test_a_solution_that_is_not_known_whole_is_not_called_right(
    step_run: Callable[..., Any], write_rows: Callable[..., Path]
) -> None:
    """Its later steps were cut, or nobody has judged them: one of them may be wrong."""
    right = {"completions": ["sun", "moon", "sky"], "labels": [True, True, True]}
    unjudged = right | {"labels": [True, True, None]}
    found = right | {"labels": [True, False, None]}
    long = {"completions": ["sun", "star " * 60], "labels": [True, False]}
    solutions = []
    for i, row in enumerate((right, unjudged, found, long)):
        solutions.append({"prompt": f"Say {i}."} | row)
    path = write_rows("partly_known.jsonl", solutions)
    run = ProcessRun(
        set_up(
            step_run(
                f"data.validation=[{{data_path: {path}, name: held_out}}]",
                "policy.max_total_sequence_length=40",
            )
        )
    )
    result = run.validate_set("held_out")
    run.close()
    first_errors = [[one.first_error for one in judged] for judged in result.problems]
    assert first_errors == [[-1], [], [1], []]
    assert result.metrics()["accuracy"].count == 3 + 2 + 2 + 1


def test_the_loss_is_the_cross_entropy_of_two_labels() -> None:
    logits = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    labels = [[[1.0, 0.25], [float("nan"), 0.0, 1.0]]]
    counts = [[[2, 1], [0, 3, 1]]]
    steps = labelled_steps(labels, counts)
    log_odds = logits[:, 1] - logits[:, 0]
    loss = step_cross_entropy(log_odds, steps)
    log_p = logits.log_softmax(-1)
    targets = torch.tensor([1.0, 0.25, 0.0, 0.0, 1.0], dtype=torch.float64)
    weight = torch.tensor([2.0, 1.0, 0.0, 3.0, 1.0], dtype=torch.float64)
    want = -(weight * (targets * log_p[:, 1] + (1 - targets) * log_p[:, 0])).sum()
    assert (
        float(loss.detach()) == pytest.approx(float(want.detach()), abs=1e-12)
        and steps.num_units == 7
    )
    # Each node once.
    once = labelled_steps(labels, counts, step_weight="node")
    assert once.weight_R.tolist() == [1, 1, 0, 1, 1] and once.num_units == 4
    # The metrics count each node once, whatever it weighs.
    sums = StepSums()
    sums.add(torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]), steps, loss)
    assert sums.read().means()["accuracy"] == 2 / 4


def test_copies_cost_what_one_node_of_their_weight_costs() -> None:
    """In float64, forward and backward: cross-entropy is linear in the label."""
    labels = [1.0, 0.0, 0.25, 1.0, 0.0]
    log_odds = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    rows_of_copies = labelled_steps([[[label] for label in labels]], [[[1] for _ in labels]])
    separate = step_cross_entropy(log_odds.expand(5), rows_of_copies)
    [want] = torch.autograd.grad(separate, log_odds)
    # The mean label is kept as float32, of which 0.45 is not exact: 3e-8.
    merged = step_cross_entropy(log_odds[None], labelled_steps([[[0.45]]], [[[5]]]))
    [got] = torch.autograd.grad(merged, log_odds)
    assert float(merged.detach()) == pytest.approx(float(separate.detach()), abs=1e-7)
    assert float(got) == pytest.approx(float(want), abs=1e-6)


def test_the_loss_is_divided_by_the_weight_of_the_whole_step() -> None:
    heads = Heads(step_options={"step_weight": "copies"})
    counts = [[[2, 1], [0, 3]], [[1]]]
    assert heads.num_units_of_steps(counts) == 7
    once = Heads(step_options={"step_weight": "node"})
    assert once.num_units_of_steps(counts) == 4


@pytest.mark.parametrize("metric", ["first_error_accuracy", "processbench_f1", "accuracy"])
def test_a_metric_of_steps_ranks_checkpoints(
    step_run: Callable[..., Any], tmp_path: Path, metric: str
) -> None:
    folder = tmp_path / "ranked"
    train(
        step_run(
            f"checkpointing.metric_name=val:validation-held_out_{metric}",
            f"checkpointing={{checkpoint_dir: {folder}, keep_top_k: 1, save_period: 4}}",
            "rm.val_period=4",
            steps=16,
        ),
        show_progress=False,
    )
    values = {}
    for line in read_metrics(tmp_path / "logs" / "metrics.jsonl"):
        value = line.get(f"validation-held_out/{metric}")
        if value is not None:
            values[line["step"]] = value
    assert len(values) == 4 and len(set(values.values())) > 1
    saved = {int(path.name.removeprefix("step_")) for path in folder.glob("step_*")}
    assert 16 in saved  # the latest stays, beside the best
    assert values[min(saved)] == max(values.values())


@pytest.mark.parametrize("step", [2, 5])
def test_resume_is_exact(
    step_run: Callable[..., Any],
    tmp_path: Path,
    read_weights: Callable[[Path], dict[str, Any]],
    step: int,
) -> None:
    def config(name: str) -> Any:
        return step_run(
            "checkpointing.save_period=2", f"checkpointing.checkpoint_dir={tmp_path}/{name}"
        )

    whole = train(config("whole"), show_progress=False).model_folder
    with killed_before_step(step):
        train(config("parts"), show_progress=False)
    resumed = train(config("parts"), show_progress=False).model_folder
    assert whole is not None and resumed is not None
    want = read_weights(whole)
    for name, weight in read_weights(resumed).items():
        assert torch.equal(weight, want[name]), name
    both = [read_contract(folder) for folder in (whole, resumed)]
    assert both[0] is not None and both[1] is not None
    assert both[0].scores_sha256 == both[1].scores_sha256


def test_a_trained_model_is_trained_further(step_run: Callable[..., Any], tmp_path: Path) -> None:
    folder = train(step_run(steps=2), show_progress=False).model_folder
    again = step_run(
        f"checkpointing.checkpoint_dir={tmp_path}/again",
        "~policy.model_config",
        "~policy.tokenizer.vocab_size",
        f"+policy.model_name={folder}",
        steps=2,
    )
    assert train(again, show_progress=False).model_folder is not None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.reward_model_cfg.freeze_backbone=true", "freeze_backbone"),
        ("policy.reward_model_cfg.num_heads=2", "num_heads"),
        ("data.truncation=truncate_left", "data.truncation"),
        ("rm.loss.label_smoothing=0.1", "rm.loss.label_smoothing"),
    ],
)
def test_what_has_no_meaning_for_steps_is_refused(
    step_run: Callable[..., Any], override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        step_run(override)


def test_keys_of_steps_are_refused_elsewhere(tiny_run: Callable[..., Any]) -> None:
    for override in ("policy.reward_model_cfg.step_score=min", "rm.loss.last_step_only=true"):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            tiny_run(override)


def test_a_mark_is_one_token_and_in_no_step(step_run: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="has the mark in it"):
        broken = rows(1, seed=0)
        broken[0]["completions"][1] = "sun <|step|> moon"
        set_up(step_run(train_rows=broken))


def test_a_card_says_where_transformers_has_no_class(
    step_run: Callable[..., Any], tmp_path: Path
) -> None:
    cards = []
    for family in ("qwen3", "gemma3_text"):
        config = step_run(
            f"policy.model_config.model_type={family}",
            f"checkpointing.checkpoint_dir={tmp_path}/{family}",
            f"logger.log_dir={tmp_path}/{family}_logs",
            steps=1,
        )
        folder = train(config, show_progress=False).model_folder
        assert folder is not None
        cards.append((folder / "README.md").read_text("utf-8"))
    assert "`AutoModelForTokenClassification.from_pretrained(" in cards[0]
    assert "transformers has no token classifier of gemma3_text" in cards[1]
    assert "AutoModelForTokenClassification" not in cards[1]
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForTokenClassification.from_pretrained(folder)


def test_problems_that_were_trained_on_are_told(
    step_run: Callable[..., Any],
    write_rows: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A split by rows: the validation set has other solutions of two of its three problems."""
    solutions = rows(4, seed=6)
    # The first solution of problems 0 and 1, and all of problem 3, which is not learnt.
    held_out = [solutions[0], solutions[4], *solutions[12:]]
    path = write_rows("by_rows.jsonl", held_out)
    more = f"data.validation=[{{data_path: {path}, name: held_out}}]"
    caplog.set_level("INFO", logger="treeward")
    set_up(step_run(more, train_rows=[row for row in solutions if row not in held_out]))
    assert "2 of 3 problems of the validation set held_out are in the training data" in caplog.text
    assert "Each step is read at the mark after it, '<|step|>'" in caplog.text


@pytest.mark.slow
def test_adapters_are_merged_into_the_export(step_run: Callable[..., Any]) -> None:
    lora = "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4}"
    folder = train(step_run(lora, steps=2), show_progress=False).model_folder
    assert folder is not None and main(["verify", str(folder)]) == 0
