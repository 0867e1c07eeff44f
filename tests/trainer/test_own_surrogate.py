"""--objective.surrogate FILE.py:NAME: a loss of the user's own, per action, in place of a built-in
surrogate."""

from __future__ import annotations

import json

import pytest
from tests import tiny
from tests.trainer.runs import metrics

import gruppo
from gruppo.types import GruppoError

CLIP = """
import torch


def clip(log_ratio, advantages, logprobs, mask):
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def one_number(log_ratio, advantages, logprobs, mask):
    return (log_ratio * advantages).sum()


SEVEN = 7
"""
OPTIONS = {"steps": 2, "optim__minibatches": 2, "evaluation__prompts": 0}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "losses.py"
    path.write_text(CLIP)
    return path


def test_the_clip_written_again_trains_the_same_weights_in_micro_batches(file, tmp_path):
    folders = []
    for name, surrogate in (("built-in", "clip"), ("own", f"{file}:clip")):
        options = OPTIONS | {"name": name, "optim__token_budget": 60}
        config = tiny.config(tmp_path, **options, objective__surrogate=surrogate)
        folders.append(gruppo.train(config, show=False).folder)
    weights = [(folder / "final/model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    built_in, own = ([row["loss/policy"] for row in metrics(folder)] for folder in folders)
    assert built_in == own


def test_a_resumed_run_whose_loss_has_changed_is_refused(file, tmp_path):
    options = OPTIONS | {"saving__every": 1, "objective__surrogate": f"{file}:clip"}
    folder = gruppo.train(tiny.config(tmp_path, **options), show=False).folder
    assert json.loads((folder / "config.json").read_text())["objective"]["surrogate"] == (
        f"{file}:clip"
    )
    file.write_text(CLIP.replace("1.2", "1.3"))
    config = json.loads((folder / "config.json").read_text()) | {"steps": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(GruppoError, match=r"code of .*losses\.py:clip has changed"):
        gruppo.resume(folder, show=False)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("one_number", r"returned \[\]; it needs the loss of each action, \[\d+, \d+\]"),
        ("SEVEN", "is a int; it needs to be a function"),
        ("none", "has no 'none'"),
    ],
)
def test_what_is_no_loss_of_each_action_is_refused_in_one_line(name, problem, file, tmp_path):
    config = tiny.config(tmp_path, **OPTIONS, objective__surrogate=f"{file}:{name}")
    with pytest.raises(GruppoError, match=problem) as error:
        gruppo.train(config, show=False)
    assert "\n" not in str(error.value)
