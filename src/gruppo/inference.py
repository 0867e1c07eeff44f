"""Trained models: load, evaluate, sample."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gruppo import trust
from gruppo.build import Parts, build, missing_parts
from gruppo.config import serialization
from gruppo.config.schema import Config, LoraConfig, Stage
from gruppo.core.images import to_pillow
from gruppo.core.objective import Objective
from gruppo.data.images import read_image
from gruppo.loading import command_name
from gruppo.modalities import find_modality
from gruppo.modalities.common.adapters import model_of
from gruppo.modalities.text.bundled import BUNDLED
from gruppo.modalities.text.custom import names_function
from gruppo.protocols import DescriptionMixin, Policy, PromptMixin, part
from gruppo.tracking.images import make_sheet
from gruppo.trainer.evaluate import Evaluated, evaluate, held_out
from gruppo.trainer.run_dir import check_is_run
from gruppo.types import DataError, GruppoError, Prompt, Request, Sampling

log = logging.getLogger("gruppo")


def load_policy(
    model: str | Path,
    *,
    compute: Any = "auto",
    trust_run: bool = False,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Policy:
    """Open the policy of a run, a folder, a bundled model, a hub id or FILE.py:FUNCTION.

    ``trust_run``: import the code that a folder names, though you did not create it;
    ``trust_remote_code``: run the code of a hub model's repository. ``kwargs``: those of the
    modality's ``load``.
    """
    name = model_of(model)
    path = Path(name)
    # in a folder that is here, it is not a hub id
    is_near = path.parent != Path() and path.parent.is_dir()
    if is_near and not path.exists() and not names_function(name):
        raise GruppoError(
            f"there is no {path.name} in {path.parent}. Name a run's folder or a model that is "
            f"there."
        )
    name = str(BUNDLED[name]().path) if name in BUNDLED else name
    modality, code = find_modality(name), trust.imports_of_model(Path(name).expanduser())
    with trust.opening(Path(name), code, typed=name, trust_run=trust_run):
        return modality.load(name, compute=compute, trust_remote_code=trust_remote_code, **kwargs)


def evaluate_run(
    path: Path,
    *,
    prompts: int,
    data: str = "",
    samples: int = 0,
    trust_run: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Evaluated, list[dict[str, Any]]]:
    """Evaluate a run's final model on its held-out prompts, or on other ``data``; return the result
    and each answer.

    ``samples``: completions per prompt besides the greedy one, for mean@k and pass@k.
    """
    check_is_run(path)
    # servers hold other weights by now, or are gone
    first = serialization.load(path / "config.json").without_servers
    code = trust.imports_of_run(serialization.to_dict(first), path)
    if prompts < 1:
        raise GruppoError(f"--prompts {prompts} leaves nothing to evaluate; it needs at least 1.")
    if not first.reward:
        raise GruppoError(f"""{path} was trained without a reward, so nothing is measured. Ask it:
            {command_name()} sample {path}""")
    config = _evaluated(first, path, prompts=prompts, data=data, samples=samples)
    if missing := missing_parts(config, Parts()):
        raise GruppoError(f"""this run's {" and ".join(missing)} came from Python objects, which a
            file does not hold.""")
    with trust.opening(
        path, code, typed=data, trust_run=trust_run, trust_remote_code=trust_remote_code
    ):
        policy = load_policy(
            path, compute=config.compute, trust_remote_code=config.trust_remote_code
        )
        run, _ = build(config, Parts(policy))
        if not (held := held_out(run, prompts)):
            raise DataError(
                f"the data of {path} have no held-out prompts to evaluate on",
                advice="Give other data with $data FILE, or train with $prompts.held_out_fraction "
                "above 0",
            )
        evaluated = evaluate(run, held)
        for line in run.rewards.describe_usage(run.rewards.usage()):
            log.info("%s", line)
        return evaluated


def _evaluated(config: Config, path: Path, *, prompts: int, data: str, samples: int) -> Config:
    """The config of a run to evaluate, without what training needs: no reference, critic or
    optimizer state takes memory, and all held-out prompts are read."""
    chosen = config.evaluation
    data = data or chosen.data
    return replace(
        config,
        stage=Stage(),
        stages=(),
        lora=LoraConfig(),
        objective=Objective(),
        model=model_of(path),
        data=data or config.data,
        evaluation=replace(chosen, prompts=prompts, data=data, samples=samples),
        # a saved model has its chat template, whose file may be gone
        prompts=replace(config.prompts, chat_template=""),
    )


def sample(
    model: str | Path,
    prompts: Sequence[str],
    folder: Path = Path("samples"),
    *,
    n: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    seed: int = 0,
    is_plain: bool = False,
    chat_template_kwargs: str = "",
    trust_run: bool = False,
    trust_remote_code: bool = False,
) -> list[Any]:
    """Return a list of ``n`` samples for each prompt; or of the PNG files that images are written
    to, a sheet last.

    Sampled as in training at temperature 1, and greedily (or by the ODE) at 0. ``is_plain``: no
    chat template. ``chat_template_kwargs``: variables of it, as JSON; a model of a run has those
    that it was trained with.
    """
    if n < 1:
        raise GruppoError(f"--n {n} samples nothing; it needs at least 1.")
    policy = load_policy(model, trust_run=trust_run, trust_remote_code=trust_remote_code)
    display = part(policy, DescriptionMixin)
    if chat_template_kwargs:
        written = replace(Config().prompts, chat_template_kwargs=chat_template_kwargs)
        part(policy, PromptMixin).configure_prompts(written)
    sampling = _sampling(policy, Path(model), temperature, max_new_tokens)
    encoding = part(policy, PromptMixin)
    requests = []
    for index, text in enumerate(prompts):
        inputs = encoding.parse_prompt(text, is_plain=is_plain, read_image=read_image)
        prompt = Prompt(str(index), inputs, draw=index)
        if why := policy.check_prompt(prompt, sampling):
            raise GruppoError(why)
        requests.append(Request(prompt, n))
    samples: list[list[Any]] = []
    for request in requests:  # one at a time: images may differ in size
        rollouts = policy.sample([request], sampling, seed=seed)
        samples.append([display.render(rollouts, row) for row in range(n)])
    if display.renders_images:
        return _written(samples, prompts, requests, folder)
    # of a conversation, the last message
    return [[x[-1]["content"] if isinstance(x, list) else x for x in row] for row in samples]


def _sampling(policy: Policy, model: Path, temperature: float, max_new_tokens: int) -> Any:
    """Sampling as in the training of a run's model, at this temperature."""
    is_run = all((model / name).is_file() for name in ("config.json", "manifest.json"))
    has_images = part(policy, DescriptionMixin).renders_images
    if not has_images and not is_run:
        return Sampling(temperature=temperature, max_actions=max_new_tokens)
    config = serialization.load(model / "config.json") if is_run else Config()
    modality = policy.modality
    sampling = modality.inference_sampling(modality.sampling(config, policy), temperature)
    sampling = policy.check_sampling(sampling)
    if modality.has_lengths and not has_images:
        return replace(sampling, max_actions=max_new_tokens)
    return sampling


def _written(
    images: Sequence[Sequence[Tensor]],
    texts: Sequence[str],
    requests: Sequence[Request],
    folder: Path,
) -> list[Path]:
    """Write each image to a PNG file, then a sheet of all, beside the images that they were
    restored from."""
    files: list[Path] = []
    shown: list[Tensor] = []
    folder.mkdir(parents=True, exist_ok=True)
    for place, (text, row, request) in enumerate(zip(texts, images, requests, strict=True)):
        inputs = request.prompt.inputs
        name = Path(text).stem if isinstance(inputs, Tensor) else text
        # a prompt may hold what no file name does, or be too long for one
        stem = re.sub(r"[^\w-]+", "-", name)[:40].strip("-") or f"prompt-{place}"
        for number, image in enumerate(row):
            files.append(folder / f"{place}-{stem}-{number}.png")
            to_pillow(image).save(files[-1])
        shown += [*([inputs] if isinstance(inputs, Tensor) else []), *row]
    files.append(folder / "sheet.png")
    make_sheet(shown, columns=len(shown) // len(images))[0].save(files[-1])
    return files
