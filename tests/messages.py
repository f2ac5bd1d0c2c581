"""Messages and files of rows, as many tests write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def write_jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
