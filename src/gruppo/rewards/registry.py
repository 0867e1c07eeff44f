"""Resolves names of rewards: built-in ones with arguments, functions in files and modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from gruppo import loading
from gruppo.loading import did_you_mean
from gruppo.names import call_by_name, parameters_of, required_of, usage_of
from gruppo.rewards import code, images, preference, text
from gruppo.rewards.functions import FunctionReward
from gruppo.rewards.judge import Judge
from gruppo.rewards.models import ProcessRewardModel, RewardModel
from gruppo.rewards.remote import RewardWorkers
from gruppo.types import DataError, GruppoError

BUILT_INS: dict[str, Callable[..., Any]] = {
    "code_tests": code.CodeTests,
    "judge": Judge,
    "reward_model": RewardModel,
    "process_reward": ProcessRewardModel,
}
"""Reward functions, and what makes one from the arguments after its name."""
for _made in (
    *(text.exact_match, text.numeric_match, text.reasoning_gym_score, text.math_verify),
    *(text.regex_format, text.length_target, text.keywords, text.repetition_penalty),
    *(images.brightness, images.jpeg_compressibility, images.jpeg_incompressibility),
    *(images.psnr, images.ssim, images.ocr_accuracy),
    *(preference.clip_score, preference.pick_score),
):
    BUILT_INS[_made.__name__] = _made
REMOTE = ("math_verify", "regex_format")
"""Called in a worker: what a model writes can make them hang, where no thread can stop them."""
PACKAGES = {
    "reasoning_gym_score": ("reasoning_gym", "tasks"),
    "math_verify": ("math_verify", "math"),
}
"""A package that is imported at the first call, and the extra that installs it."""


def resolve_reward(spec: Any, workers: RewardWorkers | None = None) -> Any:
    """Resolve a callable or FunctionReward (returned as it is), a built-in, ``file.py:name`` or
    ``module:name``.

    ``workers``: where functions of files and modules are called, and built-ins that can hang.
    """
    if callable(spec) or isinstance(spec, FunctionReward):
        return spec
    if not isinstance(spec, str):
        raise DataError(f"""the reward is {spec!r:.80} ({type(spec).__name__}), which is not
            callable; pass a function, or a name such as exact_match or my_rewards.py:length.""")
    name, colon, arguments = spec.strip().partition(":")
    if name in BUILT_INS:
        return _built_in(name, arguments, workers)
    _refuse_unknown(spec, name, is_alone=not colon)
    # Functions of recipes are ours and do not hang; a worker would import torch for them.
    if workers is not None and name.split(".")[0] != "gruppo":
        remote = workers.load(spec.strip())
        if remote is not None:
            return remote
    reward = loading.load_object(spec.strip())
    if not callable(reward):
        got = f"{spec} is {reward!r:.80} ({type(reward).__name__})"
        raise DataError(f"{got}, which is not callable; name a function.")
    return reward


def _built_in(name: str, arguments: str, workers: RewardWorkers | None) -> Any:
    made = BUILT_INS[name]
    is_function = "completions" in required_of(made)  # the reward itself
    if name in PACKAGES:  # one that is not installed is missed before the run
        loading.import_extra(*PACKAGES[name], name)
    try:
        if is_function and arguments:
            raise ValueError("it takes no arguments")
        reward = made if is_function else call_by_name(made, arguments)
    except (TypeError, ValueError) as error:
        usage = name if is_function else usage_of(name, made)
        message = f"reward {name}:{arguments} is not understood ({error}); write {usage}."
        raise GruppoError(message) from None
    if workers is None or name not in REMOTE:
        return reward
    own = () if is_function else (arguments,)
    return workers.load(f"{made.__module__}:{name}", *own, is_built_in=True) or reward


def _refuse_unknown(spec: str, name: str, *, is_alone: bool) -> None:
    """Raise GruppoError for what is no name of a function in a file or a module."""
    try:
        top = name.partition(".")[0]  # looking for a.b would import a
        is_module = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        is_module = False
    if is_alone or not (loading.is_file_name(spec.rpartition(":")[0]) or is_module):
        raise GruppoError(f"""there is no reward {spec!r}; the built-in ones are
            {", ".join(BUILT_INS)}.{did_you_mean(name, BUILT_INS)} For your own function write
            path/to/file.py:name or package.module:name.""")


def absolute_reward(spec: str) -> str:
    """Return the spec with an absolute path of its file or folder, so that it means the same in any
    folder."""
    name, _, arguments = spec.partition(":")
    if name not in BUILT_INS:
        return loading.absolute_spec(spec)
    hints = parameters_of(BUILT_INS[name])
    if not arguments or not hints or Path not in get_args(next(iter(hints.values()))):
        return spec
    path, *options = arguments.split(",", 1)
    return ",".join([f"{name}:{loading.absolute_path(path.strip())}", *options])
