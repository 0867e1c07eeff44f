"""One variant of ``benchmarks.grpo_vs_ppo`` in a process of its own, whose peak memory nothing else
has touched.

``python -m benchmarks.variants SPEC`` with SPEC the JSON of a workload. Prints one JSON object.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from typing import Any

from benchmarks import memory
from benchmarks.workloads import alternating, prompts

VARIANTS = ("grpo", "ppo-shared", "ppo-separate")


def config(spec: dict[str, Any]) -> Any:
    """GRPO and PPO as their presets are, alike in all else.

    The learning rate is 0: an update does all its work and moves nothing, so each variant writes
    the same completions.
    """
    from gruppo.config.schema import Config, CriticConfig, OptimConfig, RolloutConfig, Stage
    from gruppo.core.objective import GRPO, PPO

    name, _, kind = spec["variant"].partition("-")
    passes = spec["passes"]
    return Config(
        model=spec["model"],
        data="given",
        reward=("given",),
        steps=10_000,
        compute=spec["compute"],
        objective=GRPO if name == "grpo" else PPO,
        critic=CriticConfig(kind=kind) if name == "ppo" else CriticConfig(),
        stage=Stage(kl_coef=spec["kl_coef"]),
        rollout=RolloutConfig(
            prompts=spec["prompts"],
            group_size=spec["group_size"],
            max_new_tokens=spec["new_tokens"],
        ),
        optim=OptimConfig(lr=0.0, epochs=passes, minibatches=passes),
    )


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Steps of one variant after a warm-up step, and the memory that this process came to need
    beyond its imports."""
    import transformers.models.llama.modeling_llama  # noqa: F401  # part of the imports, not of the model

    from gruppo.api import Parts, build
    from gruppo.trainer.checks import check

    after_imports = memory.begin()
    settings = config(spec)
    check(settings)
    rows = [{"prompt": prompt} for prompt in prompts(64, spec["words"])]
    run, _ = build(settings, Parts(data=rows, rewards=[alternating]))
    run.policy.chat.eos_ids = ()  # every row to its full length
    steps = [one_step(run) for _ in range(spec["steps"] + 1)][1:]
    peak = memory.most(after_imports) / 2**30
    return {
        "compute": run.config.compute,
        "peak_gib": peak,
        "held_gib": held_gib(run),
        "steps": steps,
    }


def one_step(run: Any) -> dict[str, Any]:
    from gruppo.trainer.collect import collect
    from gruppo.trainer.forward import active_actions
    from gruppo.trainer.metrics import collected_metrics
    from gruppo.trainer.recorder import Recorder
    from gruppo.trainer.stages import step_params_at
    from gruppo.trainer.update import learn

    step_params = step_params_at(run.config, run.state.step)
    began = time.perf_counter()
    run.recorder = Recorder()
    collected = collect(run, step_params)
    metrics = collected_metrics(run, collected)
    with run.recorder.time("update"):
        metrics |= learn(run, collected.batch, step_params)
    metrics |= run.recorder.metrics
    seconds = time.perf_counter() - began
    run.state.step += 1
    actions = collected.rollouts.actions
    return {
        "seconds": seconds,
        "rollout_s": metrics["time/rollout_s"],
        "credit_s": metrics["time/credit_s"],
        "update_s": metrics["time/update_s"],
        "update_tokens": int(
            active_actions(
                run, collected.batch.loss_mask, collected.batch.advantages, step_params
            ).sum()
        ),
        "tokens": int(metrics["tokens"]),
        "rollouts_sha256": hashlib.sha256(actions.contiguous().numpy().tobytes()).hexdigest(),
    }


def held_gib(run: Any) -> float:
    """What lives through the whole run: weights and their copies, gradients, the optimiser's
    moments."""
    modules = [run.policy.module, run.policy.compute_module]
    modules += [run.reference.module] if run.reference is not None else []
    if run.critic is not None:
        copied = getattr(run.critic, "compute_copy", None)
        modules += [run.critic.module, *([copied] if copied is not None else [])]
    weights = {
        id(tensor): tensor
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    moments = [
        value
        for state in run.optimizer.state.values()
        for value in state.values()
        if hasattr(value, "nbytes")
    ]
    return (
        _bytes([*weights.values(), *run.parameters, *moments]) / 2**30
    )  # a gradient is as large as its parameter


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
