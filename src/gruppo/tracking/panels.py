"""What the pictures of a run show: one panel each, of the metrics that the run logged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

Metrics = Sequence[Mapping[str, float]]

MOST_LINES = 8
"""Lines that a panel can hold and still be read."""
MOST_PROMPTS = 40


class Curve(NamedTuple):
    """One picture: the file's name, its title and axis label, and the metrics in it with their legends."""

    name: str
    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    points: tuple[tuple[str, str], ...] = ()
    """Metrics of an evaluation, which are drawn as points. The first alone is reason enough for the panel."""
    band: str = ""
    """Standard deviation that is drawn on both sides of the first metric."""
    when_zero: str = ""
    """Said where the curve is zero up to rounding, which is right and looks wrong."""
    drawn: Literal["always", "if it is not zero", "if it changes"] = "always"
    style: Literal["smoothed", "as it is", "shades", "histogram", "heat", "along"] = "smoothed"
    """Shades: one colour, darker with each line. Histogram: how often each size occurs, by step. Heat: a line of cells
    for each metric, coloured by its value; ``unit`` is what the lines are. Along: a line for each step, over the
    metrics; ``value`` is what they are."""
    value: str = ""
    """What the colours of heat say, and the places of along."""
    is_on_overview: bool = True


REWARD = (
    Curve(
        "reward", "Reward", "reward", (("reward/mean", "while training"),), points=(("eval/reward_mean", "held-out"),)
    ),
    Curve(
        "groups",
        "Rewards in a group",
        "reward, mean over groups",
        (("reward/mean", "mean"), ("reward/best_of_group_mean", "best"), ("reward/worst_of_group_mean", "worst")),
    ),
    Curve(
        "spread",
        "Spread of rewards",
        "standard deviation",
        (
            ("reward/std_within_group", "within a group"),
            ("reward/std_between_groups", "between groups"),
            ("reward/running_std_within_group", "within groups, moving"),
        ),
    ),
    Curve("zero_spread", "Groups that teach nothing", "share", (("group/zero_spread_frac", "all rewards alike"),)),
    Curve(
        "normalised_reward",
        "Normalised reward",
        "standard deviations of the group",
        (
            ("reward/normalised_mean_abs", "mean size"),
            ("reward/normalised_max", "highest"),
            ("reward/normalised_min", "lowest"),
        ),
        is_on_overview=False,  # under GRPO it is the advantage
    ),
    Curve(
        "advantage",
        "Advantage",
        "advantage",
        (("advantage/mean", "mean ± deviation"), ("advantage/max", "highest"), ("advantage/min", "lowest")),
        band="advantage/std",
    ),
)
TERMS = {
    "policy": "policy",
    "sup": "demonstrations",
    "cons": "consistency",
    "kl": "KL",
    "entropy": "entropy",
    "value": "value",
}
"""Terms of the loss, in the order in which pairs of them are named."""
LEARNING = (
    Curve(
        "loss",
        "Loss",
        "loss",
        (("loss/policy", "policy"), ("loss/kl", "KL term"), ("loss/cons", "consistency")),
        when_zero="zero: each batch is used once, and advantages\nare centred in their group. Whether anything is\n"
        "learned, the norm of the gradient says.",
    ),
    Curve("supervised", "Demonstrations", "nats per token, or loss of a pixel", (("sup/loss_nats", "mean"),)),
    Curve(
        "kl",
        "Divergence",
        "KL, nats per action",
        (("kl/ref_nats", "to reference"), ("kl/old_nats", "of the step")),
        when_zero="zero: each batch is used once, and nothing has\nmoved away from a reference, if there is one.",
    ),
    Curve("entropy", "Entropy", "nats per action", (("entropy/mean_nats", "mean"),)),
    Curve("length", "Length", "actions per rollout", (("len/mean_actions", "mean"),)),
    Curve("turns", "Turns", "answers in a conversation", (("turns/mean", "mean"), ("turns/max", "most"))),
    Curve(
        "clip",
        "Clipped",
        "share of actions",
        (("clip/high_frac", "above"), ("clip/low_frac", "below")),
        drawn="if it is not zero",
    ),
    Curve(
        "term_norms",
        "Gradients of the terms",
        "norm",
        tuple((f"grad_norm/{term}", said) for term, said in TERMS.items()),
    ),
    Curve(
        "term_cosines",
        "Where the gradients of the terms point",
        "cosine",
        tuple((f"grad_cosine/{a}/{b}", f"{TERMS[a]}, {TERMS[b]}") for a, b in combinations(TERMS, 2)),
    ),
    Curve("value", "Value", "reward to come", (("value/mean", "critic's mean"), ("return/mean", "mean return"))),
    Curve("critic", "Critic", "share of the returns' variance", (("value/explained_variance_frac", "explained"),)),
)
COURSE = (
    Curve(
        "reference",
        "Reference",
        "reward",
        (),
        points=(("reference/eval_reward_mean", "reference, held-out"), ("eval/reward_mean", "policy, held-out")),
    ),
    Curve(
        "distance",
        "Distance to the reference",
        "share of its weights' norm",
        (),
        points=(("reference/distance_frac", ""),),
    ),
    Curve(
        "coefficients",
        "KL and entropy coefficients",
        "coefficient",
        (("stage/kl_coef", "KL"), ("stage/entropy_coef", "entropy")),
        drawn="if it changes",
        style="as it is",
    ),
    Curve(
        "terms",
        "Coefficients of the terms",
        "coefficient",
        (
            ("stage/rl_coef", "policy"),
            ("stage/sup_coef", "demonstrations"),
            ("stage/cons_coef", "consistency"),
            ("stage/value_coef", "value"),
        ),
        drawn="if it changes",
        style="as it is",
    ),
    Curve(
        "temperature", "Temperature", "", (("stage/temperature", "sampling"),), drawn="if it changes", style="as it is"
    ),
    Curve(
        "difficulty",
        "Difficulty",
        "share of the prompts",
        (("stage/difficulty", "the easiest"),),
        drawn="if it changes",
        style="as it is",
    ),
    Curve("lr", "Learning rate", "", (("optim/lr", "learning rate"),), drawn="if it changes", style="as it is"),
)
EPOCHS = (
    ("epoch_ratio", "Largest ratio", "new / old probability", "ratio_max"),
    ("epoch_clip", "Clipped", "share of actions", "clip_frac"),
    ("epoch_kl", "Divergence of the step", "KL, nats per action", "kl_old_k3_nats"),
)
EPOCHS_TAKEN = Curve(
    "epochs",
    "Epochs before the KL ended the batch",
    "epochs",
    (("update/epochs_count", "taken"),),
    drawn="if it changes",
    style="as it is",
)
TIMESTEPS = {
    "kl_ref_nats": ("Divergence", "KL to reference, nats"),
    "ratio_abs_nats": ("Size of the log-ratio", "mean |log ratio|, nats"),
    "advantage_abs_mean": ("Size of the advantage", "mean |advantage|"),
    "trained_count": ("Trained states", "states"),
    "reward_std_within_group": ("Spread of rewards", "standard deviation in a group"),
}
"""Titles and units of the metrics ``timestep/NAME/K`` that are known; any other goes by its name."""
ALONG = "timestep/reward"
"""Of what the network expects at each denoising step; measured at evaluations."""


def curves_of(metrics: Metrics) -> list[Curve]:
    """All panels that have something to show, in the order of the overview."""
    names = list(dict.fromkeys(name for row in metrics for name in row))
    panels = [*REWARD, *_of_functions(names), *_correlations(names, metrics), *_sizes(names)]
    panels += [*LEARNING, *_of_epochs(names), EPOCHS_TAKEN, *_of_timesteps(names), *_of_prompts(names), *COURSE]
    return [panel for panel in panels if _shows(panel, metrics)]


def series(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Steps and values where the metric was logged and finite."""
    pairs = [(int(row["step"]), row[name]) for row in metrics if math.isfinite(row.get(name, math.nan))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def is_zero(metrics: Metrics, curve: Curve) -> bool:
    """Up to rounding."""
    return all(abs(value) < 1e-6 for name, _ in curve.metrics for value in series(metrics, name)[1])


def _shows(curve: Curve, metrics: Metrics) -> bool:
    drawn = [series(metrics, name)[1] for name, _ in (*curve.metrics, *curve.points[:1])]
    if curve.style == "histogram":
        return sum(any(values) for values in drawn) > 1
    if curve.style in ("heat", "along"):  # where all is one colour there is nothing to see
        return sum(map(bool, drawn)) > 1 and len({value for values in drawn for value in values}) > 1
    if curve.drawn == "if it is not zero":
        return not is_zero(metrics, curve)
    if curve.drawn == "if it changes":
        return any(len(set(values)) > 1 for values in drawn)
    return any(drawn)


# --- panels of what a run alone has: its reward functions, its epochs, its groups' sizes ------------------------------


def _of_functions(names: Sequence[str]) -> list[Curve]:
    """The mean of each reward function on one panel, where there are several; and a picture of each of them."""
    functions = _named(names, r"reward/(.+)/best_of_group_mean")
    if len(functions) < 2:
        return []
    means = tuple((f"reward/{name}/mean", name) for name in functions)
    alone = [
        Curve(
            f"reward_{_as_file_name(name)}",
            f"Reward {name}",
            "reward, mean over groups",
            tuple(
                (f"reward/{name}/{metric}", label)
                for metric, label in (
                    ("mean", "mean"),
                    ("best_of_group_mean", "best"),
                    ("worst_of_group_mean", "worst"),
                )
            ),
            is_on_overview=False,
        )
        for name in functions
    ]
    return [Curve("rewards", "Reward functions", "mean before its weight", means[:MOST_LINES]), *alone]


def _correlations(names: Sequence[str], metrics: Metrics) -> list[Curve]:
    """The strongest pairs, within groups: what learning sees."""
    area = "reward_corr_within_group"

    def strength(name: str) -> float:
        values = series(metrics, name)[1]
        return abs(sum(values)) / len(values) if values else -1.0

    pairs = sorted((name for name in names if name.startswith(f"{area}/")), key=strength, reverse=True)
    said = tuple((name, name.removeprefix(f"{area}/").replace("/", ", ")) for name in pairs[:MOST_LINES])
    unit = "correlation" if len(said) > 1 else f"correlation of {said[0][1]}" if said else ""
    return [Curve("correlations", "Rewards together, within groups", unit, said)] if said else []


def _sizes(names: Sequence[str]) -> list[Curve]:
    sizes = sorted(map(int, _named(names, r"group/size_(\d+)_count")))
    said = tuple((f"group/size_{size}_count", str(size)) for size in sizes)
    return [Curve("group_sizes", "Group sizes", "rollouts of a prompt", said, style="histogram")]


def _of_epochs(names: Sequence[str]) -> Iterable[Curve]:
    epochs = sorted(map(int, _named(names, r"epoch/(\d+)/updates_count")))
    for name, title, unit, metric in EPOCHS:
        said = tuple((f"epoch/{epoch}/{metric}", f"epoch {epoch}") for epoch in epochs)
        yield Curve(name, f"{title}, by epoch", unit, said, style="shades")


def _of_timesteps(names: Sequence[str]) -> Iterable[Curve]:
    """A picture of each ``timestep/NAME/K``, K = 0 the first denoising step, whose state is almost noise."""
    yield Curve(
        "timestep_reward",
        "Reward, by denoising step",
        "reward of the expected picture",
        tuple((f"{ALONG}/{step}", str(step)) for step in sorted(map(int, _named(names, rf"{ALONG}/(\d+)")))),
        style="along",
        value="denoising step, 0 the first",
    )
    for family in dict.fromkeys(_named(names, r"timestep/(.+)/\d+")):
        if family == ALONG.removeprefix("timestep/"):
            continue
        steps = sorted(map(int, _named(names, rf"timestep/{re.escape(family)}/(\d+)")))
        title, value = TIMESTEPS.get(family, (family.replace("_", " "), family))
        said = tuple((f"timestep/{family}/{step}", str(step)) for step in steps)
        name = f"timestep_{_as_file_name(family)}"
        yield Curve(name, f"{title}, by denoising step", "denoising step, 0 the first", said, style="heat", value=value)


def _of_prompts(names: Sequence[str]) -> Iterable[Curve]:
    """The mean reward of each prompt ``prompt/reward_mean/ID``: of classes, as many as can be told apart."""
    ids = sorted(_named(names, r"prompt/reward_mean/(.+)"), key=lambda name: (not name.isdecimal(), len(name), name))
    said = tuple((f"prompt/reward_mean/{name}", name) for name in ids[:MOST_PROMPTS])
    yield Curve("prompts", "Reward, by prompt", "prompt", said, style="heat", value="mean reward")


def _as_file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)


def _named(names: Sequence[str], pattern: str) -> list[str]:
    return [found[1] for name in names if (found := re.fullmatch(pattern, name))]
