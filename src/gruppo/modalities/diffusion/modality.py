"""Diffusion and flow models: from ``--model`` to a policy, and the options that it can satisfy."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest
from gruppo.modalities.common.adapters import model_of
from gruppo.modalities.common.images import ImageModality
from gruppo.modalities.common.state_dict import load_strictly, read_policy
from gruppo.modalities.common.validation import changed_options, refuse_changed
from gruppo.modalities.diffusion.config import DiffusionConfig
from gruppo.modalities.diffusion.denoiser import ClassLabels, NoCondition
from gruppo.modalities.diffusion.pipelines import DiffusersPolicy, add_adapter, load_diffusers
from gruppo.modalities.diffusion.policy import SETTINGS, DenoiserCritic, DenoiserPolicy
from gruppo.modalities.diffusion.sampling import DiffusionSampling
from gruppo.modalities.diffusion.schedules import DiffusionSchedule, FlowSchedule
from gruppo.modalities.diffusion.unet import DenoisingUNet
from gruppo.protocols import Critic, Policy, PromptSource, peek
from gruppo.types import DataError, GruppoError

log = logging.getLogger("gruppo")

NEW, HUB, INDEX = "unet", "diffusers:", "model_index.json"
SAMPLING_OPTIONS = (
    *("transition", "eta", "guidance", "noise"),
    *("train_from", "train_to", "train_fraction"),
)
"""Options of ``DiffusionConfig`` and fields of ``DiffusionSampling``."""
NEW_OPTIONS = ("shift", "predicts", "dropped", "width")
"""Options of ``DiffusionConfig`` for a new network; a saved one has its own."""
PIPELINE_OPTIONS = ("size", "embedded_guidance")
"""Options of ``DiffusionConfig`` for a pipeline of diffusers."""


class DiffusionModality(ImageModality):
    """Networks that denoise: a new UNet, a saved denoiser, pipelines of diffusers."""

    name = "diffusion"
    config_section = DiffusionConfig
    settings_file = SETTINGS

    def matches(self, model: str) -> bool:
        return model == NEW or is_pipeline(model) or super().matches(model)

    def validate(self, config: Config) -> None:
        super().validate(config)
        self.sampling(config)  # raises for options that cannot be both sampled and scored
        model = config.model
        if model != NEW:
            refuse_changed(config, NEW_OPTIONS, "a new network")
        if not is_pipeline(model):
            refuse_changed(config, PIPELINE_OPTIONS, "a pipeline of diffusers")

    def open(self, config: Config, data: Any) -> tuple[Policy, dict[str, Any]]:
        policy: Policy
        if config.model == NEW:
            policy = new_denoiser(config, data)
        elif is_pipeline(config.model):
            dtype = torch.bfloat16 if config.compute == "bfloat16" else torch.float32
            policy = pipeline = load_diffusers(path_of(config.model), dtype=dtype)
            changed = changed_options(config.section(DiffusionConfig), PIPELINE_OPTIONS)
            if changed:  # the settings saved with the pipeline keep the others
                policy = DiffusersPolicy(pipeline.pipeline, replace(pipeline.settings, **changed))
        else:
            policy = self.load(config.model)
        return self.adapt(config, policy, data), {"name": config.model}

    def adapt(self, config: Config, policy: Policy, data: PromptSource | None) -> Policy:
        lora = config.lora
        if not isinstance(policy, DiffusersPolicy):
            return super().adapt(config, policy, data)
        if lora.adapter:
            raise GruppoError(
                f"lora.adapter={lora.adapter!r}: adapters of pipelines are trained from scratch",
                advice="""Set $lora.rank, or give the folder of a run's final model, in which its
                    adapter is merged, as $model""",
            )
        if lora.rank:
            add_adapter(
                policy,
                rank=lora.rank,
                alpha=lora.alpha,
                targets=lora.targets,
                seed=config.seed,
                base=config.model if config.model != IN_MEMORY else "",
            )
        return policy

    def load(self, model: str, **options: Any) -> Policy:
        load = load_diffusers if is_pipeline(model) else load_denoiser
        return load(path_of(model))

    def inference_sampling(self, sampling: Any, temperature: float) -> Any:
        return replace(
            sampling, temperature=float(temperature), noise="independent", train_from=0, train_to=0
        )

    def sampling(self, config: Config, policy: Policy | None = None) -> DiffusionSampling:
        chosen = config.section(DiffusionConfig)
        options = vars(config.rollout.sampling) | {n: getattr(chosen, n) for n in SAMPLING_OPTIONS}
        options |= {"max_actions": chosen.steps, "ode_steps": chosen.eval_steps}
        return DiffusionSampling(**options)

    def critic(self, config: Config, policy: Any, data: PromptSource) -> Critic | None:
        return None if config.critic.kind == "shared" else DenoiserCritic(policy)


DIFFUSION = DiffusionModality()
DenoiserPolicy.modality = DIFFUSION


def is_pipeline(model: str) -> bool:
    """Return whether a name or folder is of a pipeline of diffusers."""
    return model.startswith(HUB) or (bool(model) and (Path(model_of(model)) / INDEX).is_file())


def path_of(model: str) -> str:
    """The folder or hub id of a model."""
    return model_of(model).removeprefix(HUB)


def new_denoiser(config: Config, data: Any) -> DenoiserPolicy:
    """An untrained UNet for the data's images: of their size, conditioned on their classes if they
    have any."""
    chosen = config.section(DiffusionConfig)
    if not highest(config, "sup_coef"):
        log.warning(
            "a new network samples gray images, and no stage has demonstrations: set --stages "
            "supervised:2000,full, or train it first with --stage.rl-coef 0 --stage.sup-coef 1."
        )
    first = peek(data)[0]
    if not isinstance(first.target, torch.Tensor) or first.target.ndim != 3:
        raise DataError(
            f"""model {NEW} is made for the data's images, and a target of {config.data!r} is a
                {type(first.target).__name__}""",
            option="data",
            advice="digits or images:FOLDER:SIZE, or a $model",
        )
    if first.inputs != "" and not (isinstance(first.inputs, int) and data.classes is not None):
        raise DataError(
            f"model {NEW} reads classes, and an input of {config.data!r} is {first.inputs!r:.60}",
            advice="""Put the images of each class in a subfolder without captions, or give a
                $model of your own""",
        )
    labels = ClassLabels([""] if first.inputs == "" else data.classes, dropped=chosen.dropped)
    shape = list(first.target.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module = DenoisingUNet(shape, len(labels.names), width=chosen.width)
    return DenoiserPolicy(
        module,
        shape,
        predicts=chosen.predicts,
        schedule=FlowSchedule(chosen.shift),
        condition=labels,
        weighting="clean",
        middle="middle",
    )


def load_denoiser(folder: str | Path, module: nn.Module | None = None) -> DenoiserPolicy:
    """The policy that ``save`` wrote; a module other than ``DenoisingUNet`` is given, and gets the
    weights."""

    def build(settings: dict[str, Any]) -> DenoiserPolicy:
        network, labels, path = module, settings["condition"], settings["path"]
        if network is None and settings["unet"]:
            network = DenoisingUNet(**settings["unet"])
        if network is None:
            raise GruppoError(f"""{folder} holds the weights of a module of your own. Give
                load_denoiser that module.""")
        options = {name: settings[name] for name in ("predicts", "weighting", "middle")}
        options["schedule"] = FlowSchedule(**path) if "shift" in path else DiffusionSchedule(path)
        options["condition"] = ClassLabels(**labels) if labels else NoCondition()
        return DenoiserPolicy(network, settings["shape"], **options)

    policy, weights = read_policy(Path(folder), SETTINGS, "denoiser", build)
    load_strictly(policy.module, weights, str(folder))
    return policy
