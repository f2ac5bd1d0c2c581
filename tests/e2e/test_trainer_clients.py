"""The clients of verl and OpenRLHF, as published, get the scores of the scorer from a running
`treeward serve`.

Their packages lie in a folder of their own: `TREEWARD_TRAINER_CLIENTS`, or one that is made here,
which takes half a minute and a package index. They are installed without what they depend on (vLLM,
FlashAttention, DeepSpeed): their clients need none of it, and use this environment's PyTorch,
transformers and Ray. `TREEWARD_MODELS` adds SmolLM2 with a head (`examples/real_models.py` makes
it).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from loopback import wait_until
from messages import assistant, chat, user
from signed import signed

from treeward.scoring.scorer import Scorer

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

TRAINERS = ["verl==0.9.1", "openrlhf==0.11.2", "tensordict", "codetiming", "pyvers"]
SMALL = ["hydra-core==1.3.8", "aiohttp"]  # with what they need, an older OmegaConf included
SCRIPT = Path(__file__).parent / "trainer_clients.py"

CONVERSATIONS = [
    chat("What is two plus two?", "It is 4."),
    chat("What is two plus two?", "I do not know."),
    chat("Nenne einen Fluss in Peru.", "Der Amazonas – größer als alle anderen."),
    [
        {"role": "system", "content": "Be brief."},
        *chat("How do I boil an egg?", "Six minutes.\n\nThen cool it."),
    ],
    [*chat("Hi", "Hello!"), user("Name a river."), assistant("The Nile.")],
]


@pytest.fixture(scope="module")
def packages() -> Path:
    """The folder with verl and OpenRLHF."""
    named = os.environ.get("TREEWARD_TRAINER_CLIENTS")
    if named:
        return Path(named)
    folder = Path(tempfile.gettempdir()) / "treeward-verl-0.9.1-openrlhf-0.11.2"
    if folder.exists():
        return folder
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--retries",
        "1",
        "--timeout",
        "20",
        "--target",
        unfinished,
    ]
    try:
        for words in (SMALL, ["--no-deps", *TRAINERS]):
            subprocess.run([*pip, *words], check=True, capture_output=True, timeout=300)
        unfinished.rename(folder)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"verl and OpenRLHF cannot be installed here: {error}")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@pytest.fixture(scope="module", params=["random weights", "SmolLM2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "random weights":
        signed_model: Callable[..., Path] = request.getfixturevalue("signed_model")
        return signed_model(seed=7, max_length=200)
    if "TREEWARD_MODELS" not in os.environ:
        pytest.skip(
            "TREEWARD_MODELS names no folder of real models: examples/real_models.py makes one"
        )
    from treeward.model.loading import load_classifier

    smollm2 = Path(os.environ["TREEWARD_MODELS"]) / "smollm2-135m-instruct"
    loaded = load_classifier(smollm2, head_seed=3)
    folder = tmp_path_factory.mktemp("smollm2") / "final"
    signed(folder, loaded.tokenizer, loaded.model.hf, max_length=512)
    return folder


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """`treeward serve MODEL` as a process; its address."""
    command = [
        sys.executable,
        "-m",
        "treeward.cli.main",
        "serve",
        str(model),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )

    def address() -> str | None:
        said = log.read_text(encoding="utf-8")
        assert process.poll() is None, said
        found = re.search(r"Serving .* at (http://\S+)", said)
        return None if found is None else found[1]

    try:
        yield wait_until(address)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def ask(
    packages: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """A function that runs the clients of a trainer against the server, and gives the rewards that
    they got."""
    folder = tmp_path_factory.mktemp("clients")
    with served(model, folder / "serve.log") as url:
        job = folder / "job.json"
        job.write_text(
            json.dumps({"url": url, "model": str(model), "conversations": CONVERSATIONS}),
            encoding="utf-8",
        )

        def run(trainer: str) -> Any:
            output = folder / f"{trainer}.json"
            command = [sys.executable, str(SCRIPT), trainer, str(job), str(output)]
            environment = {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, (
                f"{done.stderr[-6000:]}\n{(folder / 'serve.log').read_text()[-2000:]}"
            )
            return json.loads(output.read_text(encoding="utf-8"))

        yield run


@pytest.fixture(scope="module")
def wanted(model: Path) -> Any:
    scorer = Scorer.load(model, device="cpu")
    scores = [score.score for score in scorer.score(CONVERSATIONS)]
    assert len(set(scores)) == len(CONVERSATIONS)
    # The server batches in another way than this call. Over SmolLM2's 30 layers that is a rounding
    # of up to 8e-6.
    num_layers = json.loads((model / "config.json").read_text(encoding="utf-8"))[
        "num_hidden_layers"
    ]
    rounding = 1e-6 if num_layers == 2 else 2e-5
    return pytest.approx(scores, rel=0, abs=rounding)


def test_verl(ask: Callable[[str], Any], wanted: Any) -> None:
    """Its reward loop at our server as vLLM and as SGLang; our functions and the example under its
    manager `naive`."""
    rewards = ask("verl")
    assert rewards.pop("known_managers") == ["naive"], "docs/verl.md says that `batch` is refused"
    assert re.search("answers 422: .*too long to score", rewards.pop("too_long"))
    ways = {"vllm", "sglang", "compute_score", "compute_score_async", "over_http"}
    assert set(rewards) == ways
    for way, values in rewards.items():
        assert values == wanted, way


def test_openrlhf(ask: Callable[[str], Any], wanted: Any) -> None:
    """Its executor of a single turn, whose `--reward.remote_url` is our server."""
    rewards = ask("openrlhf")
    assert rewards["reward"] == wanted
    assert rewards["scores"] == wanted
