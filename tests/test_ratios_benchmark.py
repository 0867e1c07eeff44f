"""The table of TRL / gruppo on a CPU goes on where it was interrupted, and says what was
measured."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from benchmarks import ratios, tables

SIDE = {"seconds_median": 2.0}


@pytest.fixture
def ran(monkeypatch):
    """Names of the cells that were run, and which of them beside the other job; each in place of
    minutes of work."""
    names: list[str] = []
    beside: list[bool] = []

    @contextmanager
    def other_job():
        beside.append(True)
        yield
        beside.pop()

    def run(cell, path, options):
        names.append(cell.name)
        assert bool(beside) != cell.is_alone
        if "interrupt" in names:
            raise KeyboardInterrupt
        ratio = {
            "median": 3.0 + len(names) / 100,
            "min": 2.0,
            "max": 4.0,
            "rollout_s": 5.0,
            "update_s": 2.5,
        }
        result = {"gruppo": SIDE, "trl": SIDE, "trl_over_gruppo": ratio}
        if cell.benchmark == "roofline":
            result = {"phases": {"update": {"rate": 1e11, "fraction": 0.5 + cell.threads / 100}}}
        path.write_text(
            json.dumps({"machine": {"date": "today"}, "results": {cell.workload: result}})
        )

    monkeypatch.setattr(ratios, "other_job", other_job)
    monkeypatch.setattr(ratios, "run", run)
    return names


def test_an_interrupted_table_goes_on_with_the_cells_that_are_missing(tmp_path, ran, capsys):
    arguments = ["--out", str(tmp_path), "--workloads", "short", "ragged", "--trl-python", "python"]
    ratios.main(arguments)
    assert ran == [
        *("step-short-2-alone", "step-short-1-alone", "step-short-2-beside", "step-short-1-beside"),
        *("roofline-short-2-alone", "roofline-short-1-alone"),
        *(
            "step-ragged-2-alone",
            "step-ragged-1-alone",
            "step-ragged-2-beside",
            "step-ragged-1-beside",
        ),
    ]
    whole = (tmp_path / "ratios.json").read_text()
    (tmp_path / "step-ragged-1-alone.json").unlink()
    ran[:] = ["interrupt"]
    with pytest.raises(KeyboardInterrupt):
        ratios.main(arguments)
    assert len(json.loads((tmp_path / "ratios.json").read_text())["results"]["ratios"]) == 5
    ran[:] = ["x"] * 7  # the fake's median counts calls
    ratios.main(arguments)
    assert ran[7:] == ["step-ragged-1-alone"] and (tmp_path / "ratios.json").read_text() == whole
    assert capsys.readouterr().out.count("3.01 (2.00 to 4.00)") > 2


def test_a_column_is_a_condition_and_the_updates_share_is_of_a_run_alone():
    ratio = {"median": 3.0, "min": 2.0, "max": 4.0, "rollout_s": 5.0, "update_s": 2.5}
    results = {
        "ratios": [
            {"workload": "long_prompt", "threads": 2, "is_alone": True, **ratio},
            {"workload": "long_prompt", "threads": 1, "is_alone": False, **ratio, "median": 3.5},
        ],
        "updates": [
            {"workload": "short", "threads": 2, "is_alone": True, "rate": 1e11, "fraction": 0.61}
        ],
    }
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in tables.of_ratios(results).splitlines()
    ]
    names = [
        "alone, threads: 1",
        "alone, threads: 2",
        "beside a job, threads: 1",
        "beside a job, threads: 2",
    ]
    assert table[0] == ["TRL / gruppo", *names]
    phases = "; rollout 5.0, update 2.5"
    assert table[2] == [
        "long prompt",
        "",
        f"3.00 (2.00 to 4.00){phases}",
        f"3.50 (2.00 to 4.00){phases}",
        "",
    ]
    assert table[3][1:] == ["", "61%", "", ""]
