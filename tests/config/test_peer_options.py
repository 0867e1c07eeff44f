"""Options of other systems: each leads to an existing option, and the docs page has the tables of
the program."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import processes

from gruppo.cli.help import all_options
from gruppo.cli.options import parse_config
from gruppo.config.peer_options import SYSTEMS, PeerOption, lookup, peer_options
from gruppo.config.schema import Config, Stage
from gruppo.errors import as_flag
from gruppo.modalities.diffusion.config import DiffusionConfig
from gruppo.types import GruppoError

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {system: DOCS / f"start/coming-from-{system}.md" for system in SYSTEMS} | {
    "sources": DOCS / "dev/sources.md"
}
"""The page with the table of each system."""
PEERS = DOCS / "objectives/peers.md"
OPTIONS = {*map(as_flag, all_options()), "--stages"}


# --- the page -------------------------------------------------------------------------------------


def table(system: str) -> str:
    """The options of a system as Markdown, one table per part."""
    all_options = peer_options(system)
    parts = dict.fromkeys(option.part for option in all_options)
    return "\n\n".join(
        _table_of_part(part, [option for option in all_options if option.part == part])
        for part in parts
    )


def _table_of_part(part: str, options: list[PeerOption]) -> str:
    head = f"| {f'`{part}`' if '.' in part or '_' in part else part} | here | remark |"
    return "\n".join([head, "|---|---|---|", *map(_row, options)])


def _row(option: PeerOption) -> str:
    theirs = ", ".join(f"`{name}`" for name in option.theirs.split(", "))
    near = f"none; nearest `{as_flag(option.near)}`" if option.near else "none"
    ours = ", ".join(f"`{as_flag(name)}`" for name in option.ours.split()) or near
    return f"| {theirs} | {ours} | {option.remark} |"


def filled(system: str) -> str:
    """The page of a system with its tables as they are now."""
    text = PAGES[system].read_text(encoding="utf-8")
    between = re.compile(rf"(<!-- {system} -->\n).*?(<!-- end -->)", re.DOTALL)
    assert between.search(text), system
    return between.sub(lambda found: f"{found[1]}{table(system)}\n{found[2]}", text)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_has_the_tables_of_the_program(system: str) -> None:
    text = PAGES[system].read_text(encoding="utf-8")
    assert text == filled(system), "python -m tests.config.test_peer_options writes them"


# --- each name ------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_name_leads_to_options_that_there_are(system: str) -> None:
    for named in peer_options(system):
        fields = [*named.ours.split(), *named.near.split()]
        typed = {as_flag(field) for field in fields} | set(
            re.findall(r"--[a-z][a-z.-]*[a-z]", named.remark)
        )
        groups = {name.rpartition(".")[0] for name in OPTIONS}
        assert typed <= OPTIONS | groups, named.theirs
        assert not (named.ours and named.near), named.theirs
        assert named.ours or named.remark or named.near, (
            f"{named.theirs}: nothing, and no word of why"
        )


@pytest.mark.parametrize("recipe", ["arithmetic-ppo", "digits-compress"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_printed_can_be_typed_and_gives_the_same_run(system: str, recipe: str) -> None:
    config = parse_config(
        "train", [recipe, "--objective.clip-low", "0.3", "--stage.kl-coef", "linear:0.1,0"]
    )
    typed: dict[str, list[str]] = {}
    for named in peer_options(system):
        for words in re.findall(r"--[^ ]+(?: (?!--)[^ ]+)*", named.describe(config)):
            name, *values = words.split(" ")
            if values and values != ["None"]:
                assert typed.setdefault(name, values) == values
    options = [
        word for name, values in typed.items() if name != "--stages" for word in (name, *values)
    ]
    again = parse_config("train", ["plain", *options])
    for name in typed:
        field: Any = again
        ours: Any = config
        for leaf in name[2:].replace("-", "_").split("."):
            if leaf == "diffusion":  # the section of the modality, or its defaults
                field, ours = again.section(DiffusionConfig), config.section(DiffusionConfig)
                continue
            field, ours = getattr(field, leaf), getattr(ours, leaf)
        assert field == ours, name
    assert "--stage.kl-coef" in typed and typed["--stage.kl-coef"] == ["linear:0.1,0"]


BY_HAND = {
    "trl": {
        "epsilon": "objective.clip_low",
        "epsilon_high": "objective.clip_high",
        "delta": "objective.dual_clip",
        "num_generations": "rollout.group_size",
        "num_iterations": "optim.epochs",
        "steps_per_generation": "optim.minibatches",
        "ref_model_mixup_alpha": "reference.update_rate",
        "ref_model_sync_steps": "reference.update_every",
        "vllm_importance_sampling_clip_max": "objective.correction_high",
        "vllm_importance_sampling_clip_min": "objective.correction_low",
    },
    "verl": {
        "actor_rollout_ref.actor.clip_ratio_low": "objective.clip_low",
        "clip_ratio_high": "objective.clip_high",
        "rollout.n": "rollout.group_size",
        "data.train_batch_size": "rollout.prompts",
        "actor.optim.lr": "optim.lr",
        "critic.optim.lr": "critic.lr",
        "algorithm.lam": "objective.lam",
    },
    "ddpo": {
        "reference_model_mixup_alpha": "reference.update_rate",
        "reference_update_freq": "reference.update_every",
        "adv_clip_max": "objective.adv_clip",
        "num_inner_epochs": "optim.epochs",
    },
    "sources": {
        "ENTROPY_COEF": "stage.entropy_coef",
        "reference_update_freq": "reference.update_every",
        "grpo_lambda_sup": "stage.sup_coef",
        "grpo_lambda_pg": "stage.rl_coef",
        "grpo_adv_clip_max": "objective.adv_clip",
    },
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_settings_that_would_train_something_else_if_they_were_exchanged(system: str) -> None:
    found = {name: {n.ours for n in lookup(system, name) if n.ours} for name in BY_HAND[system]}
    assert found == {name: {ours} for name, ours in BY_HAND[system].items()}


def rows_of_peers() -> list[tuple[str, str, str]]:
    """System, option and our column of each row of the objectives' page on TRL and verl."""
    rows, system = [], ""
    for line in PEERS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            system = "verl" if "verl" in line else "trl"
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) >= 4:
            rows += [
                (system, name, cells[2]) for name in re.findall(r"(?<!of )`([\w.]+)`", cells[0])
            ]
    return rows


def test_the_objectives_page_names_the_same_options_of_ours() -> None:
    compared = 0
    for system, name, ours in rows_of_peers():
        fields = set(re.findall(r"`((?:objective|stage|rollout|optim|critic|scoring)\.\w+)", ours))
        found = {f for n in lookup(system, name) for f in f"{n.ours} {n.near}".split()}
        if fields and not ours.startswith("none"):
            assert fields & found, (system, name, found)
            compared += 1
    assert compared > 40


def test_of_several_stages_all_are_named() -> None:
    stages = (Stage(name="a", steps=3, kl_coef=0.02), Stage(name="b", kl_coef="linear:0.1,0"))
    (named,) = lookup("sources", "BETA_KL")
    assert named.describe(Config(stages=stages)) == (
        "--stages.0.kl-coef 0.02 --stages.1.kl-coef linear:0.1,0"
    )


# --- the command ----------------------------------------------------------------------------------


def run(capsys: Any, *args: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    code = processes.exit_code(args)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "args",
    [
        ("explain", "arithmetic", "--names", "trl", "--steps", "7"),
        ("explain", "--names", "trl", "arithmetic", "--steps", "7"),
        ("explain", "--names=TRL", "arithmetic", "--steps=7"),
    ],
)
def test_names_may_stand_anywhere_and_load_no_model(capsys: Any, args: tuple[str, ...]) -> None:
    code, out, _ = run(capsys, *args)
    assert code == 0 and "GRPOConfig\n" in out and "ONE REAL PROMPT" not in out
    assert re.search(
        r"^  max_steps +--steps 7   \(in steps; there in optimizer steps\)$", out, re.MULTILINE
    )
    assert re.search(r"^  temperature +--rollout.temperature 1.5$", out, re.MULTILINE)


def test_one_name_is_answered_from_every_part_that_has_it_without_a_recipe(capsys: Any) -> None:
    code, out, _ = run(capsys, "explain", "--names", "trl:beta")
    assert code == 0 and out.splitlines()[::2] == ["GRPOConfig"]
    assert out.count("--stage.kl-coef 0") == 1


def test_a_name_that_maps_to_nothing_says_so_and_names_the_nearest(capsys: Any) -> None:
    code, out, _ = run(capsys, "explain", "--names", "trl:off_policy_mask_threshold")
    assert code == 0 and "no counterpart; nearest --objective.kl-mask 0" in out


@pytest.mark.parametrize(
    ("request_text", "answer"),
    [
        ("tlr", "Did you mean trl?"),
        ("ddpo-pytorch", "Did you mean ddpo?"),
        ("openrlhf", "it needs one of trl, verl, ddpo, sources."),
        ("num_generations", "num_generations of trl is --rollout.group-size."),
        ("trl:epsilon_hi", "Did you mean epsilon_high?"),
        ("trl:", "trl has no option of this name"),
    ],
)
def test_what_is_not_known_is_one_line_with_the_nearest(
    capsys: Any, request_text: str, answer: str
) -> None:
    code, out, err = run(capsys, "explain", "--names", request_text)
    assert code == 2 and not out and err.count("\n") == 1 and answer in err


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("--num-generations", "num_generations of trl is --rollout.group-size."),
        ("--beta", "beta of trl is --stage.kl-coef."),
        ("--actor_rollout_ref.actor.grad_clip", "is --optim.max-grad-norm."),
        ("--off_policy_mask_threshold", "has no counterpart; the nearest is --objective.kl-mask."),
        ("--lr", "Did you mean --optim.lr?"),
        ("--objective.clip-hihg", "Did you mean --objective.clip-high?"),
    ],
)
def test_an_option_of_theirs_is_refused_with_ours(typed: str, answer: str) -> None:
    with pytest.raises(GruppoError, match=r"^unknown option ") as caught:
        parse_config("train", ["arithmetic", typed, "1"])
    assert answer in str(caught.value)


if __name__ == "__main__":
    for name, page in PAGES.items():
        sys.stdout.write(f"{page}\n")
        page.write_text(filled(name), encoding="utf-8")
