"""Language models of one's own by name: what the name means, what is saved, and what cannot be
opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import own_models
from tests.fakes import TinyGPT, requests
from tests.own_models import own

from gruppo.modalities.common.state_dict import load_strictly
from gruppo.modalities.text import from_pretrained
from gruppo.modalities.text.custom import absolute_spec, names_function
from gruppo.types import GruppoError, NumericalStop, Sampling

IDS = torch.tensor([[5, 6, 7, 8]])


def said(call, kind=GruppoError) -> str:
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind and "\n" not in str(error.value)
    return str(error.value)


# --- what a name means ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "means_function"),
    [
        ("models.py:gpt", True),
        ("folder/models.py:gpt", True),
        ("C:\\mine\\models.py:gpt", True),
        ("folder/models:gpt", True),  # to be told that there is no such file
        ("models.py", True),  # to be told that a function is missing
        ("tests.own_models:model", True),
        ("smollm2-135m", False),
        ("Qwen/Qwen2.5-0.5B", False),
        ("C:\\mine\\folder", False),
        ("C:mine", False),
        ("diffusers:owner/name", False),
        ("unet", False),
        ("", False),
    ],
)
def test_a_name_means_a_function_or_a_folder(name, means_function):
    assert names_function(name) == means_function


def test_a_folder_of_that_very_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names_function("gpt.py:model")
    own_models.model().save(Path("gpt.py:model"))
    assert not names_function("gpt.py:model")
    assert "gpt.py:model' has no config.json" in said(lambda: from_pretrained("./gpt.py:model"))


def test_a_function_is_named_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.py").touch()
    assert absolute_spec("a/b.py:f") == f"{tmp_path}/a/b.py:f"
    assert absolute_spec("tests.own_models:model") == "tests.own_models:model"


def test_weights_hang_on_the_seed_alone_and_the_global_generator_rests():
    torch.manual_seed(4)
    before = torch.random.get_rng_state()
    first, again, other = (
        from_pretrained(own("model"), seed=seed).module.head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_dtype_is_the_functions_own_unless_one_is_asked_for():
    assert from_pretrained(own("in_bfloat16")).compute_dtype == torch.bfloat16
    assert from_pretrained(own("model")).compute_dtype == torch.float32
    requested = from_pretrained(own("model"), compute="bfloat16")
    assert (
        requested.compute_module is not requested.module
        and requested.compute_module.head.weight.dtype == torch.bfloat16
    )
    assert requested.module.head.weight.dtype == torch.float32
    assert (
        from_pretrained(own("in_bfloat16"), compute="float32").compute_module.head.weight.dtype
        == torch.float32
    )


# --- saved, and opened again ----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A model whose weights are no longer those that its function makes."""
    policy = from_pretrained(own("model"))
    with torch.no_grad():
        policy.module.head.bias.normal_(generator=torch.Generator().manual_seed(1))
    policy.save(tmp_path / "saved")
    return policy, tmp_path / "saved"


def test_a_saved_policy_is_made_again_by_its_function_and_samples_the_same(saved):
    policy, folder = saved
    again = from_pretrained(folder)
    assert torch.equal(again.module.head.bias, policy.module.head.bias)
    sampled = [
        one.sample(requests(3, 2, 2), Sampling(max_actions=8), seed=0) for one in (policy, again)
    ]
    assert torch.equal(sampled[0].actions, sampled[1].actions)
    assert torch.equal(sampled[0].sampler_logprobs, sampled[1].sampler_logprobs)
    made = json.loads((folder / "module.json").read_text())
    assert made["made_by"] == own("model")


def test_a_function_with_a_folder_is_told_where_the_weights_lie(tmp_path):
    own_models.told.clear()
    from_pretrained("tests.own_models:told_where").save(tmp_path / "saved")
    from_pretrained(tmp_path / "saved")
    assert own_models.told == [None, tmp_path / "saved"]


def test_tied_weights_lie_in_the_file_once_and_stay_tied(tmp_path):
    policy = from_pretrained(own("tied"))
    with torch.no_grad():
        policy.module.tokens.weight.mul_(3)
    policy.save(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert len(names & {"tokens.weight", "head.weight"}) == 1
    again = from_pretrained(tmp_path).module
    assert again.head.weight is again.tokens.weight
    assert torch.equal(again.head.weight, policy.module.head.weight)


def test_a_model_given_in_memory_is_saved_without_a_name(tmp_path):
    own_models.model().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_function_may_return_a_policy_of_transformers_which_is_saved_as_such(tmp_path):
    from_pretrained(own("of_hugging_face")).save(tmp_path)
    assert (tmp_path / "config.json").is_file() and not (tmp_path / "module.json").exists()
    assert from_pretrained(tmp_path, compute="float32").context == 128


# --- weights that do not fit ----------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused_with_names_and_change_nothing():
    module = TinyGPT()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    weights = {name: torch.zeros_like(value) for name, value in before.items()}
    del weights["head.bias"]
    weights["extra"] = torch.zeros(1)
    weights["tokens.weight"] = torch.zeros(2, 2)
    text = said(lambda: load_strictly(module, weights, "there"))
    assert (
        "the weights in there are of another network than TinyGPT: 1 missing: head.bias; 1 "
        "unknown: extra; " in text
    )
    assert f"1 of another shape: tokens.weight (of {len(before)})" in text
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("odd", ["missing", "unknown", "shape"])
def test_one_weight_that_does_not_fit_is_enough(saved, odd):
    _, folder = saved
    weights = load_file(folder / "model.safetensors")
    if odd == "missing":
        del weights["head.bias"]
    elif odd == "unknown":
        weights["more"] = torch.zeros(1)
    else:
        weights["head.bias"] = weights["head.bias"][:-1].clone()
    save_file(weights, folder / "model.safetensors")
    named = {
        "missing": "1 missing: head.bias",
        "unknown": "1 unknown: more",
        "shape": "1 of another shape: head.bias",
    }
    assert named[odd] in said(lambda: from_pretrained(folder))


@pytest.mark.parametrize("name", ["module.json", "model.safetensors"])
def test_a_damaged_folder_is_refused_by_the_file(saved, name):
    _, folder = saved
    (folder / name).write_bytes(b"{}")
    assert f"{folder / name} cannot be read" in said(lambda: from_pretrained(folder))


def test_a_folder_whose_file_is_gone_says_which(tmp_path):
    file = tmp_path / "gone.py"
    file.write_text("from tests.own_models import model\n")
    from_pretrained(f"{file}:model").save(tmp_path / "saved")
    file.unlink()
    text = said(lambda: from_pretrained(tmp_path / "saved"))
    assert text.startswith(
        f"the model {tmp_path / 'saved'} is made by {file}:model, which cannot be used: there is no"
    )


# --- functions that make none ---------------------------------------------------------------------

REFUSED = {
    "modle": r"has no 'modle'; it has: .*Did you mean .*own_models.py:model\?",
    "number": r"number raised TypeError: .*not callable.*\. Return gruppo\.from_module",
    "bare": r"bare returned a TinyGPT; it needs a policy\. Return "
    r"gruppo\.from_module\(module, tokenizer",
    "wants_more": r"missing 1 required positional argument: .width.*\. Return",
    "raises": r"raised ValueError: no such checkpoint \(own_models\.py:\d+\)\. Return gruppo",
    "ends": r"ends raised SystemExit: I end here \(own_models\.py:\d+\)",
    "gives_loss": r"a GivesLoss, raised AttributeError: .*It needs to map ids",
    "last_only": r"a LastOnly, gave \[2, 257\] for ids \[2, 3\]",
    "looks_ahead": r"a LooksAhead, is not causal: its logits of a token change with the token "
    r"after it",
    "takes_few": r"a TinyGPT, raised RuntimeError: The size of tensor .* for ids of shape \[2, 3\]",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_makes_no_model_is_refused_in_one_line(name):
    with pytest.raises(GruppoError, match=REFUSED[name]) as error:
        from_pretrained(own(name))
    assert "\n" not in str(error.value)


def test_logits_that_are_not_finite_are_a_numerical_stop():
    assert "logits that are not finite" in said(
        lambda: from_pretrained(own("not_finite")), NumericalStop
    )


def test_a_file_without_a_function_and_a_file_that_is_not_there_are_refused():
    assert "Name it too, as" in said(lambda: from_pretrained(own_models.FILE))
    near = own_models.FILE.replace("own_models", "own_model")
    assert f"there is no file {near}" in said(lambda: from_pretrained(f"{near}:model"))
    assert "Did you mean own_models.py?" in said(lambda: from_pretrained(f"{near}:model"))


def test_a_package_is_named_by_its_parts():
    assert from_pretrained("tests.own_models:model").module.head.bias.shape == (257,)
