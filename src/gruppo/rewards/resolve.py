"""From what a user writes to a reward: a callable, a built-in's name, or a function in a file or module."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from gruppo.loading import is_file_name, load_object
from gruppo.rewards import builtin, code, images, ocr, preference, restoration, verifiers
from gruppo.rewards.models import ProcessRewardModel, RewardModel
from gruppo.types import DataError, GruppoError

EXAMPLES = {
    "exact_match": "exact_match",
    "numeric_match": "numeric_match",
    "regex_format": "regex_format:PATTERN",
    "length_target": "length_target:50 or length_target:50,characters",
    "keywords": "keywords:because,so or keywords for 因为, 所以, 然而, 但是",
    "repetition_penalty": "repetition_penalty or repetition_penalty:3,-1.0",
    "reasoning_gym_score": "reasoning_gym_score",
    "code_tests": "code_tests or code_tests:all_or_nothing=true,column=test_list",
    "reward_model": "reward_model:PATH or reward_model:PATH,label=1,offload=True",
    "process_reward": "process_reward:PATH or process_reward:PATH,separator=\\n",
    "jpeg_compressibility": "jpeg_compressibility or jpeg_compressibility:quality=80,without_header=true",
    "jpeg_incompressibility": "jpeg_incompressibility or jpeg_incompressibility:quality=80",
    "brightness": "brightness or brightness:target=0.5",
    "symmetry": "symmetry or symmetry:axis=horizontal",
    "ocr_match": "ocr_match or ocr_match:line=true",
    "clip_score": "clip_score or clip_score:model=PATH",
    "pick_score": "pick_score or pick_score:model=PATH",
    "hps_score": "hps_score or hps_score:version=v2.1",
    "image_reward": "image_reward",
    "psnr": "psnr or psnr:delta=input,patch=16",
    "ssim": "ssim or ssim:patch=16",
    "jpeg_saving": "jpeg_saving or jpeg_saving:quality=90,against=reference",
    "brisque": "brisque",
    "ocr_accuracy": "ocr_accuracy or ocr_accuracy:line=true",
}
"""The built-in rewards, and how each is written."""


def resolve_reward(spec: Any) -> Callable[..., Any]:
    """The reward that ``spec`` means: a callable as it is, ``length_target:50``, ``file.py:name``, ``module:name``."""
    if callable(spec):
        return spec
    if not isinstance(spec, str):
        raise DataError(
            f"the reward is {spec!r:.80} ({type(spec).__name__}), which is not callable; pass a function, or a name"
            " such as exact_match or my_rewards.py:length."
        )
    name, colon, arguments = spec.strip().partition(":")
    if name in EXAMPLES:
        return _built_in(name, arguments if colon else None)
    if not colon or not (is_file_name(spec.rpartition(":")[0]) or _is_module(name)):
        raise GruppoError(_unknown(spec, name))
    reward = load_object(spec.strip())
    if not callable(reward):
        raise DataError(f"{spec} is {reward!r:.80} ({type(reward).__name__}), which is not callable; name a function.")
    return reward


def _built_in(name: str, arguments: str | None) -> Callable[..., Any]:
    try:
        return _BUILDERS[name](arguments)
    except (TypeError, ValueError) as error:
        raise GruppoError(
            f"reward {name}:{arguments or ''} is not understood ({error}); write {EXAMPLES[name]}."
        ) from None


def _plain(reward: Callable[..., Any]) -> Callable[[str | None], Callable[..., Any]]:
    def build(arguments: str | None) -> Callable[..., Any]:
        if arguments is not None:
            raise ValueError("it takes no arguments")
        return reward

    return build


def _regex_format(pattern: str | None) -> Callable[..., Any]:
    if not pattern:
        raise ValueError("it needs a pattern")
    return builtin.regex_format(pattern)


def _length_target(arguments: str | None) -> Callable[..., Any]:
    target, *unit = _split(arguments)
    return builtin.length_target(int(target), *unit)


def _keywords(arguments: str | None) -> Callable[..., Any]:
    return builtin.keywords() if arguments is None else builtin.keywords(_split(arguments))


def _repetition_penalty(arguments: str | None) -> Callable[..., Any]:
    if arguments is None:
        return builtin.repetition_penalty()
    n, *penalty = _split(arguments)
    return builtin.repetition_penalty(int(n), *map(float, penalty))


def _reasoning_gym_score(arguments: str | None) -> Callable[..., Any]:
    verifiers.require_reasoning_gym()
    return _plain(verifiers.reasoning_gym_score)(arguments)


def _model(kind: type[RewardModel] | type[ProcessRewardModel]) -> Callable[[str | None], Callable[..., Any]]:
    def build(arguments: str | None) -> Callable[..., Any]:
        path, *options = re.split(_OPTION, (arguments or "").strip())
        if not path:
            raise ValueError("it needs a path")
        return kind(path, **dict(_option(kind, *option.split("=", 1)) for option in options))

    return build


def _made(factory: Callable[..., Any]) -> Callable[[str | None], Callable[..., Any]]:
    """A reward that a function of options gives."""

    def build(arguments: str | None) -> Callable[..., Any]:
        options = re.split(_OPTION, arguments.strip()) if arguments else []
        if any("=" not in option for option in options):
            raise ValueError("its options are written name=value")
        return factory(**dict(_option(factory, *option.split("=", 1)) for option in options))

    return build


_OPTION = r",(?=\s*[A-Za-z_]+=)"
"""The comma before an option; others belong to the path or to the option before."""
_READ: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: {"true": True, "false": False}.__getitem__,
    str: lambda text: text.replace("\\n", "\n").replace("\\t", "\t"),
}


def _option(kind: Callable[..., Any], name: str, text: str) -> tuple[str, Any]:
    name = name.strip()
    hints = get_type_hints(kind.__init__ if isinstance(kind, type) else kind)  # type: ignore[misc]
    parameters = inspect.signature(kind).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY or not isinstance(kind, type)]
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        guess = f"; did you mean {nearest[0]}?" if nearest else "."
        raise ValueError(f"there is no option {name!r}{guess} It has {', '.join(known)}")
    hint = hints[name]
    kinds = [part for part in get_args(hint) or (hint,) if part in _READ]
    read = _READ[str if not kinds or str in kinds else kinds[0]]
    try:
        return name, read(text.strip().lower() if read is not _READ[str] else text)
    except (KeyError, ValueError):
        raise ValueError(f"{name}={text} is no {kinds[0].__name__}") from None


def absolute(spec: str) -> str:
    """The spec with its file or folder named from the root, so that it means the same in any folder."""
    name, _, arguments = spec.partition(":")
    if name in ("reward_model", "process_reward"):
        path, *options = re.split(_OPTION, arguments)
        return ",".join([f"{name}:{_from_root(path.strip())}", *options])
    place, colon, function = spec.rpartition(":")
    return f"{_from_root(place)}{colon}{function}" if colon and is_file_name(place) else spec


def _from_root(path: str) -> str:
    expanded = Path(path).expanduser()
    return os.path.abspath(expanded) if path and expanded.exists() else path


def _split(arguments: str | None) -> list[Any]:
    parts = [part.strip() for part in re.split(r"[,\uff0c\u3001]", arguments or "")]
    if not all(parts):
        raise ValueError("an argument is missing")
    return parts


_BUILDERS: dict[str, Callable[[str | None], Callable[..., Any]]] = {
    "exact_match": _plain(builtin.exact_match),
    "numeric_match": _plain(builtin.numeric_match),
    "regex_format": _regex_format,
    "length_target": _length_target,
    "keywords": _keywords,
    "repetition_penalty": _repetition_penalty,
    "reasoning_gym_score": _reasoning_gym_score,
    "code_tests": _made(code.code_tests),
    "reward_model": _model(RewardModel),
    "process_reward": _model(ProcessRewardModel),
    "jpeg_compressibility": _made(images.jpeg_compressibility),
    "jpeg_incompressibility": _made(images.jpeg_incompressibility),
    "brightness": _made(images.brightness),
    "symmetry": _made(images.symmetry),
    "ocr_match": _made(ocr.ocr_match),
    "clip_score": _made(preference.clip_score),
    "pick_score": _made(preference.pick_score),
    "hps_score": _made(preference.hps_score),
    "image_reward": _made(preference.image_reward),
    "psnr": _made(restoration.psnr),
    "ssim": _made(restoration.ssim),
    "jpeg_saving": _made(restoration.jpeg_saving),
    "brisque": _made(restoration.brisque),
    "ocr_accuracy": _made(restoration.ocr_accuracy),
}


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _unknown(spec: str, name: str) -> str:
    nearest = difflib.get_close_matches(name, EXAMPLES, n=1)
    guess = f" Did you mean {nearest[0]}?" if nearest else ""
    return (
        f"there is no reward {spec!r}; the built-in ones are {', '.join(EXAMPLES)}.{guess} For your own function write"
        " path/to/file.py:name or package.module:name."
    )
