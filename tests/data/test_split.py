"""Which side a prompt falls on depends on its content alone."""

from __future__ import annotations

import hashlib

import pytest

from gruppo.data.split import hash_unit, is_held_out, prompt_key


def test_hash_unit_is_the_leading_bits_of_blake2b():
    digest = hashlib.blake2b(b'"abc"', digest_size=8).digest()
    assert hash_unit(prompt_key("abc")) == pytest.approx(int.from_bytes(digest, "little") / 2**64, abs=2**-52)


def test_a_known_prompt_is_held_out_the_same_on_every_machine():
    assert f"{hash_unit(prompt_key('What is 2 + 2?')):.6f}" == "0.915349"


def test_field_order_does_not_change_the_side():
    one = [{"role": "user", "content": "hi"}]
    other = [{"content": "hi", "role": "user"}]
    assert prompt_key(one) == prompt_key(other)
    assert prompt_key(one) != prompt_key([{"role": "system", "content": "hi"}])
    assert prompt_key("hi") != prompt_key(one)


def test_the_share_held_out_is_the_fraction():
    n = 20_000
    share = sum(is_held_out(prompt_key(f"prompt {i}"), 0.1) for i in range(n)) / n
    assert share == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / n) ** 0.5)


def test_a_smaller_fraction_holds_out_a_subset():
    keys = [str(i) for i in range(2000)]
    assert {k for k in keys if is_held_out(k, 0.05)} < {k for k in keys if is_held_out(k, 0.2)}


def test_half_a_surrogate_pair_has_a_key():
    assert 0 <= hash_unit(prompt_key("\ud800")) < 1
    assert 0 <= hash_unit("\ud800") < 1
