"""Levels of noise: against the papers' formulas."""

from __future__ import annotations

import math

import pytest
import torch
from tests.fakes_diffusion import ddpm_schedule

from gruppo.modalities.diffusion.schedules import FlowSchedule
from gruppo.types import GruppoError


def test_a_flow_goes_from_noise_alone_to_data_in_even_times():
    times = FlowSchedule().times(4)
    assert times.tolist() == [1, 0.75, 0.5, 0.25, 0]
    alpha, sigma = FlowSchedule().level(times)
    assert alpha.tolist() == [0, 0.25, 0.5, 0.75, 1] and sigma.tolist() == times.tolist()


def test_a_shift_moves_times_towards_noise_by_the_formula():
    """3 t / (1 + 2 t) at t = 1, 0.5, 0; of a time to train at too."""
    assert FlowSchedule(3.0).times(2).tolist() == [1, pytest.approx(0.75), 0]
    assert FlowSchedule(3.0).training_times(torch.tensor([0.0, 0.5])).tolist() == [
        1,
        pytest.approx(0.75),
    ]


def test_a_flow_is_trained_at_no_time_0():
    assert FlowSchedule().training_times(
        torch.tensor([0.0, 0.25, 1 - 2**-53], dtype=torch.float64)
    ).tolist() == [
        1,
        0.75,
        2**-53,
    ]


def test_linear_betas_are_those_of_ddpm():
    """a_t = prod (1 - beta_s), betas from 1e-4 to 0.02 in 1000 steps; Ho et al.: a_T is about
    4e-5."""
    alpha, sigma = ddpm_schedule().level(torch.tensor([-1.0, 0.0, 1.0, 999.0]))
    first, second = 1 - 1e-4, 1 - (1e-4 + (0.02 - 1e-4) / 999)
    assert alpha[:3].tolist() == pytest.approx(
        [1, math.sqrt(first), math.sqrt(first * second)], rel=1e-6
    )
    assert float(alpha[3] ** 2) == pytest.approx(4.036e-5, rel=1e-3)
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones(4, dtype=torch.float64))


def test_a_diffusion_s_sampler_begins_at_the_noisiest_time_and_ends_at_clean_data():
    assert ddpm_schedule().times(4).tolist() == [999, 749, 499, 249, -1]
    assert ddpm_schedule().times(1).tolist() == [999, -1]
    assert ddpm_schedule().training_times(torch.tensor([0.0, 0.5, 0.9999])).tolist() == [
        0,
        500,
        999,
    ]


def test_more_steps_than_times_are_refused():
    with pytest.raises(GruppoError, match="11 steps are more than the 10 times"):
        ddpm_schedule(num_train_timesteps=10).times(11)
