"""The README.md of an exported model: what it was trained on and how, as a model hub shows it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gruppo.config import serialization
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest
from gruppo.core.describe import describe_objective
from gruppo.integrity import read_json
from gruppo.tracking.files import read_metrics
from gruppo.tracking.formatting import duration, number
from gruppo.tracking.panels import Metrics

LIBRARIES = {
    "adapter_config.json": "library_name: peft\npipeline_tag: text-generation",
    "config.json": "library_name: transformers\npipeline_tag: text-generation",
    "model_index.json": "library_name: diffusers\npipeline_tag: text-to-image",
    "restorer.json": "library_name: gruppo\npipeline_tag: image-to-image",
}
"""By a file of the model's folder: the library that opens it, and what the hub lists it under."""
FOLDERS = re.compile(r"(?<![\w.\\/-])(?:[A-Za-z]:|~\w*)?[\\/](?![\\/])(?:[^\\/:\n]+[\\/])*")
"""The folders of an absolute path, in which a user's name may stand."""


def model_card(
    run_dir: Path,
    model: Path,
    *,
    base: str = "",
    license: str = "",
    step: int | None = None,
    picture: str = "",
) -> str:
    """Describe the model that a run trained and that is in the folder ``model``.

    ``base`` is the hub id of the model that training began with, ``step`` that of the weights if it
    is not the last one, ``picture`` the file of the curves. Absolute paths are cut to their last
    part.
    """
    config = serialization.load(run_dir / "config.json")
    manifest = read_json(run_dir / "manifest.json")
    began = base or _public(config.model).replace(IN_MEMORY, "a model given in Python")
    front = [f"license: {license}"] if license else []
    front += [f"base_model: {base}"] if base else []
    front += [text for name, text in LIBRARIES.items() if (model / name).is_file()][:1]
    tags = ["tags:", "- gruppo", "- reinforcement-learning", *["- lora"] * bool(config.lora.rank)]
    facts = _facts(config, manifest, read_metrics(run_dir))
    facts["model"] = began
    facts["weights"] = "of the last step" if step is None else f"of step {step}, the best one"
    facts["license"] = license or f"not stated here; that of {began} applies"
    objective = describe_objective(
        config.objective,
        kl_coef=highest(config, "kl_coef"),
        group_size=config.rollout.group_size,
        max_length=config.rollout.max_new_tokens,
        action="token" if config.modality is None else "action",
    )
    made = f"Trained by reinforcement learning from {_cell(began)}, "
    made += f"with gruppo {manifest['versions']['gruppo']}."
    picture = f"![Metrics of training]({picture})\n" if picture else ""
    parts = [
        *("---", *front, *tags, "---", "", f"# {_public(model.name)}", "", made, ""),
        *("## Training", "", *_table(["", ""], facts.items()), ""),
        *_evaluations(run_dir / "evaluations.json"),
        picture,
        *("## Objective", "", "```", *objective, "```", ""),
    ]
    return "\n".join(parts)


def _facts(config: Config, manifest: Any, metrics: Metrics) -> dict[str, str]:
    """Model, data, rewards and cost of a run."""
    rollout, hardware = config.rollout, manifest["hardware"]
    seconds = [row["time/step_s"] for row in metrics if "time/step_s" in row]
    sampled = f"{rollout.prompts} prompts, {rollout.group_size} samples each"
    return {
        "model": "",
        "data": _public(config.data).replace(IN_MEMORY, "rows given in Python"),
        "rewards": ", ".join(map(_public, config.reward)),
        "steps": f"{len(seconds)} steps of {sampled}, in {duration(sum(seconds))}",
        "hardware": f"{hardware['gpu'] or hardware['cpu']}, {manifest['world']} process(es)",
    }


def _evaluations(path: Path) -> list[str]:
    """Held-out rewards at the first and the last evaluations, each with its 95% interval."""
    evaluations = read_json(path) if path.is_file() else []
    if not evaluations:
        return ["The run was not evaluated on held-out prompts.", ""]
    rows = [
        (
            str(row["step"]),
            number(row["mean"]),
            f"{number(row['low'])} to {number(row['high'])}",
            str(row["prompts"]),
        )
        for row in [*evaluations[:1], *evaluations[1:][-5:]]
    ]
    header = ["step", "mean reward at temperature 0", "95% interval", "held-out prompts"]
    return ["## Evaluation", "", *_table(header, rows), ""]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [" | ".join(map(_cell, line)) for line in [header, *rows]]
    lines.insert(1, " | ".join("---" for _ in header))
    return [f"| {line} |" for line in lines]


def _cell(text: str) -> str:
    """Text that a Markdown table holds as it is: names of rewards and data may be anything."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


def _public(text: str) -> str:
    """Text without the folders of absolute paths."""
    return FOLDERS.sub("", text)
