"""Tables, names, commands, options, metrics, links and examples of the documentation match the
code."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import typing
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests import tiny
from tests.doctor.test_provoked_restoration import config_of as restoring
from tests.engines.fake_vllm import FakeServer

import gruppo
from gruppo import api
from gruppo.cli.commands import COMMANDS, TAKING_RECIPE
from gruppo.cli.help import all_options
from gruppo.cli.options import parse_config, parse_own
from gruppo.config import schema as configs
from gruppo.config.options import Option, as_text, options
from gruppo.core.objective import PRESETS, Objective
from gruppo.errors import as_flag
from gruppo.modalities import modalities
from gruppo.recipes import RECIPES, arithmetic
from gruppo.rewards.code import ProgramScore, code_metrics
from gruppo.tracking.files import read_metrics
from gruppo.trainer import checks
from gruppo.types import GruppoError, Likelihood, Rollouts, TrainBatch

ROOT = Path(__file__).parents[1]
OBJECTIVES = ROOT / "docs/objectives"
PAGES = sorted(OBJECTIVES.glob("*.md"))
OURS = [page for page in PAGES if page.name != "peers.md"]
"""Pages whose names are all gruppo's; peers.md has those of TRL and verl."""
DOCS = ROOT / "docs"
START, GUIDES, REFERENCE = (
    sorted((DOCS / folder).glob("*.md")) for folder in ("start", "guides", "reference")
)
LEARNED = sorted((DOCS / "learn").rglob("*.md"))
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md", DOCS / "index.md"]
WITH_OPTIONS = [*PAGES, *START, *GUIDES, *REFERENCE, *LEARNED, *READMES, DOCS / "dev/sources.md"]
ALL = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
FOREIGN_OPTIONS = {
    *(
        "--gpus",
        "--replay",
        "--log-dir",
        "--entrypoint-num-gpus",
        "--max-restarts",
        "--nproc-per-node",
        "--num-generations",
        "--extra-index-url",
        "--index-url",
        "--kills",
        "--logdir",
        "--max-model-len",
    ),
    *("--debug", "--help", "--help-all", "--names", "--options", "--tours"),
    *(
        "--bind",
        "--cap-drop",
        "--dev",
        "--mount",
        "--network",
        "--proc",
        "--read-only",
        "--rm",
        "--ro-bind",
    ),
    *("--runtime", "--unshare-all"),
    *(
        "--dtype",
        "--enable-prefix-caching",
        "--enable-scale-out",
        "--enforce-eager",
        "--generation-config",
    ),
    "--no-enable-chunked-prefill",
    *("--gpu-memory-utilization", "--logprobs-mode", "--max-model-len", "--enable-sleep-mode"),
    *(
        "--enable-deterministic-inference",
        "--served-model-name",
        "--tensor-parallel-size",
    ),
}
"""Of other programs, or for all commands."""
OTHER_WORDS = {"std", "gather", "range", "epsilon_high", "gruppo", "None"}
"""In code style, but not names of gruppo."""


def parameters(command: Any) -> tuple[dict[str, Option], dict[str, Option]]:
    """Positional arguments and options of a command, by the name of its parameter."""
    positional, named = dict[str, Option](), dict[str, Option]()
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        value = parameter.default
        (text,) = hints[name].__metadata__
        option = Option(name, hints[name].__origin__, value, value, text)
        (named if parameter.kind is parameter.KEYWORD_ONLY else positional)[name] = option
    return positional, named


PARAMETERS = {name: parameters(run) for name, run in COMMANDS.items() if name not in TAKING_RECIPE}
PARAMETERS["launch"] = ({}, options(configs.LaunchConfig()))
PARAMETERS["plan"] = ({}, options(configs.PlanOptions()))
"""Positional arguments and options of each command beside those of a config."""
OPTIONS = {as_flag(name): option.hint for name, option in all_options().items()} | {"--stages": str}
OPTIONS |= {
    as_flag(name): option.hint for _, named in PARAMETERS.values() for name, option in named.items()
}
"""Type of each command-line option."""


def each(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


def blocks(page: Path) -> Iterator[tuple[str, int, str]]:
    """Yield language, number of the first line, and text of each fenced block."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield found[1], text[: found.start()].count("\n") + 2, found[2]


def spans(page: Path) -> set[str]:
    """Return the inline code of a page."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    return set(re.findall(r"`([^`\n]+)`", text))


# --- the table of presets -------------------------------------------------------------------------

COLUMNS = {
    "credit": {"credit"},
    "baseline": {"baseline"},
    "scale": {"scale"},
    "whiten": {"whiten"},
    "ratio": {"ratio"},
    "surrogate": {"surrogate", "clip_low", "clip_high"},
    "average": {"average"},
    "KL": {"kl", "kl_in"},
}
"""Columns of the table, and the fields that each shows."""


def row(name: str, o: Objective) -> list[str]:
    bounds = f" {o.clip_low:g}, {o.clip_high:g}" if o.surrogate in ("clip", "cispo") else ""
    whiten = "yes" if o.whiten else "no"
    surrogate, kl = o.surrogate + bounds, f"{o.kl}, {o.kl_in}"
    return [f"`{name}`", o.credit, o.baseline, o.scale, whiten, o.ratio, surrogate, o.average, kl]


def test_the_table_of_presets_is_that_of_the_code() -> None:
    lines = (OBJECTIVES / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| preset"))
    end = next(n for n in range(start, len(lines)) if not lines[n])
    head, _, *table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]
    ]
    assert head == ["preset", *COLUMNS]
    assert table == [row(name, objective) for name, objective in PRESETS.items()]


def test_the_overview_of_presets_lists_each_of_them() -> None:
    lines = (OBJECTIVES / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| `--objective`")) + 2
    assert [line.split("`")[1] for line in lines[start : start + len(PRESETS)]] == list(PRESETS)


def test_the_table_shows_every_field_in_which_a_preset_is_not_the_default() -> None:
    changed = {
        f.name for o in PRESETS.values() for f in fields(o) if getattr(o, f.name) != f.default
    }
    assert changed <= set().union(*COLUMNS.values())


# --- names ----------------------------------------------------------------------------------------


def names_of_tests() -> set[str]:
    return {
        n
        for path in (ROOT / "tests").rglob("*.py")
        for n in re.findall(r"def (test_\w+)", path.read_text())
    }


def defined_in(pattern: str) -> set[str]:
    """Return the names of functions, classes, constants and parameters."""
    found: set[str] = set()
    for path in (ROOT / "src/gruppo").glob(pattern):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


@cache
def known_words() -> set[str]:
    """Return options, choices, record fields, names of core, losses and rewards, presets, recipes
    and tests."""
    settings = {
        part.replace("-", "_") for option in OPTIONS for part in option.lstrip("-").split(".")
    }
    choices = {
        choice
        for hint in OPTIONS.values()
        for choice in typing.get_args(hint)
        if isinstance(choice, str)
    }
    records = {f.name for kind in (Likelihood, Rollouts, TrainBatch) for f in fields(kind)}
    mathematics = defined_in("core/*.py") | defined_in("losses.py") | defined_in("rewards/*.py")
    return (
        settings
        | choices
        | records
        | mathematics
        | {*PRESETS, *RECIPES}
        | names_of_tests()
        | OTHER_WORDS
    )


@each(OURS)
def test_every_word_in_code_style_is_a_name_of_the_code(page: Path) -> None:
    unknown = {span for span in spans(page) if re.fullmatch(r"[A-Za-z_]\w*", span)} - known_words()
    assert not unknown


@each(OURS)
def test_every_setting_exists_and_can_have_the_value_that_is_named(page: Path) -> None:
    hints = typing.get_type_hints(Objective)
    for span in spans(page):
        if not (found := re.fullmatch(r"(?:objective__)?(\w+)=([\w.\"-]+)", span)):
            continue
        name, value = found.groups()
        if name in hints:
            TypeAdapter(hints[name]).validate_python(ast.literal_eval(value))
        else:
            assert name in known_words(), name


@each(OURS)
def test_every_dotted_setting_exists(page: Path) -> None:
    groups = {option[2:].partition(".")[0] for option in OPTIONS if "." in option}
    named = {
        span
        for span in spans(page)
        if re.fullmatch(r"[a-z_]+\.[a-z_]+", span) and span.split(".")[0] in groups
    }
    unknown = {name for name in named if as_flag(name) not in OPTIONS}
    assert not unknown


@each(PAGES)
def test_every_test_and_dotted_name_that_a_page_names_exists(page: Path) -> None:
    unknown = (
        set(re.findall(r"\btest_\w+\b(?!\.py)", page.read_text(encoding="utf-8")))
        - names_of_tests()
    )
    assert not unknown
    for span in spans(page):
        if found := re.fullmatch(r"(gruppo(?:\.[a-z_]+)*)\.(\w+)(\(.*\))?", span):
            module = importlib.import_module(found[1])
            assert hasattr(module, found[2]) or importlib.import_module(f"{found[1]}.{found[2]}")


@each(WITH_OPTIONS)
def test_every_option_exists(page: Path) -> None:
    named = set(
        re.findall(
            r"(?<![\w-])--[a-z][a-z-]*(?:\.[a-z][a-z0-9-]*)*", page.read_text(encoding="utf-8")
        )
    )
    groups = {option.rpartition(".")[0] for option in OPTIONS}
    unknown = named - {*OPTIONS} - groups - FOREIGN_OPTIONS
    assert not unknown


KINDS = {
    "digits": "diffusion",
    "images": "diffusion",
    "restore": "restoration",
}
"""Modality of a recipe by the first word of its name; text by default."""


def commands_in(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line and words of each command that takes a recipe."""
    for n, line in enumerate(text.splitlines()):
        for command in line.split("&&"):
            if re.match("gruppo (train|explain) ", command.strip()):
                yield n, shlex.split(command, comments=True)


@each(WITH_OPTIONS)
def test_every_command_is_one_that_can_run(page: Path) -> None:
    """Only built-in recipes are checked; the reader's own files do not exist."""
    for _, line, text in blocks(page):
        for n, words in commands_in(text):
            if words[2] in RECIPES and not {"--help", "--help-all"} & {*words}:
                try:
                    _, typed = parse_own(words[2:], configs.ExplainOptions(), "explain")
                    checks.check(
                        parse_config(words[1], typed),
                        modalities()[KINDS.get(words[2].split("-")[0], "text")],
                    )
                except GruppoError as error:
                    pytest.fail(f"{page.name}:{line + n}: {error}")


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every metric of small runs that together use all features."""
    folder = tmp_path_factory.mktemp("runs")
    everything: dict[str, Any] = {
        "objective__correction": "truncate",
        "objective__overlong": 2,
        "stage__kl_coef": 0.01,
        "stage__sup_coef": 0.01,
        "reference__kind": "mixed",
        "reference__update_every": 1,
        "steps": 1,
        "optim__epochs": 2,
        "optim__stop_kl": 10.0,
        "rollout__refill_rounds": 1,
        "rollout__first_samples": 2,
    }
    grpo = tiny.config(folder, name="grpo", **everything)
    ppo = tiny.config(folder, name="ppo", objective="ppo", critic__kind="separate", **everything)
    moving = {
        "objective__baseline": "running",
        "objective__scale": "running",
        "back_off__metric": "eval/reward_mean",
    }
    staged = tiny.config(folder, name="staged", steps=2, evaluation__every=1, **moving)
    several = (configs.Stage(steps=1, kl_coef=0.01, sup_coef=0.1), configs.Stage(rl_coef=0.5))
    staged = replace(
        staged,
        stages=several,
        back_off=replace(staged.back_off, drop=0.0),
        optim=configs.OptimConfig(lr=10.0),
    )
    staged = replace(
        staged, environment=configs.EnvironmentConfig(reply="gruppo.recipes.guess:reply")
    )
    held = configs.Stage(sup_coef=0.1, cons_coef=0.1, kl_coef=0.1)
    restored = restoring(folder, steps=1, stage=held, optim=configs.OptimConfig(lr=1e-4))
    server = FakeServer(tiny.model())
    served = tiny.config(
        folder,
        name="served",
        engine__kind="vllm",
        engine__urls=[server.url],
        engine__lag=1,
        steps=1,
    )
    calling = {
        "model": "tests.trainer.calling:policy",
        "environment": "tests.trainer.calling:Walk",
        "steps": 1,
    }
    tools = tiny.config(folder, name="tools", **calling)
    every = (grpo, ppo, staged, restored, served, tools)
    rows = [row for config in every for row in read_metrics(api.start(config).folder)]
    server.close()
    of_programs = {f"reward_metric/{name}" for name in code_metrics([ProgramScore(1, 1)])}
    of_servers = {"engine/error_nats"}
    return {name for row in rows for name in row} - {"step"} | of_programs | of_servers


@each([*OURS, *START, *GUIDES, *REFERENCE, DOCS / "dev/sources.md"])
def test_every_metric_is_one_that_a_run_logs(page: Path, logged: set[str]) -> None:
    unknown = {
        span for span in spans(page) if re.fullmatch(r"[a-z_]+(/[a-z0-9_]+)+", span)
    } - logged
    unknown = {name for name in unknown if not name.startswith("tests/")}
    unknown = {
        name for name in unknown if re.sub(r"^reward/\w+/", "reward/digits/", name) not in logged
    }
    assert not unknown - {"owner/name", "grad/action_norm", "eval/psnr"}


def documented_metrics() -> list[str]:
    """Patterns of the first columns of the metrics page; NAME and the like stand for any word."""
    cells = re.findall(
        r"^\| (`.+?) \|", (DOCS / "reference/metrics.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    patterns = []
    for cell in cells:
        prefix = ""
        for name in re.findall(r"`([^`]+)`", cell):
            prefix = name.rpartition("/")[0] if "/" in name else prefix
            full = name if "/" in name else f"{prefix}/{name}"
            patterns.append(
                re.sub(r"(?<![a-z])[A-Z]+(?![a-z])", r"[^/]+", re.escape(full)).replace("…", ".+")
            )
    return patterns


def test_the_metrics_page_explains_every_metric_of_a_run(logged: set[str]) -> None:
    unknown = {
        name for name in logged if not any(re.fullmatch(p, name) for p in documented_metrics())
    }
    assert not unknown, ", ".join(sorted(unknown))


# --- the table of options -------------------------------------------------------------------------


def option_table() -> str:
    """All options by section, with defaults and the first paragraph of their help."""
    lines: list[str] = []
    section = None
    for name, option in sorted(
        all_options().items(), key=lambda item: "." in item[0]
    ):  # single options first
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            lines += [
                "",
                f"### {section or 'run'}",
                "",
                "| option | default | meaning |",
                "|---|---|---|",
            ]
        summary = (
            " ".join(option.help.partition("\n\n")[0].split())
            .replace("``", "`")
            .replace("|", "\\|")
        )
        lines.append(f"| `{as_flag(name)}` | {as_text(option.value) or '-'} | {summary} |")
    return "\n".join(lines).strip()


def command_tables() -> str:
    """Arguments and options of each command, with defaults."""
    lines: list[str] = []
    for command, (positional, named) in PARAMETERS.items():
        lines += ["", f"### gruppo {command}", "", inspect.getdoc(COMMANDS[command]) or ""]
        rows = [f"| `{name.upper()}` | | {option.help} |" for name, option in positional.items()]
        rows += [
            f"| `{as_flag(name)}` | {as_text(o.value) or '-'} | {o.help} |"
            for name, o in named.items()
        ]
        lines += ["", "| argument | default | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines).strip()


GENERATED = {DOCS / "reference/config.md": option_table, DOCS / "reference/cli.md": command_tables}
"""Pages with a part that is written from the code."""


def with_tables(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    start, end = (text.index(mark) for mark in ("<!-- options -->", "<!-- end -->"))
    return f"{text[:start]}<!-- options -->\n\n{GENERATED[page]()}\n\n{text[end:]}"


@each([*GENERATED])
def test_the_config_and_command_line_pages_list_every_option(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == with_tables(page), (
        "python -m tests.test_docs writes the table"
    )


def test_the_page_of_docstrings_lists_every_public_name() -> None:
    page = (DOCS / "reference/api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: gruppo\.(\w+)$", page, re.MULTILINE)) == sorted(
        {*gruppo.__all__} - {"__version__"}
    )


# --- links, files and examples --------------------------------------------------------------------


@each(ALL)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@each(ALL)
def test_every_link_to_a_section_leads_to_its_heading(page: Path) -> None:
    for target, anchor in re.findall(
        r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")
    ):
        text = (
            (page.parent / target if target else page).read_text(encoding="utf-8")
            if "://" not in target
            else ""
        )
        text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        headings = {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        assert anchor in headings or "://" in target, (target, anchor)


@each(ALL)
def test_every_page_is_linked_from_the_index_or_from_a_page_below_it(page: Path) -> None:
    linked, queue = set(), [DOCS / "index.md", ROOT / "README.md"]
    while queue:
        here = queue.pop()
        if here in linked:
            continue
        linked.add(here)
        targets = re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", here.read_text(encoding="utf-8"))
        queue += [(here.parent / target).resolve() for target in targets if "://" not in target]
    assert page in linked or page.name == "CHANGELOG.md"


@each(PAGES)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = {span for span in spans(page) if re.fullmatch(r"[\w/]+/[\w/]+\.(py|md|txt)", span)}
    assert [
        name
        for name in sorted(named)
        if not any((ROOT / at / name).exists() for at in (".", "src/gruppo"))
    ] == []


@each([*PAGES, *START, *GUIDES, *REFERENCE])
def test_the_examples_of_a_page_hold(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all Python blocks of a page in one session, with a tiny model in place of the bundled
    one."""
    own = {"model": tiny.model(), "compute": "float32", "runs_dir": str(tmp_path)}
    monkeypatch.setitem(RECIPES, "arithmetic", lambda: replace(arithmetic(), **own))
    session: dict[str, Any] = {}
    for language, line, text in blocks(page):
        if language == "python":
            exec(compile("\n" * (line - 1) + text, str(page), "exec"), session)


if __name__ == "__main__":
    for generated in GENERATED:
        generated.write_text(with_tables(generated), encoding="utf-8")
