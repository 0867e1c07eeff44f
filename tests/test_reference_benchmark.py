"""The table of the references' memory: the sums behind it, and that its variants are what they are
called."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import references
from tests import tiny

from gruppo.build import Parts, build
from gruppo.trainer.checks import check

RULES = (None, "frozen", "frozen", "ema", "ema", None, "adapter_off", "ema")


def spec(variant: str) -> dict[str, Any]:
    return {"model": tiny.model(), "compute": "float32", "prompts": 2, "steps": 2} | dict(
        references.VARIANTS[variant]
    )


def of_process(peak: float, *, kl: float | None = 0.0) -> dict[str, Any]:
    return {
        "peak_gb": peak,
        "held_gb": 1.0,
        "seconds": [9.0, 2.0, 4.0],
        "kl": [kl, 0.5],
        "trained": 2_500_000,
    }


@pytest.mark.parametrize(("name", "rule"), list(zip(references.VARIANTS, RULES, strict=True)))
def test_each_variant_has_the_reference_that_its_name_says(name: str, rule: str | None) -> None:
    settings = references.config(spec(name))
    check(settings)
    run, _ = build(settings, Parts())
    assert (None if run.reference is None else run.reference.rule) == rule
    assert ("CPU" in name) == (run.reference is not None and run.reference.is_offloaded)
    assert ("LoRA" in name) == (len(run.parameters) < len(list(run.policy.module.parameters())))


def test_a_variant_is_measured_over_whole_steps() -> None:
    found = references.measure(spec("all weights, mixed"))
    assert len(found["seconds"]) == 2 and found["kl"][0] == 0.0 and found["kl"][1] is not None
    assert found["trained"] > 1000 and found["peak_gb"] >= found["held_gb"] - 0.01


def test_the_table_holds_medians_and_the_difference_to_the_same_training_without_a_reference() -> (
    None
):
    peaks = {name: [2.0 + n, 1.0 + n, 4.0 + n] for n, name in enumerate(references.VARIANTS)}
    results = {name: references.summary([of_process(p) for p in of]) for name, of in peaks.items()}
    rows = [line.split(" | ") for line in references.table(results).splitlines()[2:]]
    assert [row[2] for row in rows[:2]] == ["2.00 (1.00 to 4.00)", "3.00 (2.00 to 5.00)"]
    assert [row[3] for row in rows] == [
        "",
        "+1.00",
        "+2.00",
        "+3.00",
        "+4.00",
        "",
        "+1.00",
        "+2.00",
    ]
    assert rows[0][1] == "2.5 M" and rows[0][5] == "3.0 |"


def test_a_first_kl_that_is_not_zero_ends_the_comparison() -> None:
    with pytest.raises(SystemExit, match=r"the KL of an unchanged policy is 0\.1, not 0"):
        references.summary([of_process(1.0), of_process(1.0, kl=0.1)])


def test_the_table_takes_the_place_between_its_marks() -> None:
    page = f"before\n{references.BEGIN}\nold\n{references.END}\nafter"
    assert (
        references.written(page, r"new \1")
        == f"before\n{references.BEGIN}\nnew \\1\n{references.END}\nafter"
    )
    with pytest.raises(ValueError, match="has 0 places"):
        references.written("no marks", "new")
