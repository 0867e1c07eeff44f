"""Help, completion and config files on the command line."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests import processes

from gruppo.cli.help import all_options, config_help
from gruppo.cli.options import apply_options, parse_config
from gruppo.config.schema import Config
from gruppo.errors import as_flag
from gruppo.recipes import RECIPES
from gruppo.types import GruppoError


def run(capsys: Any, *args: str) -> str:
    """The output of a command that succeeds."""
    assert processes.exit_code(args) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_help_of_a_recipe_fits_and_lists_only_options_of_its_modality(recipe: str) -> None:
    config = RECIPES[recipe]()
    lines = config_help(config, f"train {recipe}", is_complete=False).splitlines()
    listed = [line for line in lines if line.startswith("  --")]
    assert len(listed) <= 80 and len(lines) <= 200
    assert any("--diffusion." in line for line in listed) == (
        type(config.modality).__name__ == "DiffusionConfig"
    )
    assert any("--restoration." in line for line in listed) == (
        type(config.modality).__name__ == "RestorationConfig"
    )
    assert any("--rollout.max-new-tokens" in line for line in listed) == (config.modality is None)


def test_the_complete_help_lists_every_option_with_its_default_and_details(capsys: Any) -> None:
    out = run(capsys, "train", "arithmetic", "--help-all")
    hidden = {
        as_flag(name) for name in all_options() if name.startswith(("diffusion.", "restoration."))
    }
    assert {as_flag(name) for name in all_options()} - hidden <= {
        word for word in out.split() if word.startswith("--")
    }
    out = " ".join(out.split())
    assert "(default: 12)" in out and "automatic value is 640 on a CPU" in out


def test_help_shows_the_values_of_the_options_before_it(capsys: Any) -> None:
    out = run(
        capsys, "train", "arithmetic", "--objective", "ppo", "--rollout.prompts", "7", "--help"
    )
    assert "(default: 7)" in out and "--critic.kind" in out
    assert "--critic.kind" not in run(capsys, "train", "arithmetic", "--help")


def test_a_model_of_a_modality_brings_its_options_into_the_help(capsys: Any) -> None:
    assert "--diffusion.steps" in run(capsys, "train", "plain", "--model", "unet", "--help")


def test_every_option_has_one_line_of_help() -> None:
    summaries = {name: option.help.partition("\n\n")[0] for name, option in all_options().items()}
    assert {
        name: text for name, text in summaries.items() if not 0 < len(text) <= 80 or "\n" in text
    } == {}


def test_a_config_that_is_printed_and_edited_trains(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        run(capsys, "config", "arithmetic", "--steps", "3", "--device", "cpu"), encoding="utf-8"
    )
    config = parse_config("train", [str(file), "--optim.lr", "1e-3"])
    assert (config.steps, config.device, config.optim.lr) == (3, "cpu", 1e-3)
    assert config.rollout == RECIPES["arithmetic"]().rollout


def test_options_of_a_modality_choose_its_section_and_exclude_others() -> None:
    config = apply_options(
        Config(model="unet"), ["--diffusion.steps", "7", "--diffusion.size", "8", "16"], "train"
    )
    assert (config.modality.steps, config.modality.size) == (7, (8, 16))
    with pytest.raises(GruppoError, match=r"unknown option --restoration\.patches"):
        apply_options(config, ["--restoration.patches", "2"], "train")


@pytest.mark.parametrize(("words", "value"), [(["true"], True), (["False"], False), ([], True)])
def test_a_switch_is_true_alone_or_takes_a_value(words: list[str], value: bool) -> None:
    assert (
        apply_options(Config(), ["--trust-remote-code", *words], "train").trust_remote_code is value
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid_and_know_commands_recipes_options_and_choices(
    capsys: Any, shell: str
) -> None:
    script = run(capsys, "completion", shell)
    for word in (
        "explain",
        "digits-compress",
        "rollout.group-size",
        "diffusion.steps",
        "bfloat16",
        "max-new-tokens",
    ):
        assert word in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)
    if shell == "bash":
        typed = (
            f"{script}\nCOMP_WORDS=(gruppo train arithmetic --compute b); COMP_CWORD=4; "
            f"_shtab_gruppo; echo ${{COMPREPLY[@]}}"
        )
        assert subprocess.check_output(["bash", "-c", typed], text=True) == "bfloat16\n"


def test_recipes_are_one_whole_sentence_each_and_one_in_full(capsys: Any) -> None:
    shown = run(capsys, "recipes")
    assert max(map(len, shown.splitlines())) <= 100
    entries = shown.partition("\n\n")[0].replace("\n" + " " * 22, " ").splitlines()
    assert [entry.split()[0] for entry in entries] == list(RECIPES)
    assert all(entry.endswith(".") and ".." not in entry for entry in entries)
    assert "2 CPU cores" in run(capsys, "recipes", "arithmetic")
    assert (
        processes.exit_code(["recipes", "nothing"]) == 2
        and "unknown recipe 'nothing'" in capsys.readouterr().err
    )
