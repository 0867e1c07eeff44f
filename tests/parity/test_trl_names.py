"""The names that TRL's users arrive with are those that TRL has, all of them."""

from __future__ import annotations

import dataclasses

from tests.parity.trl_side import trl

from gruppo.config.peer_options import peer_options


def test_every_setting_of_trl_is_known_and_none_that_it_does_not_have() -> None:
    fields = {
        kind: {f.name: f for f in dataclasses.fields(getattr(trl, kind))}
        for kind in ("GRPOConfig", "RLOOConfig")
    }
    known = {key for option in peer_options("trl") for key in option.keys}
    for kind, there in fields.items():
        own = {name for name in there if name in getattr(trl, kind).__annotations__}
        assert own - known == set()
    elsewhere = {"peft_config", "reward_funcs", "train_dataset", "model", "auto_find_batch_size"}
    for named in peer_options("trl"):
        if not named.part.startswith("PPO"):
            of = fields["RLOOConfig" if named.part.startswith("RLOO") else "GRPOConfig"]
            assert {*named.theirs.split(", ")} - of.keys() - elsewhere == set()
