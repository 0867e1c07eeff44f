"""What an image model cannot do: refused in one line, or counted; and what the commands say of
one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.trainer import diffusion_runs
from tests.trainer.diffusion_runs import reward

from gruppo import api, inference
from gruppo.build import Parts
from gruppo.cli.app import main
from gruppo.data.digits import load_digits
from gruppo.modalities.diffusion import load_denoiser
from gruppo.types import DataError, GruppoError

pytest.importorskip("PIL")

KL = {"stage__kl_coef": 0.1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no noise": (
        {"diffusion__eta": 0.0},
        r"eta=0.0 does not fit transition.*needs to be above 0",
    ),
    "the ODE": (
        {"diffusion__transition": "ode"},
        r"transition='ode' .* transition is one of",
    ),
    "an unknown transition": (
        {"diffusion__transition": "dddim"},
        r"transition='dddim' .* transition is one of",
    ),
    "a step of a diffusion": (
        {"diffusion__transition": "ddim"},
        r"'ddim' does not fit the flow schedule",
    ),
    "guidance without dropped classes": (
        {"diffusion__guidance": 2.0},
        r"guidance=2 needs a prediction without a condition.*Set guidance 1",
    ),
    "epsilon of a mean": (
        {"objective": "grpo", "objective__dims": "mean"},
        r"clip_high=0.2 of a mean over 192 dimensions .* 35 nats: it never clips.*"
        r"objective.clip_unit nats",
    ),
    "a clip that rounding sets off": (
        {"objective__clip_low": 1e-4, "objective__clip_high": 1e-4},
        r"clip_high=0.0001 .* of which is rounding alone",
    ),
    "k3 of normals": (
        KL | {"objective": "grpo"},
        r"kl='k3' of a Gaussian policy.*Set objective.kl exact",
    ),
    "an entropy bonus": (
        {"stage__entropy_coef": 0.1},
        r"entropy_coef is above 0.*stage.entropy_coef 0",
    ),
    "a stage's temperature": (
        {"stage__temperature": 0.5},
        r"temperature=0.5: images are sampled at 1",
    ),
    "a temperature": (
        {"rollout__temperature": 0.5},
        r"temperature.* images are sampled at 1",
    ),
    "top_k": ({"rollout__top_k": 5}, r"top_k=5, .* apply to tokens"),
    "longest completions": (
        {"rollout__max_new_tokens": 64},
        r"max_new_tokens=64 applies to text.*diffusion.steps",
    ),
    "a penalty on length": (
        {"objective__overlong": 3},
        r"overlong=3 penalizes long texts.*Leave objective.overlong out",
    ),
    "LoRA": (
        {"lora__rank": 4},
        r"LoRA is not supported by DenoiserPolicy.*Leave lora",
    ),
    "bfloat16": (
        {"compute": "bfloat16"},
        r"compute='bfloat16' holds the base below adapters.*compute float32",
    ),
    "another model as critic": (
        {"objective": "ppo", "critic__kind": "separate", "critic__model": "x"},
        r"critic.model=x has no effect: the critic of an image model is a head on its network",
    ),
    "a window past the end": (
        {"diffusion__train_to": 4},
        r"train_from=0, train_to=4 are not a range of the steps",
    ),
    "a share of one step": (
        {"diffusion__noise": "branched", "diffusion__train_fraction": 0.5},
        r"train_fraction=0.5 with noise='branched'",
    ),
    "a new network's width": (
        {"diffusion__width": 16},
        r"diffusion.width .* Leave diffusion.width out",
    ),
    "a pipeline's size": (
        {"diffusion__size": (8, 8)},
        r"diffusion.size is of a pipeline of diffusers",
    ),
    "no reward": ({"reward": ()}, r"no reward was given"),
    "a new network of texts": (
        {"model": "unet", "data": "arithmetic"},
        r"model unet is made for the data's images, and a target of 'arithmetic' is a str",
    ),
    "a folder that is no model": ({"model": str(Path(__file__).parent)}, r"tests/trainer"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_image_model_cannot_do_is_refused_in_one_line_before_anything_is_written(
    tmp_path, what
):
    changes, why = REFUSED[what]
    config = diffusion_runs.config(tmp_path, **changes)
    with pytest.raises(GruppoError, match=why) as error:
        api.start(config, diffusion_runs.parts_of(config))
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"diffusion__steps": 7},
            r"diffusion settings were given, and .* is no diffusion model. Leave",
        ),
        ({"reward": [reward("needs_images")]}, r"images.*|.*images"),
        ({"reward": ["jpeg_compressibility"]}, r"images"),
    ],
    ids=["diffusion options", "a function of images", "a built-in of images"],
)
def test_what_a_text_model_cannot_do_with_pictures_is_refused(tmp_path, changes, why):
    with pytest.raises(GruppoError, match=why) as error:
        api.start(tiny.config(tmp_path, **changes))
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


# --- rewards --------------------------------------------------------------------------------------


def test_a_reward_of_the_wrong_count_stops_the_run_in_one_line(tmp_path):
    config = diffusion_runs.config(tmp_path, reward=[reward("one_too_many")], evaluation__prompts=0)
    with pytest.raises(DataError, match=r"scored none of 12 completions: .*13.*12") as error:
        api.start(config, diffusion_runs.parts_of(config))
    assert "\n" not in str(error.value)


# --- data -----------------------------------------------------------------------------------------


def test_a_file_that_is_no_image_is_left_out_with_one_line_that_names_it(tmp_path, caplog):
    folder = diffusion_runs.write_images(tmp_path / "images", 12)
    (folder / "a/broken.png").write_bytes(b"no image")
    config = diffusion_runs.config(
        tmp_path, data=f"images:{folder}", evaluation__prompts=0, steps=4, rollout__prompts=6
    )
    api.start(config, Parts())
    messages = [
        record.getMessage() for record in caplog.records if "broken.png" in record.getMessage()
    ]
    assert len(messages) == 1 and messages[0].startswith("left out:") and "\n" not in messages[0]


def test_a_class_that_the_network_does_not_know_is_passed_over(tmp_path):
    folder = tmp_path / "images"
    diffusion_runs.write_images(folder, 12)
    (folder / "c").rename(folder / "y")
    for n in range(8):
        (folder / "d").mkdir(exist_ok=True)
        (folder / "d" / f"{n}.png").write_bytes(next((folder / "a").iterdir()).read_bytes())
    config = diffusion_runs.config(
        tmp_path, data=f"images:{folder}", evaluation__prompts=0, steps=2
    )
    path = api.start(config, Parts()).folder
    assert "3 is no class of this network" in (path / "log.txt").read_text()


@pytest.mark.parametrize("package", ["PIL", "mlxtend"])
def test_a_missing_package_is_named_in_one_line(tmp_path, monkeypatch, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    load_digits.cache_clear()  # an earlier test may have read them
    changes = (
        {"reward": ["jpeg_compressibility"]}
        if package == "PIL"
        else {"data": "digits", "model": "unet"}
    )
    config = diffusion_runs.config(tmp_path, **changes)
    with pytest.raises(
        GruppoError, match=rf'the package "?{package}.*pip install .*\[\w+\]"'
    ) as error:
        api.start(config, diffusion_runs.parts_of(config))
    assert "\n" not in str(error.value)


# --- commands -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with all its parts named, of two branches."""
    folder = tmp_path_factory.mktemp("finished")
    images = diffusion_runs.write_images(folder / "images")
    changes = {
        "data": f"images:{images}",
        "prompts__held_out_fraction": 0.3,
        "steps": 2,
        "optim__epochs": 2,
    }
    config = diffusion_runs.config(
        folder, diffusion__noise="branched", diffusion__eval_steps=3, **(changes | KL)
    )
    return api.start(config).folder


def shell(*args: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    assert left.value.code == code


def test_the_shell_evaluates_draws_and_exports_an_image_run(finished, tmp_path, capsys):
    shell("eval", str(finished), "--prompts", "3", "--show", "2")
    from PIL import Image

    with Image.open(finished / "images/evaluated.png") as sheet:
        assert sheet.width > 3 * 8
    output = capsys.readouterr().out
    after = json.loads((finished / "evaluations.json").read_text())[-1]
    assert (
        f"mean reward {after['mean']:.3f}" in output
        and "tensor" not in output
        and len(output.splitlines()) == 2
    )
    shell("sample", str(finished), "2", "0", "--n", "2", "--folder", str(tmp_path / "drawn"))
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [
        *(f"{place}-{label}-{n}.png" for place, label in enumerate("20") for n in range(2)),
        "sheet.png",
    ]
    assert "4 images in" in capsys.readouterr().out
    shell("export", str(finished), str(tmp_path / "out"))
    exported, final = (
        load_denoiser(tmp_path / "out").module,
        load_denoiser(finished / "final").module,
    )
    assert all(map(torch.equal, exported.state_dict().values(), final.state_dict().values()))


@pytest.mark.parametrize(
    ("args", "says", "code"),
    [
        (
            ["sample", "RUN", "77"],
            r"'0': 77 is no class of this network; it knows '0', '1', '2'",
            2,
        ),
        (["sample", "RUN", "²"], r"'²' is no class of this network", 2),
        (["sample", "RUN", "seven"], r"'seven' is no class of this network", 2),
        (["sample", "RUN", "1", "--n", "0"], r"--n 0 samples nothing", 2),
        (
            ["sample", "RUN", "1", "--temperature", "0.5"],
            r"temperature.* images are sampled at 1",
            2,
        ),
        (["export", "RUN", "--adapter"], r"has no adapter: its weights themselves were trained", 2),
        (["eval", "RUN", "--prompts", "0"], r"--prompts 0 leaves nothing to evaluate", 2),
    ],
    ids=lambda of: "-".join(of) if isinstance(of, list) else "",
)
def test_mistakes_at_the_shell_are_one_line_and_exit_with_2(
    finished, tmp_path, capsys, args, says, code
):
    args = [str(finished) if word == "RUN" else word for word in args]
    made = str(tmp_path / "made")
    shell(*args, *{"eval": [], "sample": ["--folder", made], "export": [made]}[args[0]], code=code)
    err = capsys.readouterr().err
    assert err.startswith("gruppo: ") and err.count("\n") == 1
    assert re.search(says, err), err
    assert not (tmp_path / "made").exists()


def test_a_run_without_a_reward_has_nothing_to_evaluate_and_can_be_asked(tmp_path):
    images = diffusion_runs.write_images(tmp_path / "images")
    changes = {
        "model": "unet",
        "data": f"images:{images}",
        "reward": (),
        "stage__rl_coef": 0.0,
        "stage__sup_coef": 1.0,
    }
    changes |= {"objective": "grpo", "diffusion__width": 8, "evaluation__prompts": 0, "steps": 1}
    run = api.start(diffusion_runs.config(tmp_path, **changes)).folder
    with pytest.raises(
        GruppoError,
        match=r"was trained without a reward, so nothing is measured. Ask it: .* sample",
    ):
        inference.evaluate_run(run, prompts=3)
    assert len(inference.sample(run, ["1"], tmp_path / "drawn")) == 2
