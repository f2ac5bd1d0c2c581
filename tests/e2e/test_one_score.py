"""One path to a score: training's own validation, the command line, the Scorer, the environment in
the process and through Ray, plain transformers; alone and in a crowd; whole and cut. All say the
same number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import assistant, chat, read_jsonl, user, write_jsonl
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from treeward import Scorer, open_dataset, train
from treeward.cli.main import main
from treeward.config.data import DatasetConfig
from treeward.environments.reward_model import RewardModelEnvironment

CLOSE = 1e-5

QUESTION = [
    *chat("I have flour and water. " * 12, "Then you can make bread."),
    user("What else do I need?"),
]
COMPLETIONS = ["About three hours; you also need salt and yeast.", "Bread is nice!"]
CONVERSATIONS = [[*QUESTION, assistant(text)] for text in COMPLETIONS]


@pytest.fixture(scope="module")
def crowd() -> list[list[dict[str, Any]]]:
    stream = open_dataset(DatasetConfig(dataset_name="Bundled", split="validation"))
    conversations = []
    for preference, _ in islice(stream, 12):
        for completion in preference.completions:
            conversations.append([*preference.context, *completion.messages])
    return conversations


@pytest.fixture(params=["whole", pytest.param("cut", marks=pytest.mark.slow)])
def trained(request: Any, tiny_run: Callable[..., Any], tmp_path: Path) -> tuple[Path, list[float]]:
    """A trained model, and the scores that its own validation gave to the two conversations."""
    completions = [
        {"rank": rank, "completion": chat[-1:]} for rank, chat in enumerate(CONVERSATIONS)
    ]
    file = write_jsonl(tmp_path / "one.jsonl", {"context": QUESTION, "completions": completions})
    words = ["checkpointing.metric_name=null", "rm.val_batches=null", "rm.max_num_steps=3"]
    words += [
        f"data.validation=[{{dataset_name: PreferenceDataset, data_path: {file}, name: one}}]"
    ]
    cut = (
        ["data.truncation=truncate_left", "policy.max_total_sequence_length=100"]
        if request.param == "cut"
        else []
    )
    outcome = train(tiny_run(*words, *cut), show_progress=False)
    assert outcome.model_folder is not None
    measured = outcome.validation["one"]
    return outcome.model_folder, [measured["chosen_rewards"], measured["rejected_rewards"]]


@pytest.mark.slow
def test_one_conversation_has_one_score(
    trained: tuple[Path, list[float]], crowd: list[Any], ray: Any, tmp_path: Path
) -> None:
    folder, want = trained
    scorer = Scorer.load(folder, device="cpu")
    expect = pytest.approx(want, abs=CLOSE)
    everyone = [*crowd[:9], CONVERSATIONS[1], *crowd[9:], CONVERSATIONS[0]]

    def both(values: list[Any]) -> list[Any]:
        return [values[-1], values[9]]

    assert [scorer.score([chat])[0].score for chat in CONVERSATIONS] == expect
    assert [score.score for score in scorer.score_completions(QUESTION, COMPLETIONS)] == expect
    assert both([score.score for score in scorer.score(everyone)]) == expect

    data = write_jsonl(tmp_path / "chats.jsonl", *({"messages": chat} for chat in everyone))
    assert main(["score", str(folder), "--data", data, "--output", f"{tmp_path}/out.jsonl"]) == 0
    assert both([row["score"] for row in read_jsonl(tmp_path / "out.jsonl")]) == expect

    tokenizer = AutoTokenizer.from_pretrained(folder)
    hf = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [scorer.renderer.fit(chat).token_ids for chat in CONVERSATIONS]  # type: ignore[union-attr]
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.inference_mode():
        assert hf(**padded).logits[:, 0].tolist() == expect

    env_config = {"model_name": str(folder), "precision": "float32"}
    here = RewardModelEnvironment(env_config)
    assert [here.step([chat], [{}]).rewards.item() for chat in CONVERSATIONS] == expect
    assert both(here.step(everyone, [{}] * len(everyone)).rewards.tolist()) == expect
    assert here.shutdown()

    if any(score.truncated for score in scorer.score(CONVERSATIONS)):
        assert len(rows[0]) <= 100 < len(scorer.renderer.encode(CONVERSATIONS[0]))
        return  # what follows takes long, and was done with whole conversations
    assert rows == [scorer.renderer.encode(chat) for chat in CONVERSATIONS]
    there = RewardModelEnvironment.remote(
        env_config | {"resources": {"gpus_per_node": 2, "num_nodes": 1}}
    )
    assert [
        ray.get(there.step.remote([chat], [{}])).rewards.item() for chat in CONVERSATIONS
    ] == expect
    assert (
        both(ray.get(there.step.remote(everyone, [{}] * len(everyone))).rewards.tolist()) == expect
    )
    assert ray.get(there.shutdown.remote())
