"""The recipes of restoration in a short form: as they are, with few steps, smaller images and a
small network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.runs import metrics

from gruppo import api
from gruppo.config.schema import Config
from gruppo.loading import load_object
from gruppo.modalities import find_modality
from gruppo.recipes import RECIPES
from gruppo.recipes.open import recipe_config

pytest.importorskip("PIL")
SMALL = "restore:unet:width=8"
EXAMPLES = Path(__file__).parents[1] / "examples"
PHOTOS = f"{EXAMPLES}/photos.py:denoise_photos"
PROGRESSIVE, QUICK = (
    f"{EXAMPLES}/documents.py:{name}" for name in ("restore_progressive", "restore_quick")
)
STAGED = [PHOTOS, "restore", PROGRESSIVE]


def short(name: str, folder: Path, **changes: Any) -> Config:
    """Two steps of each stage; the reader of text is a stand-in that knows no letter but says a
    number of each."""
    config = recipe_config(name)
    count = len(config.stages)
    stages = tuple(
        replace(stage, steps=2 if n + 1 < count else 0, warmup_steps=0, until="")
        for n, stage in enumerate(config.stages)
    )
    return replace(
        config,
        model=SMALL,
        data=config.data + ",crop=32",
        stages=stages,
        steps=2 * max(count, 1),
        rollout=replace(config.rollout, prompts=2, group_size=2),
        evaluation=replace(config.evaluation, prompts=4, every=0),
        back_off=replace(config.back_off, metric="", drop=0.05),
        runs_dir=str(folder),
        name=name.rpartition(":")[2],
        show_samples_every=0,
        **changes,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_a_staged_recipe_goes_through_its_stages(tmp_path: Path, name: str) -> None:
    config = short(name, tmp_path)
    run = api.start(config).folder
    rows = metrics(run)
    steps = [row for row in rows if "stage/number" in row]
    assert [row["stage/number"] for row in steps] == [
        1 + n // 2 for n in range(2 * len(config.stages))
    ]
    assert not any("loss/policy" in row for row in steps[:2])
    assert all("loss/policy" in row for row in steps[-2:])
    assert "loss/sup" in steps[0] and find_modality(str(run)).name == "restoration"


def test_the_quick_recipe_goes_on_from_a_run_of_the_staged_one(tmp_path: Path) -> None:
    first = api.start(short(PROGRESSIVE, tmp_path)).folder
    config = short(QUICK, tmp_path)
    quick = replace(config, model=str(first), modality=recipe_config(QUICK).modality)
    row = next(row for row in metrics(api.start(quick).folder) if "loss/policy" in row)
    assert {"loss/sup", "loss/kl", "loss/cons"} <= row.keys() and row["loss/kl"] == 0


@pytest.mark.parametrize("name", [*STAGED, QUICK])
def test_a_recipe_says_its_hardware_and_its_time(name: str) -> None:
    recipe = RECIPES[name] if name in RECIPES else load_object(name)
    result = " ".join((recipe.__doc__ or "").split())
    assert "CPU core" in result or "depend on your images" in result
