"""What to change, as options of the command line with values that are computed from the run's config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gruppo.core.schedules import Adaptive, parse
from gruppo.doctor.finding import Change
from gruppo.doctor.record import Record
from gruppo.types import GruppoError

FIRST_KL_COEF = 0.04
"""To begin with where there is none: DeepSeekMath's, arXiv 2402.03300."""


def number(value: float) -> str:
    """Two digits: more would claim a precision that no remedy has."""
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def scaled(given: float | str, factor: float) -> str:
    """A field's value times a factor; of a schedule every value, of a controller the first."""
    if not isinstance(given, str):
        return number(given * factor)
    kind, colon, rest = given.strip().partition(":")
    if not colon:
        return number(float(given) * factor)
    words = [word.strip() for word in rest.split(",")]
    values = {"linear": 2, "cosine": 2, "adaptive": 1}.get(kind, len(words))
    return f"{kind}:{','.join([_scaled_word(word, factor) for word in words[:values]] + words[values:])}"


def _scaled_word(word: str, factor: float) -> str:
    step, equals, value = word.rpartition("=")
    return f"{step}{equals}{number(float(value) * factor)}"


def lr(run: Record, factor: float, why: str) -> Change:
    """The learning rate that is in force at last, times a factor."""
    own = run.stage.lr
    if own is None:
        return Change("--optim.lr", number(run.config.optim.lr * factor), f"{why} {run.config.optim.lr:g}")
    return Change(run.option("lr"), scaled(own, factor), f"{why} {own}")


def slower(run: Record) -> Change:
    return lr(run, 0.5, "half of")


def faster(run: Record) -> Change:
    return lr(run, 3.0, "three times")


def more_kl(run: Record, *, target: float) -> Change:
    """A coefficient that holds the policy nearer to its reference, at ``target`` nats an action."""
    own = run.stage.kl_coef
    meant = parse(own, "kl_coef")
    option = run.option("kl_coef")
    if isinstance(meant, Adaptive):
        settings = {name: f"{value:g}" for name, value in meant.settings} | {"target": number(target)}
        words = ",".join(f"{name}={value}" for name, value in settings.items())
        return Change(option, f"adaptive:{number(meant.first)},{words}", f"a lower target than in {own}")
    if any(meant.values):
        return Change(option, scaled(own, 2.0), f"twice {own}")
    return Change(option, number(FIRST_KL_COEF), "there is none")


def fewer_passes(run: Record) -> list[Change]:
    """Half of the updates a batch, first of the epochs."""
    optim = run.config.optim
    if optim.epochs > 1:
        return [Change("--optim.epochs", str(max(optim.epochs // 2, 1)), f"half of {optim.epochs}")]
    if optim.minibatches > 1:
        return [Change("--optim.minibatches", str(max(optim.minibatches // 2, 1)), f"half of {optim.minibatches}")]
    return []


def return_to_best(run: Record) -> list[Change]:
    """Back to the best weights where the held-out reward falls by more than its noise."""
    config = run.config
    if config.back_off.metric:
        return []
    more = [("--back-off.drop", number(run.noise_of_evaluations))]
    more += [] if config.evaluation.every else [("--evaluation.every", str(max(config.steps // 10, 1)))]
    more += [] if config.evaluation.prompts else [("--evaluation.prompts", "64")]
    why = "back to the best weights where this falls by more than its noise"
    return [Change("--back-off.metric", "eval/reward_mean", why, tuple(more))]


def in_float32(run: Record) -> list[Change]:
    """Where the run computes in half precision."""
    return [Change("--compute", "float32", "rules rounding out; more time and memory")] if run.is_bfloat16 else []


def group_size(run: Record, size: int, why: str) -> Change:
    return Change("--rollout.group-size" if run.stage.group_size is None else run.option("group_size"), str(size), why)


def hotter(run: Record) -> list[Change]:
    """A fifth more temperature, which flattens the likelihoods that sampling draws from; pictures have none."""
    own = run.stage.temperature
    if run.draws_pictures:
        return []
    if own is None:
        return [Change("--rollout.temperature", number(1.2 * run.config.rollout.temperature), "a fifth more")]
    return [Change(run.option("temperature"), scaled(own, 1.2), f"a fifth more than {own}")]


def objective(run: Record, why: str, **fields: Any) -> list[Change]:
    """Fields of the objective; none where it already is so, or where its other choices refuse it."""
    try:
        wanted = replace(run.config.objective, **fields)
    except GruppoError:
        return []
    changed = [name for name in fields if getattr(wanted, name) != getattr(run.config.objective, name)]
    settings = [(f"--objective.{name.replace('_', '-')}", _written(fields[name])) for name in changed]
    return [Change(*settings[0], why, tuple(settings[1:]))] if settings else []


def _written(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def weights(run: Record, names: Sequence[str], factors: Sequence[float], why: str) -> list[Change]:
    """Reward weights times factors, of the rewards in the config's order; none where their number is not known."""
    given = run.config.scoring.weights or (1.0,) * len(names)
    if len(given) != len(names) or len(run.config.reward) != len(names):
        return []
    said = " ".join(number(weight * factor) for weight, factor in zip(given, factors, strict=True))
    return [Change("--scoring.weights", said, why)]
