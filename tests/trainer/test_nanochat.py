"""nanochat's tokenizer and module train through examples/nanochat_rl.py, and its preset is the
script's arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import nanochat_standin as nanochat
from tests import tiny
from tests.collecting import collect
from tests.test_examples import EXAMPLES, example

from gruppo.build import Parts, build
from gruppo.errors import DataError
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import backward

FILE = EXAMPLES / "nanochat_rl.py"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    nanochat.install(monkeypatch)


def in_nanochat(folder: Any, **changes: Any) -> Any:
    names = {"model": f"{FILE}:model", "data": f"{FILE}:problems", "reward": [f"{FILE}:is_right"]}
    here = {
        "compute": "auto",
        "prompts__held_out_fraction": 0.0,
        "scoring__isolate": False,
    }  # with the stand-in
    return tiny.config(folder, **(names | here | changes))


def test_render_ends_where_the_assistant_answers_and_keeps_an_answer_that_is_begun():
    chat = example("nanochat_rl").model().chat
    user, begun = {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "it is"}
    question = [nanochat.BOS, nanochat.USER, *b"2+3", nanochat.USER_END, nanochat.ASSISTANT]
    assert chat.encode([user]) == question
    assert chat.encode([user, begun]) == [*question, *b"it is"]
    answer, reply = [{"role": "assistant", "content": "4"}], [{"role": "user", "content": "no"}]
    with pytest.raises(DataError, match="writes no messages after an answer"):
        chat.encode_reply([user], answer, reply, is_closed=False)


# --- the preset -----------------------------------------------------------------------------------


def gradient_of_the_script(module: Any, rollouts: Any, rewards: torch.Tensor) -> list[torch.Tensor]:
    """chat_rl.py's loop over the prompts of a step, with the rows of a prompt in one pass."""
    examples = int(rollouts.group_ids.max()) + 1
    for example_step in range(examples):
        rows = (rollouts.group_ids == example_step).nonzero()[:, 0]
        prompt = rollouts.shared["prompt_ids"][example_step]
        ids = torch.cat([prompt.expand(len(rows), -1), rollouts.actions[rows]], dim=1)
        is_sampled = torch.cat(
            [torch.zeros(len(rows), len(prompt), dtype=torch.bool), rollouts.mask[rows]], dim=1
        )
        inputs, targets = ids[:, :-1], torch.where(is_sampled, ids, -1)[:, 1:]
        advantages = rewards[rows] - rewards[rows].mean()
        logp = -module(inputs, targets, loss_reduction="none").view_as(inputs)
        pg_obj = (logp * advantages.unsqueeze(-1)).sum() / (
            (targets >= 0).sum().clamp(min=1) * examples
        )
        (-pg_obj).backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    return gradients


@pytest.mark.silent_bug(11)
@pytest.mark.parametrize("token_budget", [60, 10_000], ids=["micro-batches", "one piece"])
def test_a_step_of_several_prompts_has_the_gradient_of_chat_rl(tmp_path, token_budget):
    """Prompts whose answers have unequal lengths: the token average differs from the script by
    half."""
    torch.manual_seed(0)
    policy = example("nanochat_rl").model()
    with torch.no_grad():
        policy.module.head.bias[nanochat.ASSISTANT_END] += 3  # answers of many lengths
    changes = {"rollout__prompts": 3, "rollout__group_size": 4, "rollout__max_new_tokens": 12}
    config = in_nanochat(
        tmp_path, objective="nanochat", optim__token_budget=token_budget, **changes
    )
    run, *_ = build(config, Parts(model=policy))
    step_params = step_params_at(config, 0)
    batch = collect(run, step_params).batch
    rollouts = batch.rollouts
    tokens = torch.zeros(3).index_add(0, rollouts.group_ids, rollouts.mask.sum(dim=1).float())
    assert tokens.max() > 1.3 * tokens.min()
    expected = gradient_of_the_script(policy.module, rollouts, batch.rewards)
    stats = backward(run, batch, step_params)
    assert (stats["update/micro_batches_count"].count > 1) == (token_budget == 60)
    for parameter, by_script in zip(policy.module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, by_script, rtol=1e-4, atol=1e-7)
