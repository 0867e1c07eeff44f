"""The chat script of source document 002: nanochat's ``chat_rl.py`` with what it lacks of GRPO."""

from __future__ import annotations

from gruppo.training.config import Config, Evaluation, Optim, Prompts, Rollout, Saving, Stage


def chat() -> Config:
    """Document 002's chat script with its settings: groups of 16, clip 0.2, KL 0.04, one update a batch.

    Sampling (temperature 1, the 50 likeliest tokens) and the linear decay are nanochat's. ``--objective nanochat
    --stage.kl-coef 0`` is the script as it was: reward minus the group's mean, no clip, no KL. With one update a batch
    the ratio is 1 and the clip changes nothing; ``--optim.epochs 2`` gives it something to do. gruppo train chat learns
    sums with SmolLM2-135M-Instruct, gruppo train chat --model FOLDER --data mine.jsonl --reward numeric_match your own
    task. python examples/chat_rl.py is the same on a plain module of 0.1 million weights, without transformers: one CPU
    core, half a minute, held-out exact match from 0.02 to 0.97 (seed 0). With SmolLM2 it has not been run to its end.
    """
    return Config(
        model="smollm2-135m",
        data="arithmetic:0:20:natural",
        reward=("exact_match",),
        steps=50,
        rollout=Rollout(prompts=16, group_size=16, max_new_tokens=6, temperature=1.0, top_k=50),
        optim=Optim(lr=1.2e-5, decay="linear"),
        stage=Stage(kl_coef=0.04),
        prompts=Prompts(held_out_fraction=0.4),
        evaluation=Evaluation(prompts=256),
        saving=Saving(every=25, keep=1),
    )
