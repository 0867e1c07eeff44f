"""Models by kind, opened; and what a config means for one kind and not for another."""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from gruppo import distributed as dist
from gruppo.config import serialization
from gruppo.config.schema import IN_MEMORY, Config, LoraConfig
from gruppo.config.stages import highest, values_of
from gruppo.loading import program
from gruppo.modalities.common.adapters import adapt_from, is_adapter, model_of
from gruppo.modalities.common.lora import digest, inject
from gruppo.modalities.diffusion import (
    ClassLabels,
    DenoiserPolicy,
    DenoisingUNet,
    DiffusersPolicy,
    DiffusionSampling,
    DiffusionSchedule,
    FlowSchedule,
    add_adapter,
    load_denoiser,
    load_diffusers,
)
from gruppo.modalities.diffusion.config import DiffusionConfig
from gruppo.modalities.diffusion.load import SETTINGS as DENOISER
from gruppo.modalities.restoration import RestorationPolicy
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.modalities.text.bundled import BUNDLED, bundled_model
from gruppo.modalities.text.custom import ModelFunction, is_custom, names_function
from gruppo.modalities.text.load import Adapt, give_adapter
from gruppo.trainer import restorers
from gruppo.trainer.demonstrations import peeked
from gruppo.types import DataError, GruppoError, Sampling

log = logging.getLogger("gruppo")

Kind = Literal["text", "denoiser", "pipeline", "restorer"]
NEW, HUB, INDEX = "unet", "diffusers:", "model_index.json"
KINDS: tuple[tuple[type, Kind], ...] = (
    (TextPolicy, "text"),
    (DiffusersPolicy, "pipeline"),
    (DenoiserPolicy, "denoiser"),
    (RestorationPolicy, "restorer"),
)
"""Of a policy, the first that it is."""
POLICIES = tuple(policy for policy, _ in KINDS)
"""What a caller may give in place of a model's name."""
OF_NEW = ("path", "shift", "predicts", "weighting", "dropped", "width")
OF_PIPELINES = ("size", "embedded_guidance")
"""Settings of ``DiffusionConfig`` that are read for these models alone."""


def kind_of(config: Config, given: Any = None) -> Kind:
    """Of the model that is given in memory, or that the config names; nothing is loaded."""
    if given is not None:
        return next(kind for policy, kind in KINDS if isinstance(given, policy))
    if restorers.is_restorer(config.model):
        return "restorer"
    folder = Path(model_of(config.model)) if config.model else Path(NEW)
    if config.model.startswith(HUB) or (folder / INDEX).is_file():
        return "pipeline"
    return "denoiser" if config.model == NEW or (folder / DENOISER).is_file() else "text"


def sampling_of(config: Config, kind: Kind, actions: int = 1) -> Sampling:
    """The distribution that a run samples from. ``actions``: of a restored picture."""
    rollout, drawn = config.rollout, config.section(DiffusionConfig)
    if kind == "text":
        return rollout.sampling
    if kind == "restorer":
        return replace(rollout.sampling, max_actions=actions)
    return DiffusionSampling(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        max_actions=drawn.steps,
        stop=rollout.stop,
        transition=drawn.transition,
        eta=drawn.eta,
        guidance=drawn.guidance,
        noise=drawn.noise,
        train_from=drawn.train_from,
        train_to=drawn.train_to,
        train_fraction=drawn.train_fraction,
        ode_steps=drawn.eval_steps,
    )


# --- what a kind rules out --------------------------------------------------------------------------------------------


def check_kind(config: Config, kind: Kind) -> None:
    """Refuse settings of another kind of model, before anything is loaded."""
    if kind == "text":
        is_here = config.model in BUNDLED or names_function(config.model) or Path(config.model).exists()
        if config.section(DiffusionConfig) != DiffusionConfig() and not is_here:
            raise GruppoError(
                f"there is no folder {config.model!r} with an image model. Train one first, as with {program()} train "
                f"digits-pretrain, or set --model {NEW} or diffusers:OWNER/NAME."
            )
        if config.section(DiffusionConfig) != DiffusionConfig():
            raise GruppoError(
                f"diffusion settings were given, and {config.model!r} is a text model. Leave the --diffusion options "
                f"out, or set --model {NEW} or a folder with an image model."
            )
        _refuse_settings_of_restorers(config)
        return
    sampling_of(config, kind)  # its own refusals
    _refuse_settings_of_text(config)
    if kind == "restorer":
        _refuse_settings_of_drawing(config)
        restorers.check_restorer(config)
        return
    _refuse_settings_of_restorers(config)
    _refuse_settings_of_denoising(config)
    _refuse_settings_of_others(config, kind)


def _refuse_settings_of_restorers(config: Config) -> None:
    if config.section(RestorationConfig) != RestorationConfig():
        raise GruppoError(
            f"restoration settings were given, and {config.model!r} restores no images. Leave the --restoration "
            f"options out, or set --model {restorers.NEW}unet or a folder with a network that does."
        )
    if highest(config, "cons_coef"):
        raise GruppoError(
            f"a stage's cons_coef is above 0: consistency is of restored images, and {config.model!r} restores none. "
            "Set --stage.cons-coef 0; --stage.kl-coef holds any policy to its reference."
        )


def _refuse_settings_of_drawing(config: Config) -> None:
    if config.section(DiffusionConfig) != DiffusionConfig():
        raise GruppoError(
            f"diffusion settings were given, and {config.model!r} restores images in one step. Leave the --diffusion "
            f"options out; --restoration.action says what is drawn."
        )


def _refuse_settings_of_text(config: Config) -> None:
    model = config.model
    if config.rollout.max_new_tokens != type(config.rollout)().max_new_tokens:
        raise GruppoError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} is of texts, and {model!r} is an image model. "
            "Leave it out; --diffusion.steps are the steps of a picture that is drawn from noise."
        )
    if config.objective.overlong:
        raise GruppoError(
            f"objective.overlong={config.objective.overlong} penalises long texts; every image has as many steps. Set "
            "--objective.overlong 0."
        )
    if config.critic.model:
        raise GruppoError(
            f"critic.model={config.critic.model!r}: the critic of an image model is a head on its network, or a copy "
            "of it. Leave --critic.model out."
        )
    if config.objective.mask_truncated:
        raise GruppoError(
            "objective.mask_truncated leaves out texts that were cut; every picture has all its steps. Set "
            "--objective.mask-truncated False."
        )


def _refuse_settings_of_denoising(config: Config) -> None:
    if odd := [t for t in values_of(config, "temperature") if t != 1]:
        raise GruppoError(
            f"a stage's temperature of {odd[0]:g}: a denoising step has none beside eta. Leave temperature out of the "
            "stages, and set --diffusion.eta."
        )
    if highest(config, "entropy_coef"):
        raise GruppoError(
            "a stage's entropy_coef is above 0, and the noise of a denoising step is fixed: its entropy is the same "
            "whatever is learned. Set --stage.entropy-coef 0, and --diffusion.eta for more noise."
        )


def _refuse_settings_of_others(config: Config, kind: Kind) -> None:
    chosen, usual, model = config.section(DiffusionConfig), DiffusionConfig(), config.model
    if chosen.path == "diffusion" and chosen.shift != 1:
        raise GruppoError(
            f"diffusion.shift={chosen.shift:g} moves the times of a flow, and --diffusion.path is diffusion. Leave "
            "one of them out."
        )
    if kind == "denoiser" and (config.lora.rank or config.lora.adapter):
        raise GruppoError(
            f"LoRA puts adapters on the attention of a pipeline, and {model!r} is a small network whose weights are "
            "trained themselves. Leave the --lora options out."
        )
    if kind == "pipeline" and config.lora.adapter:
        raise GruppoError(
            f"lora.adapter={config.lora.adapter!r}: adapters of pipelines are trained from new. Set --lora.rank, or "
            "give the folder of a run's final model, in which its adapter is merged, as --model."
        )
    if config.compute == "bfloat16" and not (kind == "pipeline" and config.lora.rank):
        raise GruppoError(
            f"compute='bfloat16' holds the base below adapters, and the weights of {model!r} are trained themselves. "
            "Set --compute float32, or --lora.rank with a pipeline."
        )
    for name in (*OF_NEW, *OF_PIPELINES):
        is_read = kind == "pipeline" if name in OF_PIPELINES else model == NEW
        if getattr(chosen, name) != getattr(usual, name) and not is_read:
            whose = "a pipeline of diffusers" if name in OF_PIPELINES else f"a new network (--model {NEW})"
            raise GruppoError(
                f"diffusion.{name} is of {whose}, and {model!r} is none: it has its own. Leave --diffusion."
                f"{name.replace('_', '-')} out."
            )


# --- opening one ------------------------------------------------------------------------------------------------------


def open_model(config: Config, kind: Kind, given: Any, source: Any) -> tuple[Any, dict[str, Any]]:
    """The policy, and what a manifest says of where it came from. ``source``: the data, whose size a new one has."""
    if kind == "text":
        return _open_text(config, given)
    if kind == "restorer":
        policy = restorers.open_policy(config, given, source)
        _to_accelerator(policy)
        return policy, {"name": config.model}
    return _open_images(config, given, source, kind)


def open_images(model: str | Path) -> tuple[Any, DiffusionSampling]:
    """An image model to be asked, and how it is drawn from: of a run as in its training."""
    saved = Path(model) / "config.json"
    is_run = saved.is_file() and (Path(model) / "manifest.json").is_file()
    config = serialization.load(saved) if is_run else Config()
    config = replace(config, model=str(model), lora=LoraConfig(), compute="float32")
    kind = kind_of(config)
    policy, _ = _open_images(config, None, None, kind)
    sampling = policy.check_sampling(sampling_of(config, kind))
    return policy, sampling


def _open_images(config: Config, given: Any, source: Any, kind: Kind) -> tuple[Any, dict[str, Any]]:
    path = model_of(config.model).removeprefix(HUB)
    if given is not None:
        policy = given
    elif config.model == NEW:
        policy = new_denoiser(config, source)
    elif kind == "denoiser":
        policy = load_denoiser(path)
    else:
        policy = load_diffusers(path, dtype=torch.bfloat16 if config.compute == "bfloat16" else torch.float32)
        chosen, usual = config.section(DiffusionConfig), DiffusionConfig()
        asked = {name: getattr(chosen, name) for name in OF_PIPELINES if getattr(chosen, name) != getattr(usual, name)}
        if asked:  # what lies beside the pipeline says the rest
            policy = DiffusersPolicy(policy.pipeline, replace(policy.settings, **asked))
    if config.lora.rank:
        lora = config.lora
        add_adapter(
            policy,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=lora.targets,
            seed=config.seed,
            base=config.model if config.model != IN_MEMORY else "",
        )
    _to_accelerator(policy)
    return policy, {"name": config.model}


def _to_accelerator(policy: Any) -> None:
    if not torch.cuda.is_available():
        return
    device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
    torch.backends.cudnn.allow_tf32 = False  # 10 bits of a convolution are too few for a ratio of 1
    parts = getattr(policy, "pipeline", policy.module)
    parts.to(device)


def new_denoiser(config: Config, source: Any) -> DenoiserPolicy:
    """A UNet for the pictures of the data: of their size, and asked for their classes where they have numbers."""
    shape, classes = _pictures_of(source, config.data)
    chosen = config.section(DiffusionConfig)
    labels = ClassLabels(classes, dropped=chosen.dropped)
    schedule = FlowSchedule(chosen.shift) if chosen.path == "flow" else DiffusionSchedule()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module = DenoisingUNet(
            shape, len(labels.names), width=chosen.width, time_scale=1000.0 if schedule.is_flow else 1.0
        )
    return DenoiserPolicy(
        module,
        shape,
        predicts=chosen.predicts,
        schedule=schedule,
        condition=labels,
        weighting=chosen.weighting,
        middle="middle",
    )


def _pictures_of(source: Any, name: str) -> tuple[list[int], int | list[str]]:
    """Shape [C, H, W] of the pictures, and the classes that they are asked for by: their number, or the empty text."""
    first = peeked(source)[0]
    if not isinstance(first.target, torch.Tensor) or first.target.ndim != 3:
        raise DataError(
            f"--model {NEW} is made for the data's pictures, and the data {name!r} have none: a target is a "
            f"{type(first.target).__name__}. Set --data digits or images:FOLDER:SIZE, or a --model."
        )
    if first.inputs != "" and not (isinstance(first.inputs, int) and source.classes is not None):
        raise DataError(
            f"--model {NEW} is asked for classes, and the data {name!r} ask by {first.inputs!r:.60}. Put the images of "
            "each class in a subfolder without captions, or give a --model of your own."
        )
    return list(first.target.shape), [""] if first.inputs == "" else source.classes


def _open_text(config: Config, given: Any) -> tuple[TextPolicy, dict[str, Any]]:
    adapt = _adapt_for(config)
    if given is not None:
        if adapt is not None:
            give_adapter(given, adapt)
        return given, {"name": config.model}
    path, source = found_model(config.model)
    if is_adapter(path) and adapt is None:
        log.warning("the model %s is an adapter: it is merged into its base, and all weights are trained.", path)
    policy = from_pretrained(
        path,
        compute=config.compute,
        trust_remote_code=config.trust_remote_code,
        adapt=adapt,
        is_merged=True,
        seed=config.seed,
    )
    if "made_by" in source:
        _check_ranks_agree(policy, config.model)
    return policy, source


def _check_ranks_agree(policy: TextPolicy, name: str) -> None:
    """Refuse a function that makes other weights on each rank: they would be trained as if they were the same."""
    weights = {name: parameter.detach() for name, parameter in policy.module.named_parameters()}
    if dist.world_size() > 1 and len(set(dist.all_gather(digest(weights).encode()))) > 1:
        raise GruppoError(
            f"{name} made other weights on each of the {dist.world_size()} ranks. Draw them from torch's generator, "
            "which --seed seeds, or read them from a file."
        )


def _adapt_for(config: Config) -> Adapt | None:
    """What gives the policy the adapter that is trained, or None where all weights are."""
    lora, base = config.lora, config.model if config.model != IN_MEMORY else ""
    if lora.adapter:
        return adapt_from(lora.adapter, base=base)
    if not lora.rank:
        return None
    return partial(inject, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed, base=base)


def found_model(name: str) -> tuple[str, dict[str, Any]]:
    """Where a text model is to be loaded from, and what a manifest says of it; of one's own, the hash of its file."""
    if name in BUNDLED:
        found = bundled_model(name)
        return str(found.path), {"name": name, "source": found.source, "sha256": found.sha256}
    if names_function(name) or is_custom(model_of(name)):
        made = (
            ModelFunction.from_name(name)
            if names_function(name)
            else ModelFunction.read(Path(model_of(name)).expanduser())
        )
        return name, {"name": name, "made_by": made.made_by, "sha256": made.sha256}
    if "/" not in name and not Path(name).exists() and (near := difflib.get_close_matches(name, [*BUNDLED, NEW], 1)):
        raise GruppoError(f"there is no model {name!r}. Did you mean {near[0]}?")
    return name, {"name": name}
