"""Training from Python: names, functions, objects."""

from __future__ import annotations

import functools
import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests import fakes, processes, tiny
from tests.trainer.runs import metrics

import gruppo
from gruppo import api
from gruppo.build import Parts, build, name_of
from gruppo.cli.commands import COMMANDS
from gruppo.cli.options import parse_command, parse_config
from gruppo.config import schema as configs
from gruppo.config import serialization
from gruppo.modalities.text import from_pretrained
from gruppo.types import GruppoError

SMALL = {
    "steps": 2,
    "show": False,
    "name": "run",
    "compute": "float32",
    "rollout__prompts": 2,
    "rollout__group_size": 3,
    "rollout__max_new_tokens": 6,
    "evaluation__prompts": 0,
    # a process that imports this file, and torch with it, takes 3 s of CPU time
    "scoring__isolate": False,
}


def length(completions, **_):
    return [float(len(tiny.said(completion))) for completion in completions]


def saved_config(result: api.Result) -> dict[str, Any]:
    return json.loads((result.folder / "config.json").read_text())


def test_names_a_list_of_texts_and_a_function_train(tmp_path):
    result = gruppo.train(
        model=tiny.model(),
        data=["1 + 1", "2 + 2", "3 + 3", "4 + 4"],
        reward=length,
        runs_dir=tmp_path,
        **SMALL,
    )
    config = saved_config(result)
    assert (config["model"], config["data"]) == (tiny.model(), "<in memory>")
    assert config["reward"] == ["tests.trainer.test_api:length"]
    assert result.tokens == metrics(result.folder)[-1]["progress/tokens"] > 0
    policy = from_pretrained(result.model)
    assert isinstance(policy, gruppo.TextPolicy)


def test_a_recipes_name_and_a_config_file_train_as_on_the_command_line(tmp_path):
    parts = {"model": tiny.model(), "data": tiny.rows(), "reward": length, "runs_dir": tmp_path}
    result = gruppo.train("arithmetic", **parts, **SMALL | {"name": "", "steps": 1})
    assert result.folder.name.startswith("arithmetic-")
    assert saved_config(result)["optim"]["lr"] == parse_config("train", ["arithmetic"]).optim.lr
    mine = tmp_path / "mine.toml"
    mine.write_text(f'model = "{tiny.model()}"\nreward = ["exact_match"]\n[optim]\nlr = 0.5\n')
    result = gruppo.train(
        mine, data=tiny.rows(), runs_dir=tmp_path, **SMALL | {"name": "", "steps": 1}
    )
    assert result.folder.name.startswith("mine-")
    assert saved_config(result)["optim"]["lr"] == 0.5 and saved_config(result)["reward"] == [
        "exact_match"
    ]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            {"steps": 3},
            {},
            r"config is {'steps': 3} \(dict\); it needs a gruppo.Config, a recipe's name",
        ),
        ("", {}, "unknown recipe ''. Built in: arithmetic"),
        ("arithmetik", {}, "Did you mean arithmetic?"),
        ("nowhere.toml", {}, "nowhere.toml does not exist"),
        (
            "arithmetic",
            {"rollout__group_size": 0},
            "^rollout__group_size=0 is out of range",
        ),
        (None, {"rollout__group_size": "x"}, "^rollout__group_size='x' needs"),
        (
            None,
            {"num_generations": 4},
            "^unknown option num_generations. .* of trl is rollout__group_size",
        ),
        (None, {"stages__1__lr": 4}, "^unknown option stages__1__lr"),
        (  # two options, of which one was given
            "arithmetic",
            {"objective__correction": "truncate", "objective__correction_low": 5.0},
            "Set objective__correction_low 0 objective__correction_high 3",
        ),
    ],
)
def test_a_mistake_in_python_is_one_line_in_names_of_python(config, changes, message):
    with pytest.raises(GruppoError, match=message) as error:
        gruppo.train(config, show=False, **changes)
    assert "\n" not in str(error.value)


def test_a_model_without_its_tokenizer_is_refused_with_what_to_do():
    with pytest.raises(
        GruppoError, match=r"TinyGPT; it needs a name, a folder, or a policy.*from_transformers"
    ):
        gruppo.train(model=fakes.TinyGPT(), data=["x"], reward=length)


def test_what_is_named_can_be_named_and_what_cannot_is_in_memory():
    @functools.wraps(length)
    def inner(completions):
        return length(completions)

    assert name_of(length) == "tests.trainer.test_api:length"
    assert name_of(Path("a/b.jsonl")) == "a/b.jsonl"
    unnamed = [
        inner,
        lambda completions: [],
        functools.partial(length),
        [1],
        fakes.plain(),
        length.__call__,
    ]
    assert [name_of(part) for part in unnamed] == [configs.IN_MEMORY] * len(unnamed)


SCRIPT = """
import gruppo
from tests import tiny

def reward(completions, **_):
    return tiny.digits(completions)

print("before")
gruppo.train(model=tiny.model(), data=DATA, reward=reward, runs_dir=RUNS, name="run", steps=4,
             rollout__prompts=2, rollout__group_size=2, rollout__max_new_tokens=4, saving__every=1,
             show=False)
print("after")
"""


@pytest.mark.slow
def test_a_run_of_a_ten_line_script_is_resumed_by_its_folder_without_training_again(tmp_path):
    script = tmp_path / "script.py"
    tiny.write_rows(tmp_path / "data.jsonl")
    arguments = [str(tmp_path / "data.jsonl"), str(tmp_path / "runs")]
    script.write_text(
        SCRIPT.replace("DATA", repr(arguments[0])).replace("RUNS", repr(arguments[1]))
    )
    api.train(  # as the script would: the function is the file's
        model=tiny.model(),
        data=arguments[0],
        reward=f"{script}:reward",
        runs_dir=arguments[1],
        **SMALL | {"steps": 4},
    )
    run = tmp_path / "runs/run"
    saved = json.loads((run / "config.json").read_text())
    saved["scoring"]["isolate"] = True  # as it is by default: another process loads the script
    (run / "config.json").write_text(json.dumps(saved))
    for path in (
        run / "final",
        run / "checkpoints",
        run / "metrics.jsonl",
    ):  # as if it had been killed at once
        path.rename(path.with_name(f"moved-{path.name}"))
    child = processes.gruppo("resume", str(run), folder=tmp_path / "child")
    assert child.wait() == 0, child.err
    assert "before" in child.out and "after" not in child.out
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["run"]


def test_an_unfinished_name_gets_a_number_when_it_is_taken(tmp_path):
    first = api.new_name("x", tmp_path)
    (tmp_path / first).mkdir()
    second = api.new_name("x", tmp_path)
    assert second != first and second.startswith("x-")


@pytest.mark.parametrize("data", [tiny.rows(), [row["prompt"] for row in tiny.rows()]])
def test_data_without_held_out_prompts_are_one_warning_and_no_evaluation(tmp_path, data, caplog):
    settings = SMALL | {
        "evaluation__prompts": 4,
        "evaluation__every": 1,
        "prompts__held_out_fraction": 0.0,
    }
    with caplog.at_level("WARNING", "gruppo"):
        result = gruppo.train(
            model=tiny.model(), data=data, reward=length, runs_dir=tmp_path, **settings
        )
    assert caplog.text.count("no held-out prompts") == 1
    assert (
        result.before is result.after is None and saved_config(result)["evaluation"]["prompts"] == 0
    )


def test_commands_are_written_as_the_shell_needs_them(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "command_name", lambda: "/my env/bin/gruppo")
    run = build(tiny.config(tmp_path), Parts())[0]
    (command, _), *_ = api.next_commands(run, tmp_path / "a run")
    assert shlex.split(command) == [
        "/my env/bin/gruppo",
        "sample",
        str(tmp_path / "a run"),
        "PROMPT",
    ]


ALL = {"sample", "eval", "doctor"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "given"),
    [
        (ALL, {}),
        (ALL - {"eval"}, {"data": tiny.rows()}),
        (ALL - {"eval"}, {"reward": lambda completions, **_: [1.0] * len(completions)}),
        (ALL - {"eval"}, {"prompts__held_out_fraction": 0.0}),
        (
            ALL - {"sample", "eval"},
            {"model": "a module", "data": [f"{n} + {n} = " for n in range(9)]},
        ),
    ],
    ids=[
        "by name",
        "rows in memory",
        "a reward in memory",
        "nothing held out",
        "a module in memory",
    ],
)
def test_the_next_commands_are_those_that_work(tmp_path, capsys, names, given):
    named = {
        "model": tiny.model(),
        "data": tiny.write_rows(tmp_path / "rows.jsonl"),
        "reward": length,
    }
    parts = named | {"evaluation__prompts": 2} | given
    if parts["model"] == "a module":
        parts["model"] = gruppo.from_module(
            fakes.TinyGPT(), fakes.ByteTokenizer(), eos_ids=[fakes.END], context=64
        )
    result = gruppo.train(runs_dir=tmp_path, **SMALL | parts)
    commands = [shlex.split(text)[1:] for text, _ in result.next]
    assert {name for name, *_ in commands} == names
    for name, *arguments in commands:
        COMMANDS[name](**parse_command(name, COMMANDS[name], arguments))
    assert capsys.readouterr().out


@pytest.mark.usefixtures("plots")
def test_curves_are_drawn_also_where_nothing_is_shown(tmp_path):
    result = gruppo.train(
        model=tiny.model(), data=tiny.rows(), reward=length, runs_dir=tmp_path, **SMALL
    )
    assert (result.folder / "plots/overview.png").is_file()


def test_files_are_written_into_the_config_by_their_whole_path(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work/m").symlink_to(tiny.model())
    tiny.write_rows(tmp_path / "work/q.jsonl")
    (tmp_path / "work/my.py").write_text(
        "def f(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    settings = {
        "model": "./m",
        "data": "q.jsonl",
        "reward": ["my.py:f", "exact_match", "regex_format:a/b:c"],
    }
    config = gruppo.train(**settings, runs_dir=tmp_path / "runs", **SMALL).folder / "config.json"
    monkeypatch.chdir(tmp_path)
    saved = json.loads(config.read_text())
    assert (saved["model"], saved["data"]) == (f"{tmp_path}/work/m", f"{tmp_path}/work/q.jsonl")
    assert saved["reward"] == [f"{tmp_path}/work/my.py:f", "exact_match", "regex_format:a/b:c"]
    assert gruppo.resume(config.parent, show=False).tokens > 0


def test_screen_and_log_are_given_back_when_a_run_fails(tmp_path, capsys):
    log = logging.getLogger("gruppo")
    before = list(log.handlers)
    with pytest.raises(GruppoError):
        gruppo.train(tiny.config(tmp_path, reward=[tiny.reward("raises")], evaluation__prompts=0))
    assert log.handlers == before
    with pytest.raises(GruppoError, match="exists already"):
        gruppo.train(tiny.config(tmp_path))


def test_a_config_in_memory_cannot_be_trained_from_its_file(tmp_path):
    result = gruppo.train(
        model=tiny.model(), data=tiny.rows(), reward=length, runs_dir=tmp_path, **SMALL
    )
    config = serialization.load(result.folder / "config.json")
    with pytest.raises(
        GruppoError, match=r"the data of this config came from Python objects.*Set data"
    ):
        api.start(serialization.from_dict(serialization.to_dict(config) | {"name": "again"}))
