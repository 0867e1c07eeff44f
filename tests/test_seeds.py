"""Addressed randomness: what an address gives, and what it does not depend on."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gruppo.seeds import generator_at, seed_at, uniforms_at


def test_seeds_are_the_same_on_every_machine_and_in_every_version():
    """Recorded once: a change would break the resuming of runs."""
    assert seed_at(0) == 3581690635855307741
    assert seed_at(7, "sample", 3, 11) == 7915577249245174713
    assert uniforms_at(7, 3, 11, 2).tolist() == [0.13803086938176645, 0.6344987606149635]


@pytest.mark.silent_bug(26)
def test_every_address_has_a_seed_of_its_own():
    addresses = list(product(range(3), ["sample", "minibatches"], range(20), range(20)))
    assert len({seed_at(*address) for address in addresses}) == len(addresses)


def test_parts_of_an_address_are_told_apart_by_place_and_type():
    assert (
        len(
            {
                seed_at(1, 23),
                seed_at(12, 3),
                seed_at(123),
                seed_at("1", 23),
                seed_at(1, "23"),
                seed_at(23, 1),
            }
        )
        == 6
    )


@pytest.mark.silent_bug(34)
@settings(max_examples=20)
@given(
    st.integers(0, 2**40),
    st.integers(0, 10**6),
    st.integers(0, 100),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_asking_for_more_of_an_address_only_appends(seed, draw, sample, few, more):
    long = uniforms_at(seed, draw, sample, few + more)
    assert torch.equal(long[:few], uniforms_at(seed, draw, sample, few))
    assert ((long >= 0) & (long < 1)).all()


@pytest.mark.silent_bug(34)
def test_neither_the_global_generator_nor_other_addresses_matter():
    first = uniforms_at(1, 2, 3, 8)
    before = torch.get_rng_state()
    uniforms_at(9, 9, 9, 1000)
    generator_at("else", 4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert torch.equal(uniforms_at(1, 2, 3, 8), first)


@pytest.mark.silent_bug(26)
def test_neighbouring_samples_are_independent():
    """Correlations of 20 000 uniforms of neighbouring samples, draws and seeds: below five standard
    errors."""
    x = torch.stack(
        [uniforms_at(*address, 20_000) for address in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]]
    )
    off_diagonal = torch.corrcoef(x) - torch.eye(4)
    assert off_diagonal.abs().max() < 5 / 20_000**0.5
    assert (x.mean(1) - 0.5).abs().max() < 5 * (1 / 12 / 20_000) ** 0.5
