"""A stranger's run folder runs no code without --trust-run: every command, every spelling, every
key that names code.

By commands and the public Python functions alone. The stranger's files leave a mark when they are
imported.
"""

from __future__ import annotations

import io
import json
import logging
import os
import py_compile
import shutil
import socketserver
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from tests import tiny

import gruppo
from gruppo.cli import app
from gruppo.types import GruppoError

EVIL = """
from pathlib import Path

Path({mark!r}).touch()


def f(*args, completions=(), **_):
    return [0.0] * len(completions)
"""
REMOTE = {
    "model_type": "evil",
    "architectures": ["Evil"],
    "auto_map": {"AutoConfig": "x.Evil", "AutoModel": "x.Evil"},
}


def run_command(*args: str) -> tuple[int, str]:
    """Exit code and output of ``gruppo ARGS``."""
    out = io.StringIO()
    logging.getLogger("gruppo").handlers.clear()  # that of the command before writes to its output
    with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit) as ended:
        app.main(args)
    return int(ended.value.code or 0), out.getvalue()


def call(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[int, str]:
    """Exit code and message of a function of the Python interface."""
    try:
        function(*args, **options)
    except GruppoError as error:
        return 2, " ".join(str(error).split())
    return 0, ""


IMPORTING: dict[str, Callable[[str], tuple[int, str]]] = {
    "train DIR": lambda run: run_command("train", run),
    "train FILE": lambda run: run_command("train", f"{run}/config.json"),
    "train --replay": lambda run: run_command("train", "--replay", run),
    "explain": lambda run: run_command("explain", run),
    "eval": lambda run: run_command("eval", run, "--prompts", "2"),
    "resume": lambda run: run_command("resume", run),
    "doctor": lambda run: run_command("doctor", run),
    "launch": lambda run: run_command("launch", run, "--servers", "0", "--dry-run"),
    "gruppo.train(DIR)": lambda run: call(gruppo.train, run, show=False),
    "gruppo.train(FILE)": lambda run: call(gruppo.train, f"{run}/config.json", show=False),
    "gruppo.resume": lambda run: call(gruppo.resume, run, show=False),
}
"""Commands that use what a config names, so that they ask."""
READING: dict[str, Callable[[str], tuple[int, str]]] = {
    "config": lambda run: run_command("config", run),
    "sample": lambda run: run_command("sample", run, "1 + 1", "--max-new-tokens", "2"),
    "export": lambda run: run_command("export", run, f"{run}-exported"),
    "report": lambda run: run_command("report", run),
    "view": lambda run: run_command("view", run, "--port", "0"),
}
"""Commands that import nothing that a config names."""
COMMANDS = IMPORTING | READING
USING = tuple(IMPORTING)

LISTED = {
    "absolute": "{st}/x.py:f",
    "relative": "st/x.py:f",
    "relative with a dot": "./st/x.py:f",
    "slash": "{st}/x.py/:f",
    "slashes": "{st}/x.py///:f",
    "slash dot": "{st}/x.py/.:f",
    "slash dot slash": "{st}/x.py/./:f",
    "slash dot dot": "{st}/x.py/../x.py:f",
    "two slashes before": "/{st}/x.py:f",
    "dot dot": "{st}/../st/./x.py:f",
    "link and dot dot": "{st}/link/../../../st/x.py/:f",
    "link to the file": "{st}/linked.py:f",
    "link without a suffix": "{st}/linked:f",
    "link in another case": "{st}/LINKED.PY:f",
    "linked folder": "{st}/self/self/x.py:f",
    "home": "~/st/x.py:f",
    "home and slash": "~/st/x.py/:f",
    "spaces": " {st}/x.py/:f ",
    "unicode, composed": "{st}/\u00e9.py:f",
    "unicode and slash": "{st}/\u00e9.py/:f",
    "module": "stranger_x:f",
    "module in a package": "stranger.x:f",
}
"""Names that lead to a Python file: the question shows where it is."""
REFUSED = {
    "upper-case suffix": "{st}/x.PY:f",
    "upper-case suffix and slash": "{st}/x.PY/:f",
    "mixed suffix": "{st}/x.Py:f",
    "other case": "{st}/X.py:f",
    "unicode, decomposed": "{st}/e\u0301.py:f",
    "full-width": "{st}/\uff58.py:f",
    "full-width colon": "{st}/x.py\uff1af",
    "invisible": "{st}/x.py\u200b:f",
    "compiled": "{st}/x.pyc:f",
    "text": "{st}/x.txt:f",
    "link to a text": "{st}/text.py:f",
    "a folder": "{st}/folder.py:f",
    "null character": "{st}/x.py\0:f",
    "newline": "{st}/x.py\n:f",
    "url": "file://{st}/x.py:f",
    "no attribute": "{st}/x.py/:",
    "odd attribute": "{st}/x.py/:f.g",
    "no colon": "{st}/x.py/",
    "module that is no identifier": "stranger-x:f",
    "relative module": ".stranger.x:f",
}
"""Names that lead to none, or that no plain Python file has: nothing is imported, whether they are
asked for or not."""
SPELLINGS = LISTED | REFUSED

KEYS: dict[str, Callable[[str], Any]] = {
    "reward": lambda name: ["exact_match", name],
    "model": lambda name: name,
    "critic.model": lambda name: name,
    "environment": lambda name: name,
    "environment.kind": lambda name: name,
    "environment.reply": lambda name: name,
    "environment.tools": lambda name: [name],
    "engine": lambda name: name,
    "engine.kind": lambda name: name,
    "track": lambda name: ["tensorboard", name],
    "restoration.consistency": lambda name: name,
    "objective.surrogate": lambda name: name,
}
"""Keys that take FILE.py:NAME and package.module:NAME, and the value with such a name."""
DATA_KEYS = {key: lambda name: name for key in ("data", "supervised.data", "evaluation.data")}
"""These take FILE.py:NAME; with another colon they are data of another kind."""
RESTORERS = {"model": lambda name: f"restore:{name}"}


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """A finished run whose config names no code."""
    options = {
        "evaluation__prompts": 0,
        "saving__every": 1,
        "steps": 1,
        "reward": ["exact_match"],
        "engine__lag": 0,
    }
    return gruppo.train(tiny.config(tmp_path_factory.mktemp("clean"), **options), show=False).folder


class Stranger:
    """The folder ``st`` with a stranger's run and Python files."""

    def __init__(self, clean: Path, place: Path) -> None:
        self.place, self.run, self.mark = place, place / "st", place / "executed"
        shutil.copytree(clean, self.run)
        code = EVIL.format(mark=str(self.mark))
        (self.run / "stranger").mkdir()
        files = (
            "x.py",
            "x.PY",
            "x.Py",
            "x.txt",
            "\u00e9.py",
            "stranger_x.py",
            "stranger-x.py",
            "stranger/x.py",
        )
        for name in files:
            (self.run / name).write_text(code)
        py_compile.compile(str(self.run / "x.py"), cfile=str(self.run / "x.pyc"))
        (self.run / "folder.py").mkdir()
        (self.run / "folder.py/__init__.py").write_text(code)
        (self.run / "a/b/c").mkdir(parents=True)
        links = {
            "link": "a/b/c",
            "linked.py": "x.py",
            "linked": "x.py",
            "LINKED.PY": "x.py",
            "text.py": "x.txt",
        }
        for name, target in (links | {"self": "."}).items():
            (self.run / name).symlink_to(target)
        self.config = json.loads((self.run / "config.json").read_text())

    def edit(self, changes: dict[str, Any]) -> None:
        """Write the config with other values at dotted keys."""
        config = json.loads(json.dumps(self.config))
        for key, value in changes.items():
            *sections, leaf = key.split(".")
            section = config
            for name in sections:
                section = section.setdefault(name, {})
            section[leaf] = value
        (self.run / "config.json").write_text(json.dumps(config))

    def spelled(self, spelling: str) -> str:
        return SPELLINGS[spelling].replace("{st}", str(self.run))

    def was_run(self) -> bool:
        """Whether the stranger's code was imported since the last call; the next import is another
        one."""
        was_run = self.mark.exists()
        self.mark.unlink(missing_ok=True)
        for name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", "")).startswith(str(self.place)):
                del sys.modules[name]
        return was_run

    def attack(self, commands: Iterable[str], question: str = "") -> None:
        """Run commands: none imports the code, and each one that uses the config lists
        ``question``."""
        open_doors = list[str]()
        for command in commands:
            code, text = COMMANDS[command](str(self.run))
            if self.was_run():
                open_doors.append(f"{command} runs the code")
            elif (
                question
                and command in IMPORTING
                and not (code == 2 and question in text and "--trust-" in text)
            ):
                open_doors.append(f"{command} does not list {question}: {text}")
        assert not open_doors, open_doors

    def listed(self, spelling: str) -> str:
        """What the question shows of a name; "" for one that is refused."""
        if spelling in REFUSED:
            return ""
        name = self.spelled(spelling).strip()
        if spelling.startswith("module"):
            return name
        return f"{os.path.realpath(os.path.expanduser(name.rpartition(':')[0]))}:f"


@pytest.fixture
def stranger(clean, tmp_path, monkeypatch) -> Iterator[Stranger]:
    monkeypatch.setenv("GRUPPO_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("GRUPPO_TRUSTED_RUNS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "st"))

    def stop(server: socketserver.BaseServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(socketserver.BaseServer, "serve_forever", stop)
    yield Stranger(clean, tmp_path)


# --- spellings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_of_a_reward_runs_it(stranger, spelling):
    stranger.edit({"reward": [stranger.spelled(spelling)]})
    stranger.attack(USING, stranger.listed(spelling))


@pytest.mark.parametrize("command", READING)
def test_commands_that_only_read_a_config_import_nothing(stranger, command, plots):
    for key, value in (KEYS | DATA_KEYS).items():
        stranger.edit({key: value(stranger.spelled("slash"))})
        shutil.rmtree(f"{stranger.run}-exported", ignore_errors=True)
        stranger.attack([command])


@pytest.mark.parametrize("key", KEYS | DATA_KEYS)
def test_every_key_is_asked_for(stranger, key):
    """The plainest spelling, and the one that a rule about the end of a name does not see."""
    value = (KEYS | DATA_KEYS)[key]
    for spelling in ("absolute", "slash", "link and dot dot"):
        stranger.edit({key: value(stranger.spelled(spelling))})
        stranger.attack(USING, stranger.listed(spelling))


def text_keys(settings: dict[str, Any], above: str = "") -> Iterator[str]:
    """Dotted keys whose values may be a text or a list."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from text_keys(value, f"{above}{name}.")
        elif value is None or isinstance(value, str | list):
            yield above + name


def test_no_other_key_of_a_config_runs_it_either(stranger):
    """Whichever option comes to take a name, the list above is not to be complete for it to be
    asked for."""
    keys = [*text_keys(stranger.config)]
    assert len(keys) > 40 and {"reward", "objective.surrogate"} <= {*keys}
    for key in keys:
        name = stranger.spelled("slash")
        is_list = isinstance(stranger.config.get(key), list)
        stranger.edit({key: [name] if is_list else name})
        stranger.attack(["explain"])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_network_of_a_restorer_is_asked_for(stranger, spelling):
    stranger.edit({"model": f"restore:{stranger.spelled(spelling)}"})
    stranger.attack(
        ("train DIR", "explain", "resume", "gruppo.train(FILE)"), stranger.listed(spelling)
    )


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("key", [*KEYS, *DATA_KEYS])
def test_no_spelling_of_any_key_runs_it(stranger, key, spelling):
    is_task = key in DATA_KEYS and spelling.startswith("module")  # reasoning_gym:NAME
    stranger.edit({key: (KEYS | DATA_KEYS)[key](stranger.spelled(spelling))})
    stranger.attack(USING, "" if is_task else stranger.listed(spelling))


@pytest.mark.parametrize("command", IMPORTING)
def test_the_question_lists_every_name(stranger, command):
    """Also beside a harmless one, in all keys at once, in a saved model, and where options of
    rewards run code."""
    (stranger.run / "saved").mkdir()
    (stranger.run / "saved/module.json").write_text(
        json.dumps({"made_by": "st/linked.py/:f", "sha256": ""})
    )
    rewards = [
        "json:loads",
        "st/x.py/:f",
        f"reward_model:{stranger.run},head=x",
    ]
    names = {
        "reward": rewards,
        "environment.tools": ["st/\u00e9.py/.:f"],
        "track": ["stranger.x:f"],
        "critic.model": str(stranger.run / "saved"),
    }
    stranger.edit(names)
    _, text = COMMANDS[command](str(stranger.run))
    found = ("json:loads", "/st/x.py:f", "/st/\u00e9.py:f", "stranger.x:f")
    assert all(name in text for name in found), text
    stranger.edit(names | {"reward": ["json:loads"], "environment.tools": [], "track": []})
    stranger.attack([command], f"{stranger.run}/x.py:f")


@pytest.mark.parametrize("command", ["train DIR", "eval", "resume", "gruppo.resume"])
def test_the_flag_runs_what_the_question_listed(stranger, command):
    """So the tests above are about names that would run."""
    stranger.edit({"reward": [stranger.spelled("slash dot")], "steps": 2})
    options = {
        "train DIR": ["train", "st", "--steps", "1"],
        "eval": ["eval", "st", "--prompts", "2"],
    }
    if command == "gruppo.resume":
        gruppo.resume(stranger.run, show=False, trust_run=True, allow_changes=True)
    else:
        code, text = run_command(
            *options.get(command, ["resume", "st", "--allow-changes"]), "--trust-run"
        )
        assert code == 0, text
    assert stranger.mark.exists()


@pytest.mark.parametrize("name", ["{st}/x.PY:f", "{st}/text.py:f", "{st}/x.pyc:f", "stranger-x:f"])
def test_what_no_question_lists_runs_with_no_flag_either(stranger, name):
    stranger.edit({"reward": ["json:loads", name.replace("{st}", str(stranger.run))]})
    for command in (
        ["train", "st"],
        ["explain", "st"],
        ["resume", "st"],
        ["eval", "st", "--prompts", "2"],
    ):
        code, text = run_command(*command, "--trust-run")
        assert code and text.count("\n") <= 2 and "bug in gruppo" not in text, text
        assert not stranger.was_run()


# --- saved models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    "file", ["module.json", pytest.param("restorer.json", marks=pytest.mark.slow)]
)
def test_no_spelling_in_a_saved_model_runs(stranger, file, spelling):
    name = stranger.spelled(spelling)
    for old in (stranger.run / "final").iterdir():
        old.unlink()
    restorer = {"action": {"kind": "pixels"}, "channels": 1, "network": name, "sizes": None}
    contents = {"made_by": name, "sha256": ""} if file == "module.json" else restorer
    (stranger.run / "final" / file).write_text(json.dumps(contents))
    (stranger.run / "final/COMPLETE").write_text("{}")
    said = stranger.listed(spelling)
    for place in (stranger.run, stranger.run / "self/final/../final"):
        for attempt in (
            lambda place=place: run_command("sample", str(place), "hi"),
            lambda place=place: run_command("export", str(place), str(stranger.place / "out")),
            lambda place=place: call(gruppo.load_policy, place),
        ):
            code, text = attempt()
            assert not stranger.was_run() and code == 2 and said in text, text
    stranger.edit({"model": "st/link/../../../final"})
    stranger.attack(["train DIR", "explain", "resume"], said)


def test_code_beside_the_weights_runs_only_with_the_option_of_the_command_line(stranger):
    for folder in ("hub", "final"):
        (stranger.run / folder).mkdir(exist_ok=True)
        (stranger.run / folder / "config.json").write_text(json.dumps(REMOTE))
        (stranger.run / folder / "x.py").write_text(EVIL.format(mark=str(stranger.mark)))
    stranger.edit({"model": str(stranger.run / "hub"), "trust_remote_code": True})
    stranger.attack([*USING, "sample", "export"], "trust_remote_code")
    stranger.edit({"reward": [f"reward_model:{stranger.run}/hub, trust_remote_code = TRUE"]})
    stranger.attack(USING, "reward_model:")


# --- environments of libraries --------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["verifiers:stranger_x", " verifiers:stranger_x"],
)
def test_an_environment_that_imports_a_package_is_asked_for(stranger, kind):
    stranger.edit({"environment.kind": kind})
    stranger.attack(USING, kind.strip())


# --- one's own runs, edited -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Iterator[Path]:
    """The place of a run of this user's, with their reward in own.py and links beside it."""
    place = tmp_path_factory.mktemp("own")
    (place / "a/b/c").mkdir(parents=True)
    (place / "own.py").write_text("def f(completions, **_):\n    return [0.0] * len(completions)\n")
    (place / "link").symlink_to("a/b/c")
    (place / "own").symlink_to("a/b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRUPPO_STATE", str(place / "state"))
        patch.chdir(place)
        options = {"evaluation__prompts": 0, "saving__every": 1, "steps": 1, "name": "mine"}
        gruppo.train(tiny.config(place, **options, reward=["own.py:f"]), show=False)
    yield place


@pytest.mark.parametrize("command", IMPORTING)
def test_a_run_of_ones_own_that_was_edited_is_asked_for(stranger, own, command, monkeypatch):
    """Also by a name that means the recorded file where .. is cut without looking, and another one
    where it is not."""
    monkeypatch.setenv("GRUPPO_STATE", str(own / "state"))
    shutil.copy(stranger.run / "x.py", own / "a/own.py")
    stranger.run, stranger.place = own / "runs/mine", own
    text = (stranger.run / "config.json").read_text()
    stranger.config = json.loads(text)
    try:
        assert stranger.config["reward"] == [f"{own}/own.py:f"]
        for reward in (
            [f"{own}/link/../../own.py:f"],
            [f"{own}/own/../own.py:f"],
            [f"{own}/own.py:f", f"{own}/a/own.py/:f"],
        ):
            stranger.edit({"reward": reward, "steps": 2})
            stranger.attack([command], f"{own}/a/own.py:f")
        stranger.edit({"reward": [f"{own}/link/../../../own.py:f"]})  # the recorded file
        if command in ("doctor", "explain"):
            assert COMMANDS[command](str(stranger.run))[0] == 0
    finally:
        (stranger.run / "config.json").write_text(text)


def test_a_launch_that_continues_an_edited_run_asks(stranger, own, monkeypatch):
    monkeypatch.setenv("GRUPPO_STATE", str(own / "state"))
    recipe, saved = own / "recipe.json", own / "runs/mine/config.json"
    text = saved.read_text()
    recipe.write_text(text)
    saved.write_text(json.dumps(json.loads(text) | {"track": [f"{stranger.run}/x.py/:f"]}))
    try:
        code, said = run_command("launch", str(recipe), "--servers", "0", "--dry-run")
        assert (
            not stranger.was_run()
            and code == 2
            and f"{stranger.run}/x.py:f" in said
            and "--trust-run" in said
        )
    finally:
        saved.write_text(text)


# --- where runs are written, and lines of a script ------------------------------------------------


@pytest.mark.parametrize("value", ["a\nscancel --me", "a\r", "\x1b[2J", "\0", "\u2028", "\x85"])
@pytest.mark.parametrize("key", ["name", "runs_dir"])
def test_control_characters_in_places_are_refused_in_one_line(stranger, key, value):
    template = stranger.place / "cluster.sh"
    template.write_text("#SBATCH --partition=p\n")
    own = stranger.place / "own.json"
    own.write_text(
        json.dumps(
            stranger.config | {"name": "", "runs_dir": str(stranger.place / "runs")} | {key: value}
        )
    )
    slurm = ["--slurm", str(template), "--servers", "0", "--dry-run"]
    option = f"--{key.replace('_', '-')}"
    for file, given in ((own, []), (stranger.run, [option, value])):
        for command in (
            ["train", str(file)],
            ["explain", str(file)],
            ["launch", str(file), *slurm],
        ):
            code, text = run_command(*command, *given)
            assert (
                code == 2 and f"{option}={value!r}"[2:10] in text and "control character" in text
            ), text
            assert text.count("\n") <= 2 and "\nscancel" not in text
    code, text = call(gruppo.train, tiny.config(stranger.place, **{key: value}), show=False)
    assert code == 2 and "control character" in text


def test_a_strangers_config_does_not_choose_where_runs_are_written(stranger):
    elsewhere = stranger.place / "elsewhere"
    stranger.edit({"runs_dir": str(elsewhere)})
    code, text = run_command("train", "st", "--steps", "1", "--name", "new")
    assert code == 0 and "its runs_dir" in text and str(elsewhere) in text and "ignored" in text
    assert (stranger.place / "runs/new/config.json").is_file() and not elsewhere.exists()
    code, text = run_command("launch", "st", "--servers", "0", "--dry-run")
    assert code == 0 and "ignored" in text and not elsewhere.exists()
    gruppo.train(stranger.run, steps=1, name="from-python", show=False)
    assert (stranger.place / "runs/from-python").is_dir() and not elsewhere.exists()
    code, text = run_command("train", "st", "--steps", "1", "--name", "new", "--runs-dir", "chosen")
    assert code == 0 and "ignored" not in text and (stranger.place / "chosen/new").is_dir()


def test_a_run_of_ones_own_is_trained_again_beside_it(stranger):
    own = tiny.config(
        stranger.place / "far", evaluation__prompts=0, steps=1, reward=["exact_match"]
    )
    run = gruppo.train(own, show=False).folder
    code, text = run_command("train", str(run / "config.json"), "--name", "again")
    assert code == 0 and "ignored" not in text and (run.parent / "again/config.json").is_file()


def test_names_differ_in_their_unicode_form():
    assert (
        unicodedata.normalize("NFC", SPELLINGS["unicode, decomposed"])
        == SPELLINGS["unicode, composed"]
    )
