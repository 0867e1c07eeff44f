"""An environment: what it is given, what it may return, and what its failures cost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gruppo.environments import Environment
from gruppo.environments.classes import Episode
from gruppo.timeouts import CallError
from gruppo.types import DataError, GruppoError, Prompt

HELLO = [{"role": "user", "content": "hello"}]


def request(text="7", inputs=HELLO, completion=None, **changes):
    completion = (
        (text if isinstance(inputs, str) else [{"role": "assistant", "content": text}])
        if completion is None
        else completion
    )
    prompt = Prompt("p", inputs, target="12", meta={"level": 3})
    options = {"turn": 1, "seed": 5} | changes
    return Episode(
        prompt, 0, group_seed=0, inputs=inputs, completion=completion, text=text, **options
    )


def reply_to(fn, *several, **changes):
    several = several or (request(),)
    return list(Environment(fn, **changes).replies(dict(enumerate(several))).values())


def test_it_is_given_what_its_signature_asks_for_and_nothing_else():
    seen = []

    def reply(text, messages, state, turn, seed, prompt, answer, target, level, missing="none"):
        seen.append((text, messages, state, turn, seed, prompt, answer, target, level, missing))

    one = request()
    assert reply_to(reply, one) == [None]
    talk = [*HELLO, {"role": "assistant", "content": "7"}]
    assert seen == [("7", talk, {}, 1, 5, HELLO, "12", "12", 3, "none")]
    assert seen[0][2] is one.state and seen[0][1][0] is not HELLO[0]
    assert reply_to(lambda **everything: " ".join(sorted(everything)))[0] == [
        {"role": "user", "content": "answer level messages prompt seed state target text turn"}
    ]
    assert reply_to(lambda messages: messages, request("7", inputs="1 +")) == ["1 +7"]


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        (None, None),
        ("no", [{"role": "user", "content": "no"}]),
        ("", [{"role": "user", "content": ""}]),
        ({"role": "tool", "content": "3"}, [{"role": "tool", "content": "3"}]),
        (
            ({"role": "tool", "content": "3"}, {"role": "user", "content": "so?"}),
            [{"role": "tool", "content": "3"}, {"role": "user", "content": "so?"}],
        ),
    ],
)
def test_replies_to_a_conversation_become_messages(raw, messages):
    assert reply_to(lambda: raw) == [messages]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (3, r"returned 3 \(int\); a reply is a text, a message with role and content"),
        ([], r"returned \[\] \(list\)"),
        ([None], r"returned \[None\]"),
        ({"content": "3"}, "a message with role and content"),
        ({"role": "user", "content": 3}, "a message with role and content"),
        ({"role": "assistant", "content": "I"}, "that is not the assistant's"),
    ],
)
def test_what_is_no_reply_is_told(raw, why):
    (answer,) = reply_to(lambda: raw)
    assert isinstance(answer, CallError)
    with pytest.raises(CallError, match=why):
        raise answer


def test_a_prompt_that_is_a_text_is_replied_to_with_a_text():
    assert reply_to(lambda text: text + "!", request("7", inputs="1 +")) == ["7!"]
    (answer,) = reply_to(lambda: {"role": "user", "content": "x"}, request(inputs="1 +"))
    assert "to a prompt that is a text only a text" in answer.message


def test_what_fails_costs_its_conversation_alone_and_names_file_and_line():
    def reply(text):
        return f"{1 / int(text):g}"

    first, second, third = reply_to(reply, request("2"), request("0"), request("4"))
    assert [first[0]["content"], third[0]["content"]] == ["0.5", "0.25"]
    line = reply.__code__.co_firstlineno + 1
    assert second.message == f"ZeroDivisionError: division by zero (test_environment.py:{line})"

    def leaves(text):
        raise SystemExit(3)

    (answer,) = reply_to(leaves)
    assert answer.message.startswith("SystemExit: 3")


@pytest.mark.parametrize("timeout_s", [60.0, None])
def test_a_state_is_a_conversations_own_and_kept_from_call_to_call(timeout_s):
    def reply(text, state):
        state["seen"] = [*state.get("seen", []), text]

    one, other = request("1"), request("2")
    environment = Environment(reply, timeout_s=timeout_s)
    for _ in range(2):
        environment.replies({7: one, 3: other})
    assert (one.state, other.state) == ({"seen": ["1", "1"]}, {"seen": ["2", "2"]})
    assert environment.elapsed_s > 0


def test_a_late_reply_costs_its_conversation_and_the_others_are_still_asked():
    release = threading.Event()

    def reply(text, state):
        if text == "slow":
            release.wait(20)
        state["asked"] = True
        return text

    several = [request("a"), request("slow"), request("b")]
    first, late, last = reply_to(reply, *several, timeout_s=0.3)
    assert first == [{"role": "user", "content": "a"}] and last == [
        {"role": "user", "content": "b"}
    ]
    assert (late.kind, late.message) == ("timeout", "no answer within 0.3 s")
    release.set()


def test_async_replies_are_waited_for_together():
    both = {"waiting": 0}

    async def reply(text):
        both["waiting"] += 1
        while both["waiting"] < 3:
            await asyncio.sleep(0.001)
        if text == "bad":
            raise ValueError("boom")
        return text

    first, bad, last = reply_to(reply, request("a"), request("bad"), request("b"), timeout_s=20)
    assert first[0]["content"] == "a" and last[0]["content"] == "b"
    assert bad.message.startswith("ValueError: boom (test_environment.py:")


@pytest.mark.parametrize("timeout_s", [20.0, None])
def test_a_function_that_returns_an_awaitable_is_waited_for_too(timeout_s):
    async def later(text):
        return text + "!"

    ((reply,),) = reply_to(lambda text: later(text), timeout_s=timeout_s)
    assert reply["content"] == "7!"


def test_an_async_reply_that_is_late_costs_its_conversation_alone():
    async def reply(text):
        if text == "slow":
            await asyncio.sleep(30)
        return text

    first, late = reply_to(reply, request("a"), request("slow"), timeout_s=0.3)
    assert first[0]["content"] == "a" and (late.kind, late.message) == (
        "timeout",
        "no answer within 0.3 s",
    )


def test_an_async_reply_that_blocks_ends_its_turn():
    release = threading.Event()

    async def reply():
        release.wait(20)

    answers = reply_to(reply, request(), request(), timeout_s=0.1)
    release.set()
    assert {answer.kind for answer in answers} == {"timeout"}


@pytest.mark.parametrize("timeout_s", [20.0, None])
def test_an_async_reply_that_leaves_costs_its_conversation_alone(timeout_s):
    async def reply(text):
        if text == "bad":
            raise SystemExit(3)
        return text

    first, bad = reply_to(reply, request("a"), request("bad"), timeout_s=timeout_s)
    assert first[0]["content"] == "a" and bad.message.startswith("SystemExit: 3")
    assert reply_to(reply, request("a"), timeout_s=timeout_s)[0][0]["content"] == "a"


def test_a_timeout_of_the_functions_own_is_told_as_it_is():
    async def reply():
        raise TimeoutError("connect to db:5432 refused")

    (answer,) = reply_to(reply, timeout_s=20)
    assert (
        answer.kind == "exception" and "TimeoutError: connect to db:5432 refused" in answer.message
    )


def test_what_a_function_changes_is_its_own_copy():
    def reply(prompt, messages, answer, level, rows):
        for own in (prompt, messages, rows):
            own.append("x")

    prompt = Prompt("p", [dict(HELLO[0])], target="1", meta={"level": 1, "rows": ["a"]})
    completion = [{"role": "assistant", "content": "7"}]
    assert reply_to(reply, Episode(prompt, 0, 0, 0, prompt.inputs, completion, "7", 1)) == [None]
    assert (prompt.inputs, prompt.meta["rows"], len(completion)) == ([HELLO[0]], ["a"], 1)


def test_columns_that_are_not_there_are_refused_with_the_nearest():
    def reply(text, levle):
        return text

    with pytest.raises(
        DataError, match=r"environment 'reply' asks for 'levle'.*they have: level.*mean level\?"
    ):
        Environment(reply).check(["level"])
    Environment(reply).check(["levle"])
    with pytest.raises(DataError, match="they have: no columns"):
        Environment(reply).check([])


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (3, r"the environment is 3 \(int\), not a function"),
        (dict, "environment 'dict' has no method reset"),
        (Environment(lambda: None), r"the environment is .*not a function"),
        (max, "environment 'max' has no readable signature"),
        (eval("lambda x, /: x"), "takes 'x' by position only"),
    ],
)
def test_what_cannot_be_called_by_keywords_is_refused(fn, why):
    with pytest.raises(GruppoError, match=why):
        Environment(fn)
