"""The reward ``code_tests``: programs of completions against the tests of their rows."""

from __future__ import annotations

import functools
import json
import math
import re
import time

import pytest
from tests.rewards.fakes import rollouts_of
from tests.rewards.kernels import jailed

from gruppo import check_reward
from gruppo.rewards import RewardSet, code, resolve_reward
from gruppo.rewards.code import code_tests, program_in
from gruppo.rewards.code_cases import BadTest, ProgramCase, ProgramTests, read_tests
from gruppo.rewards.sandbox.jail import CaseResult, Jail, SandboxError
from gruppo.timeouts import CallError
from gruppo.types import DataError, GruppoError, Prompt

DOUBLE = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(1.5) == 3"]
RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"
HALF = "```python\ndef double(x):\n    return x + 2\n```"


def scores(texts, tests, **options):
    """Of completions that all have the same tests."""
    columns = {
        key: [options.pop(key)] * len(texts)
        for key in ("entry_point", "test_setup_code")
        if key in options
    }
    return code_tests(**options)(list(texts), tests=[tests] * len(texts), **columns)


def refusal(tests, **columns):
    with pytest.raises(BadTest) as refused:
        read_tests(tests, **columns)
    return str(refused.value)


# --- scores


@jailed
def test_the_score_is_the_share_of_tests_that_pass_or_all_or_nothing():
    texts = [RIGHT, HALF, "```python\ndef double(x): return x * 2.0\n```", "I do not know.", ""]
    assert scores(texts, DOUBLE) == [1.0, 1 / 3, 2 / 3, 0.0, 0.0]
    assert scores(texts, DOUBLE, all_or_nothing=True) == [1.0, 0.0, 0.0, 0.0, 0.0]


@jailed
def test_scores_stay_with_their_rows_however_many_run_at_once():
    texts = [f"```python\ndef f(x): return {n} if x < {n % 4} else -1\n```" for n in range(24)]
    tests = [[f"assert f({case}) == {n}" for case in range(4)] for n in range(24)]
    for workers in (1, 5):
        assert code_tests(workers=workers)(texts, tests=tests) == [n % 4 / 4 for n in range(24)]


@jailed
def test_each_form_of_tests_is_read():
    script = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    lines = [
        {"input": "1 2\n", "output": "3\n"},
        {"input": "4 5", "output": "9"},
        {"input": "0 0", "output": "1"},
    ]
    assert scores([script], lines) == scores([script], json.dumps(lines)) == [2 / 3]
    apps = {"inputs": ["1 2\n", ["4 5"]], "outputs": ["3\n", ["9"]]}
    assert scores([script], apps) == scores([script], json.dumps(apps)) == [1.0]

    method = "```python\nclass Solution:\n    def pair(self, x, y=0):\n        return (x, [y])\n```"
    calls = [
        {"args": [1, 2], "output": [1, [2]]},
        {"args": [1], "output": [1, [1]]},
    ]
    assert scores([method], calls, entry_point="pair") == [0.5]
    assert scores([method], {"inputs": [[1, 2]], "outputs": [[1, [2]]], "fn_name": "pair"}) == [1.0]
    assert scores([RIGHT], {"inputs": [[1], [2]], "outputs": [[2], 4], "fn_name": "double"}) == [
        1.0
    ]
    functional = [{"input": '[1, "a"]\n2', "output": '[[1, "a"], 2]', "testtype": "functional"}]
    echo = "```python\ndef both(x, y): return x, y\n```"
    assert scores([echo], functional, entry_point="both") == [1.0]
    assert scores([RIGHT], "assert double(2) == 4\nassert double(3) == 7") == [0.5]
    text = "```python\ndef f(x): return x\n```"
    values = [None, True, 10**5000, 1.5, math.inf, "\u4f60'\"\n", [1, [2]], {"a": [1]}]
    assert scores(
        [text], [{"args": [value], "output": value} for value in values], entry_point="f"
    ) == [1.0]


@jailed
def test_a_row_without_tests_is_not_scored_and_one_whose_tests_cannot_be_judged_says_why():
    metas = [
        {"tests": tests} for tests in (DOUBLE, None, [], "", ["assert double(2) == triple(1)"])
    ]
    rollouts = rollouts_of([RIGHT] * 5, group_ids=range(5), targets=[None] * 5, metas=metas)
    found = RewardSet(code_tests()).score(rollouts)
    assert found.rewards[0] == 1.0 and found.rewards[1:].isnan().all()
    (failure,) = found.failures
    assert failure.row == 4 and "both sides are the program's own" in failure.message
    assert failure.message.startswith(
        "its tests cannot be used: test 1: assert double(2) == triple(1): "
    )


@jailed
def test_an_expected_value_that_is_no_plain_data_costs_its_own_row():
    deep = "[" * 150 + "]" * 150
    tests = [["assert f(1) == ..."], [f"assert f(1) == {deep}"], DOUBLE]
    first, second, third = code_tests()([RIGHT] * 3, tests=tests)
    assert "which is not plain data" in first.message and "nested deeper" in second.message
    assert third == 1.0


@jailed
def test_a_jail_that_fails_leaves_its_rows_unscored_and_the_next_row_has_a_new_one(monkeypatch):
    plain = Jail.calls

    def failing(jail, program, cases, **options):
        if "2 * x" in program:
            raise SandboxError("the jail ended")
        return plain(jail, program, cases, **options)

    monkeypatch.setattr(Jail, "calls", failing)
    first, second, third = code_tests(workers=1)([RIGHT, HALF, RIGHT], tests=[DOUBLE] * 3)
    assert second == 1 / 3 and all(isinstance(each, CallError) for each in (first, third))
    assert first.message == "the sandbox failed: the jail ended"


@jailed
def test_what_went_wrong_is_logged_with_the_row_and_counted():
    loop = "```python\ndef double(x):\n    while True: pass\n```"
    broken = "```python\ndef double(x) return\n```"
    texts = [RIGHT, HALF, loop, broken, " "]
    rollouts = rollouts_of(texts, targets=[None], metas=[{"tests": DOUBLE}])
    found = RewardSet(code_tests(case_s=0.2, program_s=0.2)).score(rollouts)
    errors, passed = found.extras["code_error"], found.extras["code_passed"]
    assert passed == ("3/3", "1/3", "0/3", "0/3", "0/3")
    assert errors[:3] == (
        "",
        'case 2: TypeError: can only concatenate str (not "int") to str',
        "case 1: over 0.2 s for the case or 0.2 s in all",
    )
    assert errors[3].startswith("case 1: SyntaxError: ")
    assert errors[4] == "there is no program"
    assert found.metrics == pytest.approx(
        {
            "reward_metric/code_passed_frac": 0.2,
            "reward_metric/code_error_frac": 0.6,
            "reward_metric/code_timeout_frac": 0.2,
        }
    )


@jailed
def test_the_contract_of_rewards_holds():
    prompts = [Prompt(f"p{n}", "ask", None, {"tests": DOUBLE}, draw=n) for n in range(2)]
    check_reward("code_tests", prompts)


@jailed
def test_an_expected_exception_is_raised_by_the_call_itself_and_by_nothing_else():
    tests = [
        "with pytest.raises(ValueError):\n    f(-1)",
        "import pytest\nwith pytest.raises(Exception): f(-2)",
    ]
    programs = {
        "def f(x): raise ValueError": 1.0,
        "class Own(ValueError): pass\ndef f(x): raise Own('x')": 1.0,
        "def f(x): raise KeyError": 0.5,
        "def f(x): return x": 0.0,
        "def f(x): return object()": 0.0,
        "raise ValueError": 0.0,
        "def g(x): raise ValueError": 0.0,
        "import os\ndef f(x): os.abort()": 0.0,
        "def f(x):\n    while True: pass": 0.0,
    }
    assert scores(programs, tests, case_s=0.2) == list(programs.values())


# --- cheats

ANSWER = "okapi-4711"
CHEAT_TEXTS = r"""
## leave with status 0
import sys
sys.exit(0)
## leave at once
import os
os._exit(0)
## leave when called
import os
def f(x): os._exit(0)
## raise SystemExit when called
def f(x): raise SystemExit(0)
## print that it passed
print('PASS')
print('1 passed, 0 failed')
def f(x): print('okay'); return None
## equal everything
class Yes:
    def __eq__(self, other): return True
def f(x): return Yes()
## equal everything as text
class Yes(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(x): return Yes()
## equal everything as a list
class Yes(list):
    def __eq__(self, other): return True
def f(x): return Yes()
## claim another representation
class Yes(str):
    def __repr__(self): return 'okapi-4711'
    __str__ = __repr__
def f(x): return Yes()
## replace json
import json
json.dumps = lambda *a, **k: '"okay"'
def f(x): return None
## replace comparisons
import builtins, operator
builtins.all = any = lambda *a: True
operator.eq = lambda *a: True
def f(x): return 1
## replace the encoder
import sys
for name, module in list(sys.modules.items()):
    if 'sandbox' in name:
        for key in list(vars(module)):
            if key == 'encode': setattr(module, key, lambda v: 'true')
def f(x): return 1
## write to the channel
import os
os.write(3, b'0 v true\n')
def f(x): return 1
## use the nonce
import sys
frame = sys._getframe()
while frame and 'report' not in frame.f_locals: frame = frame.f_back
report = frame.f_locals['report']
report(-1, 'v', 'null')
report(0, 'v', 'true')
report(0, 'v', '[true]')
def f(x): return 1
## look for the answer
import gc, sys
found = []
def f(x):
    frame, texts = sys._getframe(), []
    while frame: texts += map(repr, frame.f_locals.values()); frame = frame.f_back
    texts += [o for o in gc.get_objects() if isinstance(o, str)]
    kinds = dict, list, tuple
    texts += [repr(o) for o in gc.get_objects() if isinstance(o, kinds) and len(o) < 50]
    word = 'oka' + 'pi-'
    at = [t for t in texts if word in t and 'oka' + chr(39) not in t]
    return at[0][at[0].index(word):][:10] if at else 'nothing found'
## look in files
import glob
def f(x):
    for path in ['/proc/self/mem', '/proc/self/environ', *glob.glob('/proc/*/environ')]:
        try: return open(path, 'rb').read()
        except OSError: pass
    return 'nothing found'
## redefine what the test uses
def set(*_): return ANY
class Any:
    def __eq__(self, o): return True
ANY = Any()
def f(x): return ANY
## return what is asked
def f(x): return x
## return a generator
def f(x):
    yield 'okapi'
## catch the harness
import sys
sys.settrace(lambda *a: None)
sys.excepthook = print
sys.setrecursionlimit(50)
def f(x): return f(x)
"""
CHEATS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)+)", CHEAT_TEXTS, re.MULTILINE))


@jailed
@pytest.mark.silent_bug(42)
def test_no_program_passes_but_by_giving_the_answer():
    tests = [
        f"assert f(1) == {ANSWER!r}",
        f"assert f('a') == {ANSWER!r}",
        f"assert set(f(2)) == set({ANSWER!r})",
    ]
    honest = f"def f(x): return {ANSWER!r}"
    cheats = list(CHEATS.values())
    assert len(cheats) >= 20
    earned = scores([f"```python\n{program}\n```" for program in [honest, *cheats]], tests)
    assert earned == [1.0] + [0.0] * len(cheats), dict(zip(CHEATS, earned[1:], strict=True))


@jailed
@pytest.mark.silent_bug(42)
def test_no_script_passes_but_by_printing_the_answer():
    scripts = [
        "exit(0)",
        "import os; os._exit(0)",
        "print(input())",
        "import sys; sys.stdout = None",
        "print('PASS')",
    ]
    scripts += [
        "import os; os.write(3, b'okapi')",
        f"print({ANSWER!r}); 1/0",
        f"print({ANSWER!r}); exit(1)",
    ]
    tests = [{"input": "okapi", "output": f"{ANSWER}\n"}]
    texts = [f"```python\n{script}\n```" for script in [f"print({ANSWER!r}); exit(0)", *scripts]]
    assert scores(texts, tests) == [1.0] + [0.0] * len(scripts)


@jailed
@pytest.mark.silent_bug(42)
def test_leaving_with_the_status_of_a_failed_lock_is_a_score_of_0_and_no_failure():
    for status in (0, 1, 117, 255):
        assert scores([f"```python\nimport os\nos._exit({status})\n```"], DOUBLE) == [0.0]


@jailed
def test_only_what_is_asked_enters_the_jail(monkeypatch):
    sent = []
    plain = Jail._run
    monkeypatch.setattr(
        Jail,
        "_run",
        lambda self, **request: sent.append(json.dumps(request)) or plain(self, **request),
    )
    forms = [
        [f"assert f(1) == {ANSWER!r}", f"assert [{ANSWER!r}] == f(2), {ANSWER!r}"],
        [{"input": "1", "output": ANSWER}],
        {"inputs": ["1"], "outputs": [ANSWER]},
    ]
    for form in forms:
        scores(["```python\ndef f(x): pass\n```"], form)
    scores(["```python\ndef f(x): pass\n```"], [{"args": [1], "output": ANSWER}], entry_point="f")
    assert len(sent) >= 4 and not any("okapi" in data or "4711" in data for data in sent)


@jailed
@pytest.mark.silent_bug(42)
def test_nothing_of_what_is_expected_can_be_told_from_the_request(monkeypatch):
    code_tests(workers=1)(
        ["x"], tests=[["assert True"]]
    )  # the first use of a jail sends programs of its own
    sent = []
    plain = Jail._run
    monkeypatch.setattr(
        Jail,
        "_run",
        lambda self, **request: sent.append(json.dumps(request)) or plain(self, **request),
    )
    text = "```python\ndef f(x): pass\n```"
    for form, columns in [
        (lambda expected: [f"assert f(1) == {expected!r}"], {}),
        (lambda expected: [{"input": "1", "output": expected}, {"input": "2", "output": "x"}], {}),
        (lambda expected: [{"args": [1], "output": expected}], {"entry_point": "f"}),
        (lambda expected: {"inputs": ["1"], "outputs": [expected]}, {}),
    ]:
        sent.clear()
        answers = ("YES", "NO", "True", "False", "", "a long answer" * 30)
        columns = {name: [value] * 6 for name, value in columns.items()}
        code_tests(workers=1)([text] * 6, tests=[form(answer) for answer in answers], **columns)
        assert len(sent) == 6 and len(set(sent)) == 1


@jailed
def test_a_long_answer_that_a_test_writes_shortly_has_room():
    """By the length of the text, 64 KiB: no program could have passed."""
    tests = ["assert f(1) == [0] * 50_000", "assert f(1) == [0.5] * 50_000"]
    texts = [f"```python\ndef f(x): return [{value}] * 50_000\n```" for value in ("0", "0.5")]
    assert code_tests()(texts, tests=[tests[:1], tests[1:]]) == [1.0, 1.0]


FORGED = """
import sys
frame = sys._getframe()
while 'report' not in frame.f_locals: frame = frame.f_back
report = frame.f_locals['report']
report(-1, 'v', 'null')
report(0, 'v', %r)
"""


@jailed
@pytest.mark.silent_bug(42)
def test_no_program_can_leave_its_row_unscored():
    programs = [
        "import os\ndef f(x): os.kill(os.getpid(), 40)",
        "def f(x): return 1j",
        *(
            FORGED % text
            for text in ('["l",[]]', '["l",[["i","2"],["i","2"]]]', '["i","2"]', "[" * 50_000)
        ),
    ]
    huge = [{"args": [1], "output": 10**400}]
    for tests in (huge, ["assert f(1) == 2"], [{"args": [1], "output": 2}]):
        assert scores(programs, tests, entry_point="f") == [0.0] * len(programs)


def test_an_answer_whose_comparison_raises_is_wrong():
    tests = ProgramTests((ProgramCase("f(1)", expected=1),))
    score = code.score_results([CaseResult("value", [])], tests)
    assert (score.passed, score.failures) == (0, ("wrong",))
    score = code.score_results([CaseResult("value", [10**5000])], tests)
    assert (score.failures, score.message) == (("wrong",), "case 1: gave a very large number")


@jailed
def test_a_column_of_the_wrong_type_costs_its_own_row_and_is_named():
    right, tests = [RIGHT] * 2, [DOUBLE] * 2
    for name, bad, why in [
        ("test_imports", 5, "test_imports is 5; it needs text"),
        ("test_imports", [["a"]], "test_imports is"),
        ("test_setup_code", {"a": 1}, "test_setup_code is {'a': 1}; it needs text"),
        ("entry_point", ["f"], "the entry point is .'f'.; it needs the name"),
    ]:
        first, second = code_tests()(right, tests=tests, **{name: [bad, None]})
        assert isinstance(first, CallError) and re.search(why, first.message) and second == 1.0


@jailed
def test_a_setup_that_is_broken_by_itself_is_no_fault_of_a_program():
    reward, bad = (
        code_tests(case_s=0.2, program_s=0.4),
        "```python\ndef double(x): return None\n```",
    )
    for setup, why in [
        ("import numpy as np", "fails: ModuleNotFoundError: No module named 'numpy'"),
        ("def f(:", "fails: SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("while True: pass", "over 0.2 s for the case"),
    ]:
        for found in reward([RIGHT, bad], tests=[DOUBLE] * 2, test_setup_code=[setup] * 2):
            assert isinstance(found, CallError) and why in found.message
    needs = "root = double(Node(1).value)"
    assert reward([RIGHT], tests=[DOUBLE], test_setup_code=[needs]) == [
        0.0
    ]  # Node is the program's to define
    breaks = "```python\nimport builtins\ndel builtins.__import__\n```"
    assert reward([breaks], tests=[DOUBLE], test_setup_code=["import math"]) == [0.0]


@jailed
def test_messages_hold_no_control_characters():
    errors = []
    text = "```python\ndef double(x): raise ValueError('\\x1b[2J\\x07a')\n```"
    code_tests()([text], tests=[DOUBLE], log_extra=lambda _, values: errors.append(values[0]))
    assert errors[0] == r"case 1: ValueError: \x1b[2J\x07a"


# --- where the program is


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```\nand ```c```", "b"),
        ("```python\na\n```\n```\noutput\n```", "a"),
        ("```\na\n```\ntext\n```cpp\nb\n```", "b"),
        ("```Python3 title='x'\n  a\n  b\n```", "  a\n  b"),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb"),
        ("````python\na\n```\nb\n````", "a\n```\nb"),
        ("First\n```python\ndef f():\n    return", "def f():\n    return"),
        ("x = 1\ny = 2", "x = 1\ny = 2"),
        ("no code", "no code"),
        ("", ""),
        ("```python\n```", ""),
        (
            "1. So:\n\n   ```python\n   def f():\n       return 1\n   ```\n",
            "def f():\n    return 1",
        ),
        ("> ```python\n> def f():\n>\n>     return 1\n> ```", "def f():\n\n    return 1"),
        ("  ```python\ndef f():\n    return 1\n  ```", "def f():\n  return 1"),
        ("```python\na\n```\n```python-repl\n>>> a\n```", "a"),
        ("\ufeffx = 1", "x = 1"),
        ("```python\n\ufeffx = 1\n```", "x = 1"),
        ("~~~ a`b\n```py\nc\n```", "c"),
    ],
)
def test_the_program_is_the_last_python_block_else_the_last_block_else_all(text, program):
    assert program_in(text) == program


@pytest.mark.parametrize(
    "text", ["~" * 100_000 + "`", ("`" * 99 + "~") * 1000, " " * 100_000, "> " * 50_000]
)
def test_a_program_is_found_in_linear_time(text):
    began = time.process_time()
    program_in(text)
    assert time.process_time() - began < 1


# --- tests that cannot be used


def test_tests_that_are_not_understood_are_refused_with_what_is_needed():
    deep = functools.reduce(lambda inner, _: [inner], range(250), [])
    for cell, entry, why in [
        ([{"args": [1]}], "f", "is not understood (KeyError: 'output'); it needs asserts"),
        ([{"output": 1}], "f", "is not understood (KeyError: 'input')"),
        ([{"args": [1], "output": 2}], None, "no function; it needs a column entry_point"),
        ([{"args": [], "output": 2}], "__import__('os')", "it needs the name of a function"),
        ({"inputs": [1], "outputs": []}, None, "inputs and outputs do not match"),
        ({"inputs": [[1, 2]], "outputs": ["x"]}, None, "without a column entry_point"),
        (5, None, "it is 5; it needs asserts"),
        (["assert f(1) == 1", "f(1)"], None, "test 2: "),
        ([{"args": [object()], "output": 2}], "f", "is not understood (NotPlain: it is a object"),
        ([{"args": [], "output": object()}], "f", "is not understood (NotPlain: it is a object"),
        ([{"args": [deep], "output": 2}], "f", "nested deeper"),
        ([{"args": 1, "output": 2}], "f", "{'args': 1, 'output': 2} is not understood"),
        (
            [{"input": "x", "output": "1", "testtype": "functional"}],
            "f",
            "is not understood (JSONDecodeError",
        ),
    ]:
        assert why in refusal(cell, entry=entry), why


@jailed
def test_data_without_tests_are_refused_before_anything_is_sampled_and_the_option_is_named():
    rewards = RewardSet(resolve_reward("code_tests"))
    for columns in (["tests"], ["test_list", "prompt"], ["input_output"]):
        rewards.check(columns)
    with pytest.raises(
        DataError,
        match=r"reads the column tests or test_list or input_output.*they have: answer.*"
        r"column=NAME",
    ):
        rewards.check(["answer"])
    named = RewardSet(resolve_reward("code_tests:column=cases"))
    named.check(["cases"])
    with pytest.raises(
        DataError, match="reads the column cases, which the data do not have; they have: tests"
    ):
        named.check(["tests"])


def test_without_a_jail_the_reward_is_refused_when_it_is_named(monkeypatch):
    from gruppo.rewards.sandbox import jail

    monkeypatch.setattr(jail, "probe", lambda *_: "it needs Linux, and this is darwin")
    with pytest.raises(
        GruppoError,
        match=r"code that a model wrote is not run here: it needs Linux.*reward file\.py",
    ):
        resolve_reward("code_tests")


@jailed
def test_ranks_of_one_machine_share_its_processors(monkeypatch):
    monkeypatch.setattr(code.os, "sched_getaffinity", lambda _: set(range(40)))
    assert code_tests().workers == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert code_tests().workers == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert code_tests().workers == 1
