"""Resolves reward specs: built-in rewards with options, functions in files and modules."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from gruppo import loading
from gruppo.loading import did_you_mean
from gruppo.rewards import code, images, preference, text
from gruppo.rewards.functions import FunctionReward
from gruppo.rewards.judge import Judge
from gruppo.rewards.models import ProcessRewardModel, RewardModel, ScoringNetwork
from gruppo.rewards.remote import RewardWorkers
from gruppo.types import DataError, GruppoError


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward and the syntax of its arguments after the colon."""

    factory: Callable[..., Any]
    arguments: Literal["none", "text", "values", "options", "path"] = "options"
    """none: the factory is the reward. text: one string. values: separated by commas. options: NAME=VALUE. path: a
    path, then options."""
    usage: str = ""
    is_isolated: bool = False
    """Called in a process of its own: what a model writes can make it hang, where no thread can stop it."""
    package: tuple[str, str] | None = None
    """A module that it imports when it is called, and the extra that installs it."""


BUILT_INS = {
    "exact_match": BuiltIn(text.exact_match, "none"),
    "numeric_match": BuiltIn(text.numeric_match, "none"),
    "reasoning_gym_score": BuiltIn(
        text.reasoning_gym_score, "none", package=("reasoning_gym", "tasks")
    ),
    "math_verify": BuiltIn(
        text.math_verify, "none", is_isolated=True, package=("math_verify", "math")
    ),
    "regex_format": BuiltIn(text.regex_format, "text", "regex_format:PATTERN", is_isolated=True),
    "length_target": BuiltIn(
        text.length_target, "values", "length_target:50 or length_target:50,characters"
    ),
    "keywords": BuiltIn(
        text.keywords, "values", "keywords:because,so or keywords for 因为, 所以, 然而, 但是"
    ),
    "repetition_penalty": BuiltIn(
        text.repetition_penalty, "values", "repetition_penalty or repetition_penalty:3,-1.0"
    ),
    "code_tests": BuiltIn(code.CodeTests),
    "judge": BuiltIn(Judge, "path", "judge:FILE.toml"),
    "reward_model": BuiltIn(
        RewardModel, "path", "reward_model:PATH or reward_model:PATH,label=1,offload=True"
    ),
    "process_reward": BuiltIn(
        ProcessRewardModel, "path", "process_reward:PATH or process_reward:PATH,separator=\\n"
    ),
}
for _factory in (
    *(
        images.brightness,
        images.symmetry,
        images.jpeg_compressibility,
        images.jpeg_incompressibility,
    ),
    *(
        images.jpeg_saving,
        images.psnr,
        images.ssim,
        images.brisque,
        images.ocr_match,
        images.ocr_accuracy,
    ),
    *(preference.clip_score, preference.pick_score, preference.hps_score, preference.image_reward),
):
    BUILT_INS[_factory.__name__] = BuiltIn(_factory)
_OPTION = r",(?=\s*[A-Za-z_]+=)"  # the comma before an option; others belong to the path or to the value before


def resolve_reward(spec: Any, processes: RewardWorkers | None = None) -> Any:
    """Resolve a callable or FunctionReward (returned as it is), a built-in, ``file.py:name`` or ``module:name``.

    ``processes``: where functions of files and modules are called, and built-ins that a completion can make hang.
    """
    if callable(spec) or isinstance(spec, FunctionReward):
        return spec
    if not isinstance(spec, str):
        raise DataError(f"""the reward is {spec!r:.80} ({type(spec).__name__}), which is not callable; pass a function,
            or a name such as exact_match or my_rewards.py:length.""")
    name, colon, arguments = spec.strip().partition(":")
    if name in BUILT_INS:
        try:
            entry = BUILT_INS[name]
            reward = _build(entry, arguments if colon else None)
            if processes is None or not entry.is_isolated:
                return reward
            place = f"{entry.factory.__module__}:{entry.factory.__name__}"
            positional = [arguments] if entry.arguments == "text" else []
            return processes.load(place, *positional, is_built_in=True) or reward
        except (TypeError, ValueError) as error:
            options = ",".join(
                f"{option}=VALUE" for option in inspect.signature(entry.factory).parameters
            )
            usage = entry.usage or (
                name if entry.arguments == "none" else f"{name} or {name}:{options}"
            )
            raise GruppoError(
                f"reward {name}:{arguments} is not understood ({error}); write {usage}."
            ) from None
    try:
        is_module = (
            importlib.util.find_spec(name.partition(".")[0]) is not None
        )  # that of a.b would import a
    except (ImportError, ValueError):
        is_module = False
    if not colon and name.endswith(".py") and Path(name).is_file():
        functions = loading.functions_of(Path(name))
        has = f"; it has: {', '.join(functions)}." if functions else ". It has no public function."
        raise GruppoError(f"""the reward {name!r} is a file; name a function of it:
            {name}:{(*functions, "NAME")[0]}{has}""")
    if not colon or not (loading.is_file_name(spec.rpartition(":")[0]) or is_module):
        raise GruppoError(f"""there is no reward {spec!r}; the built-in ones are
            {", ".join(BUILT_INS)}.{did_you_mean(name, BUILT_INS)} For your own function write path/to/file.py:name or
            package.module:name.""")
    # Functions of recipes are ours and do not hang: another process would import torch for them, for 2 s and 250 MB.
    is_ours = name.split(".")[0] == "gruppo"
    if (
        processes is not None
        and not is_ours
        and (isolated := processes.load(spec.strip())) is not None
    ):
        return isolated
    reward = loading.load_object(spec.strip())
    if not callable(reward):
        raise DataError(
            f"{spec} is {reward!r:.80} ({type(reward).__name__}), which is not callable; name a function."
        )
    return reward


def _build(entry: BuiltIn, arguments: str | None) -> Callable[..., Any]:
    """Call a factory with the arguments after the colon; None: there is no colon."""
    factory, style = entry.factory, entry.arguments
    if style == "none":
        if arguments is not None:
            raise ValueError("it takes no arguments")
        if (
            entry.package is not None
        ):  # one that is not installed is missed before the run, not at the first answer
            loading.import_extra(*entry.package, factory.__name__)
        return factory
    if style in ("text", "path") and not arguments:
        raise ValueError(f"it needs a {'pattern' if style == 'text' else 'path'}")
    if style == "text":
        return factory(arguments)
    hints = {**get_type_hints(factory.__init__ if isinstance(factory, type) else factory)}  # type: ignore[misc]
    parameters = {**inspect.signature(factory).parameters}
    if style == "values":
        values = (
            []
            if arguments is None
            else [v.strip() for v in re.split(r"[,\uff0c\u3001]", arguments)]
        )
        if not all(values):
            raise ValueError("an argument is missing")
        if factory is text.keywords:  # any number of words
            return text.keywords(values or text.COHERENCE_WORDS)
        if len(values) > len(parameters):
            raise ValueError(f"it takes at most {len(parameters)} values")
        return factory(
            *(
                _parse(name, value, hints[name])
                for name, value in zip(parameters, values, strict=False)
            )
        )
    first, *options = re.split(_OPTION, (arguments or "").strip())
    if style == "options":
        options = [first, *options] if first else []
    if parameters.pop("options", None):  # **options of a reward model
        hints |= get_type_hints(ScoringNetwork.__init__)
        parameters = {
            **parameters,
            **inspect.signature(ScoringNetwork).parameters,
            **parameters,
        }  # own ones first
    known = [
        name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY or style == "options"
    ]
    keywords = {}
    for name, equals, value in (option.partition("=") for option in options):
        name = name.strip()
        if not equals:
            raise ValueError("its options are written name=value")
        if name not in known:
            raise ValueError(
                f"there is no option {name!r}.{did_you_mean(name, known)} It has {', '.join(known)}"
            )
        keywords[name] = _parse(name, value, hints[name])
    return factory(*([first] if style == "path" else []), **keywords)


def _parse(name: str, value: str, hint: Any) -> Any:
    """Convert a value to the type of its parameter; text stays text where the parameter may be a string."""
    types = [part for part in get_args(hint) or (hint,) if part in (int, float, bool, str)]
    if not types or str in types:
        return value.replace("\\n", "\n").replace("\\t", "\t")
    plain = value.strip().lower()
    try:
        return {"true": True, "false": False}[plain] if types[0] is bool else types[0](plain)
    except (KeyError, ValueError):
        raise ValueError(f"{name}={value} is no {types[0].__name__}") from None


def absolute_reward(spec: str) -> str:
    """Return the spec with an absolute path of its file or folder, so that it means the same in any folder."""
    name, _, arguments = spec.partition(":")
    if name in BUILT_INS and BUILT_INS[name].arguments == "path":
        path, *options = re.split(_OPTION, arguments)
        return ",".join([f"{name}:{loading.absolute_path(path.strip())}", *options])
    return loading.absolute_spec(spec)
