"""What every benchmark says beside its numbers, and where it writes them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.memory import GB
from gruppo.trainer.run_dir import environment


def machine() -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for name in ("torch", "transformers", "trl"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": time.strftime("%Y-%m-%d"),
        **environment()["hardware"],
        "memory_gb": _memory_gb(),
        "python": platform.python_version(),
        **versions,
    }


def heading(about: Mapping[str, Any]) -> str:
    """One line that names the hardware."""
    where = (
        about["gpu"] or f"{about['threads']} threads on {os.cpu_count()} cores of {about['cpu']}"
    )
    return f"{where}, {about['memory_gb']:.0f} GB, torch {about['torch']}"


def tell(
    name: str,
    results: Any,
    table: str,
    options: argparse.Namespace,
    *,
    measured: Any,
    draw: Callable[[Any, Path, str], None] | None = None,
) -> None:
    """Print the results as JSON, then as a table; write and draw them where asked, with all that
    was measured."""
    about = machine()
    document = {"benchmark": name, "machine": about, "results": results}
    print(_json(document))
    print(f"\n{name}: {heading(about)}\n{table}")
    if options.json:
        options.json.write_text(_json(document | {"measured": measured}) + "\n", encoding="utf-8")
    if options.plot and draw is not None:
        draw(results, options.plot, heading(about))


def _json(document: Any) -> str:
    """Lists of numbers on one line each."""
    return re.sub(
        r"\[[-+\d.e,\s]+\]",
        lambda numbers: " ".join(numbers[0].split()),
        json.dumps(document, indent=1),
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that all benchmarks share."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--short", action="store_true", help="the small form, one or two minutes")
    options.add_argument(
        "--model", default=None, help="a Hugging Face folder; without it, SmolLM2-135M"
    )
    options.add_argument("--compute", default="auto", choices=["auto", "float32", "bfloat16"])
    options.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    options.add_argument("--plot", type=Path, default=None, help="draw them here")
    return options


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
