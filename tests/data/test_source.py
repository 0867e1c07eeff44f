"""Every kind of source is a resumable stream that never draws a held-out prompt; the split goes by
content alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.data.arithmetic import arithmetic
from gruppo.data.digits import labelled_images
from gruppo.data.images import image_folder
from gruppo.data.open import open_source
from gruppo.data.reasoning_gym import reasoning_gym
from gruppo.data.restoration import Degradation, ImagePair, image_pairs
from gruppo.data.rows import row_source
from gruppo.data.source import IndexedSource, SourceWrapper, hash_unit, prompt_key
from gruppo.types import DataError, Prompt


def rows(count: int = 30, **options: Any) -> IndexedSource:
    return row_source(
        [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(count)], **{"seed": 3} | options
    )


def gym(**options: Any) -> IndexedSource:
    pytest.importorskip("reasoning_gym")
    return reasoning_gym(
        "chain_sum", **{"seed": 3, "size_per_epoch": 20, "held_out_fraction": 0.2} | options
    )


def labelled(count: int = 40, **options: Any) -> IndexedSource:
    pixels = (torch.arange(count)[:, None, None, None] + torch.arange(6).reshape(1, 1, 2, 3)).byte()
    return labelled_images(pixels, torch.arange(count) % 5, **{"seed": 3} | options)


def pairs(count: int = 10, **options: Any) -> IndexedSource:
    clean = torch.rand(count, 3, 24, 20, generator=torch.Generator().manual_seed(0))
    images = {f"image {i}": ImagePair(clean[i], clean[i] / 2) for i in range(count)}
    return image_pairs(images, **{"seed": 3, "crop": 8} | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[..., IndexedSource]:
    """Sources over a folder of 20 images, two of which cannot be read."""
    pillow = pytest.importorskip("PIL.Image")
    root = tmp_path_factory.mktemp("images")

    def opened(count: int = 20, **options: Any) -> IndexedSource:
        path: Path = root / str(count)
        if not path.exists():
            path.mkdir()
            for i in range(count):
                pillow.new("L", (6, 4), 10 * i).save(path / f"{i:02}.png")
            for name in ("03.png", "11.png"):
                (path / name).write_bytes(b"broken")
        return image_folder(path, **{"seed": 3} | options)

    return opened


KINDS: dict[str, Any] = {
    "rows": rows,
    "arithmetic": lambda **options: arithmetic(**{"seed": 3} | options),
    "gym": gym,
    "labelled": labelled,
    "folder": None,
    "pairs": pairs,
}
FINITE = ("rows", "labelled", "pairs")


@pytest.fixture
def make(request, folder) -> Callable[..., IndexedSource]:
    return KINDS[request.param] or folder


every_kind = pytest.mark.parametrize("make", KINDS, indirect=True)


def contents(prompts: list[Prompt]) -> list[tuple]:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return [(p.id, plain(p.inputs), plain(p.target), dict(p.meta), p.draw) for p in prompts]


def without_draw(prompts: list[Prompt]) -> list[tuple]:
    return [row[1:3] for row in contents(prompts)]


# --- the stream -----------------------------------------------------------------------------------


@pytest.mark.silent_bug(33)
@every_kind
@pytest.mark.parametrize("n", [1, 45])
def test_2n_prompts_are_n_then_reload_then_n(make, n):
    whole, first, resumed = contents(make().take(2 * n)), make(), make()
    head = contents(first.take(n))
    resumed.take(5)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + contents(resumed.take(n)) == whole
    assert len({row[-1] for row in whole}) == 2 * n


@pytest.mark.silent_bug(34)
@every_kind
def test_the_seed_alone_determines_the_stream(make):
    source = make()
    split = [p for n in (1, 2, 27, 30) for p in source.take(n)]
    assert contents(split) == contents(make().take(60)) != contents(make(seed=4).take(60))


@pytest.mark.silent_bug(25)
@pytest.mark.parametrize("make", FINITE, indirect=True)
def test_every_item_comes_once_an_epoch_in_a_new_order_and_draws_count_the_stream(make):
    source = make(held_out_fraction=0)
    prompts = source.take(3 * source.epoch_size)
    assert [p.draw for p in prompts] == list(range(len(prompts)))
    ids = [p.meta.get("index", p.id) for p in prompts]
    epochs = [
        ids[start : start + source.epoch_size] for start in range(0, len(ids), source.epoch_size)
    ]
    assert all(
        set(epoch) == set(epochs[0]) and len(set(epoch)) == source.epoch_size for epoch in epochs
    )
    assert epochs[0] != epochs[1] != epochs[2]


@every_kind
def test_held_out_prompts_are_the_same_for_every_seed_and_never_drawn_and_do_not_move_the_stream(
    make,
):
    source, other = make(held_out_fraction=0.3), make(held_out_fraction=0.3, seed=9)
    source.take(4)
    held_out = source.held_out(1000)
    assert contents(held_out) == contents(other.held_out(1000)) and len(held_out) > 1
    assert contents(source.held_out(2)) == contents(held_out)[:2] and source.held_out(0) == []
    assert [p.draw for p in held_out] == list(range(len(held_out)))
    sampled = source.take(60)
    assert sampled[0].draw >= 4 and not any(
        row in without_draw(held_out) for row in without_draw(sampled)
    )


@pytest.mark.silent_bug(33)
@pytest.mark.parametrize(
    ("make", "changes"),
    [
        ("rows", {"count": 31}),
        ("rows", {"held_out_fraction": 0}),
        ("arithmetic", {"high": 21}),
        ("arithmetic", {"held_out_fraction": 0.2}),
        ("gym", {"max_terms": 9}),
        ("gym", {"size_per_epoch": 21}),
        ("gym", {"held_out_fraction": 0.3}),
        ("labelled", {"count": 41}),
        ("folder", {"count": 21}),
        ("folder", {"size": 8}),
        ("pairs", {"count": 9}),
        ("pairs", {"crop": 7}),
        ("pairs", {"held_out_fraction": 0.5}),
        ("pairs", {"flips": False}),
        ("pairs", {"degradation": Degradation.parse("dark=0.5")}),
    ],
    indirect=["make"],
)
def test_a_position_in_other_data_is_refused(make, changes):
    with pytest.raises(DataError, match="does not belong"):
        make().load_state_dict(make(**changes).state_dict())


@pytest.mark.silent_bug(33)
def test_a_position_in_another_stream_is_refused_with_the_difference():
    with pytest.raises(DataError, match="seed was 4, is 3"):
        rows().load_state_dict(rows(seed=4).state_dict())


@pytest.mark.parametrize("cursor", [None, -1, "3"])
def test_a_damaged_position_is_refused(cursor):
    source = rows()
    with pytest.raises(DataError, match="earlier checkpoint"):
        source.load_state_dict(source.state_dict() | {"cursor": cursor})


class Minimal:
    """A user's source without optional members."""

    position = 0

    def take(self, n):
        self.position += n
        return [Prompt(str(i), "") for i in range(self.position - n, self.position)]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_a_users_source_gets_neutral_values_for_the_optional_members_that_it_lacks():
    minimal = Minimal()
    source = open_source(minimal, seed=0)
    assert (
        isinstance(source, SourceWrapper) and source.source is minimal and source.name == "Minimal"
    )
    assert [p.id for p in source.take(2)] == ["0", "1"] and source.state_dict() == {"position": 2}
    source.load_state_dict({"position": 1})
    assert source.position == 1
    assert (
        source.columns,
        source.fingerprint(),
        source.held_out(3),
        list(source.all_prompts()),
    ) == (
        None,
        None,
        [],
        [],
    )
    minimal.columns = ("target",)
    assert source.columns == ("target",) and open_source(source, seed=0) is source


# --- the held-out split ---------------------------------------------------------------------------


def test_hash_unit_is_the_leading_bits_of_blake2b():
    digest = hashlib.blake2b(b'"abc"', digest_size=8).digest()
    assert hash_unit(prompt_key("abc")) == pytest.approx(
        int.from_bytes(digest, "little") / 2**64, abs=2**-52
    )
    assert f"{hash_unit(prompt_key('What is 2 + 2?')):.6f}" == "0.915349", "on every machine"


def test_field_order_does_not_change_the_side():
    one = [{"role": "user", "content": "hi"}]
    other = [{"content": "hi", "role": "user"}]
    assert prompt_key(one) == prompt_key(other)
    assert prompt_key(one) != prompt_key([{"role": "system", "content": "hi"}])
    assert prompt_key("hi") != prompt_key(one)


def test_the_held_out_share_is_the_fraction():
    n = 20_000
    share = sum(hash_unit(prompt_key(f"prompt {i}")) < 0.1 for i in range(n)) / n
    assert share == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / n) ** 0.5)


def test_a_smaller_fraction_holds_out_a_subset():
    small, large = (
        {p.id for p in rows(300, held_out_fraction=x).held_out(300)} for x in (0.05, 0.2)
    )
    assert small and small < large


def test_half_a_surrogate_pair_has_a_key():
    assert 0 <= hash_unit(prompt_key("\ud800")) < 1
    assert 0 <= hash_unit("\ud800") < 1
