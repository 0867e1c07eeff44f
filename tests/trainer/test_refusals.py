"""What cannot learn is refused in one line, through gruppo.train and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import tiny

import gruppo
from gruppo.types import GruppoError

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a group of one": (
        {"rollout__group_size": 1},
        r"group_size=1 gives no baseline.*objective reinforce",
    ),
    "clip bounds that cross": ({"objective__clip_low": 1.5}, r"clip_low=1.5.*needs clip_low <= 1"),
    "a dual clip inside": (
        {"objective__dual_clip": 1.1},
        r"dual_clip=1.1 crosses.*objective__dual_clip 3",
    ),
    "correction bounds that cross": (
        {"objective__correction": "mask", "objective__correction_low": 4.0},
        r"correction_low=4, correction_high=3: 1, the weight.*Set objective__correction_low 0",
    ),
    "a negative kl_coef": ({"stage__kl_coef": -0.1}, r"stage__kl_coef=-0.1 .*at least 0"),
    "a negative value_clip": (
        {"objective": "ppo", "objective__value_clip": -1.0},
        r"value_clip=-1.0 is out of range",
    ),
    "lam above 1": (
        {"objective": "ppo", "objective__lam": 1.5},
        r"lam=1.5 is out of range.*Set objective__lam 0.95",
    ),
    "no lesson for the critic": (
        {"objective": "ppo", "stage__value_coef": 0.0},
        "the critic is never trained",
    ),
    "a penalty on every length": (
        {"objective": "dapo", "objective__overlong": 8},
        r"overlong=8 penalizes every length up to the longest, 8.*Set objective__overlong 1",
    ),
    "several updates without a ratio": (
        {"objective": "rloo", "optim__epochs": 2},
        r"surrogate='reinforce' has no",
    ),
}


def train(folder: Path, **changes: Any) -> Any:
    return gruppo.train(tiny.config(folder), show=False, **changes)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_learn_is_refused_in_one_line_before_anything_is_written(tmp_path, what):
    changes, why = REFUSED[what]
    with pytest.raises(GruppoError, match=why) as error:
        train(tmp_path, **changes)
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()
