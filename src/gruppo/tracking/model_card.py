"""The README.md of an exported model: what it was trained on and how, as a model hub shows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gruppo.config import serialization
from gruppo.config.options import as_text, options
from gruppo.config.schema import IN_MEMORY
from gruppo.config.stages import highest
from gruppo.core.describe import describe_objective
from gruppo.integrity import read_json
from gruppo.tracking.files import read_metrics
from gruppo.tracking.formatting import duration, number

LIBRARIES = {
    "adapter_config.json": "library_name: peft\npipeline_tag: text-generation",
    "config.json": "library_name: transformers\npipeline_tag: text-generation",
    "model_index.json": "library_name: diffusers\npipeline_tag: text-to-image",
    "restorer.json": "library_name: gruppo\npipeline_tag: image-to-image",
}
"""By a file of the model's folder: the library that opens it, and what the hub lists it under."""
LOCAL = re.compile(
    r"name|runs_dir|device|track|trust_remote_code|show_samples_every|(engine|distributed|saving)\..*"
)
"""Settings of the machine, which are not published."""
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
    metrics = [row for row in read_metrics(run_dir) if "time/step_s" in row]
    library = next((LIBRARIES[name] for name in LIBRARIES if (model / name).is_file()), "")
    began = base or _public(config.model)
    if config.model == IN_MEMORY:
        began = "a model given in Python"
    front = [f"license: {license}" if license else "", f"base_model: {base}" if base else ""]
    tags = [
        "tags:",
        "- gruppo",
        "- reinforcement-learning",
        *(["- lora"] if config.lora.rank else []),
    ]
    rollout, hardware = config.rollout, manifest["hardware"]
    took = duration(sum(row["time/step_s"] for row in metrics))
    counts = f"{len(metrics)} steps of {rollout.prompts} prompts, {rollout.group_size} samples each"
    facts = [
        ("model", began),
        ("data", "rows given in Python" if config.data == IN_MEMORY else _public(config.data)),
        ("rewards", ", ".join(_public(name) for name in config.reward)),
        ("steps", f"{counts}, in {took}"),
        ("weights", "of the last step" if step is None else f"of step {step}, the best one"),
        ("hardware", f"{hardware['gpu'] or hardware['cpu']}, {manifest['world']} process(es)"),
        ("license", license or f"not stated here; that of {began} applies"),
    ]
    objective = describe_objective(
        config.objective,
        kl_coef=highest(config, "kl_coef"),
        group_size=rollout.group_size,
        max_length=rollout.max_new_tokens,
        action="token" if config.modality is None else "action",
    )
    # One line each in a fenced block: no value may end the block or begin another line.
    changed = [
        " ".join(f"{name} = {_public(as_text(option.value)) or 'empty'}".replace("`", "'").split())
        for name, option in options(config).items()
        if option.value != option.default and not LOCAL.fullmatch(name)
    ]
    version = manifest["versions"]["gruppo"]
    header = ["---", *filter(None, [*front, library]), *tags, "---", "", f"# {_public(model.name)}"]
    lines = [
        *(
            *header,
            "",
            f"Trained by reinforcement learning from {_cell(began)}, with gruppo {version}.",
        ),
        *("", "## Training", "", *_table(["", ""], facts), ""),
        *_evaluations(run_dir / "evaluations.json"),
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
            *_table(["package", "version"], list(manifest["versions"].items())),
            "",
        ),
    ]
    return "\n".join(lines)


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
    header = ["step", "mean reward", "95% interval", "held-out prompts"]
    text = "Held-out prompts, sampled at temperature 0."
    return ["## Evaluation", "", text, "", *_table(header, rows), ""]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [" | ".join(map(_cell, line)) for line in [header, *rows]]
    lines.insert(1, " | ".join("---" for _ in header))
    return [f"| {line} |" for line in lines]


def _cell(text: str) -> str:
    """Text that a Markdown table holds as it is: names of rewards and data may be anything."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


def _public(text: str) -> str:
    """Text without the folders of absolute paths."""
    return FOLDERS.sub("", text)
