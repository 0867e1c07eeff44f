"""The recipes whose models learn to call tools: their data, their tools, and one short run of
each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.fakes import causal_lm
from tests.modalities.text.families import family_tokenizer
from tests.test_examples import EXAMPLES, example
from tests.trainer.runs import metrics

from gruppo import api
from gruppo.modalities.text.chat_template import read_template
from gruppo.recipes.open import recipe_config

calculator = search = example("tool_recipes")


def test_the_calculator_calculates_and_does_nothing_else():
    assert calculator.calculator("473 * 86") == "40678"
    assert calculator.calculator(" (2 + 3) * -4 - 1 ") == "-21"
    for refused in (
        "2 ** 9",
        "1 / 2",
        "len('ab')",
        "__import__('os')",
        "2.5 * 2",
        "True * 3",
        "",
        "2 *",
        "(" * 99,
    ):
        with pytest.raises(ValueError, match="is not an expression of integers"):
            calculator.calculator(refused)


def test_every_demonstration_of_a_tool_is_what_the_tool_returns_and_holds_the_answer():
    rows = calculator.products()
    assert len({row["prompt"][0]["content"] for row in rows}) > 0.99 * len(rows)
    for row in (*rows, *search.questions()):
        call, result, last = row["demonstration"]
        function = call["tool_calls"][0]["function"]
        tool = calculator.calculator if function["name"] == "calculator" else search.search
        assert tool(**function["arguments"]) == result["content"]
        assert (
            last["content"] == row["answer"] and row["answer"] in result["content"].split("\n")[0]
        )
        assert row["answer"] not in row["prompt"][0]["content"]


def test_the_reward_is_for_the_last_message_alone():
    call, result, last = calculator.products()[0]["demonstration"]
    answer = last["content"]
    conversations = [
        [call, result, last],
        [call, result, call | {"content": answer}],
        [last, result, call],
        [last],
    ]
    conversations += [[call, result, {"role": "assistant", "content": f"It is {answer}"}]]
    assert calculator.right(conversations, [answer] * 5) == [1, 0, 0, 1, 0]


def test_bm25_is_the_formula_computed_by_hand():
    index = search.BM25(["the mill", "the old mill by the river", "the tower"], k1=1.2, b=0.75)
    mean = (2 + 6 + 2) / 3
    rare, common = math.log(1 + 2.5 / 1.5), math.log(1 + 0.5 / 3.5)
    norm = [1.2 * (0.25 + 0.75 * length / mean) for length in (2, 6, 2)]
    expected = [
        common * 2.2 / (1 + norm[0]),
        rare * 2.2 / (1 + norm[1]) + common * 2 * 2.2 / (2 + norm[1]),
        common * 2.2 / (1 + norm[2]),
    ]
    assert index.scores("The river, unknown") == pytest.approx(expected, rel=1e-12)
    assert (
        index.best("tower", 2) == [2]
        and index.best("mill", 2) == [0, 1]
        and index.best("unknown", 2) == []
    )


def test_a_search_finds_the_building_by_its_whole_name_and_says_so_where_it_finds_nothing():
    for building in search.buildings():
        assert search.search(building["name"]).startswith(building["name"] + " in ")
    assert search.search("zeppelin") == "nothing found"


@pytest.mark.parametrize("name", ["tool_calculator", "tool_search"])
def test_a_tool_recipe_shows_calls_then_samples_them_with_any_chat_model(name, tmp_path):
    sizes = {
        "rollout__prompts": 2,
        "rollout__group_size": 2,
        "rollout__max_new_tokens": 4,
        "steps": 2,
        "supervised__batch": 2,
    }
    tokenizer = family_tokenizer(read_template("examples/chatml_tools.jinja"), ["<|im_end|>"])
    tokenizer.save_pretrained(tmp_path / "tiny")
    sizes_of_model = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    causal_lm("Llama", max_position_embeddings=1024, **sizes_of_model).save_pretrained(
        tmp_path / "tiny"
    )
    model = {
        "model": str(tmp_path / "tiny"),
        "compute": "float32",
        "runs_dir": str(tmp_path / "runs"),
    }
    chosen = api.change(
        recipe_config(f"{EXAMPLES}/tool_recipes.py:{name}"),
        sizes | model | {"steps": 2, "evaluation__prompts": 2},
    )
    first, *rest = chosen.stages
    chosen = replace(chosen, stages=(replace(first, steps=1, warmup_steps=0), *rest))
    rows = metrics(api.start(chosen).folder)
    found = {name for row in rows for name in row}
    assert {"sup/tokens_count", "turns/mean", "tools/calls_mean", "reward/right/mean"} <= found
