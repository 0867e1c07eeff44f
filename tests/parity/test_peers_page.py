"""docs/objectives/peers.md lists every option of TRL's that bears on the objective, with TRL's own
default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tests.parity.trl_side import trl

PAGE = (Path(__file__).parents[2] / "docs/objectives/peers.md").read_text(encoding="utf-8")
ELSEWHERE = {
    *(
        "learning_rate",
        "remove_unused_columns",
        "model_init_kwargs",
        "trust_remote_code",
        "cast_lm_head_to_fp32",
    ),
    *("num_generations_eval", "ds3_gather_for_generation", "shuffle_dataset", "pad_to_multiple_of"),
    *(
        "generation_kwargs",
        "chat_template_kwargs",
        "cache_implementation",
        "max_tool_calling_iterations",
    ),
}
"""How a model is loaded, data are read and rows are generated; and these families:"""
FAMILIES = ("vllm_", "use_vllm", "log_", "num_completions", "use_transformers", "transformers_")


def options(title: str) -> dict[str, str]:
    """Option and default of each row of the page's table under that heading."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section, re.MULTILINE))


def own_fields(name: str) -> dict[str, str]:
    """What the config adds to the trainer's arguments in transformers."""
    config = getattr(trl, name)
    return {
        f.name: str(f.default)
        for f in dataclasses.fields(config)
        if f.name in config.__annotations__
    }


@pytest.mark.parametrize("name", ["GRPOConfig", "RLOOConfig"])
def test_every_option_on_the_page_is_trls_with_its_default(name: str):
    fields, listed = own_fields(name), options(f"TRL's {name}")
    assert listed == {option: fields.get(option) for option in listed}
    assert len(listed) > 5


def test_every_objective_related_option_of_trl_is_on_the_page():
    listed = options("TRL's GRPOConfig") | options("TRL's RLOOConfig")
    left = (
        {f for name in ("GRPOConfig", "RLOOConfig") for f in own_fields(name)}
        - listed.keys()
        - ELSEWHERE
    )
    assert {
        f for f in left if not f.startswith(FAMILIES) or f.startswith("vllm_importance")
    } == set()
