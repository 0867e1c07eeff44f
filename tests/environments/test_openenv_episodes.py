"""Episodes of OpenEnv as conversations, with a client that answers in this process instead of a
server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gruppo.environments.openenv import OpenEnv, OpenEnvTools

ONE = {"properties": {"metadata": {}, "message": {"type": "string"}}, "required": ["message"]}
TWO = {
    "properties": {"row": {"type": "integer"}, "word": {"type": "string"}},
    "required": ["row", "word"],
}
NUMBER = {"properties": {"row": {"type": "integer"}}, "required": ["row"]}


class Client:
    """A session that rewards and ends as it is told, and remembers what it was told."""

    def __init__(self, results=(), problem=None):
        self.results, self.problem, self.actions, self.resets, self.is_open = (
            list(results),
            problem,
            [],
            [],
            False,
        )
        self._ws = "socket 1"

    async_client = property(lambda self: self)

    def sync(self):
        return self

    def connect(self):
        self.is_open = True

    def reset(self, **options):
        self.resets.append(options)
        return SimpleNamespace(observation={"text": "begin", "metadata": {"id": 1}})

    def step(self, action):
        if self.problem is not None:
            raise self.problem
        self.actions.append(action)
        reward, done = self.results.pop(0) if self.results else (1.0, False)
        return SimpleNamespace(observation={"n": 3, "t": None}, reward=reward, done=done)

    def close(self):
        self.is_open = False


def episode_of(client, schema=ONE):
    episode = OpenEnv(lambda: client, schema)
    return episode, episode.reset(seed=2**40 + 3, reset={"level": 2})


def test_the_first_message_is_the_observation_and_the_fields_of_an_action():
    client = Client()
    episode, text = episode_of(client)
    fields = '{"message": {"type": "string"}}'
    assert text == f"\n\nbegin\n\nAnswer with an action, as JSON with the fields {fields}."
    assert client.resets == [{"seed": 3, "level": 2}] and client.is_open
    assert episode.step("hi") == '{"n": 3}'
    episode.close()
    assert not client.is_open


@pytest.mark.parametrize(
    ("schema", "text", "action"),
    [
        (ONE, " hello there\n", {"message": "hello there"}),
        (ONE, '{"message": "hi"}', {"message": "hi"}),
        (ONE, 'I say\n```json\n{"message": "hi"}\n```\nnow.', {"message": "hi"}),
        (ONE, "12", {"message": "12"}),
        (ONE, '"quoted"', {"message": '"quoted"'}),
        (NUMBER, "12", {"row": 12}),
        (TWO, '{"row": 1, "word": "a"}', {"row": 1, "word": "a"}),
        (TWO, "row one", None),
        (TWO, "[" * 99_999, None),
    ],
)
def test_an_answer_is_json_or_the_only_field_that_is_required(schema, text, action):
    client = Client()
    episode, _ = episode_of(client, schema)
    reply = episode.step(text)
    assert client.actions == ([] if action is None else [action])
    assert ("no action" in reply, episode.rewards) == (
        (True, [0.0]) if action is None else (False, [1.0])
    )


def test_an_action_that_the_server_refuses_is_the_policys_and_any_other_error_the_environments():
    episode, _ = episode_of(
        Client(problem=RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)"))
    )
    assert "no action" in episode.step("a") and episode.rewards == [0.0]
    episode, _ = episode_of(
        Client(problem=RuntimeError("Server error: no door (code: EXECUTION_ERROR)"))
    )
    with pytest.raises(RuntimeError, match="no door"):
        episode.step("a")


def test_an_episode_that_the_client_lost_is_not_taken_for_a_new_one():
    client = Client()
    episode, _ = episode_of(client)
    client._ws = "socket 2"
    with pytest.raises(ConnectionError, match="with the episode"):
        episode.step("a")
    assert episode.rewards == []


def test_an_episode_is_rewarded_by_the_sum_and_by_nothing_after_a_failure():
    results = [(0.5, False), (None, False), (2, True)]
    episode, _ = episode_of(Client(results))
    replies = [episode.step("a") for _ in results]
    assert [reply is None for reply in replies] == [done for _, done in results]
    assert episode.rewards == [0.5, None, 2.0] and episode.get_reward() == 2.5
    assert OpenEnvTools(lambda: Client(), {}).get_reward() is None
    tools = OpenEnvTools(lambda: Client(problem=OSError("gone")), {})
    tools.reset(seed=0)
    for call in (lambda: tools.call_tool("look", {}), tools.get_reward):
        with pytest.raises(OSError, match="gone"):
            call()
