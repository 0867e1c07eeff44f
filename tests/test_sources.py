"""docs/dev/sources.md has a row for every section of the five documents, and each row names what
shows it."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from tests.test_docs import KINDS

from gruppo.cli import commands
from gruppo.cli.options import parse_config, parse_own
from gruppo.config import peer_options
from gruppo.config.schema import Config, ExplainOptions
from gruppo.modalities import find_modality, modalities
from gruppo.recipes import RECIPES
from gruppo.trainer import checks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/dev/sources.md"

HEADINGS = {
    "000": {
        "PPO 到 GRPO 的修改文档": "",
        "1. 配置文件修改": "1",
        "2. 统计跟踪修改": "2",
        "3. 训练脚本修改": "3",
        "3.1 添加 GRPO 损失函数": "3.1",
        "3.2 修改采样逻辑": "3.2",
        "3.3 修改训练循环": "3.3",
        "4. 主要变化": "4",
        "5. 测试步骤": "5",
        "6. 注意事项": "6",
        "7. 后续优化建议": "7",
    },
    "001": {
        "GRPO (Group Relative Policy Optimization) 训练脚本": "",
        "概述": "overview",
        "核心算法原理": "principle",
        "GRPO vs PPO 主要区别": "principle: GRPO and PPO",
        "GRPO算法流程": "principle: steps",
        "数学公式": "principle: formula",
        "代码结构": "code",
        "主要类和函数": "code: classes",
        "关键修改点": "code",
        "1. 移除价值函数": "code 1",
        "2. 组内奖励归一化": "code 2",
        "3. 组响应生成": "code 3",
        "4. 可编程奖励函数": "code 4",
        "配置参数": "settings",
        "使用方法": "use",
        "优势和适用场景": "scope",
        "优势": "scope: advantages",
        "适用场景": "scope: fits",
        "不适用场景": "scope: does not fit",
        "实验结果": "results",
        "进一步优化": "further",
    },
    "002": {
        "Chat Dialogue Log": "",
        "对话时间": "header",
        "对话内容": "",
        "问题 1": "1",
        "1. 修改配置 (Configuration)": "1.1",
        "2. 引入参考模型 (Reference Model)": "1.2",
        "3. 增强数据采集 (Rollout Phase)": "1.3",
        "4. 实现 GRPO 损失函数 (Training Loop)": "1.4",
        "总结：GRPO 与现有代码的核心区别": "1 summary",
        "实施建议": "1 advice",
        "问题 2": "2",
        "具体缺了哪些 GRPO 关键件（对照当前实现）": "2 missing",
        "结论": "2 conclusion",
        "问题 3": "3",
    },
    "003": {
        "课时9：GRPO与PPO强化学习": "",
        "学习目标": "goals",
        "1. GRPO (Group Relative Policy Optimization)": "1",
        "1.1 GRPO核心思想": "1.1",
        "1.2 GRPO算法流程": "1.2",
        "1.3 GRPO vs PPO对比": "1.3",
        "2. PPO (Proximal Policy Optimization)": "2",
        "2.1 策略梯度基础": "2.1",
        "2.2 Actor-Critic架构": "2.2",
        "2.3 广义优势估计 (GAE)": "2.3",
        "2.4 PPO裁剪目标": "2.4",
        "2.5 PPO完整损失函数": "2.5",
        "3. 实现指引": "3",
        "3.1 loss/grpo_loss.py": "3.1",
        "3.2 loss/ppo_loss.py": "3.2",
        "3.3 training/grpo_trainer.py": "3.3",
        "3.4 training/ppo_trainer.py": "3.4",
        "4. 关键公式总结": "4",
        "GRPO损失": "4 GRPO",
        "GAE": "4 GAE",
        "PPO CLIP": "4 PPO",
        "5. 常见陷阱与注意事项": "5",
        "6. 课后练习": "6",
    },
    "004": {
        "GRPO 训练改进指南": "",
        "改进概述": "overview",
        "原始问题": "problems",
        "核心改进": "",
        "1. PPO式政策损失 (train.py)": "1",
        "2. 全局奖励统计归一化": "2",
        "3. 分阶段训练策略": "3",
        "4. 梯度裁剪与正则化": "4",
        "5. 自适应学习率": "5",
        "新增监控指标": "metrics",
        "使用方法": "use",
        "推荐方式：分阶段训练 (最稳定)": "use: progressive",
        "快速方式：改进单阶段训练": "use: quick",
        "手动调参": "use: by hand",
        "关键参数说明": "parameters",
        "调试指南": "hints",
        "如果 loss_pg 仍然不降": "hints: loss_pg",
        "如果 loss_sup 不降": "hints: loss_sup",
        "如果 advantages 分布异常": "hints: advantages",
        "预期改进效果": "expected",
        "注意事项": "cautions",
    },
}
"""The headings of the documents, which are not in this repository, and the section that the page
calls each by; titles and headings with nothing but sections below them have none, or the beginning
of their sections' names."""
SECTIONS = {number: set(headings.values()) - {""} for number, headings in HEADINGS.items()}


@cache
def rows() -> list[tuple[str, int, list[str]]]:
    """Document, line and cells of each row."""
    found, number = [], ""
    for n, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1):
        if heading := re.match(r"## (?:(\d{3}): )?", line):
            number = heading[1] or ""
        if number and line.startswith("| ") and not line.startswith("| section"):
            found.append((number, n, [cell.strip() for cell in line.strip("|").split(" | ")]))
    return found


@cache
def functions_of(path: str) -> set[str]:
    """Test functions that pytest would collect from a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {
        node.name
        for node in tree
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def shows(span: str) -> bool:
    """Whether a span of code is a test that exists or a command that can be given; other words are
    neither."""
    if found := re.fullmatch(r"(tests/[\w/]+\.py)::(test_\w+)", span):
        return (ROOT / found[1]).is_file() and found[2] in functions_of(found[1])
    words = shlex.split(span)
    if words[0] == "make":
        return (
            re.search(
                rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            )
            is not None
        )
    if words[:2] == ["python", "-m"]:
        return importlib.util.find_spec(words[2]) is not None
    return words[0] == "gruppo" and runs(words[1], words[2:])


def runs(command: str, args: list[str]) -> bool:
    """Whether the command takes these words; a mistake in them is an error."""
    if command not in ("train", "explain"):
        return command in commands.COMMANDS
    own, args = parse_own(args, ExplainOptions(), "explain")
    if own.names:
        peer_options.explain_names(Config(), own.names)
    config = parse_config(command, args)
    if config.model and (config.reward or args[0] != "plain"):
        kind = KINDS.get(args[0].split("-")[0])
        checks.check(config, modalities()[kind] if kind else find_modality(config.model))
    return True


def test_each_row_has_four_cells_and_says_what_is_asked_and_what_shows_it() -> None:
    wrong = [
        (number, n) for number, n, cells in rows() if len(cells) != 4 or not (cells[1] and cells[3])
    ]
    assert not wrong
    assert len(rows()) > 230


@pytest.mark.parametrize("number", HEADINGS)
def test_each_row_names_a_test_or_a_command_that_there_is(number: str) -> None:
    missing = {}
    for document, n, cells in rows():
        spans = re.findall(r"`([^`]+)`", cells[-1])
        if document == number and not (spans and all(map(shows, spans))):
            missing[n] = [span for span in spans if not shows(span)]
    assert missing == {}


@pytest.mark.parametrize("number", HEADINGS)
def test_each_section_has_a_row_and_each_row_a_section(number: str) -> None:
    named = {cells[0] for document, _, cells in rows() if document == number}
    assert {s for s in SECTIONS[number] if not any(name.startswith(s) for name in named)} == set()
    assert {
        name
        for name in named
        if not any(name == s or name.startswith(f"{s}.") for s in SECTIONS[number])
    } == set()


def test_a_test_that_is_gone_and_a_command_that_is_wrong_are_seen() -> None:
    assert shows("tests/test_sources.py::test_each_section_has_a_row_and_each_row_a_section")
    assert not shows("tests/test_sources.py::test_each_section_has_a_row")
    assert not shows(
        "tests/test_no_such_file.py::test_each_section_has_a_row_and_each_row_a_section"
    )
    assert not shows("make nothing") and not shows("loss_pg")
    assert shows("gruppo explain arithmetic --names trl:beta") and not shows(
        "gruppo begin arithmetic"
    )


def test_every_recipe_of_the_page_is_built_in() -> None:
    used = set(
        re.findall(r"`gruppo (?:train|explain) (\w[\w-]*)", PAGE.read_text(encoding="utf-8"))
    )
    assert used - {"examples"} <= {*RECIPES} and len(used) > 3


def test_settings_of_the_documents_that_the_page_names_are_known_by_name() -> None:
    """Each parameter of sections of settings: the names that ``--names sources`` answers for."""
    requested = {
        "000": re.findall(r"`(train\.\w+)`", " ".join(c[1] for d, _, c in rows() if d == "000")),
        "004": re.findall(r"`(grpo_\w+)", " ".join(c[1] for d, _, c in rows() if d == "004")),
        "001": [
            "GROUP_SIZE",
            "TEMPERATURE",
            "BETA_KL",
            "LEARNING_RATE",
            "CLIP_RATIO",
            "ENTROPY_COEF",
            "MAX_GRAD_NORM",
        ],
        "002": ["group_size", "clip_epsilon", "beta", "update_epochs", "device_batch_size"],
        "003": [
            "clip_epsilon",
            "kl_beta",
            "value_loss_coef",
            "entropy_coef",
            "gamma",
            "lam",
            "num_epochs",
        ],
    }
    known = {key for option in peer_options.peer_options("sources") for key in option.keys}
    for expected in requested.values():
        assert [name for name in expected if peer_options.normalized(name) not in known] == []
        assert expected
