"""The table of restored lines: what is compared with what, by hand, with a reader that reads
brightness."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks import lines
from torch import nn

from gruppo.core.images import quantize
from gruppo.data.open import open_source
from gruppo.modalities.restoration import Control, Controls, RestorationPolicy, open_restorer
from gruppo.types import Prompt

ACTION = "controls:blur=0-2@1.5,noise=0-40@30,mix=0-1@1,unit=true"
DATA = "lines:blur=0.5-1,noise=5-20,count=40,width=64"


class Brighter(nn.Module):
    """x and a tenth of the first condition."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, conditions):
        return x + self.by * conditions[:, :1, None, None]


def policy_of(*controls: Control) -> RestorationPolicy:
    return RestorationPolicy(Brighter(), Controls(controls, channels=1), channels=1)


def prompts(*levels: float) -> list[Prompt]:
    return [
        Prompt(str(n), torch.full((1, 8, 8), level), meta={"blur": 0.5})
        for n, level in enumerate(levels)
    ]


def near(wanted: float) -> lines.Score:
    """1 less the distance of the mean level from the wanted one."""
    return lambda images, prompts: torch.tensor(
        [1 - abs(float(image.mean()) - wanted) for image in images]
    ).double()


def test_a_paired_difference_has_the_interval_of_its_mean():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(400, generator=generator)
    mean, low, high = lines.paired(a + 1, a)
    assert (mean, low, high) == pytest.approx((1, 1, 1))  # paired: what both share is no spread
    b = torch.randn(400, generator=generator)
    mean, low, high = lines.paired(a, b)
    width = 1.96 * float((a - b).std()) / 20
    assert mean == pytest.approx(float((a - b).mean()), abs=1e-6)
    assert (mean - low, high - mean) == pytest.approx((width, width), rel=0.15)


def test_pictures_of_values_are_the_network_s_mixed_with_what_was_given():
    policy = policy_of(Control("blur", 0, 2, 1), Control("mix", 0, 1, 1))
    shown = lines.restored(policy, prompts(0.2, 0.4), torch.tensor([2.0, 0.5]))
    torch.testing.assert_close(
        shown.mean(dim=(1, 2, 3)), quantize(torch.tensor([0.3, 0.5])[:, None])[:, 0]
    )
    each = lines.restored(policy, prompts(0.2, 0.4), torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    torch.testing.assert_close(
        each.mean(dim=(1, 2, 3)), quantize(torch.tensor([0.2, 0.5])[:, None])[:, 0]
    )
    assert lines.nominal(policy).tolist() == [1, 1]


def test_the_best_constant_is_that_of_the_grid_which_these_lines_are_read_best_under():
    policy = policy_of(Control("blur", 0, 3, 0.5))
    assert [values.tolist() for values in lines.grid(policy)] == [[0.5], [0], [1], [2], [3]]
    assert lines.best_constant(policy, prompts(0.3, 0.3), near(0.5)).tolist() == [2]
    assert lines.best_constant(policy, prompts(0.3, 0.3), near(0.35)).tolist() == [0.5]


def test_a_head_taught_by_parameters_says_them_and_the_network_rests():
    policy = policy_of(Control("blur", 0, 2, 1.5))

    class Same:
        def take(self, n):
            return prompts(*[0.5] * n)

    learner = lines.taught(policy, Same(), by="parameters", steps=60)
    values = learner.module.action.values(learner.module(prompts(0.5)[0].inputs[None])[0])
    assert float(values.detach()) == pytest.approx(0.5, abs=0.1)
    assert learner.module.network is policy.module.network and float(
        policy.module.network.by
    ) == pytest.approx(0.1)
    assert (
        float(policy.module.action.head.conv_out.weight.abs().sum()) == 0
    )  # the run's own head is as it was


def test_a_head_taught_by_clean_pictures_comes_nearer_to_them():
    policy = policy_of(Control("blur", 0, 2, 0))

    class Darker:
        def take(self, n):
            return [replace(p, target=p.inputs + 0.1) for p in prompts(*[0.5] * n)]

    learner = lines.taught(policy, Darker(), by="pictures", steps=60)
    (prompt,) = prompts(0.5)
    assert float(learner.output_of(prompt.inputs[None]).mean()) == pytest.approx(0.6, abs=0.02)


def test_the_rows_of_a_run_are_compared_in_pairs():
    policy = policy_of(Control("blur", 0, 2, 1))
    with torch.no_grad():
        policy.module.action.head.conv_out.bias.fill_(0.5)  # the run's head says 2
    rows = lines.judged("r", policy, train=[], test=prompts(0.3, 0.4), source=None, score=near(0.6))
    by_name = {row.name: row for row in rows}
    assert list(by_name) == ["as given", "nominal", "true parameters", "the run's head"]
    accuracies = [row.accuracy for row in rows]
    assert accuracies == pytest.approx([0.75, 0.85, 0.8, 0.95], abs=5e-3)
    assert by_name["the run's head"].gain["over_nominal"][0] == pytest.approx(0.1, abs=5e-3)
    assert by_name["true parameters"].gain["run_over_this"][0] == pytest.approx(0.15, abs=5e-3)
    assert by_name["nominal"].settings == {"blur": 1}
    assert "| r | nominal (blur 1) | 0.85" in by_name["nominal"].line()


def test_a_run_s_folder_becomes_a_table_and_a_file(tmp_path, capsys):
    source = open_source(DATA, seed=0)
    assert len(source.held_out(3)) == 3
    policy = open_restorer("dncnn:width=4,depth=2", ACTION, channels=1, supervises="told")
    policy.save(tmp_path / "run" / "final")

    def read(image: np.ndarray) -> str:
        return "abc" if image.mean() > 100 else ""

    options = [
        "--data", DATA + ",clean=no", "--source", DATA + ",set=1", "--lines", "3",
        "--grid-lines", "2", "--head-steps", "2", "--json", str(tmp_path / "rows.json"),
    ]  # fmt: skip
    lines.main([f"mine={tmp_path / 'run'}", *options], read=read)
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "rows.json").read_text())
    names = [row["name"] for row in rows]
    assert names[2:] == [
        "true parameters", "best constant", "head taught by pictures",
        "head taught by parameters", "the run's head",
    ]  # fmt: skip
    assert "direct back-propagation has no gradient" in shown and shown.count("| mine |") == 7
    untrained = [row["accuracy"] for row in rows if row["name"] in ("nominal", "the run's head")]
    assert untrained[0] == untrained[1]
