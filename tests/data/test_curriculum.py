"""Easy prompts first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gruppo.data.arithmetic import arithmetic
from gruppo.data.open import open_source
from gruppo.data.source import PROBED, Curriculum
from gruppo.types import DataError, Prompt

SIZES = [3, 1, 2, 2, 5, 4, 2, 1, 5, 9]


def rows(sizes: list[Any] = SIZES) -> list[dict[str, Any]]:
    return [{"prompt": f"p{n}", "size": size} for n, size in enumerate(sizes)]


def opened(data: Any = None, column: str = "size", **options: Any) -> Curriculum:
    options = {"seed": 0, "held_out_fraction": 0.0} | options
    source = open_source(rows() if data is None else data, difficulty_column=column, **options)
    assert isinstance(source, Curriculum)
    return source


def drawn(source: Curriculum, level: float, n: int) -> list[int]:
    source.level = level
    return [prompt.meta["size"] for prompt in source.take(n)]


@pytest.mark.parametrize(
    ("level", "hardest", "allowed"),
    [
        (0.0, 1, {1}),
        (0.1, 1, {1}),
        (0.2, 1, {1}),  # 2 of 10
        (0.21, 2, {1, 2}),  # the third easiest is a 2, and with it all of them
        (0.5, 2, {1, 2}),
        (0.6, 3, {1, 2, 3}),
        (0.9, 5, {1, 2, 3, 4, 5}),
        (0.91, 9, {1, 2, 3, 4, 5, 9}),
    ],
)
def test_a_level_is_the_share_of_the_rows_that_are_easiest_with_their_equals(
    level, hardest, allowed
):
    source = opened()
    assert set(drawn(source, level, 40)) == allowed and source.hardest == hardest


def test_what_is_passed_over_is_the_stream_without_it_and_comes_again_in_the_next_epoch():
    source, plain = opened(), open_source(rows(), seed=0, held_out_fraction=0.0)
    source.level = 0.5
    stream = [(p.id, p.draw) for p in plain.take(20) if p.meta["size"] <= 2]
    assert [(p.id, p.draw) for p in source.take(10)] == stream
    assert source.passed_over == stream[-1][1] + 1 - 10
    assert set(drawn(source, 1.0, 20)) == set(SIZES)


def test_the_share_is_of_the_rows_that_are_trained_on():
    """Held-out rows are the hardest here: of all rows, level 0.5 would allow more."""
    plain = open_source(rows(list(range(40))), seed=0, held_out_fraction=0.5)
    kept = {int(p.id) for p in plain.held_out(40)}
    sizes = [100 + n if n in kept else n for n in range(40)]
    source = opened(rows(sizes), held_out_fraction=0.5)
    trained = sorted(n for n in range(40) if n not in kept)
    source.level = 0.5
    assert source.hardest == trained[(len(trained) + 1) // 2 - 1]
    assert {p.meta["size"] for p in source.held_out(40)} == {
        100 + n for n in kept
    }  # whatever the level


def test_of_a_source_without_end_the_share_is_over_its_first_draws_and_the_stream_does_not_move():
    options: dict[str, Any] = {"seed": 3, "held_out_fraction": 0.4}
    source = opened("arithmetic:0:20", **options)
    plain = arithmetic(0, 20, **options)
    sizes = sorted(p.meta["size"] for p in plain.take(PROBED))
    source.level = 0.25
    assert source.hardest == sizes[PROBED // 4 - 1]
    first = source.take(50)
    assert first[0].draw < 10 and max(p.meta["size"] for p in first) <= source.hardest
    assert all(p.meta["size"] == abs(p.meta["a"]) + abs(p.meta["b"]) for p in first)


@pytest.mark.silent_bug(33)
def test_a_curriculum_resumes_where_it_was():
    source = opened("arithmetic:0:20")
    drawn(source, 0.3, 7)
    state = json.loads(json.dumps(source.state_dict()))
    after = [(p.id, p.draw) for p in source.take(5)]
    other = opened("arithmetic:0:20")
    other.load_state_dict(state)
    other.level = 0.3
    assert [(p.id, p.draw) for p in other.take(5)] == after


def test_other_difficulties_than_the_run_began_with_are_refused():
    state = opened().state_dict()
    column = opened([row | {"other": row["size"]} for row in rows()], column="other")
    with pytest.raises(DataError, match=r"was 'size' .* and is 'other'.*start a new run"):
        column.load_state_dict(state)
    with pytest.raises(DataError, match=r"the saved position does not belong to the list"):
        opened(rows([*SIZES[:-1], 8])).load_state_dict(state)


def test_a_missing_column_is_refused_with_the_nearest():
    with pytest.raises(
        DataError,
        match=r"no column 'sise'; its columns are 'prompt', 'size'.*Did you mean size",
    ):
        opened(column="sise")
    with pytest.raises(
        DataError,
        match=r"arithmetic has no column 'level'; .*'operation', 'size'.*difficulty_column",
    ):
        opened("arithmetic", column="level")


@pytest.mark.parametrize("value", ["hard", None, True, float("nan"), float("inf"), [1], "3"])
def test_what_is_not_a_number_is_refused_with_the_prompt(value):
    with pytest.raises(
        DataError,
        match=r"prompt '4' of the list has size=.* which is not a number; .* Fix the data",
    ):
        opened(rows([1, 2, 3, 4, value]))


class Waning:
    """A source of one's own, without columns, whose easy prompts end."""

    def __init__(self) -> None:
        self.position = 0

    def take(self, n: int) -> list[Prompt]:
        self.position += n
        return [
            Prompt(str(i), "", meta={"size": min(i, 2)}, draw=i)
            for i in range(self.position - n, self.position)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def test_a_search_without_end_is_given_up_with_the_reason():
    source = opened(Waning())
    assert drawn(source, 0.0, 1) == [0]
    with pytest.raises(
        DataError, match=r"10000 prompts of Waning in a row have size above 0, .* Raise the stage's"
    ):
        source.take(1)
    assert drawn(source, 0.9, 3) == [2, 2, 2]
    assert source.held_out(3) == [] and source.position == source.state_dict()["source"]["position"]
