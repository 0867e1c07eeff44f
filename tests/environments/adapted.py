"""Ten steps of a tiny text model on an environment, and the conversations that it had."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests import tiny

import gruppo

PROMPTS = [{"prompt": [{"role": "user", "content": f"Game {n}."}]} for n in range(6)]


def trained(folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics of the steps, and the rows of all completions. ``changes`` as in
    ``gruppo.train``."""
    options = {"steps": 10, "environment__turns": 3, "evaluation__prompts": 0} | changes
    if "data" not in changes:
        options["data"] = PROMPTS
    if (
        "model" not in changes
    ):  # what an environment begins with is longer than the context of the usual model
        options["model"] = tiny.write_model(folder / "model", context=1024)
    result = gruppo.train(tiny.config(folder, reward=()), show=False, **options)
    rows = []
    for file in sorted(result.folder.glob("completions/*.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            rows += map(json.loads, lines)
    metrics = (result.folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in metrics.splitlines()], rows


def said(row: dict[str, Any]) -> list[str]:
    """The answers of the policy in a conversation."""
    return [message["content"] for message in row["completion"] if message["role"] == "assistant"]
