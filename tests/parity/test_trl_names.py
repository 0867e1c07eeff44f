"""The names that TRL's users arrive with are those that TRL has, all of them."""

from __future__ import annotations

import dataclasses

from tests.parity.trl_side import trl

from gruppo.config.peer_options import peer_options
from gruppo.trl import translation


def test_every_setting_of_trl_is_known_and_none_that_it_does_not_have() -> None:
    there = {f.name for f in dataclasses.fields(trl.GRPOConfig)}
    known = {key for option in peer_options("trl") for key in option.keys}
    own = {name for name in there if name in trl.GRPOConfig.__annotations__}
    assert own - known - translation.WITHOUT_EFFECT == set()
    elsewhere = {"peft_config", "reward_funcs", "train_dataset", "model"}
    for named in peer_options("trl"):
        assert {*named.theirs.split(", ")} - there - elsewhere == set()
