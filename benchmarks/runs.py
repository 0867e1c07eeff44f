"""gruppo as the benchmarks run it: as ``gruppo train`` would, with nothing else configured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.workloads import PROMPTS, alternating, prompts
from gruppo.api import Parts, build
from gruppo.config.schema import Config, OptimConfig, RolloutConfig
from gruppo.trainer.collect import collect
from gruppo.trainer.metrics import collected_metrics
from gruppo.trainer.recorder import Recorder
from gruppo.trainer.run import Run
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import learn


def started(spec: Mapping[str, Any], *, model: Any = None) -> Run:
    """A run of GRPO on a workload, as told; ``model``, a policy, in the place of the spec's."""
    optim = {"token_budget": spec["token_budget"]} if spec.get("token_budget") else {}
    config = Config(
        model=spec.get("model", ""),
        data="given",
        reward=("given",),
        steps=10_000,
        compute=spec.get("compute", "auto"),
        rollout=RolloutConfig(
            prompts=spec["prompts"],
            group_size=spec["group_size"],
            max_new_tokens=spec["new_tokens"],
        ),
        optim=OptimConfig(lr=spec.get("lr", 1e-6), **optim),
    )
    rows = [{"prompt": prompt} for prompt in prompts(PROMPTS, spec["words"])]
    run, _ = build(config, Parts(model=model, data=rows, rewards=[alternating]))
    return run


def one_step(run: Run) -> dict[str, Any]:
    """Collect, learn, publish; how long each took, and what was in it."""
    step_params = step_params_at(run.config, run.state.step)
    began = time.perf_counter()
    run.recorder = Recorder()
    collected = collect(run, step_params)
    metrics = collected_metrics(run, collected)
    with run.recorder.time("update"):
        metrics |= learn(run, collected.batch, step_params)
    metrics |= run.recorder.metrics
    run.state.step += 1
    run.engine.sync(run.policy, run.state.step)
    seconds = time.perf_counter() - began
    rollouts = collected.rollouts
    prompt_tokens = [len(ids) for ids in rollouts.shared["prompt_ids"]]
    return {
        "seconds": seconds,
        "rollout_s": metrics["time/rollout_s"],
        "update_s": metrics["time/update_s"],
        "micro_batches": metrics["update/micro_batches_count"],
        "lengths": rollouts.lengths.tolist(),
        "prompt_tokens": [prompt_tokens[group] for group in rollouts.group_ids.tolist()],
        "mismatch_nats": metrics.get("mismatch/mean_nats"),
    }
