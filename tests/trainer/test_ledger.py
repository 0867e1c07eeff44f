"""The ledger of asynchronous rollouts as a file: what it returns, what a kill leaves of it, and how large it grows."""

from __future__ import annotations

import errno
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.trainer import ledger as ledger_module
from gruppo.trainer.ledger import Ledger, split
from gruppo.types import GruppoError, Prompt, Request, Rollouts, Sampling

CONFIG = dict.fromkeys(("name", "seed", "model", "data", "prompts", "rollout"), "x")
SAMPLING = Sampling(temperature=0.7, stop=("end",))


def request(position: int, size: int = 2, first: int = 0) -> Request:
    return Request(Prompt(f"p{position}", "1 + 1 =", target=object(), draw=position), size, first)


def rollouts(position: int, size: int = 2, columns: int = 5, **changes: Any) -> Rollouts:
    generator = torch.Generator().manual_seed(position)
    mask = torch.arange(columns) < torch.tensor([[columns], [2]]).expand(2, 1).repeat(size // 2, 1)
    made = Rollouts(
        prompts=(request(position).prompt,),
        group_ids=torch.zeros(size, dtype=torch.long),
        actions=torch.randint(100, (size, columns), generator=generator),
        mask=mask,
        lengths=mask.sum(dim=1),
        completions=("a \ud800 text", [{"role": "assistant", "content": "b"}]) * (size // 2),
        sampler_logprobs=torch.randn(size, columns, generator=generator).bfloat16().float(),
        policy_version=torch.arange(columns).expand(size, columns).clone(),
        temperature=torch.full((size,), 0.7),
        finish=("stop", "length") * (size // 2),
        shared={"prompt_ids": (torch.tensor([1, 2, 3]),)},
        per_row={
            "state": ({"turns": [1, (2.5, None)], 3: True}, {}) * (size // 2),
            "top_p": torch.ones(size).double(),
        },
    )
    return replace(made, **changes)


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, Rollouts):
        for name in vars(one):
            a, b = (
                (dict(x) if name in ("shared", "per_row") else x)
                for x in (getattr(one, name), getattr(other, name))
            )
            assert_equal(a, b)
    elif isinstance(one, dict | list | tuple):
        assert len(one) == len(other)
        for a, b in zip(
            *(x.items() if isinstance(x, dict) else x for x in (one, other)), strict=True
        ):
            assert_equal(a, b)
    else:
        assert one == other or one is other


def written(folder: Path, positions: range, **options: Any) -> Ledger:
    ledger = Ledger(folder, CONFIG, **options)
    for position in positions:
        ledger.append_group(position, request(position), SAMPLING, rollouts(position))
    return ledger


def test_samples_are_read_as_they_were_with_texts_states_and_tensors(tmp_path):
    written(tmp_path, range(3)).close()
    ledger = Ledger(tmp_path, CONFIG)
    for position in range(3):
        requested = request(position)
        found = ledger.find(position, requested, SAMPLING)
        assert found is not None and found.prompts == (
            requested.prompt,
        )  # with the target, which is not in the ledger
        assert_equal(replace(found, prompts=()), replace(rollouts(position), prompts=()))


def test_what_was_sampled_for_other_settings_is_not_found_and_of_another_prompt_refused(tmp_path):
    ledger = written(tmp_path, range(1))
    assert ledger.find(1, request(1), SAMPLING) is None
    assert ledger.find(0, request(0, size=4), SAMPLING) is None
    assert ledger.find(0, request(0, first=2), SAMPLING) is None
    assert ledger.find(0, request(0), replace(SAMPLING, temperature=1.0)) is None
    with pytest.raises(GruppoError, match="prompt 'p0' at position 0, where the data have 'p1'"):
        ledger.find(0, request(1), SAMPLING)


def test_the_newest_record_of_a_draw_counts(tmp_path):
    ledger = written(tmp_path, range(2))
    ledger.close()
    again = Ledger(tmp_path, CONFIG)
    again.append_group(0, request(0), SAMPLING, rollouts(7))
    again.close()
    found = Ledger(tmp_path, CONFIG).find(0, request(0), SAMPLING)
    assert found is not None and torch.equal(found.actions, rollouts(7).actions)
    assert [path.name for path in again.segments()] == ["000000-r0.ledger", "000001-r0.ledger"]


def test_the_newest_record_counts_also_where_another_rank_has_written_it(tmp_path, monkeypatch):
    """A run that goes on with another number of ranks gives a draw to another rank."""
    for session, rank in enumerate((1, 0, 1, 0)):
        monkeypatch.setattr(ledger_module.dist, "rank", lambda rank=rank: rank)
        ledger = Ledger(tmp_path, CONFIG)
        assert ledger.session == session
        ledger.append_group(0, request(0), SAMPLING, rollouts(session))
        ledger.close()
        found = Ledger(tmp_path, CONFIG).find(0, request(0), SAMPLING)
        assert found is not None and torch.equal(found.actions, rollouts(session).actions)


@pytest.mark.parametrize("damage", ["cut", "garbled"])
def test_of_a_segment_whose_end_was_lost_all_whole_records_are_read(tmp_path, damage):
    ledger = written(tmp_path, range(3))
    ledger.close()
    (path,) = ledger.segments()
    size = path.stat().st_size
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        path.write_bytes(path.read_bytes()[:-10] + b"\0" * 10)
    found = Ledger(tmp_path, CONFIG)
    assert sorted(found.groups) == [(0, 0), (1, 0)]
    if damage == "cut":
        with pytest.raises(
            GruppoError, match=f"has {size - 10} of {size} bytes, and the checkpoint needs it"
        ):
            found.check({path.name: size})


def test_a_segment_that_a_checkpoint_needs_must_be_there_unless_the_whole_ledger_was_deleted(
    tmp_path,
):
    ledger = written(tmp_path, range(3))
    state = ledger.state(2)
    assert list(state) == ["000000-r0.ledger"] and not ledger.state(3)
    ledger.close()
    (path,) = ledger.segments()
    path.unlink()
    with pytest.raises(GruppoError, match=r"000000-r0\.ledger is missing"):
        Ledger(tmp_path, CONFIG).check(state)
    ledger.folder.rmdir()
    Ledger(tmp_path, CONFIG).check(state)


def test_it_is_bounded_and_what_a_checkpoint_needs_is_never_deleted(tmp_path):
    one = written(tmp_path / "one", range(1))
    one.close()
    record = one.segments()[0].stat().st_size
    ledger, most = Ledger(tmp_path, CONFIG, max_bytes=20 * record), 0
    for position in range(200):
        ledger.append_group(position, request(position), SAMPLING, rollouts(position))
        ledger.prune(position - 10)  # of the oldest checkpoint
        size = sum(path.stat().st_size for path in ledger.segments())
        most = max(most, size)
        assert all(
            (needed, 0) in ledger.groups for needed in range(max(position - 10, 0), position + 1)
        )
    assert most < 25 * record and (0, 0) not in ledger.groups
    ledger.close()
    tight = Ledger(tmp_path, CONFIG, max_bytes=record)
    tight.prune(195)
    assert {195, 199} <= {position for position, _ in tight.groups}


def test_what_cannot_be_kept_is_one_line_and_nothing_is_written(tmp_path):
    ledger = Ledger(tmp_path, CONFIG)
    with pytest.raises(
        GruppoError, match=r"rollouts\.per_row holds a object, which the ledger cannot keep"
    ):
        ledger.append_group(0, request(0), SAMPLING, rollouts(0, per_row={"state": (object(), 1)}))
    assert not ledger.groups


class FullDisk(io.BytesIO):
    """Takes half of what is written, as a disk that is full does."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file, self.name = file, file.name

    def tell(self) -> int:
        return self.file.tell()

    def write(self, data: Any) -> int:
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")


def test_after_a_write_that_failed_records_are_read_from_a_new_segment(tmp_path):
    ledger = written(tmp_path, range(1))
    ledger._file = FullDisk(ledger._file)
    with pytest.raises(GruppoError, match="the disk is full"):
        ledger.append_group(1, request(1), SAMPLING, rollouts(1))
    ledger.append_group(2, request(2), SAMPLING, rollouts(2))
    ledger.close()
    assert sorted(Ledger(tmp_path, CONFIG).groups) == [(0, 0), (2, 0)]


def test_groups_of_a_call_are_split_without_the_columns_of_the_others():
    wide, narrow = rollouts(0, columns=9), rollouts(1, columns=4)
    first, second = split(Rollouts.cat([wide, narrow]))
    assert_equal(replace(first, prompts=()), replace(wide, prompts=()))
    assert_equal(replace(second, prompts=()), replace(narrow, prompts=()))
