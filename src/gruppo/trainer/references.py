"""References of the KL term: errors of the options, proof that frozen weights are frozen, metrics
of moving ones."""

from __future__ import annotations

from functools import partial
from typing import Any

from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.distributed.sharding import local
from gruppo.environments import converse
from gruppo.protocols import ConversationMixin, Modality, digest, part
from gruppo.trainer.evaluate import evaluate, held_out
from gruppo.trainer.forward import whole_weights
from gruppo.trainer.run import Run
from gruppo.types import GruppoError


def has_reference(config: Config, modality: Modality) -> bool:
    """Whether a KL or a consistency term needs a reference."""
    return highest(config, "kl_coef") > 0 or modality.consistency_reads_reference(config)


def remember(run: Run) -> str | None:
    """Return the SHA-256 of the weights that must not change, taken before the first update; None
    without any."""
    if run.reference is not None and not run.reference_sha256:
        frozen = run.reference.frozen_state_dict()
        run.reference_sha256 = digest(frozen) if frozen else None
    return run.reference_sha256


def check_unchanged(run: Run) -> None:
    """Stop a run whose frozen weights are no longer those of its start. Of sharded ones, each rank
    reads its shards."""
    then = run.reference_shards_sha256 or run.reference_sha256
    if run.reference is None or then is None:
        return
    frozen = run.reference.frozen_state_dict()
    now = digest({name: local(tensor) for name, tensor in frozen.items()})
    if now != then:
        raise GruppoError(f"""step {run.state.step}: the frozen weights of the reference have
            changed since the start (SHA-256 {now[:12]}, was {then[:12]}), so the KL was to
            something else. Nothing was saved at this step; every save before it is kept. Something
            other than gruppo writes to the model: find it, then resume.""")


def watch(run: Run) -> dict[str, float]:
    """Distance of the policy from a reference that moves, and the reference's own evaluation."""
    reference = run.reference
    if reference is None or not reference.follows_policy:
        return {}
    metrics = {"reference/distance_frac": reference.distance(run.policy)}
    prompts = held_out(run, run.config.reference.watch_prompts)
    if run.config.reference.is_mixed and prompts:
        with reference.active() as policy, whole_weights(policy):
            generate: Any = policy.sample
            if run.environment is not None:
                generate = partial(
                    converse,
                    policy.sample,
                    part(policy, ConversationMixin).continue_rollouts,
                    run.environment,
                    check_prompt=policy.check_prompt,
                )
            evaluation, _ = evaluate(run, prompts, generate=generate)
            metrics["reference/eval_reward_mean"] = evaluation.mean
    return metrics
