"""Stages that learn from demonstrations: their gradient, what they leave alone, and what is
refused."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
from tests import tiny
from tests.collecting import collect
from tests.trainer import by_hand
from tests.trainer.runs import metrics
from tests.trainer.test_memory import Full, gradients
from tests.trainer.test_ranks import both, first_weights, weights
from tests.trainer.test_step import run_in, step, vector

import gruppo
from gruppo import api
from gruppo.build import Parts, build
from gruppo.config.schema import SupervisedConfig
from gruppo.modalities.text.memory import TOKENS_ON_CPU
from gruppo.trainer.demonstrations import Answers
from gruppo.trainer.forward import minibatches
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams, step_params_at
from gruppo.trainer.update import backward, learn
from gruppo.types import DataError, GruppoError, Prompt, TrainBatch

ALONE: dict[str, Any] = {"stage__rl_coef": 0.0, "stage__sup_coef": 1.0, "supervised__batch": 5}
BOTH: dict[str, Any] = {"stage__sup_coef": 0.5, "supervised__batch": 5}
PLAN: list[dict[str, Any]] = [
    {"name": "supervised", "steps": 2, "rl_coef": 0.0, "sup_coef": 1.0},
    {"name": "ramp", "steps": 2, "rl_coef": "linear:0.5,1", "sup_coef": "linear:1,0"},
    {"name": "full"},
]
"""Demonstrations alone, both, rewards alone."""


def batch_of(run: Run) -> tuple[TrainBatch, StepParams]:
    step_params = step_params_at(run.config, run.state.step)
    return collect(run, step_params).batch, step_params


def gradient_of(run: Run, batch: TrainBatch, step_params: StepParams) -> torch.Tensor:
    run.optimizer.zero_grad(set_to_none=True)
    backward(run, batch, step_params)
    return gradients(run)


# --- the gradient ---------------------------------------------------------------------------------


def nll_by_hand(module: Any, rollouts: Any) -> torch.Tensor:
    """Mean cross-entropy over all tokens of all answers, row by row."""
    losses = []
    for row in range(len(rollouts)):
        ids, start = by_hand.tokens(rollouts, row)
        losses.append(
            torch.nn.functional.cross_entropy(
                module(ids[None]).logits[0, start - 1 : -1], ids[start:]
            )
        )
    counts = rollouts.lengths.double()
    return (torch.stack(losses) * counts).sum() / counts.sum()


def test_a_supervised_step_is_the_step_computed_by_hand(tmp_path):
    run = run_in(tmp_path, **ALONE, supervised__template="{answer}={number:02d}")
    module = copy.deepcopy(run.policy.module).double()
    collected, logged = step(run)
    demos = collected.batch.demos
    columns = [prompt.meta for prompt in demos.prompts]
    assert list(demos.completions[0]) == [
        {"role": "assistant", "content": f"{columns[0]['answer']}={columns[0]['number']:02d}"}
    ]
    assert len(demos) == 5 and demos.lengths.unique().numel() > 1
    loss = nll_by_hand(module, demos)
    loss.backward()
    optim = run.config.optim
    by_hand.limited(list(module.parameters()), optim.max_grad_norm)
    by_hand.AdamW(list(module.parameters()), optim.lr, optim).step()
    torch.testing.assert_close(
        vector(run.policy.module).double(), vector(module), rtol=0, atol=2e-7
    )
    expected = pytest.approx(float(loss.detach()), rel=1e-5)
    assert logged["sup/loss_nats"] == expected and logged["loss/sup"] == expected
    assert (
        logged["sup/tokens_count"] == int(demos.lengths.sum())
        and logged["update/updates_count"] == 1
    )


@pytest.mark.silent_bug(13)
def test_each_term_has_weights_of_its_own_and_its_own_coefficient(tmp_path):
    """However many demonstrations stand beside however many rows, the gradient is rl x theirs + sup
    x the others'."""
    run = run_in(tmp_path, **BOTH)
    batch, step_params = batch_of(run)
    together = gradient_of(run, batch, step_params)
    rewards = gradient_of(run, TrainBatch(**(vars(batch) | {"demos": None})), step_params)
    demos = gradient_of(run, TrainBatch(**(vars(batch) | {"rollouts": None})), step_params)
    assert rewards.norm() > 1e-3 and demos.norm() > 1e-3
    torch.testing.assert_close(together, rewards + demos, rtol=0, atol=1e-6)
    module = copy.deepcopy(run.policy.module).double()
    (0.5 * nll_by_hand(module, batch.demos)).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close(demos.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.silent_bug(11)
def test_micro_batches_do_not_change_the_gradient(tmp_path):
    run = run_in(tmp_path, **BOTH)
    batch, step_params = batch_of(run)
    whole = gradient_of(run, batch, step_params)
    run.config = api.change(run.config, {"optim__token_budget": 1})
    run.state.token_budget = 1
    stats = backward(run, batch, step_params)
    assert stats["update/micro_batches_count"].count > 10
    torch.testing.assert_close(gradient_of(run, batch, step_params), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [3, 2])
def test_where_memory_runs_out_in_either_term_both_begin_again(tmp_path, rows):
    """Of 12 rows and 5 demonstrations: what the first term had added is not lost, and does not
    count twice."""
    run = run_in(tmp_path, **BOTH)
    batch, step_params = batch_of(run)
    full = Full(run.policy, "likelihood", rows=rows)
    stats = backward(run, batch, step_params)
    got, lowered = gradients(run), run.state.token_budget
    assert max(full.asked) > rows and lowered < TOKENS_ON_CPU
    full.rows = 1 << 30
    torch.testing.assert_close(gradient_of(run, batch, step_params), got, rtol=0, atol=0)
    assert stats["sup/loss_nats"].count == int(batch.demos.lengths.sum())
    run.state.token_budget = TOKENS_ON_CPU
    torch.testing.assert_close(gradient_of(run, batch, step_params), got, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_minibatches_of_an_epoch_hold_each_demonstration_once(tmp_path, count):
    run = run_in(tmp_path, **ALONE, optim__epochs=2, optim__minibatches=count, optim__stop_kl=0.1)
    batch, step_params = batch_of(run)
    sampled = sorted(prompt.draw for prompt in batch.demos.prompts)
    parts = [part.demos for part in minibatches(run, batch)]
    assert len(parts) == 2 * count
    for epoch in (parts[:count], parts[count:]):
        assert (
            sorted(prompt.draw for part in epoch for prompt in part.prompts)
            == sampled
            == list(range(5))
        )
        assert max(map(len, epoch)) - min(map(len, epoch)) <= 1
    first, second = (
        [prompt.draw for part in epoch for prompt in part.prompts]
        for epoch in (parts[:count], parts[count:])
    )
    assert count == 1 or first != second
    logged = learn(run, batch, step_params)
    assert logged["update/updates_count"] == 2 * count
    assert logged["sup/tokens_count"] == 2 * int(batch.demos.lengths.sum())


@pytest.mark.slow
@pytest.mark.silent_bug(12)
@pytest.mark.parametrize("minibatches_", [1, 4])
def test_two_ranks_give_the_weights_and_metrics_of_one(tmp_path, minibatches_):
    """Five demonstrations on two ranks; of four minibatches one rank has none in some."""
    plan = [
        {"name": "sup", "steps": 1, "rl_coef": 0.0, "sup_coef": 1.0},
        {"name": "both", "sup_coef": 0.5},
    ]
    changes = {
        "stages": plan,
        "supervised__batch": 5,
        "optim__minibatches": minibatches_,
        "rollout__prompts": 3,
    }
    one, two, _, _ = both(tmp_path, 2, **changes)
    start = torch.cat([t.flatten().double() for t in first_weights()])
    assert (weights(one) - start).abs().max() > 1e-2
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-6)
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"update/micro_batches_count"}:
            expected = None if mine[name] is None else pytest.approx(mine[name], rel=1e-5, abs=1e-6)
            assert theirs[name] == expected, name
    assert sum("sup/loss_nats" in row for row in metrics(two)) == 2


# --- what a stage without samples leaves alone ----------------------------------------------------


def test_a_supervised_stage_samples_and_rewards_nothing_and_says_nothing_of_rewards(tmp_path):
    requested: list[int] = []

    def counted(completions: Any, **_: Any) -> list[float]:
        requested.append(len(completions))
        return [1.0] * len(completions)

    config = tiny.config(tmp_path, **ALONE, steps=3, evaluation__prompts=0)
    result = gruppo.train(config, reward=counted, show=False)
    rows = metrics(result.folder)
    assert requested == [] and result.tokens == 0 and len(rows) == 3
    of_samples = (
        "reward/",
        "group/",
        "ratio/",
        "kl/",
        "clip/",
        "len/",
        "finish/",
        "advantage/",
        "entropy/",
        "loss/policy",
    )
    assert not [name for row in rows for name in row if name.startswith(of_samples)]
    assert rows[0]["sup/loss_nats"] > rows[-1]["sup/loss_nats"] and rows[-1]["progress/tokens"] == 0


def test_the_rollouts_prompts_are_those_of_a_run_without_demonstrations(tmp_path):
    def seen(**changes: Any) -> tuple[list[str], Any]:
        run = run_in(tmp_path, **changes)
        batch, _ = batch_of(run)
        return [prompt.id for prompt in batch.rollouts.prompts], batch

    (alone, _), (beside, batch) = seen(), seen(**BOTH)
    assert alone == beside
    assert [prompt.id for prompt in batch.demos.prompts][:4] != beside


def test_held_out_prompts_are_never_demonstrated(tmp_path):
    run = run_in(tmp_path, **ALONE)
    held_out = {prompt.inputs[0]["content"] for prompt in run.source.held_out(100)}
    shown = {
        prompt.inputs[0]["content"] for _ in range(20) for prompt in batch_of(run)[0].demos.prompts
    }
    assert len(held_out) > 2 and len(shown) > 10 and not held_out & shown


def test_the_critic_alone_has_no_demonstrations_beside_it(tmp_path):
    run = run_in(tmp_path, **BOTH, objective="ppo", critic__warmup_steps=1)
    assert batch_of(run)[0].demos is None
    run.state.step = 1
    assert batch_of(run)[0].demos is not None


def test_a_step_whose_coefficients_are_all_zero_learns_nothing(tmp_path):
    run = run_in(tmp_path, stage__rl_coef="linear:0,1", stage__kl_coef=0.0)
    before = vector(run.policy.module)
    collected, logged = step(run)
    assert collected.rollouts is None and logged["update/updates_count"] == 0
    assert torch.equal(vector(run.policy.module), before)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_critic_rests_while_demonstrations_teach_alone(tmp_path, kind):
    """It and its moments are what they were until there is something to predict; ranks share no
    gradient of it."""
    plan = [PLAN[0], {"name": "full", "kl_coef": 0.01}]
    config = tiny.config(
        tmp_path, objective="ppo", critic__kind=kind, stages=plan, steps=3, supervised__batch=5
    )
    run = build(config, Parts())[0]
    head = copy.deepcopy(list(run.critic.module.parameters()))
    for _ in range(2):
        collected = collect(run, run.stage_schedule.step_params(run.state.step))
        learn(run, collected.batch, run.stage_schedule.step_params(run.state.step))
        run.state.step += 1
    assert all(
        torch.equal(was, now) for was, now in zip(head, run.critic.module.parameters(), strict=True)
    )
    assert not any(parameter in run.optimizer.state for parameter in run.critic.module.parameters())
    rows = metrics(api.start(config).folder)
    assert ["value/mean" in row for row in rows if "optim/lr" in row] == [False, False, True]


def test_rows_given_in_memory_are_demonstrated_and_the_manifest_says_which(tmp_path):
    config = tiny.config(tmp_path, **ALONE, steps=1, evaluation__prompts=0)
    result = gruppo.train(config, data=tiny.rows(), show=False)
    manifest = json.loads((result.folder / "manifest.json").read_text())
    assert manifest["demonstrations"]["fingerprint"] == manifest["data"]["fingerprint"] is not None
    other = tiny.write_rows(tmp_path / "other.jsonl", tiny.rows(7))
    config = tiny.config(
        tmp_path, **ALONE, steps=1, evaluation__prompts=0, supervised__data=other, name="other"
    )
    manifest = json.loads((gruppo.train(config, show=False).folder / "manifest.json").read_text())
    assert manifest["demonstrations"]["name"] == other
    assert manifest["demonstrations"]["fingerprint"] != manifest["data"]["fingerprint"]


# --- the whole run --------------------------------------------------------------------------------


# --- what to answer -------------------------------------------------------------------------------

PROMPT = Prompt("p", "1 + 1 =", "2", {"answer": "two", "gold": 2.5, "hint": None})


@pytest.mark.parametrize(
    ("supervised", "target"),
    [
        (SupervisedConfig(), "2"),
        (SupervisedConfig(column="gold"), 2.5),
        (SupervisedConfig(column="target"), "2"),
        (SupervisedConfig(template="<answer>{answer}</answer>"), "<answer>two</answer>"),
        (SupervisedConfig(template="{target} = {gold:.2f}"), "2 = 2.50"),
        (SupervisedConfig(template=r"\boxed{{{target}}}"), r"\boxed{2}"),
        (SupervisedConfig(template="{hint} {answer}"), None),
        (SupervisedConfig(column="hint"), None),
    ],
)
def test_what_to_answer_is_a_column_or_a_text_around_columns(supervised, target):
    assert Answers(supervised).given(PROMPT).target == target


def test_a_template_around_a_list_is_refused_rather_than_written_as_python():
    prompt = Prompt("p", "1 + 1 =", None, {"steps": ["1 + 1", "2"]})
    with pytest.raises(GruppoError, match="needs strings and numbers"):
        Answers(SupervisedConfig(template="<think>{steps}</think>")).given(prompt)


def rows_with(answers: list[Any]) -> list[dict[str, Any]]:
    return [
        row | {"answer": answer}
        for row, answer in zip(tiny.rows(len(answers)), answers, strict=True)
    ]


def test_what_cannot_be_learned_from_is_skipped_and_counted(tmp_path, caplog):
    data = tiny.write_rows(
        tmp_path / "gaps.jsonl", rows_with([str(n) if n % 3 else None for n in range(24)])
    )
    run = run_in(tmp_path, **ALONE, data=data, prompts__held_out_fraction=0.0)
    with caplog.at_level(logging.WARNING):
        collected, _ = step(run)
    demos, skipped = collected.batch.demos, collected.metrics["sup/skipped_count"]
    assert len(demos) == 5 and all(prompt.target for prompt in demos.prompts)
    assert skipped == run.demos.state_dict()["cursor"] - 5 > 0
    assert f"{skipped:.0f} demonstrations were skipped; the last: prompt" in caplog.text


def test_data_that_run_out_of_answers_end_the_run_with_the_reason(tmp_path):
    run = run_in(tmp_path, **ALONE)
    run.policy.check_demonstration = lambda prompt: f"{prompt.id} is bad"
    with pytest.raises(
        DataError, match=r"100 demonstrations in a row cannot be learned from; the last: .* is bad"
    ):
        step(run)


def test_demonstrations_may_come_from_data_of_their_own(tmp_path):
    other = tiny.write_rows(
        tmp_path / "other.jsonl", [{"prompt": f"say {n}", "label": f"{n}!"} for n in range(9)]
    )
    run = run_in(tmp_path, **ALONE, supervised__data=other)
    demos = batch_of(run)[0].demos
    assert all(
        result == f"{prompt.inputs[4:]}!"
        for result, prompt in zip(demos.completions, demos.prompts, strict=True)
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown column": (
        ALONE | {"supervised__column": "anser"},
        r"supervised.column names 'anser', which is none of .*data.*'answer'.*Did you mean answer",
    ),
    "an unknown column in a template": (
        ALONE | {"supervised__template": "<{nummer}>"},
        r"supervised.template names 'nummer', .*Set supervised__template",
    ),
    "a brace that is not closed": (
        ALONE | {"supervised__template": "<{answer>"},
        r"is not understood; .*in braces, as",
    ),
    "a brace without a name": (
        ALONE | {"supervised__template": "<{}>"},
        "is not understood; columns stand",
    ),
    "a format that does not fit": (
        ALONE | {"supervised__template": "{answer:.2f}"},
        r"does not fit",
    ),
    "more updates than demonstrations": (
        ALONE | {"optim__minibatches": 6},
        r"optim.minibatches=6 is more than supervised.batch=5.*Set supervised__batch",
    ),
    "no demonstration": (ALONE | {"supervised__batch": 0}, r"supervised.batch=0 is out of range"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_demonstrated_is_refused_before_anything_is_written(tmp_path, what):
    changes, why = REFUSED[what]
    with pytest.raises(GruppoError, match=why) as error:
        gruppo.train(tiny.config(tmp_path, **changes), show=False)
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


def test_data_without_targets_are_refused(tmp_path):
    data = tiny.write_rows(tmp_path / "bare.jsonl", [{"prompt": f"say {n}"} for n in range(9)])
    with pytest.raises(
        GruppoError,
        match=r"have no target to learn from; their columns are 'prompt'. Set supervised__",
    ):
        gruppo.train(tiny.config(tmp_path, **ALONE, data=data), show=False)
    empty = tiny.write_rows(
        tmp_path / "empty.jsonl", [{"prompt": f"say {n}", "answer": ""} for n in range(9)]
    )
    with pytest.raises(
        DataError,
        match=r"none of the first 8 demonstrations can be learned from: prompt .* it is ''",
    ):
        gruppo.train(tiny.config(tmp_path, **ALONE, data=empty), show=False)
