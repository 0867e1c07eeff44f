"""Runs of a language model of one's own, named as ``file.py:function``: all that a model in a
folder can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import own_models, processes, tiny
from tests.own_models import own
from tests.trainer.runs import FULL, Signalling, assert_same, metrics, newest, tensors, weights

from gruppo import api, inference
from gruppo import export as exporting
from gruppo.build import Parts, with_absolute_paths
from gruppo.cli.app import main
from gruppo.config import serialization
from gruppo.modalities import find_modality
from gruppo.modalities.text import from_pretrained
from gruppo.modalities.text.modality import found_model
from gruppo.trainer.loop import Stopped
from gruppo.types import GruppoError


def config(folder: Path, **changes: Any) -> Any:
    return tiny.config(folder, **({"model": own("model"), "compute": "auto"} | changes))


def begun(folder: Path, **changes: Any) -> Path:
    return api.start(config(folder, **changes)).folder


def one_line(call: Any) -> str:
    with pytest.raises(GruppoError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run, with a KL to its beginning."""
    return begun(tmp_path_factory.mktemp("whole"), stage__kl_coef=0.1)


def code_of(*typed: str) -> int:
    """How a command ends."""
    with pytest.raises(SystemExit) as ended:
        main(typed)
    return int(ended.value.code or 0)


# --- what a run leaves ----------------------------------------------------------------------------


def test_the_final_model_has_the_last_weights_and_names_its_function(run):
    assert tensors(run / "final/model.safetensors") == tensors(newest(run) / "model.safetensors")
    made = json.loads((run / "final/module.json").read_text())
    assert made["made_by"] == own("model")
    model = json.loads((run / "manifest.json").read_text())["model"]
    assert model == {"name": own("model"), **made}
    assert json.loads((run / "config.json").read_text())["model"] == own("model")


def test_it_has_learned_and_its_kl_begins_at_0(run):
    steps = [row for row in metrics(run) if "reward/mean" in row]
    assert steps[0]["kl/ref_nats"] == 0.0 < steps[-1]["kl/ref_nats"]
    assert steps[0]["mismatch/max_nats"] < 1e-3
    first = from_pretrained(own("model")).module
    assert not torch.equal(
        weights(run), torch.cat([p.flatten().double() for _, p in sorted(first.named_parameters())])
    )


def test_a_run_is_asked_exported_and_trained_further_as_a_folder(run, tmp_path, capsys):
    (answer,) = inference.sample(run, ["1 + 1 = ?"], max_new_tokens=6)
    exporting.export(run, tmp_path / "copy")
    assert inference.sample(tmp_path / "copy", ["1 + 1 = ?"], max_new_tokens=6) == [answer]
    assert code_of("sample", str(run), "1 + 1 = ?", "--max-new-tokens", "6") == 0
    assert capsys.readouterr().out.strip() == answer[0].strip()
    further = begun(tmp_path, model=str(run), steps=1, stage__kl_coef=0.1)
    model = json.loads((further / "manifest.json").read_text())["model"]
    assert (model["name"], model["made_by"]) == (str(run), own("model"))
    assert (further / "final/module.json").read_text() == (run / "final/module.json").read_text()


def test_a_name_means_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(own_models.FILE).parent)
    named = with_absolute_paths(config(tmp_path, model="own_models.py:model"))
    assert named.model == own("model") and find_modality(named.model).name == "function"
    assert found_model("own_models.py:model")[1]["made_by"] == own("model")
    assert (
        with_absolute_paths(config(tmp_path, model="tests.own_models:model")).model
        == "tests.own_models:model"
    )


# --- stopped and resumed --------------------------------------------------------------------------


def test_a_run_that_is_stopped_goes_on_to_the_bit(tmp_path):
    whole = begun(tmp_path / "whole", **FULL)
    reward = Signalling(4)

    def noisy(completions, **_):
        reward(completions)
        return tiny.noisy(completions)

    stopped = serialization.load(whole / "config.json")
    stopped = api.change(stopped, {"runs_dir": str(tmp_path / "runs")})
    with pytest.raises(Stopped):
        api.start(stopped, Parts(rewards=[noisy]))
    assert_same(api.start(tmp_path / "runs/run").folder, whole)


FROM_A_FILE = """
from pathlib import Path

from tests.own_models import (TinyGPT, wrapped)


def model():
    policy = wrapped(TinyGPT())
    policy.module.head.bias.data.fill_(float(Path(__file__).with_name("bias").read_text()))
    return policy
"""


def stopped_at_step_1(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A stopped run and the file of its model, which reads a number from the file ``bias`` beside
    it."""
    file = folder / "mine.py"
    file.write_text(FROM_A_FILE)
    (folder / "bias").write_text("0.25")
    reward = Signalling(3)
    reward.__name__ = "digits"
    with pytest.raises(Stopped):
        api.start(config(folder, model=f"{file}:model", **changes), Parts(rewards=[reward]))
    return folder / "runs/run", file


def test_a_function_that_makes_other_weights_by_now_is_refused_where_they_are_the_reference(
    tmp_path,
):
    run, file = stopped_at_step_1(tmp_path, stage__kl_coef=0.1)
    (file.parent / "bias").write_text("0.5")
    assert f"the model {file}:model is not the one that {run} began with" in one_line(
        lambda: api.start(run)
    )
    (file.parent / "bias").write_text("0.25")
    assert api.start(run).model == run / "final"


# --- references, critics, dtypes, adapters --------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"reference__place": "cpu"},
        {"reference__kind": "mixed", "reference__update_every": 2},
        {"compute": "bfloat16"},
        {"model": own("in_bfloat16")},
        {"objective": "ppo"},
        {"objective": "ppo", "critic__kind": "separate"},
    ],
    ids=["on the CPU", "mixed", "bfloat16", "the function's bfloat16", "critic", "separate critic"],
)
def test_references_critics_and_dtypes_are_as_of_any_model(tmp_path, changes):
    run = begun(tmp_path, stage__kl_coef=0.1, steps=3, **changes)
    steps = [row for row in metrics(run) if "reward/mean" in row]
    assert steps[0]["kl/ref_nats"] == 0.0 < steps[1]["kl/ref_nats"]
    expected = "bfloat16" if "bfloat16" in str(changes) else "float32"
    assert json.loads((run / "manifest.json").read_text())["compute_dtype"] == expected
    assert (
        inference.evaluate_run(run, prompts=4)[0].mean
        == json.loads((run / "evaluations.json").read_text())[-1]["mean"]
    )


def test_a_critic_of_another_tokenizer_cannot_be_compared_and_is_refused(tmp_path):
    critic = {"objective": "ppo", "critic__kind": "separate", "critic__model": own("model")}
    text = one_line(lambda: begun(tmp_path, **critic))
    assert (
        "without a vocabulary, which cannot be compared" in text
        and "or none, for a copy of the policy" in text
    )


# --- refused before anything is written -----------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (own("modle"), "Did you mean"),
        (own("bare"), "it needs a policy"),
        (own("raises"), "raised ValueError: no such checkpoint"),
        (own("looks_ahead"), "is not causal"),
        (own("model").replace("own_models.py", "own_model.py"), "there is no file"),
        (own_models.FILE, "a function in it makes the model"),
    ],
)
def test_a_name_that_makes_no_model_ends_the_command_with_one_line(tmp_path, capsys, model, said):
    data = tiny.write_rows(tmp_path / "data.jsonl")
    runs = tmp_path / "runs"
    typed = [
        "--model",
        model,
        "--data",
        data,
        "--reward",
        tiny.reward("digits"),
        "--runs-dir",
        str(runs),
    ]
    typed += ["--scoring.isolate", "False"]
    assert code_of("train", "plain", *typed) == 2
    err = capsys.readouterr().err.strip()
    assert said in err and "\n" not in err and "Traceback" not in err
    assert not runs.exists()


# --- what it would do -----------------------------------------------------------------------------


# --- several ranks --------------------------------------------------------------------------------


def train(given: dict[str, Any]) -> None:
    api.start(serialization.from_dict(given))


def of_two_ranks(folder: Path, name: str, ranks: int = 2, **changes: Any) -> list[Any]:
    given = config(folder, name=name, steps=2, stage__kl_coef=0.1, optim__eps=0.1, **changes)
    children = processes.ranks(ranks, train, serialization.to_dict(given), folder=folder / name)
    for child in children:
        child.wait()
    return children


def test_two_ranks_are_one_run(tmp_path):
    for name, ranks in (("one", 1), ("two", 2)):
        children = of_two_ranks(tmp_path, name, ranks)
        assert not any(child.wait() for child in children), "\n".join(
            child.err for child in children
        )
    one, two = (weights(tmp_path / "runs" / name) for name in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
    assert (tmp_path / "runs/two/final/module.json").is_file()


def test_ranks_whose_functions_make_other_weights_are_refused(tmp_path):
    children = of_two_ranks(tmp_path, "odd", model=own("other_on_each_rank"))
    assert all(child.wait() for child in children)
    assert any("made other weights on each of the 2 ranks" in child.err for child in children)
    assert not (tmp_path / "runs/odd/config.json").exists()
