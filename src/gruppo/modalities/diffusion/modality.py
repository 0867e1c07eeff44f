"""Diffusion and flow models: from ``--model`` to a policy, and the options that it can satisfy."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest, learns_from_samples, values_of
from gruppo.modalities.common.adapters import model_of
from gruppo.modalities.common.validation import refuse, refuse_unused_options
from gruppo.modalities.diffusion.config import DiffusionConfig
from gruppo.modalities.diffusion.diffusers_policy import DiffusersPolicy, add_adapter, load_diffusers
from gruppo.modalities.diffusion.encoders import ClassLabels
from gruppo.modalities.diffusion.load import SETTINGS
from gruppo.modalities.diffusion.policy import DenoiserCritic, DenoiserPolicy, load_denoiser
from gruppo.modalities.diffusion.sampling import DiffusionSampling
from gruppo.modalities.diffusion.schedules import DiffusionSchedule, FlowSchedule
from gruppo.modalities.diffusion.trust_region import check_trust_region
from gruppo.modalities.diffusion.unet import DenoisingUNet
from gruppo.protocols import Critic, Modality, Policy, PromptSource, peek
from gruppo.types import DataError, GruppoError

log = logging.getLogger("gruppo")

NEW, HUB, INDEX = "unet", "diffusers:", "model_index.json"
NEW_OPTIONS = ("path", "shift", "predicts", "weighting", "dropped", "width")
PIPELINE_OPTIONS = ("size", "embedded_guidance")
"""Options of ``DiffusionConfig`` that are read for a new network, and for a pipeline of diffusers, alone."""


class DiffusionModality(Modality):
    """Networks that denoise: a new UNet, a saved denoiser, pipelines of diffusers."""

    name = "diffusion"
    config_section = DiffusionConfig
    rewards_read_images = True
    has_lengths = False
    is_gaussian = True

    def matches(self, model: str) -> bool:
        folder = Path(model_of(model)) if model else Path(NEW)
        return model == NEW or is_pipeline(model) or (folder / SETTINGS).is_file()

    def validate(self, config: Config) -> None:
        self.sampling(config)  # raises for options that cannot be sampled and scored alike
        refuse_unused_options(config, self)
        model, lora, chosen, default = config.model, config.lora, config.section(DiffusionConfig), DiffusionConfig()
        is_named, has_pipeline = model != IN_MEMORY, is_pipeline(model)
        temperatures = [t for t in values_of(config, "temperature") if t != 1]
        refuse(
            temperatures
            and f"a stage's temperature of {next(iter(temperatures), 1):g}: a denoising step has none but eta. Leave "
            "temperature out of the stages, and set --diffusion.eta.",
            highest(config, "entropy_coef")
            and "a stage's entropy_coef is above 0, and the noise of a denoising step is fixed, so that its entropy "
            "never changes. Set --stage.entropy-coef 0, and --diffusion.eta for more noise.",
            chosen.path == "diffusion"
            and chosen.shift != 1
            and f"diffusion.shift={chosen.shift:g} shifts times of a flow, and --diffusion.path is diffusion. Leave "
            "one of them out.",
            is_named
            and not has_pipeline
            and (lora.rank or lora.adapter)
            and f"LoRA puts adapters on the attention of a pipeline, and {model!r} is a small network that is trained "
            "itself. Leave the --lora options out.",
            has_pipeline
            and lora.adapter
            and f"lora.adapter={lora.adapter!r}: adapters of pipelines are trained from scratch. Set --lora.rank, or "
            "give the folder of a run's final model, in which its adapter is merged, as --model.",
            is_named
            and config.compute == "bfloat16"
            and not (has_pipeline and lora.rank)
            and f"compute='bfloat16' holds the base below adapters, and the weights of {model!r} are trained "
            "themselves. Set --compute float32, or --lora.rank with a pipeline.",
        )
        for name in (*NEW_OPTIONS, *PIPELINE_OPTIONS):
            is_read = has_pipeline if name in PIPELINE_OPTIONS else model == NEW
            if getattr(chosen, name) != getattr(default, name) and not is_read:
                owner = "a pipeline of diffusers" if name in PIPELINE_OPTIONS else f"a new network (--model {NEW})"
                raise GruppoError(
                    f"diffusion.{name} is of {owner}, and {model!r} already has its own. Leave --diffusion."
                    f"{name.replace('_', '-')} out."
                )

    def open(self, config: Config, data: PromptSource | None) -> tuple[Policy, dict[str, Any]]:
        policy: Policy
        if config.model == NEW:
            policy = new_denoiser(config, data)
        elif not is_pipeline(config.model):
            policy = load_denoiser(model_of(config.model))
        else:
            dtype = torch.bfloat16 if config.compute == "bfloat16" else torch.float32
            policy = pipeline = load_diffusers(model_of(config.model).removeprefix(HUB), dtype=dtype)
            chosen, default = config.section(DiffusionConfig), DiffusionConfig()
            changed = {n: getattr(chosen, n) for n in PIPELINE_OPTIONS if getattr(chosen, n) != getattr(default, n)}
            if changed:  # the settings saved with the pipeline keep the others
                policy = DiffusersPolicy(pipeline.pipeline, replace(pipeline.settings, **changed))
        return self.adapt(config, policy, data), {"name": config.model}

    def adapt(self, config: Config, policy: Policy, data: PromptSource | None) -> Policy:
        lora = config.lora
        if lora.rank or lora.adapter:
            if not isinstance(policy, DiffusersPolicy) or lora.adapter:
                raise GruppoError(
                    "LoRA puts new adapters on the attention of a diffusers pipeline, which this model is not. Leave "
                    "the --lora options out."
                )
            base = config.model if config.model != IN_MEMORY else ""
            add_adapter(policy, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed, base=base)
        return policy

    def load(
        self, model: str, *, compute: Any = "auto", trust_remote_code: bool = False, is_merged: bool = False
    ) -> Policy:
        path = model_of(model).removeprefix(HUB)
        return load_diffusers(path, dtype=torch.float32) if is_pipeline(model) else load_denoiser(path)

    def inference_sampling(self, sampling: Any, temperature: float) -> Any:
        return replace(sampling, temperature=float(temperature), noise="independent", train_from=0, train_to=0)

    def sampling(self, config: Config, policy: Policy | None = None) -> DiffusionSampling:
        rollout, chosen = config.rollout, config.section(DiffusionConfig)
        return DiffusionSampling(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            max_actions=chosen.steps,
            stop=rollout.stop,
            transition=chosen.transition,
            eta=chosen.eta,
            guidance=chosen.guidance,
            noise=chosen.noise,
            train_from=chosen.train_from,
            train_to=chosen.train_to,
            train_fraction=chosen.train_fraction,
            ode_steps=chosen.eval_steps,
        )

    def check(self, config: Config, policy: Policy, sampling: Any, data: PromptSource, rewards: Any) -> None:
        assert isinstance(policy, DenoiserPolicy)
        policy.check_sampling(policy.check_sampling(sampling))
        policy.check_sampling(sampling.greedy())
        first = peek(data)
        refused = [policy.check_prompt(prompt, None) for prompt in first]  # type: ignore[arg-type]
        if all(refused):
            hint = " Put captions.jsonl or a .txt file beside each image." if is_pipeline(config.model) else ""
            raise DataError(
                f"none of the first {len(first)} prompts of {config.data!r} can be drawn: {refused[0]}{hint}"
            )
        shapes = {tuple(p.target.shape) for p in first if isinstance(p.target, torch.Tensor)}
        shape = tuple(policy.denoiser.codec.image_shape)
        if shapes and shape not in shapes:
            log.warning(
                "the model draws %s, and the pictures of %s are %s.", list(shape), config.data, list(min(shapes))
            )
        if config.model == NEW and not highest(config, "sup_coef"):
            log.warning(
                "a new network draws grey, and no stage has demonstrations to learn from: set --stages "
                "supervised:2000,full, or train it first with --stage.rl-coef 0 --stage.sup-coef 1."
            )
        if learns_from_samples(config):
            check_trust_region(config.objective, policy.dims)
        # A ratio of whole rows needs each row of denoising steps in one micro-batch.
        evaluations = (sampling.max_actions - 1) * (2 if sampling.guidance != 1 else 1)
        budget = config.optim.token_budget or policy.default_budget
        if config.objective.needs_whole_rows and sampling.noise != "branched" and evaluations > budget:
            raise GruppoError(
                f"this objective compares whole rows, of up to {evaluations} evaluations of the network, and a "
                f"micro-batch has {budget}. Set --optim.token-budget {evaluations}, or --objective.ratio token."
            )

    def critic(self, config: Config, policy: Policy, data: PromptSource) -> Critic | None:
        assert isinstance(policy, DenoiserPolicy)
        return None if config.critic.kind == "shared" else DenoiserCritic(policy)


DIFFUSION = DiffusionModality()
DenoiserPolicy.modality = DIFFUSION


def is_pipeline(model: str) -> bool:
    """Return whether a name or folder is of a pipeline of diffusers."""
    return model.startswith(HUB) or (bool(model) and (Path(model_of(model)) / INDEX).is_file())


def new_denoiser(config: Config, data: Any) -> DenoiserPolicy:
    """Return an untrained UNet for the data's images: of their size, conditioned on their classes if they have any."""
    first, chosen = peek(data)[0], config.section(DiffusionConfig)
    if not isinstance(first.target, torch.Tensor) or first.target.ndim != 3:
        raise DataError(
            f"--model {NEW} is made for the data's pictures, and the data {config.data!r} have none: a target is a "
            f"{type(first.target).__name__}. Set --data digits or images:FOLDER:SIZE, or a --model."
        )
    if first.inputs != "" and not (isinstance(first.inputs, int) and data.classes is not None):
        raise DataError(
            f"--model {NEW} is asked for classes, and the data {config.data!r} ask by {first.inputs!r:.60}. Put the "
            "images of each class in a subfolder without captions, or give a --model of your own."
        )
    shape, classes = list(first.target.shape), [""] if first.inputs == "" else data.classes
    labels = ClassLabels(classes, dropped=chosen.dropped)
    schedule = FlowSchedule(chosen.shift) if chosen.path == "flow" else DiffusionSchedule()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        scale = 1000.0 if schedule.is_flow else 1.0
        module = DenoisingUNet(shape, len(labels.names), width=chosen.width, time_scale=scale)
    return DenoiserPolicy(
        module,
        shape,
        predicts=chosen.predicts,
        schedule=schedule,
        condition=labels,
        weighting=chosen.weighting,
        middle="middle",
    )
