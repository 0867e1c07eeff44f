"""What a run of an image model would do, in words: of one that draws, or of one that restores."""

from __future__ import annotations

from typing import Any

import torch

from gruppo.config import peer_options
from gruppo.config.checks import group_sizes
from gruppo.config.stages import highest, learns_from_samples
from gruppo.modalities.diffusion import DiffusionSampling
from gruppo.modalities.diffusion.trust_region import joint_clip_nats
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.trainer.demonstrations import drawn, peeked
from gruppo.trainer.memory import token_budget
from gruppo.trainer.run import Run
from gruppo.types import Request


def work(run: Run) -> list[str]:
    """What is drawn and trained on in a step."""
    if run.restores:
        return _restoring(run)
    config, sampling = run.config, run.sampling
    assert isinstance(sampling, DiffusionSampling)
    rows = config.rollout.prompts * max(group_sizes(config))
    asks = 2 if sampling.guidance != 1 else 1
    last = sampling.train_to or sampling.steps - 1
    each = max(round(sampling.train_fraction * (last - sampling.train_from)), 1)
    is_branched = sampling.noise == "branched"
    trained = config.rollout.prompts if is_branched else each * rows
    what = "1, at which its group parts," if is_branched else f"{each}"
    eta = "" if sampling.eta is None else f", eta {sampling.eta:g}"
    shape = list(run.policy.denoiser.codec.image_shape)
    lines = [f"  a picture   {shape}; an action has {run.policy.dims:,} dimensions"]
    if learns_from_samples(config):
        lines += [
            f"  a step      {config.rollout.prompts} prompts x {max(group_sizes(config))} samples = {rows} rows",
            f"  drawn       {sampling.steps} steps of {sampling.transition}{eta}, the last without noise; "
            f"{sampling.steps * rows * asks:,} evaluations of the network"
            + (", guided" if asks == 2 else "")
            + (", less where a group has its state in common" if sampling.noise != "independent" else ""),
            f"  noise       {_NOISE[sampling.noise]}",
            f"  trained on  {what} of steps {sampling.train_from} to {last - 1} of each row: "
            f"{trained * asks:,} evaluations an epoch",
        ]
        if config.objective.surrogate in ("clip", "cispo"):
            nats = joint_clip_nats(config.objective, run.policy.dims)
            lines.append(f"  clip        the log-ratio of a step's joint density above {nats:.3g} nats")
    ode = sampling.ode_steps or sampling.max_actions
    return ["WORK", *lines, f"  evaluated   by the ODE, in {ode} steps"]


def _restoring(run: Run) -> list[str]:
    config, policy = run.config, run.policy
    chosen = config.section(RestorationConfig)
    picture = peeked(run.source)[0].inputs
    options = policy.module.action.settings.items()
    settings = ", ".join(f"{name} {value}" for name, value in options if name != "controls")
    weights = {name: sum(p.numel() for p in part.parameters()) for name, part in policy.module.named_children()}
    parts = "" if policy.patches == 1 else f"; one of each of {policy.patches} x {policy.patches} patches"
    lines = [
        f"  a picture   {list(picture.shape)}",
        f"  an action   {settings}: {policy.dims(picture.shape):,} numbers{parts}",
        f"  weights     {weights['network']:,} of the network"
        + (", which rests" if policy.trains == "action" else "")
        + f", {weights['action']:,} of the action, at {chosen.action_lr_factor:g} times the rate",
    ]
    if learns_from_samples(config):
        size = max(group_sizes(config))
        rows = config.rollout.prompts * size
        lines.append(f"  a step      {config.rollout.prompts} prompts x {size} samples = {rows} pictures")
    if run.demos is not None:
        lines.append(f"  taught by   {policy.loss}, on the picture of {_SUPERVISED[policy.supervises]}")
    if highest(config, "cons_coef"):
        lines.append(f"  held to     {chosen.consistency} (consistency), by {policy.loss}")
    return ["WORK", *lines, "  evaluated   the picture of the mean action"]


_SUPERVISED = {
    "output": "the mean action",
    "base": "the network without any action",
    "told": "the network, told the true controls",
}
_NOISE = {
    "independent": "each sample its own",
    "shared": "a group has one first latent",
    "branched": "a group has all in common but that of one random step",
}


def memory(run: Run) -> list[str]:
    """Bytes of weights, gradients and optimiser; activations are not counted: networks differ too much."""
    module = run.policy.module
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    components = getattr(getattr(run.policy, "pipeline", None), "components", {}).values()
    others = [part for part in components if isinstance(part, torch.nn.Module) and part is not module]
    trained = sum(p.numel() for p in run.parameters)
    parts = {"weights": held, "gradients, float32": 4 * trained, "AdamW state, float32": 8 * trained}
    if others:
        size = sum(p.numel() * p.element_size() for part in others for p in part.parameters())
        parts["text encoders and VAE"] = size
    if (
        run.reference is not None
        and run.reference.module is not run.policy.compute_module
        and not run.reference.is_offloaded
    ):
        parts["reference"] = held
    unit, said = (2**30, "GiB") if sum(parts.values()) > 2**29 else (2**20, "MiB")
    return [
        f"MEMORY, without activations; pieces of {token_budget(run):,} {'squares' if run.restores else 'evaluations'}",
        *(f"  {name:<24} {size / unit:6.2f} {said}" for name, size in parts.items()),
        f"  {'together':<24} {sum(parts.values()) / unit:6.2f} {said}",
    ]


def example(run: Run) -> list[str]:
    """One picture that the model draws, and what the rewards say of it."""
    prompt = run.source.take(1)[0]
    lines = ["ONE REAL PROMPT", f"  prompt      {_said(prompt.inputs)}", f"  target      {_said(prompt.target)}"]
    if run.restores:
        lines.append(f"  columns     {', '.join(f'{name} {_said(value)}' for name, value in prompt.meta.items())}")
    if run.rewards.names:
        rollouts = run.engine.generate([Request(prompt, 1)], run.sampling, seed=run.config.seed)
        scores = run.rewards.score(rollouts, step=0, max_steps=run.config.steps)
        lines.append(f"  drawn       {_said(rollouts.completions[0])}")
        lines += [
            f"  reward      {name}(prompts=[...], images=[...], ...) = {float(part[0]):g}"
            for name, part in scores.parts.items()
        ]
        lines += [f"  failed      {f.reward}: {f.kind}: {f.message}" for f in scores.failures]
    if run.demos is not None:
        demo = drawn(run)[0][0]
        lines += [
            "",
            "ONE REAL DEMONSTRATION",
            f"  prompt      {_said(demo.inputs)}",
            f"  to draw     {_said(demo.target)}",
        ]
    return lines


def ddpo_names(run: Run) -> list[str]:
    return ["DDPO-PYTORCH'S NAMES", *(f"  {line}" for line in peer_options.main_lines(run.config, "ddpo"))]


def _said(picture: Any) -> str:
    if not isinstance(picture, torch.Tensor):
        return repr(picture)
    return f"{list(picture.shape)}, from {float(picture.min()):.3g} to {float(picture.max()):.3g}"
