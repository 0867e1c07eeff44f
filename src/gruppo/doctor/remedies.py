"""What a check yields, and changes that several rules propose, with values computed from the run's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gruppo.core.schedules import AdaptiveSpec, parse_schedule
from gruppo.doctor.record import Record, Series, Span
from gruppo.types import GruppoError


@dataclass(frozen=True)
class Change:
    """Options of the command line with their new values, and the reason for those values."""

    settings: Mapping[str, str]
    why: str

    def __str__(self) -> str:
        return " ".join(f"{option} {value}" for option, value in self.settings.items())


@dataclass(frozen=True)
class Match:
    """A rule that applies to a run: the changes to try, the first one first, and what the rule's text needs."""

    rule: str
    changes: Sequence[Change] = ()
    case: str = ""
    """Key of the meaning, if the rule has several."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values in the text of the meaning, beside the run."""
    evidence: Sequence[tuple[Series, Sequence[Span]]] = ()
    """Shown before the metrics of the rule: a series, and the spans of steps over which its means are given."""
    blocks: bool = False
    """Whether nothing can be learned until this is solved: such findings come first."""


FACTORS = {0.5: "half of", 3.0: "three times", 10.0: "ten times"}


def number(value: float) -> str:
    """Two digits; more would claim a precision that no remedy has."""
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def scaled(value: float | str, factor: float) -> str:
    """A field's value times a factor: of a schedule every value, of a controller the first."""
    if not isinstance(value, str) or ":" not in value:
        return number(float(value) * factor)
    kind, _, rest = value.strip().partition(":")
    words = [word.strip() for word in rest.split(",")]
    # What follows in linear and cosine are steps; of a controller the target and so on, which are in other units.
    values = {"linear": 2, "cosine": 2, "adaptive": 1}.get(kind, len(words))
    for i, word in enumerate(words[:values]):
        step, equals, text = word.rpartition("=")
        words[i] = f"{step}{equals}{number(float(text) * factor)}"
    return f"{kind}:{','.join(words)}"


def scale_lr(run: Record, factor: float) -> Change:
    """Multiply the learning rate of the current stage."""
    option, lr = (
        ("--optim.lr", run.config.optim.lr)
        if run.stage.lr is None
        else (run.option("lr"), run.stage.lr)
    )
    return Change(
        {option: scaled(lr, factor)},
        f"{FACTORS[factor]} {lr if isinstance(lr, str) else f'{lr:g}'}",
    )


def more_kl(run: Record, *, target: float) -> Change:
    """Hold the policy closer to its reference: twice the coefficient, or a controller's target in nats per action."""
    kl_coef, option = run.stage.kl_coef, run.option("kl_coef")
    schedule = parse_schedule(kl_coef, "kl_coef")
    if isinstance(schedule, AdaptiveSpec):
        settings = {name: f"{value:g}" for name, value in schedule.settings} | {
            "target": number(target)
        }
        words = ",".join(f"{name}={value}" for name, value in settings.items())
        return Change(
            {option: f"adaptive:{number(schedule.initial)},{words}"}, f"lower target than {kl_coef}"
        )
    if any(schedule.values):
        return Change({option: scaled(kl_coef, 2.0)}, f"twice {kl_coef}")
    return Change({option: "0.04"}, "currently 0")  # DeepSeekMath, arXiv 2402.03300


def fewer_updates(run: Record) -> list[Change]:
    """Half the epochs per batch, else half the minibatches."""
    counts = {"epochs": run.config.optim.epochs, "minibatches": run.config.optim.minibatches}
    return [
        Change({f"--optim.{name}": str(n // 2)}, f"half of {n}")
        for name, n in counts.items()
        if n > 1
    ][:1]


def return_to_best(run: Record) -> list[Change]:
    """Restore the best weights when the held-out reward drops by more than its noise."""
    config = run.config
    if config.back_off.metric:
        return []
    settings = {
        "--back-off.metric": "eval/reward_mean",
        "--back-off.drop": number(run.evaluation_noise),
    }
    settings |= (
        {} if config.evaluation.every else {"--evaluation.every": str(max(config.steps // 10, 1))}
    )
    settings |= {} if config.evaluation.prompts else {"--evaluation.prompts": "64"}
    return [Change(settings, "restores the best weights when this drops by more than its noise")]


def use_float32(run: Record) -> list[Change]:
    return (
        [Change({"--compute": "float32"}, "rules out rounding; costs time and memory")]
        if run.is_bfloat16
        else []
    )


def higher_temperature(run: Record) -> list[Change]:
    """Raise the sampling temperature of a text model by a fifth."""
    temperature = run.stage.temperature
    if run.is_image_run:
        return []
    if temperature is None:
        return [
            Change(
                {"--rollout.temperature": number(1.2 * run.config.rollout.temperature)},
                "a fifth higher",
            )
        ]
    return [
        Change(
            {run.option("temperature"): scaled(temperature, 1.2)},
            f"a fifth higher than {temperature}",
        )
    ]


def set_objective(run: Record, why: str, **fields: Any) -> list[Change]:
    """Set fields of the objective; nothing if they have these values, or do not fit its other choices."""
    objective = run.config.objective
    try:  # the objective checks itself when it is made
        replace(objective, **fields)
    except GruppoError:
        return []
    changed = {name: value for name, value in fields.items() if value != getattr(objective, name)}
    texts = {
        name: number(value) if isinstance(value, float) else str(value)
        for name, value in changed.items()
    }
    settings = {f"--objective.{name.replace('_', '-')}": text for name, text in texts.items()}
    return [Change(settings, why)] if settings else []


def scale_weights(run: Record, factors: Mapping[str, float], why: str) -> list[Change]:
    """Multiply the weights of reward functions, by name; nothing if the config has another number of rewards."""
    weights = run.config.scoring.weights or (1.0,) * len(factors)
    if len(weights) != len(factors) or len(run.config.reward) != len(factors):
        return []
    values = (
        number(weight * factor) for weight, factor in zip(weights, factors.values(), strict=True)
    )
    return [Change({"--scoring.weights": " ".join(values)}, why)]


def shorter(run: Record) -> list[Change]:
    """Penalize completions near the limit, or leave truncated ones out of the loss if that is done already."""
    limit = run.config.rollout.max_new_tokens
    if run.config.objective.overlong or limit < 5:
        return set_objective(run, "ignores truncated completions", mask_truncated=True)
    return set_objective(
        run, "penalizes the last fifth before the limit (DAPO)", overlong=limit // 5
    )
