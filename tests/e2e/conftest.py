"""`gym`: an environment with the real NeMo Gym, and `workplace`: a folder in which it starts our
servers.

NeMo Gym lives in an environment of its own: `TREEWARD_GYM_VENV`, or one that is made here, which
takes minutes and a package index.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent

GYM = "nemo-gym==0.7.0"
NEEDS = [
    *(
        "openai==2.44.0",
        "anthropic<=0.109.2",
        "tqdm",
        "pydantic",
        "devtools",
        "packaging>=24.2",
        "fastapi",
    ),
    *(
        "mcp>=1.28.1,<2",
        "itsdangerous",
        "uvicorn",
        "httptools",
        "uvloop",
        "hydra-core",
        "omegaconf",
        "rich",
    ),
    *(
        "aiohttp>=3.14.4",
        "yappi>=1.7.6",
        "ray[default]>=2.58.0",
        "psutil",
        "orjson>=3.11.6",
        "pandas",
        "scipy",
    ),
    *(
        "wandb>=0.30.0",
        "pydot",
        "python-multipart",
        "datasets",
        "mlflow-skinny>=3.16.1",
        "jinja2",
        "requests",
    ),
]


@pytest.fixture(scope="session")
def gym() -> Path:
    """The environment with NeMo Gym."""
    given = os.environ.get("TREEWARD_GYM_VENV")
    venv = (
        Path(given) if given else Path(tempfile.gettempdir()) / f"treeward-gym-{GYM.split('==')[1]}"
    )
    if not (venv / "bin" / "gym").exists():
        if given:
            pytest.skip(f"there is no NeMo Gym in TREEWARD_GYM_VENV ({given})")
        try:
            subprocess.run([sys.executable, "-m", "venv", venv], check=True, capture_output=True)
            pip = [
                str(venv / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "-q",
                "--retries",
                "1",
                "--timeout",
                "20",
            ]
            subprocess.run([*pip, *NEEDS], check=True, capture_output=True, timeout=900)
            # it declares Python 3.13 and runs on 3.11
            gym_only = ["--no-deps", "--ignore-requires-python", GYM]
            subprocess.run([*pip, *gym_only], check=True, capture_output=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(venv, ignore_errors=True)
            pytest.skip(f"NeMo Gym cannot be installed here: {error}")
    return venv


@pytest.fixture
def workplace(gym: Path, tmp_path: Path) -> Path:
    """A folder as a user of NeMo Gym has it: the resources server, `env.yaml`, and environments
    that are there."""
    if not (Path(sys.prefix) / "bin" / "activate").exists():
        pytest.skip(
            "these tests do not run in a virtual environment, which gym needs for the server"
        )
    shutil.copytree(REPOSITORY / "resources_servers", tmp_path / "resources_servers")
    for kind, name, venv in (
        ("responses_api_agents", "simple_agent", gym),
        ("responses_api_models", "openai_model", gym),
        ("environment_servers", "legacy_agent", gym),
        ("resources_servers", "reward_model", Path(sys.prefix)),
        ("resources_servers", "math_with_judge", Path(sys.prefix)),
        ("resources_servers", "genrm_compare", Path(sys.prefix)),
    ):
        folder = tmp_path / "venvs" / kind / name
        folder.mkdir(parents=True)
        (folder / ".venv").symlink_to(venv)
    (tmp_path / "data").mkdir()
    return tmp_path


@contextlib.contextmanager
def gym_servers(
    gym: Path, workplace: Path, arguments: Sequence[str]
) -> Iterator[Callable[[Sequence[str]], None]]:
    """NeMo Gym's servers with these arguments of `gym env start`, until the context ends; gives a
    function that runs another command of `gym`."""
    environment = {
        **{
            key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))
        },
        **{
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        "PATH": f"{gym / 'bin'}:{os.environ['PATH']}",
    }
    log = workplace / "gym.log"
    with log.open("wb") as stream:
        servers = subprocess.Popen(
            [
                *(str(gym / "bin" / "gym"), "env", "start", *arguments),
                *("+skip_venv_if_present=true", f"+uv_venv_dir={workplace / 'venvs'}"),
            ],
            cwd=workplace,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(command: Sequence[str]) -> None:
        done = subprocess.run(
            [str(gym / "bin" / "gym"), *command],
            cwd=workplace,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, (
            f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{log.read_text()[-4000:]}"
        )

    try:
        _wait_for("servers ready", servers, log, seconds=240)
        yield run
    finally:
        os.killpg(servers.pid, signal.SIGINT)
        try:
            servers.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(servers.pid, signal.SIGKILL)
            servers.wait(20)


def _wait_for(text: str, process: subprocess.Popen[bytes], log: Path, *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while text not in log.read_text(encoding="utf-8", errors="replace"):
        assert process.poll() is None, f"gym env start ended:\n{log.read_text()[-6000:]}"
        assert time.monotonic() < end, f"gym env start is not ready:\n{log.read_text()[-6000:]}"
        time.sleep(0.5)
