"""Real pipelines of ``diffusers`` at tiny random sizes: trained, stopped, resumed to the bit,
opened by both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import diffusion_runs
from tests.trainer.diffusion_runs import stopped_and_resumed
from tests.trainer.runs import metrics
from tests.trainer.test_diffusion_runs import assert_same

pytest.importorskip("PIL")
diffusers = pytest.importorskip("diffusers")

from tests.modalities.diffusion.test_pipelines import SIZE, made, sd3, sd15  # noqa: E402

from gruppo import api, inference  # noqa: E402
from gruppo.build import Parts, build  # noqa: E402
from gruppo.config import serialization  # noqa: E402
from gruppo.config.schema import Config  # noqa: E402
from gruppo.modalities.diffusion import DiffusersPolicy  # noqa: E402
from gruppo.types import GruppoError, Prompt, Request  # noqa: E402

CAPTIONS = (
    "a seven",
    "an eight",
    "a three in the snow",
    "7",
    "a dot",
    "a line",
    "two lines",
    "a cross",
)
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SD 1.5": (
        sd15,
        {"diffusion__guidance": 2.0, "diffusion__transition": "ddim", "diffusion__eta": 0.8},
    ),
    "SD 1.5, LoRA": (sd15, {"lora__rank": 2, "lora__alpha": 4.0, "diffusion__train_to": 2}),
    "SD 3": (sd3, {"diffusion__transition": "flow_sde", "diffusion__noise": "branched"}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Pipelines in folders, and captioned pictures."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("saved")
    for make in (sd15, sd3):
        made(make).policy.save(folder / make.__name__)
    generator = torch.Generator().manual_seed(0)
    (folder / "images").mkdir()
    rows = []
    for n, caption in enumerate(CAPTIONS):
        picture = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(picture.numpy()).save(folder / f"images/{n}.png")
        rows.append(json.dumps({"file_name": f"{n}.png", "caption": caption}))
    (folder / "images/captions.jsonl").write_text("\n".join(rows))
    return folder


def chosen(saved: Path, kind: str) -> dict[str, Any]:
    make, changes = RUNS[kind]
    return {
        "model": str(saved / make.__name__),
        "data": f"images:{saved / 'images'}",
        "prompts__held_out_fraction": 0.3,
        "stage__kl_coef": 0.1,
        "rollout__prompts": 2,
        "rollout__group_size": 2,
        "evaluation__prompts": 1,
        "evaluation__every": 0,
        "saving__every": 0,
        "steps": 2,
        **changes,
    }


@pytest.mark.slow
@pytest.mark.silent_bug(33)
@pytest.mark.silent_bug(36)
@pytest.mark.parametrize("kind", RUNS)
def test_a_pipeline_is_trained_resumed_to_the_bit_and_opened_by_diffusers(
    tmp_path, monkeypatch, saved, kind
):
    changes = chosen(saved, kind)
    if "lora__rank" in changes:
        pytest.importorskip("peft")
    run = diffusion_runs.trained(tmp_path / "whole", **changes)
    rows = [row for row in metrics(run) if "reward/mean" in row]
    assert (
        rows[0]["kl/ref_nats"] == 0.0 < rows[1]["kl/ref_nats"]
        and rows[1]["mismatch/max_nats"] <= 1e-5 * 256
    )
    assert_same(stopped_and_resumed(tmp_path / "parts", monkeypatch, after=1, **changes), run)

    *_, file, _ = inference.sample(
        run, ["7"], tmp_path / "drawn"
    )  # a caption, and no number of a class
    policy = inference.load_policy(run)
    sampling = policy.modality.sampling(serialization.load(run / "config.json"), policy)
    assert (policy.settings.size, policy.settings.caption_tokens) == ((16, 16), 6)
    mode = api.replace(sampling, temperature=0.0, noise="independent", train_to=0)
    first = policy.sample([Request(Prompt("0", "7", draw=0), 1)], mode, seed=0).per_row["first"]
    pipeline = diffusers.DiffusionPipeline.from_pretrained(run / "final")
    pipeline.set_progress_bar_config(disable=True)
    reported = {"max_sequence_length": 6} if RUNS[kind][0] is sd3 else {}
    guidance = changes.get("diffusion__guidance", 1.0)
    reported |= {"num_inference_steps": 4, "guidance_scale": guidance, "height": 16, "width": 16}
    own = pipeline("7", latents=first, output_type="pt", **reported).images[0]
    assert (read(file) - own).abs().max() <= 1.01 / 255 and own.std() > 0.01
    untrained = DiffusersPolicy(diffusers.DiffusionPipeline.from_pretrained(changes["model"]), SIZE)
    before = untrained.sample([Request(Prompt("0", "7", draw=0), 1)], mode, seed=0).completions[0]
    assert not torch.equal(before, read(file)), "training has changed the picture"


def read(file: Path) -> torch.Tensor:
    import numpy
    from PIL import Image

    return torch.from_numpy(numpy.array(Image.open(file))).permute(2, 0, 1) / 255


def test_what_is_set_is_laid_over_the_settings_beside_the_pipeline(saved):
    """A size alone keeps the number of caption tokens that the folder says."""
    changes = chosen(saved, "SD 3") | {"diffusion__size": (8, 16)}
    policy = build(diffusion_runs.config(saved, **changes), Parts())[0].policy
    assert (policy.settings.size, policy.settings.caption_tokens) == ((8, 16), 6)
    assert policy.image_shape == (3, 8, 16)
    assert api.change(Config(), changes).modality.size == (8, 16)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown layers": (
        "SD 1.5, LoRA",
        {"lora__targets": ("to_kk",)},
        r"no linear layers 'to_kk'. Did you mean to_k",
    ),
    "an adapter of a former run": (
        "SD 1.5",
        {"lora__adapter": "x"},
        r"lora.adapter='x': adapters of pipelines are",
    ),
    "bfloat16 weights": (
        "SD 1.5",
        {"compute": "bfloat16"},
        r"compute='bfloat16' holds the base below adapters",
    ),
    "options of a new network": (
        "SD 3",
        {"diffusion__width": 16},
        r"diffusion.width is of a new network",
    ),
    "a step of a flow": (
        "SD 1.5",
        {"diffusion__transition": "cps"},
        r"transition='cps' does not fit the diffusion",
    ),
    "a size that does not fit": (
        "SD 1.5",
        {"diffusion__size": (15, 16)},
        r"size=15 x 16 does not fit the pipeline",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_pipeline_cannot_do_is_refused_in_one_line(tmp_path, saved, what):
    kind, changes, why = REFUSED[what]
    changes = {"evaluation__prompts": 0} | chosen(saved, kind) | changes
    with pytest.raises(GruppoError, match=why) as error:
        api.start(diffusion_runs.config(tmp_path, **changes))
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


def test_a_missing_package_is_named_in_one_line(tmp_path, monkeypatch, saved):
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(
        GruppoError, match=r'needs the package "diffusers".*pip install .*\[diffusion\]"$'
    ):
        api.start(diffusion_runs.config(tmp_path, **chosen(saved, "SD 1.5")))
