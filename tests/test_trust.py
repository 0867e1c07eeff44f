"""Folders of somebody else import no code without a flag, and damaged or hostile files are one
line."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from tests import own_models, tiny
from tests.engines.fake_vllm import FakeServer

import gruppo
from gruppo import api, inference, trust
from gruppo import export as exporting
from gruppo.cli import app, commands
from gruppo.config import serialization
from gruppo.config.schema import Config
from gruppo.data.open import open_source
from gruppo.loading import absolute_spec
from gruppo.modalities import find_modality
from gruppo.modalities.common.lora import inject
from gruppo.modalities.diffusion.config import DiffusionConfig
from gruppo.protocols import save_with_origin
from gruppo.trainer import checkpoint
from gruppo.types import GruppoError

BARE = {"evaluation__prompts": 0, "saving__every": 1, "steps": 1}


@pytest.fixture(autouse=True)
def _own_state(monkeypatch, tmp_path_factory):
    """No parent is trusted."""
    monkeypatch.delenv(trust.TRUSTED)


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """A finished run whose config names no code."""
    config = tiny.config(tmp_path_factory.mktemp("clean"), **BARE, reward=["exact_match"])
    return api.start(config).folder


@pytest.fixture
def evil(tmp_path) -> str:
    """A file that leaves a trace when it is imported."""
    (tmp_path / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()\n"
        "def f(prompts, completions, **_):\n    return [0.0] * len(completions)\n"
    )
    return f"{tmp_path / 'evil.py'}:f"


def edit(run: Path, **changes: object) -> Path:
    """Change entries of a run's config."""
    config = json.loads((run / "config.json").read_text())
    for name, value in changes.items():
        *path, leaf = name.split("__")
        section = config
        for part in path:
            section = section[part]
        section[leaf] = value
    (run / "config.json").write_text(json.dumps(config))
    return run


def gives(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Exit code and error of a command in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        app.main(args)
    err = capsys.readouterr().err
    assert ended.value.code == 0 or (err.count("\n") == 1 and "bug in gruppo" not in err), err
    return int(ended.value.code or 0), err


COMMANDS = {
    "resume": ["resume", "RUN"],
    "eval": ["eval", "RUN", "--prompts", "2"],
    "doctor": ["doctor", "RUN"],
    "train its config": ["train", "RUN/config.json"],
    "train its folder": ["train", "RUN"],
    "explain": ["explain", "RUN"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_copy_with_an_edited_config_imports_nothing_without_the_flag(
    tmp_path, capsys, clean, evil, command
):
    run = edit(shutil.copytree(clean, tmp_path / "run"), reward=[evil], trust_remote_code=True)
    code, line = gives(capsys, *(word.replace("RUN", str(run)) for word in command))
    assert (
        code == 2
        and f"{run} names code to run or servers: " in line
        and evil in line
        and "trust_remote_code" in line
    )
    assert "add --trust-run" in line and not (tmp_path / "executed").exists()


def test_training_from_python_by_the_name_of_a_copied_run_imports_nothing_either(
    tmp_path, clean, evil
):
    run = edit(shutil.copytree(clean, tmp_path / "run"), reward=[evil], trust_remote_code=True)
    for config in (run, str(run / "config.json")):
        with pytest.raises(
            GruppoError,
            match=r"names code to run or servers: .*add --trust-run .*trust_remote_code=True",
        ):
            gruppo.train(config, show=False, steps=1, runs_dir=tmp_path / "runs")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "entry",
    ["environment__reply", "engine", "data", "supervised__data", "model", "critic__model"],
)
def test_every_entry_that_names_code_is_listed(tmp_path, capsys, clean, evil, entry):
    run = edit(shutil.copytree(clean, tmp_path / "run"), **{entry: evil})
    code, line = gives(capsys, "resume", str(run))
    assert code == 2 and evil in line and not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"model": "restore:/x/net.py:Net"}, ["/x/net.py:Net"]),
        ({"reward": ["json:loads", "exact_match", "keywords:because",
                     "reward_model:/m,trust_remote_code=true"]},
         ["json:loads", "reward_model:/m,trust_remote_code=true"]),
        ({"track": ["wandb", "/x/t.so:T"], "data": "reasoning_gym:json",
          "supervised": {"data": "/x/rows.py:f"}},
         ["/x/rows.py:f"]),
        ({"restoration": {"consistency": "/x/c.py:blur"}, "trust_remote_code": False},
         ["/x/c.py:blur"]),
        ({"engine": {"kind": "vllm", "urls": ["http://a:8000", "b:1,c:2"],
                     "publish_dir": "/shared"}},
         ["engine.urls=http://a:8000", "engine.urls=b:1,c:2", "engine.publish_dir=/shared"]),
        ({"trust_remote_code": True, "reward": ["process_reward:/m,trust_remote_code=False"]},
         ["trust_remote_code"]),
    ],
)  # fmt: skip
def test_names_of_code_are_found_wherever_they_are(settings, names):
    assert trust.imports(settings) == names


def test_servers_of_a_copied_run_get_no_key_and_no_weights_without_the_flag(
    tmp_path, capsys, clean, monkeypatch
):
    """Commands that train nothing need neither the flag nor the servers."""
    monkeypatch.setenv("GRUPPO_ENGINE_KEY", "secret")
    server, place = FakeServer(tiny.model()), tmp_path / "place"
    engine = {"kind": "vllm", "urls": [server.url], "publish_dir": str(place)}
    run = edit(shutil.copytree(clean, tmp_path / "run"), engine=engine, steps=2)
    for command in (["resume", str(run)], ["train", str(run)]):
        code, line = gives(capsys, *command)
        assert (
            code == 2
            and f"or servers: engine.urls={server.url}, engine.publish_dir={place}" in line
        )
        assert "check the servers; if you trust it, add --trust-run" in line
    assert (
        gives(capsys, "eval", str(run), "--prompts", "2")[0]
        == gives(capsys, "doctor", str(run))[0]
        == 0
    )
    assert not server.log and not place.exists()
    with pytest.raises(GruppoError, match="names code to run or servers"):
        api.resume(run)
    assert api.resume(run, trust_run=True).folder == run and server.log
    server.close()


def test_an_entry_that_is_not_listed_imports_nothing(tmp_path, clean, evil, monkeypatch):
    run = edit(shutil.copytree(clean, tmp_path / "run"), reward=[evil])
    monkeypatch.setattr(trust, "imports_of_run", lambda settings, folder: [])
    with pytest.raises(GruppoError, match=r"evil.py:f would run code, .* so it is not imported"):
        inference.evaluate_run(run, prompts=2)
    own = tmp_path / "own.py"
    own.write_text("def rows():\n    return [{'prompt': '1 + 1', 'answer': '2'}]\n")
    with pytest.raises(GruppoError, match=r"evil.py:f would run code"):  # data of one's own may
        inference.evaluate_run(run, prompts=2, data=f"{own}:rows")
    assert not (tmp_path / "executed").exists()


def test_the_flag_and_a_trusted_parent_allow_a_foreign_folder(
    tmp_path, capsys, clean, evil, monkeypatch
):
    run = edit(shutil.copytree(clean, tmp_path / "runs/run"), reward=[evil])
    assert gives(capsys, "eval", str(run), "--prompts", "2", "--trust-run")[0] == 0
    assert gives(capsys, "eval", str(run), "--prompts", "2")[0] == 2  # for one command
    monkeypatch.setenv(trust.TRUSTED, os.pathsep.join(["/nowhere", str(tmp_path / "runs")]))
    assert gives(capsys, "doctor", str(run))[0] == 0
    outside = edit(shutil.copytree(clean, tmp_path / "outside"), reward=[evil])
    (tmp_path / "runs/link").symlink_to(outside)
    assert (
        gives(capsys, "doctor", str(tmp_path / "runs/link"))[0] == 2
    )  # it is where it is, not where its link is
    monkeypatch.setenv(trust.TRUSTED, "runs")
    assert "Give its full path" in gives(capsys, "doctor", str(run))[1]


def test_a_run_of_this_user_needs_no_flag_until_its_code_or_place_changes(
    tmp_path, capsys, evil, monkeypatch
):
    monkeypatch.setenv(trust.STATE, str(tmp_path / "state"))
    other = evil.replace("evil.py", "other.py")
    shutil.copy(tmp_path / "evil.py", tmp_path / "other.py")
    run = api.start(tiny.config(tmp_path, **BARE, reward=[evil, "exact_match"])).folder
    (record,) = (tmp_path / "state/runs").iterdir()
    assert json.loads(record.read_text()) == {"folder": str(run), "imports": [evil]}
    for command in (
        ["resume", str(run)],
        ["eval", str(run), "--prompts", "2"],
        ["doctor", str(run)],
    ):
        assert gives(capsys, *command)[0] == 0
    (tmp_path / "link").symlink_to(run)
    assert gives(capsys, "doctor", str(tmp_path / "link"))[0] == 0
    for changes in (
        {"reward": [evil, other]},
        {"engine": other},
        {"environment__reply": "evil.py:f"},
    ):
        copy = (run / "config.json").read_text()
        assert gives(capsys, "doctor", str(edit(run, **changes)))[0] == 2
        (run / "config.json").write_text(copy)
    assert gives(capsys, "doctor", str(shutil.copytree(run, tmp_path / "copied")))[0] == 2
    run.rename(tmp_path / "moved")
    assert gives(capsys, "doctor", str(tmp_path / "moved"))[0] == 2
    edit(shutil.copytree(tmp_path / "moved", run), reward=["exact_match"])
    assert gives(capsys, "doctor", str(run))[0] == 0
    monkeypatch.setenv(trust.STATE, "state")
    assert "Give its full path" in gives(capsys, "doctor", str(tmp_path / "moved"))[1]


def test_a_state_folder_that_cannot_be_written_is_a_warning_and_the_run_needs_the_flag_later(
    tmp_path, capsys, caplog, evil, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv(trust.STATE, str(tmp_path / "file/state"))
    run = api.start(tiny.config(tmp_path, **BARE, reward=[evil])).folder
    (warning,) = [
        record.getMessage() for record in caplog.records if trust.STATE in record.getMessage()
    ]
    assert (
        "could not be recorded as yours" in warning
        and f"{trust.TRUSTED} to {run.parent}" in warning
    )
    assert gives(capsys, "resume", str(run))[0] == 2
    assert gives(capsys, "resume", str(run), "--trust-run")[0] == 0


def test_remote_code_is_turned_on_by_the_command_line_alone(tmp_path, capsys, clean, monkeypatch):
    monkeypatch.setenv(trust.TRUSTED, str(tmp_path))
    run = edit(shutil.copytree(clean, tmp_path / "run"), trust_remote_code=True)
    shutil.copy(run / "config.json", tmp_path / "mine.json")
    for command in (
        ["resume", str(run)],
        ["eval", str(run), "--prompts", "2"],
        ["explain", str(tmp_path / "mine.json")],
    ):
        code, line = gives(capsys, *command)
        assert (
            code == 2
            and "Only the command line can turn that on" in line
            and "add --trust-remote-code" in line
        )
        assert gives(capsys, *command, "--trust-remote-code")[0] == 0


def test_options_replace_the_code_of_a_foreign_config(tmp_path, clean, evil):
    run = edit(shutil.copytree(clean, tmp_path / "run"), reward=[evil])
    parsed = commands.parse_config("train", [str(run), "--reward", "exact_match"])
    assert parsed.reward == ("exact_match",)
    (tmp_path / "mine.json").write_text((run / "config.json").read_text())
    assert commands.parse_config("train", [str(tmp_path / "mine.json")]).reward == (
        evil,
    )  # a file of the user's own


# --- models that a function makes -----------------------------------------------------------------


def test_the_function_of_a_saved_model_runs_only_where_this_user_saved_it(
    tmp_path, capsys, monkeypatch
):
    name = own_models.own("model")
    policy = gruppo.load_policy(name)
    save_with_origin(policy, tmp_path / "saved")
    exporting.export(tmp_path / "saved", tmp_path / "exported")
    for folder in (tmp_path / "saved", tmp_path / "exported"):
        assert gives(capsys, "sample", str(folder), "hello", "--max-new-tokens", "2")[0] == 0
    foreign = str(shutil.copytree(tmp_path / "saved", tmp_path / "foreign"))
    training = [
        "--model",
        foreign,
        "--steps",
        "1",
        "--runs-dir",
        str(tmp_path / "runs"),
        "--name",
        "own",
    ]
    recipe = tmp_path / "recipe.json"
    settings = tiny.config(
        tmp_path, **BARE, reward=["exact_match"], data=tiny.config(tmp_path).data
    )
    recipe.write_text(json.dumps(serialization.to_dict(settings)))
    for command in (
        ["sample", foreign, "hello"],
        ["export", foreign, str(tmp_path / "out")],
        ["train", str(recipe), *training],
        ["explain", str(recipe), *training],
    ):
        code, line = gives(capsys, *command)
        assert (
            code == 2 and f"{foreign} names code to run or servers: {absolute_spec(name)}" in line
        )
    with pytest.raises(GruppoError, match="names code to run"):
        gruppo.from_pretrained(foreign)
    assert gives(capsys, "sample", foreign, "hello", "--max-new-tokens", "2", "--trust-run")[0] == 0
    # a run that began with the flag is this user's own
    assert gives(capsys, "train", str(recipe), *training, "--trust-run")[0] == 0
    assert gives(capsys, "resume", str(tmp_path / "runs/own"))[0] == 0
    assert (
        gives(capsys, "sample", str(tmp_path / "runs/own"), "hello", "--max-new-tokens", "2")[0]
        == 0
    )


def test_the_network_of_a_saved_restorer_is_not_imported(tmp_path, evil):
    policy = gruppo.open_restorer("unet:width=4", "band_gains", channels=1)
    policy.save(tmp_path / "saved")
    gruppo.load_restorer(tmp_path / "saved")
    settings = json.loads((tmp_path / "saved/restorer.json").read_text()) | {
        "network": evil,
        "sizes": None,
    }
    (tmp_path / "saved/restorer.json").write_text(json.dumps(settings))
    for load in (gruppo.load_restorer, gruppo.load_policy):
        with pytest.raises(GruppoError, match=r"names code to run or servers: .*evil.py:f"):
            load(tmp_path / "saved")
    assert not (tmp_path / "executed").exists()


# --- seals ----------------------------------------------------------------------------------------


def test_a_flipped_byte_in_the_final_model_is_refused_and_resume_writes_it_again(
    tmp_path, capsys, clean
):
    run = shutil.copytree(clean, tmp_path / "run")
    weights = run / "final/model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    recipe = str(clean / "config.json")
    for command in (
        ["sample", str(run), "hello"],
        ["eval", str(run), "--prompts", "2"],
        ["export", str(run), str(tmp_path / "out")],
        ["train", recipe, "--model", str(run), "--runs-dir", str(tmp_path / "runs")],
        ["train", recipe, "--critic.kind", "separate", "--objective", "ppo",
         "--critic.model", str(run), "--runs-dir", str(tmp_path / "runs")],
    ):  # fmt: skip
        code, line = gives(capsys, *command)
        assert (
            code == 2
            and "model.safetensors has changed since it was written" in line
            and f"resume {run}" in line
        )
    assert gives(capsys, "resume", str(run))[0] == 0 and weights.read_bytes() == data
    assert gives(capsys, "sample", str(run), "hello")[0] == 0


@pytest.mark.parametrize("kind", ["own module", "restorer", "denoiser", "adapter"])
def test_every_kind_of_model_is_compared_with_its_seal(tmp_path, kind):
    if kind == "own module":
        policy = gruppo.load_policy(own_models.own("model"))
    elif kind == "restorer":
        policy = gruppo.open_restorer("unet:width=4", "band_gains", channels=1)
    elif kind == "denoiser":
        config = api.change(
            Config(), {"model": "unet", "data": "digits", "modality": DiffusionConfig(width=8)}
        )
        policy = find_modality("unet").open(config, open_source("digits", seed=0))[0]
    else:
        pytest.importorskip("peft")
        adapt = partial(inject, rank=2, alpha=4.0, targets=(), seed=0, base=tiny.model())
        policy = gruppo.from_pretrained(tiny.model(), adapt=adapt)
    with checkpoint.replacing(tmp_path / "saved") as temporary:
        save_with_origin(policy, temporary)
    trust.record(tmp_path / "saved", trust.imports_of_model(tmp_path / "saved"))
    gruppo.load_policy(tmp_path / "saved")
    (weights,) = (tmp_path / "saved").glob("*.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        GruppoError,
        match=rf"{weights.name} has changed since it was written\. Save or export it again",
    ):
        gruppo.load_policy(tmp_path / "saved")


# --- hostile files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["config.json", "manifest.json", "evaluations.json", "metrics.jsonl", "samples.jsonl"]
)
@pytest.mark.parametrize("kind", ["deep", "huge", "long number"])
def test_hostile_json_is_one_line(tmp_path, capsys, clean, file, kind, monkeypatch):
    run = shutil.copytree(clean, tmp_path / "run")
    monkeypatch.setattr("gruppo.integrity.MAX_BYTES", 1 << 20)
    monkeypatch.setattr(serialization, "MAX_BYTES", 1 << 20)
    depth = 5000 if file == "config.json" else 500
    text = {
        "deep": '{"step": 1, "a": ' + "[" * depth + "]" * depth + "}",
        "huge": json.dumps({"step": 1, "a": "x" * (1 << 20)}),
        "long number": '{"step": ' + "9" * 400 + "}",
    }[kind]
    (run / file).write_text(f"{text}\n{text}\n" if file.endswith("l") else text)
    for command in (["doctor", str(run)], ["resume", str(run)]):
        gives(capsys, *command)  # at most one line, never a bug


def test_a_terminal_gets_no_control_characters_from_a_sample(capsys, monkeypatch):
    hostile = "a\x1b]52;c;ZXZpbA==\x07b\x9b2J\u202etxt\r\nc\td 语\u3000言 \udc80"
    monkeypatch.setattr(inference, "sample", lambda *_, **__: [[hostile]])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    commands.sample("run", ("hi",))
    out = capsys.readouterr().out
    assert out == "a\\x1b]52;c;ZXZpbA==\\x07b\\x9b2J\\u202etxt\\r\nc\td 语\u3000言 \\udc80\n"


def test_an_error_quotes_a_hostile_file_without_control_characters(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps(serialization.to_dict(Config()) | {"\x1b[2J": 1})
    )
    code, line = gives(capsys, "train", str(tmp_path))
    assert code == 2 and "\x1b" not in line and "\\x1b[2J" in line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"environment": {"kind": "openenv:http://10.0.0.7:8000"}},
            "code to run or servers: openenv:http://",
        ),
        (
            {"data": "verifiers:sums:count=3"},
            "code to run or servers: verifiers:sums:count=3",
        ),
        (
            {"evaluation": {"data": "verifiers:sums"}},
            "code to run or servers: verifiers:sums",
        ),
    ],
)
def test_environments_of_other_libraries_are_code_or_servers_that_a_folder_names(
    tmp_path, settings, said
):
    with pytest.raises(GruppoError) as error:
        trust.check(tmp_path, trust.imports(settings))
    assert said in str(error.value) and "--trust-run" in str(error.value)
    trust.check(tmp_path, trust.imports(settings), trust_run=True)
