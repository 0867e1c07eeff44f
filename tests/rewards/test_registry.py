"""From what a user writes to a reward, and objects named in files."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from gruppo.loading import load_object
from gruppo.rewards import resolve_reward, text
from gruppo.types import DataError, GruppoError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "import math\nfrom fractions import Fraction\nimport helpers_beside\n"
        "SCALE = 2\n\ndef length(completions, **kwargs):\n    return [float(len(c)) * SCALE for c "
        "in completions]\n"
        "\ndef _hidden():\n    pass\n\nclass Judge:\n    pass\n"
    )
    (tmp_path / "helpers_beside.py").write_text("X = 1\n")
    return path


def test_built_ins_by_name():
    assert (
        resolve_reward("exact_match") is text.exact_match
        and resolve_reward(" numeric_match ") is text.numeric_match
    )


@pytest.mark.parametrize(
    ("spec", "completion", "score"),
    [
        ("length_target:4", "a b c", 0.75),
        ("length_target:4, characters", "abc", 0.75),
        (r"regex_format:^\d+:\d+$", "12:30", 1.0),
        ("keywords", "因为", 0.2),
        ("keywords:because, so", "So it is because of you", 0.4),
        ("keywords:因为\uff0c所以\u3001但是", "因为,所以", 0.4),
        ("repetition_penalty", "a b c a b c", -0.25),
        ("repetition_penalty:2,-2", "a b a b", -2 / 3),
    ],
)
def test_built_ins_with_arguments(spec, completion, score):
    reward = resolve_reward(spec)
    assert reward(completions=[completion], completion_ids=[[0]]) == pytest.approx([score])


@pytest.mark.parametrize(
    "spec",
    [
        "length_target",
        "length_target:fifty",
        "length_target:5,words,more",
        "regex_format",
        "exact_match:7",
    ],
)
def test_arguments_that_do_not_fit_name_the_right_way_to_write_them(spec):
    with pytest.raises(GruppoError, match=rf"is not understood .*; write {spec.split(':')[0]}"):
        resolve_reward(spec)


@pytest.mark.parametrize("spec", ["exactmatch", "exact_mach", "numeric-match", "lenght_target:50"])
def test_an_unknown_built_in_names_the_nearest(spec):
    with pytest.raises(
        GruppoError,
        match=r"there is no reward .* Did you mean (exact_match|numeric_match|length_target)\?",
    ):
        resolve_reward(spec)


def test_a_file_without_a_function_is_refused_and_not_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\ndef length(completions): ...\ndef _own(): ...\nraise ValueError('was run')\n"
    )
    with pytest.raises(
        GruppoError, match=r"there is no reward '.*mine\.py'.*write path/to/file.py:name"
    ):
        resolve_reward(str(file))


@pytest.mark.parametrize("spec", [None, 3, ["exact_match"]])
def test_what_is_neither_text_nor_callable_is_refused(spec):
    with pytest.raises(DataError, match="not callable"):
        resolve_reward(spec)


def test_a_function_in_a_file_and_in_a_module(file):
    assert resolve_reward(f"{file}:length")(completions=["abc"]) == [6.0]
    assert resolve_reward("math:sqrt") is math.sqrt


def test_a_missing_name_lists_what_the_file_defines_and_the_nearest(file):
    with pytest.raises(
        GruppoError,
        match=r"has no 'lenght'; it has: length, Judge\. Did you mean .*:length\?",
    ):
        resolve_reward(f"{file}:lenght")


def test_a_missing_file_names_the_nearest_and_one_of_a_missing_folder_is_named(file):
    with pytest.raises(
        GruppoError, match=r"there is no file .*my_reward\.py; .*Did you mean my_rewards\.py\?"
    ):
        load_object(f"{file.parent}/my_reward.py:length")
    with pytest.raises(GruppoError, match=r"there is no file .*nowhere/x\.py"):
        load_object(f"{file.parent}/nowhere/x.py:length")
    with pytest.raises(GruppoError, match=r"names no object; write path/to/file.py:name"):
        load_object(f"{file.parent}/:length")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = x / 0\n", r"line 2, raised ZeroDivisionError on import: division by zero"),
        ("x = 1\ndef f(:\n", r"line 2, raised SyntaxError on import: invalid syntax"),
        (
            "\nimport no_such_module_here\n",
            r"line 2, raised ModuleNotFoundError on import: No module named",
        ),
        ("import sys\n\nsys.exit(4)\n", r"line 3, raised SystemExit on import: 4"),
        (
            "import json\njson.loads('{')\n",
            r"line 2, raised JSONDecodeError on import: Expecting property name",
        ),
    ],
)
def test_a_file_that_raises_on_import_is_one_line_with_the_line_number(tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    before = set(sys.modules)
    with pytest.raises(GruppoError, match=message) as caught:
        load_object(f"{path}:f")
    assert "\n" not in str(caught.value) and not [
        name for name in set(sys.modules) - before if "broken" in name
    ]


def test_an_unchanged_file_is_imported_once_and_a_changed_one_again(file):
    first = load_object(f"{file}:Judge")
    assert load_object(f"{file}:Judge") is first
    file.write_text(file.read_text() + "\nMORE = 1\n")
    assert load_object(f"{file}:Judge") is not first and load_object(f"{file}:MORE") == 1


def test_a_module_that_does_not_import_is_one_line():
    with pytest.raises(GruppoError, match="'no_such_package' cannot be imported"):
        load_object("no_such_package:name")


@pytest.mark.parametrize(
    ("spec", "score"),
    [
        ("brightness", 0.2),
        ("brightness:target=0.6", 0.6),
        ("jpeg_compressibility:quality=80,without_header=true", 0.0),
    ],
)
def test_rewards_of_images_are_written_with_their_options(spec, score):
    grey = torch.full((1, 8, 8), 0.0 if spec.startswith("jpeg") else 0.2)
    assert resolve_reward(spec)(images=[grey]) == pytest.approx([score])


def test_options_of_images_that_are_not_understood_are_refused():
    with pytest.raises(
        GruppoError, match=r"Did you mean quality\?.*write jpeg_compressibility:quality"
    ):
        resolve_reward("jpeg_compressibility:qualty=80")
    with pytest.raises(GruppoError, match=r"without a name=.*write code_tests:"):
        resolve_reward("code_tests:0.5")
