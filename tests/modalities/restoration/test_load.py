"""Networks and policies by name and in folders: all weights, or one line that names what is
missing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.modalities.restoration.fakes import (
    POLICIES,
    SAMPLING,
    TinyNetwork,
    policy_of,
    requests,
)

from gruppo.modalities.restoration import (
    BandGains,
    LowResolution,
    PixelNoise,
    RestorationUNet,
    load_restorer,
    open_network,
    open_restorer,
)
from gruppo.modalities.restoration.actions import open_action
from gruppo.types import GruppoError

SMALL = ("unet:width=4", "unet:width=5")


@pytest.mark.parametrize("network", SMALL)
@pytest.mark.parametrize("action", ["pixels:std=0.05", "band_gains:grid=4,std=0.2"])
def test_what_is_saved_and_loaded_draws_the_same(tmp_path, network, action):
    policy = open_restorer(network, action, loss="l1", seed=5)
    policy.save(tmp_path / "saved")
    loaded = load_restorer(tmp_path / "saved")
    loaded.save(tmp_path / "again")
    first, again = ((tmp_path / name / "restorer.json").read_text() for name in ("saved", "again"))
    assert first == again and loaded.spec == network.partition(":")[0]
    a, b = (one.sample(requests(2, 1), SAMPLING, seed=1) for one in (policy, loaded))
    assert torch.equal(a.actions, b.actions) and torch.equal(
        torch.stack(a.completions), torch.stack(b.completions)
    )


@pytest.mark.parametrize("make", POLICIES, ids=lambda make: make.__name__)
def test_a_network_that_is_not_ours_is_given_and_gets_the_weights(tmp_path, make):
    policy = make()
    policy.save(tmp_path)
    with pytest.raises(
        GruppoError, match=r"of a module of your own. Give load_restorer that module"
    ):
        load_restorer(tmp_path)
    loaded = load_restorer(tmp_path, TinyNetwork())
    a, b = (one.sample(requests(2), SAMPLING, seed=1) for one in (policy, loaded))
    assert torch.equal(a.actions, b.actions)


OWN = """
import torch

class Mine(torch.nn.Module):
    def __init__(self, channels=1):
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv(x)

def needs(something):
    return Mine()

def none():
    return 3

number = 3
"""


def test_an_own_network_in_a_file_is_found_again_by_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    spec = f"{tmp_path / 'mine.py'}:Mine"
    policy = open_restorer(spec, "pixels")
    assert policy.module.network.conv.in_channels == 3
    policy.save(tmp_path / "saved")
    assert torch.equal(
        load_restorer(tmp_path / "saved").module.network.conv.weight,
        policy.module.network.conv.weight,
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("needs", "cannot be called without arguments other than channels"),
        ("none", "is a int; it needs to be a torch.nn.Module"),
        ("number", "is a int; it needs to be a torch.nn.Module"),
        ("Mime", "has no 'Mime'.*Did you mean .*Mine"),
    ],
)
def test_what_is_no_network_is_refused(tmp_path, name, why):
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(GruppoError, match=why):
        open_network(f"{tmp_path / 'mine.py'}:{name}")


def test_the_weights_of_another_network_are_refused_with_the_names(tmp_path):
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)).state_dict()
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(GruppoError) as caught:
        open_restorer("unet:width=4", "pixels", weights=tmp_path / "other.safetensors")
    message = str(caught.value)
    assert "of another network than RestorationUNet: 28 missing: coarse.0.first.bias" in message
    assert "2 unknown: 0.bias, 0.weight (of 28)" in message and "\n" not in message
    changed = RestorationUNet(3, width=4).state_dict()
    changed["down.bias"] = torch.zeros(7)
    save_file(changed, tmp_path / "changed.safetensors")
    with pytest.raises(GruppoError, match=r"1 of another shape: down.bias"):
        open_restorer("unet:width=4", "pixels", weights=tmp_path / "changed.safetensors")


def test_a_policy_s_network_begins_another_policy(tmp_path):
    first = open_restorer("unet:width=4", "pixels", seed=1)
    first.save(tmp_path)
    second = open_restorer("unet:width=4", "band_gains:grid=2", weights=tmp_path, seed=2)
    for mine, theirs in zip(
        second.module.network.parameters(), first.module.network.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
    with pytest.raises(GruppoError, match="of another network than RestorationUNet"):
        open_restorer("unet:width=6", "pixels", weights=tmp_path)


def test_a_damaged_folder_is_one_line(tmp_path):
    policy = policy_of(PixelNoise())
    policy.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["network.conv_in.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(GruppoError, match=r"1 missing: network\.conv_in\.bias"):
        load_restorer(tmp_path, TinyNetwork())
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(GruppoError, match="holds no restoration policy"):
        load_restorer(tmp_path, TinyNetwork())
    policy.save(tmp_path)
    (tmp_path / "restorer.json").write_text(json.dumps({"channels": 3}))
    with pytest.raises(GruppoError, match="holds no restoration policy: 'action'"):
        load_restorer(tmp_path)
    with pytest.raises(GruppoError, match="holds no restoration policy: No such file"):
        load_restorer(tmp_path / "nowhere")


def test_networks_and_actions_are_drawn_by_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    a, b, c = (open_restorer("unet:width=4", "band_gains", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    weights = [[p for p in one.module.parameters() if p.std() > 0] for one in (a, b, c)]
    assert all(torch.equal(x, y) for x, y in zip(weights[0], weights[1], strict=True))
    sampled = [(x, y) for x, y in zip(weights[0], weights[2], strict=True)]
    assert all(not torch.equal(x, y) for x, y in sampled) and len(sampled) > 10


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("pixels", PixelNoise(3)),
        ("low_resolution:grid=4,detached=false", LowResolution(3, grid=4, detached=False)),
        ("band_gains:grid=4,std=0.2", BandGains(3, grid=4, std=0.2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_action_is_written_as_a_name_with_options(text, made):
    assert open_action(text).settings == made.settings


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gains", "there is no action 'gains'; write pixels"),
        ("band_gain", "Did you mean band_gains"),
        ("band_gains:grid=many", "cannot read grid='many'"),
        ("band_gains:size=3", "there is no option 'size'"),
        ("band_gains:grid=0", "grid=0 of 3 channels: it needs 1 cell"),
        ("pixels:std=-1", "std=-1 of an action"),
    ],
)
def test_an_action_that_there_is_not_is_refused(text, why):
    with pytest.raises(GruppoError, match=why):
        open_action(text)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("unett", "Did you mean unet"),
        ("unet:size=3", "there is no option 'size'"),
        ("unet:width=0", "width=0; it needs 1"),
    ],
)
def test_a_network_that_there_is_not_is_refused(spec, why):
    with pytest.raises(GruppoError, match=why):
        open_network(spec)


def test_the_network_is_the_identity_at_first_of_any_size():
    torch.manual_seed(0)
    network = RestorationUNet(3, width=4)
    x = torch.rand(2, 3, 13, 10)
    assert torch.equal(network(x), x)
    for parameter in network.double().parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    output = network(x.double())
    torch.testing.assert_close(network(x[1:].double()), output[1:], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(output, x.double())
