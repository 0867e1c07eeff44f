"""final/ of a sharded run is the folder that one process writes, of every modality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import processes, tiny
from tests.trainer import diffusion_runs, restoration_runs

from gruppo import api
from gruppo.build import Parts
from gruppo.config import serialization


def train(configs: dict[str, dict[str, Any]], name: str) -> None:
    for kind, config in configs.items():
        parts = Parts(data=diffusion_runs.labelled()) if kind == "denoiser" else None
        api.start(serialization.from_dict(config | {"name": f"{name}-{kind}"}), parts)


def pipeline_config(folder: Path) -> dict[str, Any]:
    """An adapter on a diffusers pipeline, which is merged into a copy of the network as it is
    saved."""
    pytest.importorskip("PIL")
    pytest.importorskip("diffusers")
    from tests.modalities.diffusion.test_pipelines import made, sd15

    made(sd15).policy.save(folder / "sd15")
    for number, picture in enumerate(
        diffusion_runs.write_images(folder / "pictures").rglob("*.png")
    ):
        picture.with_suffix(".txt").write_text(f"picture {number}")
    return diffusion_runs.config(
        folder,
        model=str(folder / "sd15"),
        data=f"images:{folder / 'pictures'}",
        lora__rank=2,
        lora__alpha=4.0,
        prompts__held_out_fraction=0.3,
        rollout__prompts=2,
        rollout__group_size=2,
        **SMALL,
    )


SMALL: dict[str, Any] = {
    "steps": 1,
    "evaluation__prompts": 0,
    "saving__every": 0,
    "optim__eps": 0.1,
    "distributed__shard": "fsdp",
}


@pytest.mark.slow
def test_the_final_folder_of_two_ranks_is_that_of_one(tmp_path):
    pytest.importorskip("peft")
    made = {
        "text": tiny.config(tmp_path, lora__rank=3, lora__alpha=6.0, **SMALL),
        "denoiser": diffusion_runs.config(tmp_path, **SMALL),
        "restorer": restoration_runs.config(tmp_path, **SMALL),
        "pipeline": pipeline_config(tmp_path),
    }
    configs = {kind: serialization.to_dict(config) for kind, config in made.items()}
    train(configs, "one")
    processes.run_ranks(2, train, configs, "two", folder=tmp_path / "ranks")
    for kind in configs:
        one, two = (tmp_path / f"runs/{name}-{kind}/final" for name in ("one", "two"))
        files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
        assert files == sorted(
            path.relative_to(two) for path in two.rglob("*") if path.is_file()
        ), kind
        for file in files:
            if file.suffix == ".safetensors":
                expected, found = load_file(one / file), load_file(two / file)
                assert expected.keys() == found.keys(), file
                for name, tensor in expected.items():
                    torch.testing.assert_close(
                        found[name], tensor, rtol=0, atol=1e-5, msg=f"{kind}: {file}: {name}"
                    )
            # transformers' record of how it loaded the tokenizer differs between processes, and so
            # does the seal
            elif file.name not in (
                "COMPLETE",
                "tokenizer_config.json",
            ):  # peft writes a set of names, in any order
                assert sorted((one / file).read_bytes()) == sorted((two / file).read_bytes()), (
                    f"{kind}: {file}"
                )
