"""The ledger of asynchronous rollouts as files: what it returns, and what a kill leaves of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.trainer import ledger as ledger_module
from gruppo.trainer.ledger import Ledger, split
from gruppo.types import GruppoError, Prompt, Request, Rollouts, Sampling

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
    one, other = (dict(x) if isinstance(x, Mapping) else x for x in (one, other))
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, Rollouts):
        for name in vars(one):
            assert_equal(getattr(one, name), getattr(other, name))
    elif isinstance(one, dict | list | tuple):
        assert len(one) == len(other)
        for a, b in zip(
            *(x.items() if isinstance(x, dict) else x for x in (one, other)), strict=True
        ):
            assert_equal(a, b)
    else:
        assert one == other or one is other


def written(folder: Path, positions: range, step: int = 1) -> Ledger:
    ledger = Ledger(folder)
    for position in positions:
        ledger.append(position, request(position), SAMPLING, rollouts(position))
    ledger.write(step, positions)
    return ledger


def held(folder: Path, positions: range = range(9)) -> list[int]:
    """Positions whose samples a process that starts now finds."""
    ledger = Ledger(folder)
    return [n for n in positions if ledger.find(n, request(n), SAMPLING) is not None]


def test_samples_are_read_as_they_were_with_texts_states_and_tensors(tmp_path):
    written(tmp_path, range(3))
    ledger = Ledger(tmp_path)
    assert ledger.steps == {1: [0, 1, 2]}
    for position in range(3):
        requested = request(position)
        found = ledger.find(position, requested, SAMPLING)
        assert found is not None
        # with the target, which is not in the ledger
        assert found.prompts == (requested.prompt,)
        assert_equal(replace(found, prompts=()), replace(rollouts(position), prompts=()))


def test_what_was_sampled_for_other_settings_is_not_found_and_of_another_prompt_refused(tmp_path):
    written(tmp_path, range(1))
    ledger = Ledger(tmp_path)
    assert ledger.find(1, request(1), SAMPLING) is None
    assert ledger.find(0, request(0, size=4), SAMPLING) is None
    assert ledger.find(0, request(0, first=2), SAMPLING) is None
    assert ledger.find(0, request(0), replace(SAMPLING, temperature=1.0)) is None
    with pytest.raises(GruppoError, match="prompt 'p0' at position 0, where the data have 'p1'"):
        ledger.find(0, request(1), SAMPLING)


@pytest.mark.parametrize("step", [1, 2])
def test_the_newest_samples_of_a_draw_count(tmp_path, step):
    """Those that were beyond the bound are sampled again, in the same step or in a later one."""
    ledger = Ledger(tmp_path)
    ledger.append(0, request(0), SAMPLING, rollouts(3))
    if step == 2:
        ledger.write(1, [9])
    ledger.append(0, request(0), SAMPLING, rollouts(7))
    ledger.write(step, [0])
    found = Ledger(tmp_path).find(0, request(0), SAMPLING)
    assert found is not None and torch.equal(found.actions, rollouts(7).actions)


def test_what_a_killed_process_finished_after_the_checkpoint_is_used_if_this_run_has_its_weights(
    tmp_path,
):
    for step, version in ((1, 0), (2, 1), (3, 2), (4, 3)):
        ledger = Ledger(tmp_path)
        one = rollouts(step)
        one = replace(one, policy_version=torch.full_like(one.policy_version, version))
        ledger.append(step, request(step), SAMPLING, one)
        ledger.write(step, [step])
    resumed = Ledger(tmp_path)
    resumed.resume(1, version=2)  # three files after step 1, the last of weights that it has not
    assert [path.name for path in resumed.paths()] == [
        "step_000001-r0.safetensors",
        "step_000002-r0.safetensors",
    ]
    assert held(tmp_path) == [1, 2, 3]
    assert resumed.steps == {1: [1]}  # the later ones are not complete in this run
    resumed.append(5, request(5), SAMPLING, rollouts(5))
    resumed.write(2, [2])
    assert held(tmp_path) == [1, 2, 3, 5]


def test_with_another_number_of_ranks_what_was_finished_after_the_checkpoint_is_sampled_again(
    tmp_path, monkeypatch
):
    for step in (1, 2):
        written(tmp_path, range(step, step + 1), step)
    monkeypatch.setattr(ledger_module.dist, "world_size", lambda: 2)
    Ledger(tmp_path).resume(1, version=9)
    assert held(tmp_path) == [1]


def test_each_rank_reads_its_own_files_and_a_replay_those_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module.dist, "world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(ledger_module.dist, "rank", lambda rank=rank: rank)
        written(tmp_path, range(rank, rank + 1))
        assert held(tmp_path) == [rank]
    replay = Ledger(tmp_path, is_replayed=True)
    assert all(replay.find(n, request(n), SAMPLING) is not None for n in range(2))


def test_what_cannot_be_kept_is_one_line_and_nothing_is_written(tmp_path):
    ledger = Ledger(tmp_path)
    odd = rollouts(0, per_row={"state": (object(), 1)})
    with pytest.raises(
        GruppoError, match=r"the rollouts hold a builtins\.object, which the ledger"
    ):
        ledger.append(0, request(0), SAMPLING, odd)
    ledger.write(1)
    assert not (tmp_path / "ledger").exists()


def test_groups_of_a_call_are_split_without_the_columns_of_the_others():
    wide, narrow = rollouts(0, columns=9), rollouts(1, columns=4)
    first, second = split(Rollouts.cat([wide, narrow]))
    assert_equal(replace(first, prompts=()), replace(wide, prompts=()))
    assert_equal(replace(second, prompts=()), replace(narrow, prompts=()))
