"""The three symptoms of source document 004, each provoked by the configuration of a real run, and
a healthy run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import api
from gruppo.config.schema import (
    Config,
    EvaluationConfig,
    OptimConfig,
    RolloutConfig,
    SavingConfig,
    Stage,
    SupervisedConfig,
)
from gruppo.core.objective import Objective
from gruppo.doctor.record import read
from gruppo.doctor.report import diagnose
from gruppo.modalities.restoration.config import RestorationConfig

pytest.importorskip("PIL")

TAUGHT = Stage(name="supervised", rl_coef=0.0, sup_coef=1.0)
FREE = Stage(name="full", kl_coef=1e-4, cons_coef=1e-4)
GLOBAL = Objective(baseline="running", scale="none", kl="exact")
RISING = Stage(lr="linear:0,0.02")

BYTES = "jpeg_compressibility:quality=90,without_header=true"
PROVOKED: dict[str, tuple[dict[str, Any], str, str]] = {
    "loss_pg is positive and grows: global normalisation, and steps so large that rewards fall": (
        {"objective": GLOBAL, "stage": RISING, "optim": OptimConfig(lr=5e-3)},
        "policy-loss",
        "--objective.baseline mean",
    ),
    "loss_sup does not fall: a warm-up longer than the stage": (
        {"stages": (replace(TAUGHT, steps=15, warmup_steps=60), Stage("full")), "steps": 16},
        "warmup-too-long",
        "--stages.0.warmup-steps 1",
    ),
    "loss_cons goes on rising: bytes are rewarded alone, and next to nothing holds": (
        {"reward": (BYTES,), "stage": FREE, "optim": OptimConfig(lr=5e-3)},
        "consistency-loss",
        "--stage.kl-coef",
    ),
}


def images(folder: Path) -> Path:
    """Smooth pictures with an edge each."""
    from PIL import Image

    folder.mkdir()
    across, down = torch.meshgrid(torch.linspace(0, 1, 32), torch.linspace(0, 1, 32), indexing="ij")
    for n in range(8):
        picture = torch.stack([across, down, (across > n / 8).float()], dim=-1)
        Image.fromarray((picture * 255).byte().numpy()).save(folder / f"{n}.png")
    return folder


def config_of(folder: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "model": "restore:unet:width=8",
        "data": f"degrade:{images(folder / 'images')}:noise=25,crop=16",
        "reward": ("psnr",),
        "steps": 30,
        "runs_dir": str(folder / "runs"),
        "name": "run",
        "objective": Objective(kl="exact"),
        "modality": RestorationConfig(action="pixels:std=0.05", consistency="reference"),
        "rollout": RolloutConfig(prompts=4, group_size=4),
        "optim": OptimConfig(lr=1e-4),
        "supervised": SupervisedConfig(batch=8),
        "evaluation": EvaluationConfig(prompts=0),
        "saving": SavingConfig(every=0),
        "show_samples_every": 0,
    }
    settings |= changes
    if not any(stage.sup_coef for stage in settings.get("stages", ())):
        settings["supervised"] = SupervisedConfig()
    return Config(**settings)


@pytest.mark.parametrize(("changes", "name", "change"), PROVOKED.values(), ids=PROVOKED)
def test_a_symptom_of_document_004_is_provoked_and_named(tmp_path, changes, name, change):
    run = api.start(config_of(tmp_path, **changes)).folder
    named = {finding.rule: finding for finding in diagnose(read(run)).findings}
    assert name in named
    assert any(str(one).startswith(change) for one in named[name].changes)


def test_a_healthy_run_has_none_of_them(tmp_path):
    full = Stage(name="full", kl_coef=0.05, cons_coef=0.1, new_reference=True)
    stages = (replace(TAUGHT, steps=60, lr=5e-3), full)
    run = api.start(
        config_of(tmp_path, model="restore:unet:width=8", steps=75, stages=stages)
    ).folder
    named = {finding.rule for finding in diagnose(read(run)).findings}
    assert not named & {name for _, name, _ in PROVOKED.values()}
