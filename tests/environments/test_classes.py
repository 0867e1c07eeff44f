"""Environments of a class: an object for each conversation, whatever happens in it."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch
from tests.environments.scripted import ASK, Script, call, counts, play, says

from gruppo.environments import Environment, EnvironmentClass
from gruppo.rewards import RewardSet
from gruppo.rewards.functions import turn_reward
from gruppo.types import GruppoError, Prompt, Request


class Counter:
    """As in TRL's documentation of environments."""

    def reset(self, start: int = 0, **kwargs) -> str | None:
        self.count, self._secret, self.client = start, "s", threading.Lock()
        return f" Start: {start}."

    def increment(self, by: int) -> str:
        """
        Increments the counter.

        Args:
            by: How far.

        Returns:
            The count.
        """
        if by > 9:
            raise ValueError("at most 9")
        self.count += by
        return f"now {self.count}"

    def _helper(self):
        """No tool."""


def two(**meta):
    return [
        Request(Prompt(name, ASK, meta={"start": n}, draw=n), 2) for name, n in (("a", 1), ("b", 5))
    ]


def test_methods_are_tools_of_an_object_for_each_conversation():
    environment = Environment(Counter)
    assert [schema["function"]["name"] for schema in environment.tools] == ["increment"]
    script = Script(lambda prompt, sample: says("", call("increment", by=2 + 10 * sample)))
    rollouts = play(script, environment, two())
    assert script.prompts == [[{"role": "user", "content": f"6 x 7? Start: {n}."}] for n in (1, 5)]
    assert [messages[1]["content"] for messages in rollouts.completions] == [
        *("now 3", "error: ValueError: at most 9", "now 7", "error: ValueError: at most 9")
    ]
    assert [state["count"] for state in rollouts.per_row["state"]] == [3, 1, 7, 5]
    assert [prompt.inputs for prompt in rollouts.prompts] == [ASK, ASK]  # those of the data
    assert rollouts.per_row["inputs"][2] == script.prompts[1]
    assert counts(rollouts, 1) == {"calls": 1, "failed": 1} and rollouts.finish == ("stop",) * 4


def test_rewards_read_copies_of_plain_attributes():
    environment = Environment(Counter)
    rollouts = play(Script(says("", call("increment", by=2))), environment, two())

    def count(environments, prompts, state, **columns):
        assert all(isinstance(one, Counter) and not hasattr(one, "client") for one in environments)
        assert [prompt[0]["content"] for prompt in prompts] == ["6 x 7? Start: 1."] * 2 + [
            "6 x 7? Start: 5."
        ] * 2
        environments[0].increment(by=1)  # of its own copy
        return [
            one.count + len(own["_secret"]) for one, own in zip(environments, state, strict=True)
        ]

    rewards = RewardSet([count])
    rewards.set_view(environment.view)
    assert rewards.score(rollouts).rewards.tolist() == [5.0, 4.0, 8.0, 8.0]
    assert rollouts.per_row["state"][0]["count"] == 3


class Closing(Counter):
    """Notes what becomes of its objects; column ``trouble`` names the method that raises or
    hangs."""

    alive = set()  # noqa: RUF012
    made = 0
    released = threading.Event()

    def __init__(self):
        type(self).made += 1
        self.alive.add(self)

    def reset(self, trouble="", how="", **kwargs):
        self.trouble, self.how = trouble, how
        super().reset()
        self._at("reset")

    def _at(self, method):
        if method == getattr(self, "trouble", ""):
            if self.how == "hangs":
                self.released.wait(30)
            else:
                raise OSError("the server is gone")

    def look(self) -> str:
        """Looks."""
        self._at("look")
        return "seen"

    def step(self, text):
        self._at("step")
        return None

    def get_reward(self):
        self._at("get_reward")
        return 1.0

    def close(self):
        self._at("close")
        self.alive.remove(self)


@pytest.mark.parametrize("how", ["raises", "hangs"])
@pytest.mark.parametrize("trouble", ["reset", "look", "step", "get_reward", "close"])
def test_an_environment_that_fails_costs_its_own_row_and_is_closed(trouble, how):
    Closing.alive.clear()
    Closing.released.clear()
    requests = [
        Request(Prompt(str(n), ASK, meta={"trouble": trouble if n == 1 else "", "how": how}), 1)
        for n in range(3)
    ]
    began = time.monotonic()
    rollouts = play(
        Script(says("", call("look")), says("I saw it")),
        Environment(Closing, timeout_s=0.5),
        requests,
    )
    assert time.monotonic() - began < 10
    failed = [why for why in rollouts.per_row["environment_failure"] if why]
    why = "no answer within 0.5 s" if how == "hangs" else "OSError: the server is gone"
    if trouble in ("look", "close"):
        assert failed == [] and rollouts.finish == ("stop",) * 3
        assert counts(rollouts, 1) == {"calls": 1} | (
            {how.replace("hangs", "timeout").replace("raises", "failed"): 1}
            if trouble == "look"
            else {}
        )
        assert rollouts.per_row["environment_rewards"] == ({"Closing": 1.0},) * 3
    else:
        assert (
            len(failed) == 1 and why in failed[0] and rollouts.finish == ("stop", "error", "stop")
        )
        assert rollouts.per_row["environment_rewards"] == ({"Closing": 1.0}, {}, {"Closing": 1.0})
    Closing.released.set()
    assert len(Closing.alive) == (trouble == "close" and how == "raises") + (
        trouble == "close" and how == "hangs" and len(Closing.alive)
    )


def test_environments_are_closed_where_sampling_ends_in_an_error():
    Closing.alive.clear()

    def broken(requests, sampling, *, seed):
        raise RuntimeError("the engine is gone")

    script = Script()
    script.sample = broken
    with pytest.raises(RuntimeError, match="the engine is gone"):
        play(script, Environment(Closing))
    assert not Closing.alive


class Slow(Closing):
    def __init__(self):
        self.released.wait(30)
        super().__init__()


def test_an_object_that_is_made_too_late_is_closed_too():
    Closing.alive.clear()
    Closing.released.clear()
    rollouts = play(Script(), Environment(Slow, timeout_s=0.3), [Request(Prompt("a", ASK), 1)])
    assert (
        rollouts.finish == ("error",)
        and "reset: no answer within 0.3 s" in rollouts.per_row["environment_failure"][0]
    )
    before = Slow.made
    Closing.released.set()
    until = time.monotonic() + 10
    while (Slow.made == before or Closing.alive) and time.monotonic() < until:
        time.sleep(0.01)
    assert Slow.made == before + 1 and not Closing.alive


class Kept(Counter):
    made = 0

    def __init__(self):
        type(self).made += 1
        self.thread = threading.current_thread()

    def increment(self, by: int) -> str:
        """
        Increments.

        Args:
            by: How far.
        """
        assert threading.current_thread() is self.thread  # as a connection of sqlite3 needs it
        return super().increment(by)


def test_objects_without_close_are_reset_again_each_in_its_thread():
    Kept.made, environment = 0, Environment(Kept)
    for _ in range(3):
        rollouts = play(Script(says("", call("increment", by=1))), environment, two())
        assert [state["count"] for state in rollouts.per_row["state"]] == [2, 2, 6, 6]
    assert Kept.made == 4
    threads = {instance.thread for instance, _ in environment.classes[None].idle}
    environment.close()
    for thread in threads:
        thread.join(5)
    assert len(threads) == 4 and not any(thread.is_alive() for thread in threads)


class Stuck(Counter):
    made = 0
    released = threading.Event()

    def __init__(self):
        type(self).made += 1

    def look(self) -> str:
        """Looks for ever."""
        self.released.wait(30)
        return "seen"


def test_an_object_that_is_still_in_a_late_call_is_not_used_again():
    environment = Environment(Stuck, timeout_s=0.3)
    for made in (2, 4):
        rollouts = play(Script(says("", call("look"))), environment)
        assert counts(rollouts) == {"calls": 1, "timeout": 1} and rollouts.finish == (
            "stop",
            "stop",
        )
        assert Stuck.made == made
    Stuck.released.set()


class Dealer:
    """Begins each conversation of a group alike, by its seed, and keeps a number for each turn."""

    def reset(self, seed):
        self.turns = []
        return {"role": "user", "content": f"cards {seed}"}

    def step(self, text, turn):
        self.turns.append(float(len(text)))
        return None if turn == 3 else f"turn {turn}"


def test_the_seed_of_reset_is_the_groups():
    script = Script()
    play(script, Environment(Dealer), two())
    assert (
        len(script.prompts) == 2 and script.prompts[0] != script.prompts[1]
    )  # a group is one prompt
    again = Script()
    play(again, Environment(Dealer), two())
    assert again.prompts == script.prompts


def test_rows_that_begin_differently_from_their_group_fail():
    class Differs(Dealer):
        deals = iter(["king", "queen", "king", "ace", "ace", "ace"])

        def reset(self, seed):
            super().reset(seed)
            return next(self.deals)

    script = Script(says("hit me"), says("no"), says("stop"))
    requests = [Request(Prompt(name, ASK, draw=n), 3) for n, name in enumerate("ab")]
    # without a timeout row by row, in one thread
    rollouts = play(script, Environment(Differs, timeout_s=None), requests)
    assert rollouts.finish == ("stop", "error", "stop", "stop", "stop", "stop")
    assert "Let reset(seed) return the same" in rollouts.per_row["environment_failure"][1]
    assert [prompt[0]["content"] for prompt in script.prompts] == ["6 x 7?king", "6 x 7?ace"]
    assert [prompt.inputs for prompt in rollouts.prompts] == [ASK, ASK]


@turn_reward
def words(completions):
    return [
        [len(m["content"]) / 10 for m in messages if m["role"] == "assistant"]
        for messages in completions
    ]


@turn_reward
def turns(environments):
    return [environment.turns for environment in environments]


def test_rewards_of_turns_stand_at_the_last_token_of_each():
    environment = Environment(Dealer)
    rollouts = play(Script(says("hit me"), says("no"), says("stop")), environment, two())
    rewards = RewardSet([words, turns])
    rewards.set_view(environment.view)
    scores = rewards.score(rollouts)
    ends = list(rollouts.per_row["turn_ends"][0])
    assert scores.steps["turns"][0, ends].tolist() == [6.0, 2.0, 4.0]
    torch.testing.assert_close(scores.steps["words"][0, ends], torch.tensor([0.6, 0.2, 0.4]))
    assert scores.steps["turns"][0].isfinite().sum() == 3
    torch.testing.assert_close(scores.rewards, torch.full((4,), 13.2))


def test_a_turn_reward_of_another_number_of_turns_is_a_failure():
    rollouts = play(Script(says("hit me"), says("no")), Environment(Dealer), two())
    scores = RewardSet([turn_reward(lambda completions: [[1.0]] * len(completions))]).score(
        rollouts
    )
    assert (
        scores.rewards.isnan().all()
        and "returned 1 numbers for a completion of 3 turns" in scores.failures[0].message
    )


class Wrong(Counter):
    def get_reward(self):
        return "much"


class NotFinite(Counter):
    def get_reward(self):
        return float("nan")


class Unscored(Counter):
    def get_reward(self):
        return None


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Wrong, "get_reward returned 'much'; it needs a finite number or None"),
        (NotFinite, "get_reward returned nan; it needs a finite"),
        (Unscored, None),
    ],
)
def test_a_reward_that_is_no_number_is_never_a_zero(made, why):
    environment = Environment(made)
    rollouts = play(Script(says("a"), says("b"), says("c")), environment, two())
    assert all(
        why in own if why else own is None for own in rollouts.per_row["environment_failure"]
    )
    assert RewardSet([*environment.rewards.values()]).score(rollouts).rewards.isnan().all()


class Over(Counter):
    def is_done(self):
        if self.count > 6:
            raise KeyError("lost")
        return self.count > 5


def test_a_method_is_done_is_called_and_its_error_costs_its_row_alone():
    environment = Environment(Over)
    assert [schema["function"]["name"] for schema in environment.tools] == ["increment"]
    script = Script(lambda prompt, sample: says("", call("increment", by=sample)))
    rollouts = play(script, environment, [Request(Prompt("a", ASK, meta={"start": 5}), 3)])
    assert rollouts.per_row["turns"].tolist() == [2, 1, 1] and rollouts.finish == (
        "stop",
        "stop",
        "error",
    )
    assert "KeyError: 'lost'" in rollouts.per_row["environment_failure"][2]


class Served:
    """Its tools are not methods, as of a server."""

    def __init__(self, name="look"):
        schema = {
            "name": name,
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {}},
        }
        self.tools, self.asked = [{"type": "function", "function": schema}], []

    def reset(self):
        self.asked = []

    def call_tool(self, name, arguments):
        self.asked.append([name, arguments])
        return "seen"


def test_tools_need_not_be_methods():
    environment = Environment(functools.partial(Served, "stare"))
    assert [schema["function"]["name"] for schema in environment.tools] == ["stare"]
    rollouts = play(Script(says("", call("stare", at="you"))), environment)
    assert rollouts.completions[0][1]["content"] == "seen"
    assert rollouts.per_row["state"][0]["asked"] == [["stare", {"at": "you"}]]


def test_prompts_choose_among_several_environments():
    class Scored(Dealer):
        def get_reward(self):
            return 3

    environment = Environment({"count": Counter, "deal": Scored})
    requests = [
        Request(Prompt(name, ASK, meta={"environment": name, "start": 1}), 1)
        for name in ("count", "deal", "nothing")
    ]
    rollouts = play(Script(says("", call("increment", by=1))), environment, requests)
    assert rollouts.finish == ("stop", "stop", "error")
    assert (
        "its environment 'nothing' is none of 'count', 'deal'"
        in rollouts.per_row["environment_failure"][2]
    )
    assert rollouts.completions[0][1]["content"] == "now 2"
    assert "error: there is no tool increment" in rollouts.completions[1][1]["content"]
    scores = RewardSet([*environment.rewards.values()]).score(rollouts)
    assert scores.rewards.isnan().tolist() == [True, False, True]


def test_a_prompt_that_does_not_fit_fails_its_row_alone():
    def check(prompt, sampling):
        return "too long" if "Start: 5" in prompt.inputs[0]["content"] else None

    script = Script()
    rollouts = play(script, Environment(Counter), two(), check_prompt=check)
    assert rollouts.finish == ("stop", "stop", "error", "error") and script.prompts[1] == ASK
    assert rollouts.per_row["environment_failure"][2] == "too long"


class Loud(Counter):
    def reset(self, **kwargs):
        return "\x1b[2J" + "x" * 2_000_000

    def step(self, text):
        return "\x07" + "y" * 100_000


def test_what_an_environment_says_is_safe_and_bounded():
    script = Script()
    rollouts = play(
        script, Environment(Loud, turns=2, max_reply_tokens=10), [Request(Prompt("a", ASK), 1)]
    )
    (prompt,) = script.prompts[0]
    assert prompt["content"].startswith("6 x 7?\\x1b[2Jxxx") and len(prompt["content"]) < 1_000_020
    assert rollouts.completions[0][1]["content"] == "\\x07" + "y" * 159


class Untold(Counter):
    def poke(self, by: int) -> str:
        return ""


class Reader(Counter):
    def reset(self, levle):
        pass


class Unserved(Served):
    def __init__(self):
        self.tools = None


class NoReset:
    def look(self) -> str:
        """Looks."""


def makes_nothing():
    raise OSError("no server at :8000")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Environment(NoReset), r"environment 'NoReset' has no method reset. Add def reset"),
        (
            lambda: Environment(Untold),
            r"tool of environment 'Untold', 'poke' cannot be shown to a model: .*no docstring",
        ),
        (
            lambda: Environment(Counter, tools=[Counter().increment]),
            "two of the tools increment, increment have one name",
        ),
        (
            lambda: EnvironmentClass(makes_nothing),
            "'makes_nothing' cannot be made: OSError: no server at :8000",
        ),
        (
            lambda: EnvironmentClass(Unserved),
            "'Unserved' has call_tool, and its attribute tools is None; it needs to",
        ),
        (
            lambda: EnvironmentClass(Counter()),
            "is <.*Counter.*; it needs to be a class.* Pass the class itself",
        ),
        (
            lambda: Environment(Reader).check(["level"]),
            r"environment 'Reader' \(reset\) asks for 'levle'.*mean level",
        ),
        (
            lambda: Environment({"a": Counter}).check(["start"]),
            "no column 'environment' that names",
        ),
        (lambda: Environment(), "no function that replies, no class and no tools"),
    ],
)
def test_an_environment_that_could_not_play_is_refused(make, why):
    with pytest.raises(GruppoError, match=why):
        make()
