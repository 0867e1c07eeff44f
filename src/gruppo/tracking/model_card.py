"""The README.md of an exported model: what it was trained on and how, as a model hub shows it."""

from __future__ import annotations

import re
from pathlib import Path

from gruppo.config import serialization
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest
from gruppo.core.describe import describe_objective
from gruppo.integrity import read_json
from gruppo.loading import visible
from gruppo.tracking.files import read_metrics
from gruppo.tracking.formatting import duration, number

LIBRARIES = {
    "adapter_config.json": ("peft", "text-generation"),
    "config.json": ("transformers", "text-generation"),
    "model_index.json": ("diffusers", "text-to-image"),
    "restorer.json": ("gruppo", "image-to-image"),
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
    picture: str = "",
) -> str:
    """Describe the model that a run trained and that is in the folder ``model``.

    ``base`` is the hub id of the model that training began with, ``picture`` the file of the
    curves. Absolute paths are cut to their last part.
    """
    config = serialization.load(run_dir / "config.json")
    began = base or config.model
    facts = {
        "model": began,
        "license": license or f"not stated here; that of {began} applies",
        **_facts(run_dir, config),
    }
    width = max(map(len, facts))
    objective = describe_objective(
        config.objective,
        kl_coef=highest(config, "kl_coef"),
        group_size=config.rollout.group_size,
        max_length=config.rollout.max_new_tokens,
        action="token" if config.modality is None else "action",
    )
    lines = [
        *_front_matter(model, base, license),
        f"# {_public(model.name)}\n",
        "Trained by reinforcement learning with gruppo. Rewards are means, with 95% intervals.\n",
        *("```", *(f"{name:{width}}  {_public(text)}" for name, text in facts.items())),
        *("", *objective, "```", ""),
        f"![Metrics of training]({picture})\n" if picture else "",
    ]
    return "\n".join(lines)


def _front_matter(model: Path, base: str, license: str) -> list[str]:
    """What the hub reads: license, base model, library and tags."""
    lines = ["---"]
    lines += [f"license: {license}"] if license else []
    lines += [f"base_model: {base}"] if base else []
    for library, task in [pair for file, pair in LIBRARIES.items() if (model / file).is_file()][:1]:
        lines += [f"library_name: {library}", f"pipeline_tag: {task}"]
    return [*lines, "tags:", "- gruppo", "- reinforcement-learning", "---", ""]


def _facts(run_dir: Path, config: Config) -> dict[str, str]:
    """Data, rewards, cost and held-out evaluations of a run."""
    manifest = read_json(run_dir / "manifest.json")
    hardware, rollout = manifest["hardware"], config.rollout
    seconds = [row["time/step_s"] for row in read_metrics(run_dir) if "time/step_s" in row]
    sampled = f"{rollout.prompts} prompts, {rollout.group_size} samples each"
    facts = {
        "data": config.data,
        "rewards": ", ".join(config.reward),
        "steps": f"{len(seconds)} steps of {sampled}, in {duration(sum(seconds))}",
        "hardware": f"{hardware['gpu'] or hardware['cpu']}, {manifest['world']} process(es)",
        "gruppo": manifest["versions"]["gruppo"],
    }
    path = run_dir / "evaluations.json"
    evaluations = read_json(path) if path.is_file() else []
    for row in [*evaluations[:1], *evaluations[1:][-5:]]:
        interval = f"[{number(row['low'])}, {number(row['high'])}]"
        facts[f"held-out at step {row['step']}"] = f"{number(row['mean'])} {interval}"
    return facts


def _public(text: str) -> str:
    """One line without the folders of absolute paths, which a code block of Markdown holds as it
    is."""
    text = FOLDERS.sub("", text.replace(IN_MEMORY, "given in Python"))
    return visible(text).replace("`", "'")
