"""Tools: what a call costs and what the policy reads of it, whatever the code of the tool does."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from tests.environments.scripted import ASK, Script, call, counts, multiply, play, says

from gruppo.environments import Environment
from gruppo.timeouts import abandoned_count
from gruppo.types import GruppoError, Prompt, Request


async def add(a: int, b: int) -> int:
    """
    Adds two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    await asyncio.sleep(0)
    return a + b


def results(rollouts, row=0):
    return [
        message["content"] for message in rollouts.completions[row] if message["role"] == "tool"
    ]


def run(tool, *calls, **options):
    """One conversation in which the policy calls a tool; its first argument is the name."""
    calls = calls or (call(tool.__name__),)
    environment = Environment(tools=[tool], **({"timeout_s": 5.0} | options))
    return play(Script(says("", *calls)), environment, [Request(Prompt("a", ASK), 1)])


def test_a_call_is_replied_to_with_its_result_and_an_answer_without_calls_ends_the_conversation():
    script = Script(says("let me", call("multiply", a=6, b=7), call("add", a=1, b=2)), says("42"))
    rollouts = play(script, Environment(tools=[multiply, add]))
    assert rollouts.completions[0] == [
        says("let me", call("multiply", a=6, b=7), call("add", a=1, b=2)),
        {"role": "tool", "name": "multiply", "content": "42"},
        {"role": "tool", "name": "add", "content": "3"},
        says("42"),
    ]
    assert rollouts.per_row["turns"].tolist() == [2, 2] and rollouts.per_row["ended"].all()
    assert counts(rollouts) == counts(rollouts, 1) == {"calls": 2} and rollouts.finish == (
        "stop",
        "stop",
    )


def test_the_schemas_are_those_of_transformers():
    from transformers.utils import get_json_schema

    assert Environment(tools=[multiply, add]).tools == [
        get_json_schema(multiply),
        get_json_schema(add),
    ]


def fails(text: str) -> str:
    """
    Fails.

    Args:
        text: What it says.
    """
    raise ValueError(text)


def leaves() -> str:
    """Leaves."""
    raise SystemExit(3)


class Rude(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def rude() -> str:
    """Raises what cannot be printed."""
    raise Rude


@pytest.mark.parametrize(
    ("tool", "made", "read"),
    [
        (
            fails,
            call("fails", text="no\x1b[2J such file"),
            r"error: ValueError: no\x1b[2J such file",
        ),
        (
            fails,
            call("fails"),
            "error: TypeError: fails() missing 1 required positional argument: 'text'",
        ),
        (
            fails,
            call("fails", text="a", of="b"),
            "error: TypeError: fails() got an unexpected keyword argument 'of'",
        ),
        (fails, call("rm\x1b", text="a"), r"error: there is no tool rm\x1b; there is fails"),
        (leaves, call("leaves"), "error: SystemExit: 3"),
        (rude, call("rude"), "error: Rude"),
    ],
)
def test_an_error_is_a_message_to_the_policy_and_counted(tool, made, read, caplog):
    rollouts = run(tool, made)
    assert results(rollouts) == [read]
    assert counts(rollouts) == {"calls": 1, "failed": 1} and "\x1b" not in caplog.text
    assert rollouts.finish == ("stop",) and rollouts.per_row["environment_failure"] == (None,)
    assert rollouts.completions[0][-1] == says("done")


def test_a_tool_that_hangs_costs_its_timeout_once_and_its_row_alone():
    released = threading.Event()

    def wait(seconds: float) -> str:
        """
        Waits.

        Args:
            seconds: How long.
        """
        released.wait(seconds)
        return "waited"

    script = Script(
        lambda prompt, sample: says(
            "", call("wait", seconds=60 * (sample < 8)), call("wait", seconds=0)
        )
    )
    began = time.monotonic()
    rollouts = play(
        script, Environment(tools=[wait], timeout_s=0.5), [Request(Prompt("a", ASK), 10)]
    )
    took = time.monotonic() - began
    assert [results(rollouts, row) for row in (0, 9)] == [
        ["error: no answer within 0.5 s", "waited"],
        ["waited"] * 2,
    ]
    assert counts(rollouts) == {"calls": 2, "timeout": 1} and counts(rollouts, 9) == {"calls": 2}
    assert took < 8 * 0.5  # eight hang at the same time
    released.set()
    while abandoned_count():
        time.sleep(0.01)


def megabytes() -> str:
    """Writes a lot."""
    return "x" * 5_000_000


def test_an_output_is_cut_before_anything_tokenizes_it():
    rollouts = run(megabytes, max_reply_tokens=10)
    assert results(rollouts) == ["x" * 160] and counts(rollouts) == {"calls": 1, "truncated": 1}


def noisy() -> str:
    """Writes control characters."""
    return "\x1b[31mred\x1b[0m\ttab\r\nline\x00\x07\x9b\ud800 \u00e9\u4f60"


def test_control_characters_of_an_output_are_shown_and_do_nothing():
    assert results(run(noisy)) == [
        "\\x1b[31mred\\x1b[0m\ttab\nline\\x00\\x07\\x9b\\ud800 \u00e9\u4f60"
    ]


def changes(items: list[int], more: dict) -> str:
    """
    Changes its arguments.

    Args:
        items: Numbers.
        more: Anything.
    """
    items.clear()
    more["inner"]["x"] = 0
    return "changed"


def test_a_tool_that_changes_its_arguments_changes_no_conversation():
    made = call("changes", items=[1, 2], more={"inner": {"x": 1}})
    assert results(run(changes, made)) == ["changed"]
    assert made["function"]["arguments"] == {"items": [1, 2], "more": {"inner": {"x": 1}}}


def blocks() -> list:
    """Returns blocks of content."""
    return [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def nothing() -> None:
    """Returns nothing."""


@pytest.mark.parametrize(("tool", "read"), [(blocks, "one\ntwo"), (nothing, "None")])
def test_any_result_is_read_as_a_text(tool, read):
    assert results(run(tool)) == [read]


def test_a_call_that_cannot_be_parsed_is_told_and_counted():
    script = Script(says("<tool_call>{", parse_error="the call is no JSON"), says("42"))
    rollouts = play(script, Environment(tools=[multiply]))
    assert rollouts.completions[0][1]["content"] == "error: the call is no JSON"
    assert counts(rollouts) == {"unparsed": 1} and rollouts.completions[0][-1] == says("42")


def test_calls_of_the_last_turn_are_not_made():
    made = []

    def note(text: str) -> str:
        """
        Notes.

        Args:
            text: What.
        """
        made.append(text)
        return "ok"

    script = Script(*(says("", call("note", text=str(turn))) for turn in range(9)))
    rollouts = play(script, Environment(tools=[note], turns=3), [Request(Prompt("a", ASK), 1)])
    assert (
        made == ["0", "1"]
        and rollouts.per_row["turns"].tolist() == [3]
        and not rollouts.per_row["ended"].any()
    )


def test_tools_run_at_the_same_time_for_all_rows_and_in_the_callers_thread_without_a_timeout():
    together, threads = threading.Barrier(6, timeout=10), set()

    def meet() -> str:
        """Waits for five others."""
        together.wait()
        return "met"

    def where() -> str:
        """Notes its thread."""
        threads.add(threading.current_thread())
        return "here"

    rollouts = play(
        Script(says("", call("meet"))), Environment(tools=[meet]), [Request(Prompt("a", ASK), 6)]
    )
    assert [results(rollouts, row) for row in range(6)] == [["met"]] * 6
    play(Script(says("", call("where"))), Environment(tools=[where], timeout_s=None))
    assert threads == {threading.current_thread()}


def test_a_function_replies_where_no_tool_is_called():
    script = Script(says("", call("multiply", a=2, b=3)), says("6"), says("six"))
    environment = Environment(lambda text: None if text == "six" else "in words", tools=[multiply])
    rollouts = play(script, environment)
    assert [message["role"] for message in rollouts.completions[0]] == [
        *("assistant", "tool", "assistant", "user", "assistant")
    ]


def untold(a: int) -> int:
    return a


def untyped(a) -> int:
    """
    No types.

    Args:
        a: A number.
    """


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        (
            [untold],
            "tool 'untold' cannot be shown to a model: .*no docstring.* Give every argument a type "
            "hint",
        ),
        ([untyped], "tool 'untyped' cannot be shown to a model: Argument a is missing a type hint"),
        ([multiply, multiply], "two of the tools multiply, multiply have one name"),
        (["multiply"], "tool 'str' cannot be shown to a model: 'multiply' is not a"),
    ],
)
def test_a_tool_that_no_policy_could_call_is_refused(tools, why):
    with pytest.raises(GruppoError, match=why):
        Environment(tools=tools)
