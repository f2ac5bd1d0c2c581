"""Every code block of README.md, AGENTS.md and docs/ is executed, in a folder laid out as a
reader's would be.

Python blocks run as they are; those of one file share their names. Commands run through the same
entry point as on a terminal; a server that is started in the background (`treeward serve ... &`) is
a process of its own, on a free port in the place of 8000, and serves the rest of its file. What
needs a hub (the recipe `rm`, a model by its hub name) is checked as far as the configuration. A
YAML block whose first line is `# NAME.yaml` lies in the folder under that name. The quickstart's
configuration is the shipped one with fewer steps; a run of GRPO that a guide writes has fewer steps
too.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from loopback import wait_until
from messages import write_jsonl
from omegaconf import OmegaConf
from pydantic import BaseModel

from treeward.cli.main import main
from treeward.config.first_run import named_values
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import load_config, load_file, load_grpo_config
from treeward.config.run import RewardModelRunConfig
from treeward.config.server import ServerConfig
from treeward.data.preference import preference_from_dict
from treeward.environments.registry import make_environments
from treeward.model.contract import CONTRACT_FILE
from treeward.parallel.ray_cluster import free_port
from treeward.training.tracking import read_metrics

REPOSITORY = Path(__file__).parent.parent
RECIPES = REPOSITORY / "src" / "treeward" / "config" / "recipes"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.yaml)\n")
_FEWER_STEPS = "grpo: {max_num_steps: 2, max_val_samples: 4}\n"
_HUB_CONFIGS = ("rm", "grpo_rm_1B", "grpo_math_1B")
_GRPO_BASE = {
    "data": "data: {dataset_name: PromptDataset, train_data_path: prompts.jsonl, val_data_path: held_out.jsonl}\n",
    "env": "env: {reward_model: {model_name: some/model}}\n",
}
_BASE = {
    "policy": "policy: {model_name: some/model}\n",
    "data": "data: {train_data_path: train.jsonl}\n",
}


class Block(NamedTuple):
    file: str
    line: int
    language: str
    code: str

    @property
    def is_run(self) -> bool:
        """Whether it is executed; what is only read needs no model."""
        return self.language in ("python", "bash")

    @property
    def uses_ray(self) -> bool:
        """Its processes take long to start."""
        return "import ray\n" in self.code or "--workers" in self.code


def blocks() -> list[Block]:
    found = []
    for file in [
        REPOSITORY / "README.md",
        REPOSITORY / "AGENTS.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
    ]:
        text = file.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(file.relative_to(REPOSITORY).as_posix(), line, match[1], match[2]))
    return found


def name_of(block: Block) -> str:
    return f"{block.file}:{block.line}"


BLOCKS = blocks()
NAMESPACES: dict[str, dict[str, object]] = {}
DONE: set[Block] = set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: the examples, and comparisons under the names that the guides use."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").mkdir()
    for name in ("gold.py", "world.json"):
        (folder / "examples" / name).symlink_to(REPOSITORY / "examples" / name)
    (folder / "resources_servers").symlink_to(REPOSITORY / "resources_servers")
    # A file of the reader's own comes before the recipe of its name.
    shorter = f"defaults: {RECIPES / 'quickstart.yaml'}\nrm: {{max_num_steps: 3, val_batches: 1}}\n"
    (folder / "quickstart").write_text(shorter, encoding="utf-8")
    pairs = [{"chosen": f"It is {n + 1}.", "rejected": "No idea."} for n in range(8)]
    rows = [{"prompt": f"{n} + 1?", **pair} for n, pair in enumerate(pairs)]
    for name in ("train", "val", "hard", "conversations"):
        write_jsonl(folder / f"{name}.jsonl", *rows)
    write_jsonl(
        folder / "questions.jsonl", *({"question": row.pop("prompt"), **row} for row in rows)
    )
    return folder


@pytest.fixture(scope="module")
def reader(folder: Path) -> Path:
    """The reader's folder with a trained quickstart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "--config", "quickstart"]) == 0
    (folder / "results" / "rm").symlink_to("quickstart")
    return folder


class Servers:
    """The servers that guides start, by their commands: two guides that start the same one share
    it."""

    def __init__(self) -> None:
        self.running: dict[tuple[Any, ...], tuple[subprocess.Popen[bytes], int]] = {}
        self.port_of: dict[str, int] = {}
        self.own_port = free_port()

    def start(self, command: str, file: str) -> None:
        words = shlex.split(command)[1:]
        # A guide may have calibrated the model since: a server goes on with what it has loaded.
        contracts = [Path(word) / CONTRACT_FILE for word in words]
        served = (command, *(path.read_bytes() for path in contracts if path.is_file()))
        if served not in self.running:
            port = free_port()
            words += ["--port", str(port)]
            process = subprocess.Popen(
                [sys.executable, "-m", "treeward.cli.main", *words], stderr=subprocess.PIPE
            )
            self.running[served] = process, port
            self._wait_for(process, port)
        self.port_of[file] = self.running[served][1]

    def on_its_port(self, code: str, file: str) -> str:
        """The code with the port of this file's server, and with a free one for the guides' own
        servers."""
        code = code.replace("localhost:8000", f"localhost:{self.port_of.get(file, 8000)}")
        return code.replace("8351", str(self.own_port))

    def stop(self) -> list[int]:
        """End all of them as a terminal would; returns their exit codes."""
        for process, _ in self.running.values():
            process.send_signal(signal.SIGINT)
        return [
            process.communicate(timeout=60) and process.returncode
            for process, _ in self.running.values()
        ]

    @staticmethod
    def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
        def is_ready() -> bool:
            assert process.poll() is None, process.communicate()[1].decode()
            with contextlib.suppress(OSError):
                return (
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
                    is None
                )
            return False

        wait_until(is_ready)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    assert set(running.stop()) <= {0}


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.is_run], ids=name_of)
def test_block_that_is_read(block: Block, folder: Path) -> None:
    check_block(block, folder)


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.is_run], ids=name_of)
def test_code_block(
    block: Block,
    reader: Path,
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The earlier blocks of its file run before it, as a reader's would, if they have not."""
    monkeypatch.chdir(reader)
    needed = [
        one for one in BLOCKS[: BLOCKS.index(block)] if one.file == block.file and not one.uses_ray
    ] + [block]
    if block.uses_ray:
        request.getfixturevalue("ray")
    for earlier in needed:
        if earlier not in DONE:
            DONE.add(earlier)
            run_block(earlier, reader, servers)


def run_block(block: Block, reader: Path, servers: Servers) -> None:
    code = servers.on_its_port(block.code, block.file)
    if block.uses_ray:  # whose processes are in another folder
        code = code.replace('"results/', f'"{reader}/results/')
    match block.language:
        case "python":
            exec(
                compile(code, f"{block.file}:{block.line}", "exec"),
                NAMESPACES.setdefault(block.file, {}),
            )
        case "bash":
            for command in block.code.replace("\\\n", " ").splitlines():
                if command.endswith("&"):
                    servers.start(command.removesuffix("&").strip(), block.file)
                else:
                    run_command(servers.on_its_port(command, block.file))
        case _:
            check_block(block, reader)


def check_block(block: Block, folder: Path) -> None:
    match block.language:
        case "yaml":
            check_yaml(block.code, folder)
        case "json":
            preference_from_dict(json.loads(block.code))
        case "text":
            pass
        case other:
            pytest.fail(f"a code block of language {other!r}: say python, bash, yaml, json or text")


def run_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "curl":
        subprocess.run(
            ["curl", "--silent", "--show-error", "--fail-with-body", *words[1:]], check=True
        )
    elif "|" in words:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        subprocess.run(
            ["bash", "-c", line],
            check=True,
            capture_output=True,
            env={"PATH": path, "HF_HUB_OFFLINE": "1"},
        )
    elif words[0] == "treeward":
        if words[1] == "train" and "--model" in words:
            options = dict(zip(words, words[1:], strict=False))
            named = (options.get(name) for name in ("--model", "--data", "--validation"))
            overrides = [word for word in words if "=" in word]
            load_file(
                RewardModelRunConfig,
                options.get("--config"),
                overrides,
                values=named_values(*named),
            )
        elif any(word in _HUB_CONFIGS or "model_name=" in word for word in words):
            load = load_grpo_config if words[1] == "grpo" else load_config
            load(words[words.index("--config") + 1], [word for word in words if "=" in word])
        else:
            assert main(words[1:]) == 0
    elif words[0] == "source":
        assert words[1] == ".venv/bin/activate"  # made by `make env`
    elif words[0] == "make":
        subprocess.run(
            ["make", "--dry-run", words[1]], cwd=REPOSITORY, check=True, capture_output=True
        )
    else:
        program = REPOSITORY / words[0]
        assert program.exists() or words[0].startswith(".venv/"), f"no such program: {words[0]}"
        for word in words[1:]:
            assert "/" not in word or (REPOSITORY / word).exists(), f"no such file: {word}"


def check_yaml(code: str, folder: Path) -> None:
    if code.startswith("env:"):
        for environment in make_environments(OmegaConf.create(code).env).values():
            environment.shutdown()
        return
    if code.startswith(("models:", "judge:")):
        file = folder / "server.yaml"
        file.write_text(code, encoding="utf-8")
        load_file(ServerConfig, file)
        return
    sections = {
        line.split(":")[0] for line in code.splitlines() if line and not line.startswith((" ", "#"))
    }
    file = folder / "block.yaml"
    is_grpo = bool(sections & {"grpo", "loss_fn", "env"})
    base = _BASE | _GRPO_BASE if is_grpo else _BASE
    file.write_text(
        code + "".join(text for name, text in base.items() if name not in sections),
        encoding="utf-8",
    )
    (load_grpo_config if is_grpo else load_config)(file)
    if named := _FILE.match(code):
        (folder / f"whole_{named[1]}").write_text(code, encoding="utf-8")
        fewer = _FEWER_STEPS if is_grpo else ""
        (folder / named[1]).write_text(f"defaults: whole_{named[1]}\n{fewer}", encoding="utf-8")


@pytest.mark.slow
def test_every_metric_of_a_run_is_in_its_guide(
    reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reader)
    (first,) = (block for block in BLOCKS if block.code.startswith("# first.yaml"))
    check_yaml(first.code, reader)
    folders = ["checkpointing.checkpoint_dir=results/measured", "logger.log_dir=logs/measured"]
    assert main(["grpo", "--config", "first.yaml", *folders]) == 0
    metrics = chain.from_iterable(read_metrics(reader / "logs" / "measured" / "metrics.jsonl"))
    # A guide may have calibrated the model before, and its scores have a spread then.
    logged = {name.replace("score/spread", "<name>") for name in metrics}
    table = "".join(
        line for line in grpo_guide().splitlines(keepends=True) if line.startswith("| `")
    )
    named = {
        name.replace("<environment>", "reward_model_env")
        for name in re.findall(r"`([^`\s]+)`", table)
    }
    assert "train/kl" in logged and "validation/gold_reward" in logged
    assert logged - {"step", "time"} <= named


def test_every_key_in_the_guide_to_grpo_exists() -> None:
    guide, _, elsewhere = grpo_guide().partition("## Coming from elsewhere")
    # What stands in the left column of the tables for those who come from elsewhere is not ours.
    ours = "\n".join(line.split(" | ", 1)[-1] for line in elsewhere.splitlines())
    known = key_paths(GRPORunConfig)
    num_found = 0
    for code in re.findall(r"`([^`\n]+)`", guide + ours):
        key = re.match(r"(?:grpo|loss_fn|policy|data|checkpointing|logger|cluster)(?:\.\w+)+", code)
        num_found += key is not None
        # what stands under `kwargs` is for the optimiser's own class
        assert key is None or key[0].partition(".kwargs.")[0] in known, (
            f"the guide to GRPO names {key[0]}"
        )
    assert num_found > 40


def grpo_guide() -> str:
    return (REPOSITORY / "docs" / "grpo.md").read_text(encoding="utf-8")


def key_paths(section: type[BaseModel], above: str = "") -> set[str]:
    """The dotted paths of all keys below a section."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        path = f"{above}{field.alias or name}"
        found.add(path)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= key_paths(kind, f"{path}.")
    return found
