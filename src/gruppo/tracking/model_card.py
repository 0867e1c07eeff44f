"""The README.md of an exported model: what it was trained on and how, as a model hub shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gruppo.config import serialization
from gruppo.config.options import as_text, options
from gruppo.config.schema import IN_MEMORY
from gruppo.config.stages import highest
from gruppo.core.describe import describe_objective
from gruppo.core.objective import PRESETS
from gruppo.integrity import read_json
from gruppo.tracking.files import read_metrics
from gruppo.tracking.formatting import duration, number

KINDS = {
    "adapter_config.json": ("peft", ""),
    "config.json": ("transformers", ""),
    "model_index.json": ("diffusers", "text-to-image"),
    "restorer.json": ("gruppo", "image-to-image"),
}
"""By a file of the model's folder: the library that opens it, and what the hub lists it under."""
LOCAL = re.compile(
    r"name|runs_dir|device|track|trust_remote_code|show_samples_every|(engine|distributed|saving)\..*"
)
"""Settings of the machine, which are not published."""
FOLDERS = re.compile(r"(?<![\w.\\/-])(?:[A-Za-z]:|~\w*)?[\\/](?![\\/])(?:[^\\/:\n]+[\\/])*")
"""The folders of an absolute path, in which a user's name may stand."""
LAST = 5
"""Evaluations in the table after the first one."""


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

    ``base``: hub id of the model that training began with. ``step``: that of the weights, if it is not the last one.
    ``picture``: file of the curves beside the card. Absolute paths are cut to their last part.
    """
    # Steps alone have a time; rows of evaluations before the first one do not.
    config, manifest = (
        serialization.load(run_dir / "config.json"),
        read_json(run_dir / "manifest.json"),
    )
    metrics = [row for row in read_metrics(run_dir) if "time/step_s" in row]
    evaluations = (
        read_json(run_dir / "evaluations.json") if (run_dir / "evaluations.json").is_file() else []
    )
    library, task = next(
        (KINDS[name] for name in KINDS if (model / name).is_file()), ("gruppo", "")
    )
    task = task or ("text-generation" if library in ("peft", "transformers") else "")
    preset = next(
        (name for name, objective in PRESETS.items() if objective == config.objective), ""
    )
    began = (
        base or _public(config.model) if config.model != IN_MEMORY else "a model given in Python"
    )
    tags = [
        "gruppo",
        "reinforcement-learning",
        *([preset] if preset else []),
        *(["lora"] if config.lora.rank else []),
    ]
    front: dict[str, Any] = {
        "license": license,
        "base_model": base,
        "library_name": library,
        "pipeline_tag": task,
    }
    header = [f"{name}: {value}" for name, value in front.items() if value] + [
        "tags:",
        *(f"- {tag}" for tag in tags),
    ]

    rollout, hardware, took = (
        config.rollout,
        manifest["hardware"],
        sum(row["time/step_s"] for row in metrics),
    )
    counts = f"{len(metrics)} steps of {rollout.prompts} prompts, {rollout.group_size} samples each"
    rows = {
        "model": began,
        "data": _public(config.data) if config.data != IN_MEMORY else "rows given in Python",
        "objective": preset or "below",
        "steps": f"{counts}, in {duration(took)}",
        "weights": "of the last step" if step is None else f"of step {step}, the best one",
        "hardware": f"{hardware['gpu'] or hardware['cpu']}, {manifest['world']} process(es), {hardware['system']}",
        "license": license or f"not stated here; that of {began} applies",
    }
    # Rewards under the names of the metrics; a run without them, such as of demonstrations alone, has the config's.
    found = (re.fullmatch(r"reward/([^/]+)/mean", name) for row in metrics[-1:] for name in row)
    functions = [match[1] for match in found if match] or [_public(name) for name in config.reward]
    weights = config.scoring.weights or [1.0] * len(functions)
    rewards = [[name, f"{weight:g}"] for name, weight in zip(functions, weights, strict=False)]
    action = "token" if config.modality is None else "action"
    kl_coef, group_size, max_length = (
        highest(config, "kl_coef"),
        rollout.group_size,
        rollout.max_new_tokens,
    )
    objective = describe_objective(
        config.objective,
        kl_coef=kl_coef,
        group_size=group_size,
        max_length=max_length,
        action=action,
    )
    # One line each, as it is read in a fenced block: no value may end the block or begin another line.
    changed = [
        " ".join(f"{name} = {_public(as_text(option.value)) or 'empty'}".replace("`", "'").split())
        for name, option in options(config).items()
        if option.value != option.default and not LOCAL.fullmatch(name)
    ]
    lines = [
        *("---", *header, "---", "", f"# {_public(model.name)}", ""),
        f"Trained by reinforcement learning from {_cell(began)}, with gruppo {manifest['versions']['gruppo']}.",
        *(
            "",
            "## Training",
            "",
            *_table(["", ""], [[name, str(value)] for name, value in rows.items()]),
            "",
        ),
        *("Rewards:", "", *_table(["reward", "weight"], rewards), ""),
        *_evaluations(evaluations),
        *([f"![Metrics of training]({picture})", ""] if picture else []),
        *("## Objective", "", "```", *objective, "```", ""),
        *(
            "## Settings",
            "",
            "Those that differ from the defaults:",
            "",
            "```",
            *changed,
            "```",
            "",
        ),
        *(
            "## Versions",
            "",
            *_table(["package", "version"], [*map(list, manifest["versions"].items())]),
            "",
        ),
    ]
    return "\n".join(lines)


def _evaluations(evaluations: list[Mapping[str, Any]]) -> list[str]:
    """Held-out rewards before training and at the last evaluations, each with its 95% interval."""
    if not evaluations:
        return ["The run was not evaluated on held-out prompts.", ""]
    shown = evaluations if len(evaluations) <= LAST + 1 else [evaluations[0], *evaluations[-LAST:]]
    parts = list(dict.fromkeys(name for each in shown for name in each["parts"]))
    parts = parts if len(parts) > 1 else []  # of a single reward the mean says the same
    rows = []
    for each in shown:
        interval = f"{number(each['low'])} to {number(each['high'])}"
        values = (number(each["parts"].get(name)) for name in parts)
        rows.append(
            [str(each["step"]), number(each["mean"]), interval, str(each["prompts"]), *values]
        )
    header = ["step", "mean reward", "95% interval", "held-out prompts", *parts]
    return [
        "## Evaluation",
        "",
        "Held-out prompts, sampled at temperature 0.",
        "",
        *_table(header, rows),
        "",
    ]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(map(_cell, line))} |" for line in [header, ["---"] * len(header), *rows]
    ]


def _cell(text: str) -> str:
    """Text that a Markdown table holds as it is: names of rewards and data may be anything."""
    text = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text) if text != "---" else text


def _public(text: str) -> str:
    """Text without the folders of absolute paths."""
    return FOLDERS.sub("", text)
