"""One reward model through TRL 1.16's GRPO trainer and ours: the same texts, padded together, and
the same scores."""

from __future__ import annotations

from typing import Any

import pytest
from tests.parity.trl_side import trainer_of
from tests.rewards.classifiers import classifier
from tests.rewards.test_models import tokenizer_of

from gruppo.rewards import RewardModel

ANSWERS = ["es", "yes, 12 times", "", "no"]


@pytest.mark.parametrize("is_chat", [True, False], ids=["conversation", "text"])
def test_a_reward_model_reads_what_it_reads_in_trl(is_chat: bool):
    module, tokenizer = classifier("SequenceClassification", 1), tokenizer_of(chats=is_chat)
    prompts: list[Any] = [[{"role": "user", "content": "ask "}] if is_chat else "ask "] * len(
        ANSWERS
    )
    completions = [[{"role": "assistant", "content": a}] if is_chat else a for a in ANSWERS]
    ours = RewardModel(module, tokenizer)(prompts=prompts, completions=completions)
    trainer = trainer_of("GRPO")
    trainer.reward_funcs, trainer.reward_processing_classes = [module], [tokenizer]
    trainer.reward_func_names = ["model"]
    inputs = [{"prompt": prompt} for prompt in prompts]
    theirs = trainer._calculate_rewards(inputs, prompts, completions, [[1]] * len(ANSWERS))[:, 0]
    assert ours == pytest.approx(theirs.tolist(), abs=2e-5)
    assert max(ours) - min(ours) > 0.5


def test_our_reward_model_is_a_reward_function_of_trls():
    model = RewardModel(classifier("SequenceClassification", 1), tokenizer_of())
    trainer = trainer_of("GRPO")
    trainer.reward_funcs, trainer.reward_processing_classes = [model], [None]
    trainer.reward_func_names = [model.__name__]
    prompts = ["ask "] * len(ANSWERS)
    inputs = [{"prompt": prompt} for prompt in prompts]
    theirs = trainer._calculate_rewards(inputs, prompts, ANSWERS, [[1]] * len(ANSWERS))[:, 0]
    assert model(prompts=prompts, completions=ANSWERS) == pytest.approx(theirs.tolist(), abs=1e-6)
