"""`gym`: an environment with the real NeMo Gym.

NeMo Gym lives in an environment of its own: `TREEWARD_GYM_VENV`, or one that is made here, which
takes minutes and a package index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
