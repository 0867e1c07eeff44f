"""Two processes are one run."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.trainer.runs import assert_same, begin_or_go_on, metrics, newest, weights

from gruppo import api
from gruppo.config import serialization
from gruppo.trainer import checkpoint
from gruppo.types import GruppoError

OWN = ("update/micro_batches_count",)
"""What depends on how the rows are shared out."""


def spying(
    completions: Sequence[Any], prompts: Sequence[Any], completion_ids: Sequence[Any], **_: Any
) -> list[Any]:
    """The share of digits; one completion in five is not scored; each row is written down by the
    rank that asked."""
    values = tiny.digits(completions)
    scored = [
        None if sum(ids) % 5 == 0 else value
        for ids, value in zip(completion_ids, values, strict=True)
    ]
    with (Path(os.environ["SPIED"]) / f"rank{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
        for prompt, completion, value in zip(prompts, completions, scored, strict=True):
            file.write(json.dumps([prompt[0]["content"], tiny.said(completion), value]) + "\n")
    return scored


def train(config: dict[str, Any], spied: str) -> None:
    os.environ["SPIED"] = spied
    api.start(serialization.from_dict(config))


def both(
    folder: Path, ranks: int, **changes: Any
) -> tuple[Path, Path, list[list[Any]], list[list[list[Any]]]]:
    """The run of this process and that of several ranks, and what each rank's reward saw."""
    spying = [f"{Path(__file__).resolve()}:spying"]
    changes = {"steps": 2, "reward": spying, "optim__eps": 0.1, "optim__lr": 0.05} | changes
    seen = []
    for name, count in (("one", 1), ("many", ranks)):
        config = serialization.to_dict(tiny.config(folder, name=name, **changes))
        spied = folder / f"spied-{name}"
        spied.mkdir()
        processes.run_ranks(count, train, config, str(spied), folder=folder / name)
        seen.append(
            [
                [json.loads(line) for line in file.read_text().splitlines()]
                for file in sorted(spied.iterdir())
            ]
        )
    return folder / "runs/one", folder / "runs/many", seen[0][0], seen[1]


@pytest.mark.silent_bug(12)
@pytest.mark.silent_bug(24)
@pytest.mark.silent_bug(25)
@pytest.mark.silent_bug(26)
@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__prompts": 3, "rollout__group_size": 3},
        {
            "rollout__prompts": 3,
            "rollout__group_size": 4,
            "optim__epochs": 2,
            "optim__minibatches": 3,
            "stage__kl_coef": 0.1,
            "stage__entropy_coef": 0.01,
            "reference": {"kind": "mixed", "update_every": 1},
            "reward": [f"{Path(__file__).resolve()}:spying", "length_target:5"],
            "objective": {"baseline": "batch_mean", "scale": "batch", "average": "token"},
        },
        {
            "rollout__prompts": 2,
            "rollout__group_size": 3,
            "optim__minibatches": 6,
            "objective": "dr_grpo",
        },
    ],
    ids=["uneven", "several updates", "a rank without rows in a minibatch"],
)
def test_two_ranks_give_the_weights_and_metrics_of_one(tmp_path, changes):
    one, two, seen_by_one, seen_by_two = both(tmp_path, 2, **changes)
    start = torch.cat([t.flatten().double() for t in first_weights()])
    assert (weights(one) - start).abs().max() > 1e-2
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-6)
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - set(OWN):
            expected = None if mine[name] is None else pytest.approx(mine[name], rel=1e-5, abs=1e-6)
            assert theirs[name] == expected, name
    assert Counter(map(str, seen_by_one)) == Counter(
        str(row) for rank in seen_by_two for row in rank
    )
    assert all(seen_by_two) and len({row[1] for rank in seen_by_two for row in rank}) > 4
    training = [Counter(row[0] for row in rank) for rank in seen_by_two]
    size = changes["rollout__group_size"]
    held_out = 2  # evaluations, at which a prompt is answered once
    assert all(
        count % size == 0 or count <= held_out for rank in training for count in rank.values()
    )


def first_weights() -> list[torch.Tensor]:
    from safetensors.torch import load_file

    found = load_file(Path(tiny.model()) / "model.safetensors")
    return [found[name] for name in sorted(found)]


def refused(config: dict[str, Any]) -> None:
    try:
        api.start(serialization.from_dict(config))
    except GruppoError as error:
        assert "leaves some of the 2 ranks without a prompt" in str(error)
        return
    raise AssertionError("one prompt on two ranks was not refused")


def test_fewer_prompts_than_ranks_are_refused(tmp_path):
    config = serialization.to_dict(tiny.config(tmp_path, rollout__prompts=1))
    children = processes.ranks(2, refused, config, folder=tmp_path / "children")
    assert [child.wait() for child in children] == [0, 0], children[0].err


# --- stopping, resuming, failing ---


def noisy_and_stopping(completions: Sequence[Any], trainer_state: Any, **_: Any) -> list[float]:
    """Draws from Python's generator, which each rank seeds on its own; at one step, a signal
    comes."""
    if os.environ.get("STOP_AT") == str(trainer_state.global_step):
        os.kill(os.getpid(), signal.SIGTERM)
    return tiny.noisy(completions)


def until_stopped(config: dict[str, Any], stop_at: str) -> None:
    os.environ["STOP_AT"] = stop_at
    begin_or_go_on(config)


@pytest.mark.slow
@pytest.mark.silent_bug(33)
def test_two_ranks_resume_to_the_bit_each_with_its_own_random_state(tmp_path):
    rewards = {"reward": [f"{Path(__file__).resolve()}:noisy_and_stopping"]}
    for name, stops in (("whole", [""]), ("parts", ["1", ""])):
        config = serialization.to_dict(
            tiny.config(tmp_path, name=name, steps=4, saving__keep=9, **rewards)
        )
        for stop_at in stops:
            children = processes.ranks(2, until_stopped, config, stop_at, folder=tmp_path / name)
            codes = [child.wait() for child in children]
            assert codes == ([75, 75] if stop_at else [0, 0]), "\n".join(
                child.err for child in children
            )
    random = json.loads((newest(tmp_path / "runs/whole") / "state.json").read_text())["random"]
    assert len(random) == 2 and random[0]["python"] != random[1]["python"]
    assert_same(tmp_path / "runs/parts", tmp_path / "runs/whole")


def with_a_full_disk(config: dict[str, Any]) -> None:
    def save_file(tensors: object, path: Path, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    checkpoint.save_file = save_file
    try:
        api.start(serialization.from_dict(config))
    except GruppoError as error:
        print(error, flush=True)
        os._exit(error.exit_code)


def test_where_the_rank_that_writes_fails_the_other_does_not_wait_for_it(tmp_path):
    config = serialization.to_dict(tiny.config(tmp_path, evaluation__prompts=0, saving__every=1))
    children = processes.ranks(2, with_a_full_disk, config, folder=tmp_path / "full")
    assert [child.wait() for child in children] == [2, 2]
    assert (
        all("the disk is full" in child.out for child in children)
        and "rank 0 (process" in children[1].out
    )
    children = processes.ranks(2, with_a_full_disk, config, folder=tmp_path / "again")
    assert [child.wait() for child in children] == [2, 2]
    assert all("exists already" in child.out for child in children)
