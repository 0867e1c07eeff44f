"""The chat script of source document 002: nanochat's ``chat_rl.py`` with what it lacks of GRPO."""

from __future__ import annotations

from gruppo.config.schema import (
    Config,
    EvaluationConfig,
    OptimConfig,
    PromptsConfig,
    RolloutConfig,
    SavingConfig,
    Stage,
)


def chat() -> Config:
    """Document 002's chat script with its settings: groups of 16, clip 0.2, KL 0.04, one update a batch.

    Sampling (temperature 1, the 50 likeliest tokens) and the linear decay are nanochat's. ``--objective nanochat
    --stage.kl-coef 0`` is the script as it was: reward minus the group's mean, no clip, no KL. With one update a batch
    the ratio is 1 and the clip changes nothing; ``--optim.epochs 2`` gives it something to do.

    gruppo train chat learns sums and differences with SmolLM2-135M-Instruct: measured here on one thread of an AMD EPYC
    CPU (Zen 5) with 2 cores, beside other jobs, 17 minutes (18 s a step); sampled reward 0.01 at first, 0.5 by step 8,
    about 0.8 from step 14 on; held-out exact match from 0.01 to 0.86. gruppo train chat --model
    examples/chat_rl.py:model --optim.lr 5e-4 is the same on a plain module of 0.1 million weights, without
    transformers: a minute of one core, half of it to teach the module; held-out 0.09 to 0.93 and 0.07 to 0.91 (seeds 0
    and 1). Your own module, task and reward: --model mine.py:function --data mine.jsonl --reward numeric_match.
    """
    return Config(
        model="smollm2-135m",
        data="arithmetic:0:20:natural",
        reward=("exact_match",),
        steps=50,
        rollout=RolloutConfig(prompts=16, group_size=16, max_new_tokens=6, temperature=1.0, top_k=50),
        optim=OptimConfig(lr=1.2e-5, decay="linear"),
        stage=Stage(kl_coef=0.04),
        prompts=PromptsConfig(held_out_fraction=0.4),
        evaluation=EvaluationConfig(prompts=256),
        saving=SavingConfig(every=25, keep=1),
    )
