"""A mistake in a judge's file is one line that names it, and its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.rewards.judge_server import RUBRIC

from gruppo.rewards import resolve_reward
from gruppo.rewards.judge import Judge
from gruppo.rewards.judge_file import load_judge
from gruppo.types import GruppoError

HEAD = 'endpoint = "http://127.0.0.1:9/v1"\nmodel = "m"\n'


def write(folder: Path, text: str) -> str:
    (folder / "j.toml").write_text(text, encoding="utf-8")
    return str(folder / "j.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "rubric needs at least one item.*Add \\[\\[rubric\\]\\]"),
        (
            HEAD + RUBRIC + "wieght = 2\n",
            "unknown entry rubric.0.wieght",
        ),
        (
            HEAD + RUBRIC + RUBRIC.replace("length", "b") + "weight = 0\n",
            "rubric.1.weight=0 is out of range",
        ),
        (HEAD + RUBRIC + "weight = nan\n", "rubric.0.weight=nan is out of range"),
        (HEAD + RUBRIC + RUBRIC, "rubric needs names that differ"),
        (HEAD + RUBRIC.replace("length", "reason"), "differ from each other and from 'reason'"),
        (HEAD + '[[rubric]]\nname = "x"\n', "rubric needs .* a name and a text"),
        (
            HEAD + "max_calls = 0\n" + RUBRIC,
            "max_calls=0 is out of range; it needs to be at least 1",
        ),
        (
            "endpont = 1\n" + HEAD + RUBRIC,
            ".*unknown entry endpont. Did you mean endpoint\\?",
        ),
        (HEAD + "samples = true\n" + RUBRIC, "samples=True needs to be a valid integer"),
        (
            HEAD + "samples = 3\n" + RUBRIC,
            "samples=3 at temperature 0 asks for one answer several times",
        ),
        (HEAD + RUBRIC + "[request]\nseed = 1\n", "request cannot set .*seed"),
        (HEAD.replace("http://", "") + RUBRIC, "endpoint needs the address"),
        (HEAD.replace('"m"', '""') + RUBRIC, "model needs the name"),
        (HEAD + 'reference = "prompts"\n' + RUBRIC, "reference='prompts' is not a column"),
        (HEAD + "rubric = [", "cannot be read as TOML"),
    ],
)
def test_bad_files_are_one_line(tmp_path, text, message):
    with pytest.raises(GruppoError, match=message) as error:
        resolve_reward(f"judge:{write(tmp_path, text)}")
    assert "\n" not in str(error.value) and error.value.exit_code == 2


def test_an_endpoint_whose_key_is_not_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(
        GruppoError, match="needs the key in the environment variable JUDGE_KEY, which is not set"
    ):
        Judge(write(tmp_path, HEAD + 'key_env = "JUDGE_KEY"\n' + RUBRIC))


@pytest.mark.parametrize("key", ["s3cret\nsecond", "s3cret\u201d", "s3 cret"])
def test_a_key_that_no_header_takes_is_refused_and_not_repeated(tmp_path, monkeypatch, key):
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(
        GruppoError, match="JUDGE_KEY holds a line break, a space or a character outside"
    ) as error:
        Judge(write(tmp_path, HEAD + 'key_env = "JUDGE_KEY"\n' + RUBRIC))
    assert "cret" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        HEAD + 'key_env = "sk-s3cret"\n' + RUBRIC,
        HEAD + 'key_env = "gsk_s3cret"\n' + RUBRIC,
        HEAD + 'api_key = "s3cret"\n' + RUBRIC,
        HEAD.replace("//", "//me:s3cret@") + RUBRIC,
        HEAD.replace("/v1", "/v1?key=s3cret") + RUBRIC,
    ],
)
def test_a_key_in_the_file_is_refused_and_not_repeated(tmp_path, text):
    with pytest.raises(GruppoError) as error:
        Judge(write(tmp_path, text))
    assert "s3cret" not in str(error.value)


def test_only_what_rewards_depend_on_is_in_the_digest(tmp_path):
    def digest(extra: str) -> str:
        return load_judge(Path(write(tmp_path, HEAD + extra + RUBRIC))).digest

    plain = digest("")
    assert digest("retries = 9\nconcurrency = 1\ntimeout_s = 5.0\nmax_calls = 7\n") == plain
    assert (
        len(
            {
                plain,
                digest("seed = 1\n"),
                digest('reference = "a"\n'),
                digest("request = {temperature = 1}\n"),
            }
        )
        == 4
    )


def test_the_example_is_a_judge_with_every_entry_but_a_key_of_its_own():
    config = load_judge(Path(__file__).parents[2] / "examples/judge.toml")
    assert [item.weight for item in config.rubric] == [3.0, 1.0] and config.max_calls
