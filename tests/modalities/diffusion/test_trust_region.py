"""What a clip means in joint nats: the project's own table, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gruppo.core.objective import GRPO, PRESETS, Objective
from gruppo.modalities.common.validation import check_trust_region, joint_clip_nats
from gruppo.types import GruppoError

MEAN = replace(GRPO, dims="mean")


@pytest.mark.silent_bug(37)
@pytest.mark.parametrize(
    ("dims", "at_1e4", "at_02"),
    [(64, 0.0064, 11.67), (784, 0.0784, 142.9), (16384, 1.64, 2987), (49152, 4.92, 8962)],
)
def test_a_mean_over_dimensions_allows_as_many_times_the_nats(dims, at_1e4, at_02):
    """facts: 0.006 and 12; 0.08 and 143; 1.6 and 2 990; 4.9 and 8 960."""
    assert joint_clip_nats(MEAN, dims) == pytest.approx(at_02, rel=2e-3)
    assert joint_clip_nats(replace(MEAN, clip_high=1e-4), dims) == pytest.approx(at_1e4, rel=5e-3)


@pytest.mark.silent_bug(37)
@pytest.mark.parametrize("dims", [64, 784, 49152])
def test_a_clip_of_the_joint_density_means_the_same_at_every_resolution(dims):
    nats = replace(GRPO, clip_unit="nats", clip_high=0.7)
    assert joint_clip_nats(nats, dims) == 0.7
    assert joint_clip_nats(replace(nats, dims="mean"), dims) == pytest.approx(0.7 * dims)
    check_trust_region(nats, dims)


@pytest.mark.silent_bug(37)
@pytest.mark.parametrize("objective", [MEAN, replace(PRESETS["cispo"], dims="mean")])
def test_a_clip_that_never_clips_is_refused_with_the_table_and_two_ways_out(objective):
    says = (
        r"of a mean over 784 dimensions lets .* it never clips.*12 nats in 64.*143 in 784.*"
        r"objective.clip_unit nats"
    )
    with pytest.raises(GruppoError, match=says):
        check_trust_region(objective, 784)
    with pytest.raises(GruppoError, match=r"objective.clip_high 0.0013 for the same with the mean"):
        check_trust_region(MEAN, 784)
    check_trust_region(replace(MEAN, clip_low=0.0013, clip_high=0.0013), 784)
    with pytest.raises(GruppoError, match=r"clip_high=0.2 nats of a mean"):
        check_trust_region(replace(MEAN, clip_unit="nats"), 784)


def test_a_clip_that_rounding_sets_off_is_refused():
    """ddpo's 1e-4 with the joint density: a tenth of it is far below what float32 loses."""
    with pytest.raises(
        GruppoError, match=r"clip_high=0.0001 with dims='sum'.*rounding alone.*at least 0.0084"
    ):
        check_trust_region(replace(GRPO, clip_low=1e-4, clip_high=1e-4), 784)


@pytest.mark.parametrize(
    ("objective", "dims"),
    [
        (MEAN, 64),  # 12 nats
        (replace(MEAN, clip_high=1e-4, clip_low=1e-4), 16384),
        (GRPO, 784),
        (replace(MEAN, surrogate="reinforce"), 784),
        (Objective(surrogate="sapo", dims="mean"), 784),
        (GRPO, 1),  # tokens
    ],
)
def test_what_clips_somewhere_and_what_does_not_clip_at_all_is_let_through(objective, dims):
    check_trust_region(objective, dims)
