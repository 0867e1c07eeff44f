"""Environments that drive the conversation, such as those of verifiers, as objects that reply to
it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from gruppo.environments.verifiers import ConversationOver, Verifiers

PROMPT = [{"role": "user", "content": "Guess."}]


@pytest.fixture
def conversation():
    """A conversation with the environment that a coroutine ``play(env, index, ask)`` is."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def opened(play):
        def run(coroutine):
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

        own = SimpleNamespace(loop=loop, run=run, env="env", play=play)
        return Verifiers({"game": own})

    yield opened
    loop.call_soon_threadsafe(loop.stop)


async def guess(env, index, ask):
    """Three guesses at the number of the task."""
    messages = list(PROMPT)
    for _ in range(3):
        try:
            text = await ask(messages)
        except ConversationOver:
            return 0.25
        if text == str(index):
            return 1.0
        # as the packages do: without the spaces around it
        messages = [
            *messages,
            {"role": "assistant", "content": text.strip()},
            {"role": "user", "content": "No."},
        ]
    return 0.0


def test_the_policy_is_asked_until_the_environment_ends_and_the_score_is_the_environments(
    conversation,
):
    game = conversation(guess)
    assert game.reset("game", 7, PROMPT) is None
    assert game.step(" 3\n") == [{"role": "user", "content": "No."}]
    assert game.step("7") is None
    assert game.get_reward() == 1.0


def test_an_environment_whose_policy_reached_a_limit_ends_and_scores_what_there_is(conversation):
    game = conversation(guess)
    game.reset("game", 7, PROMPT)
    game.step("1")
    assert game.get_reward() == 0.25


def test_conversations_of_one_environment_do_not_meet(conversation):
    games = [conversation(guess) for _ in range(4)]
    for index, game in enumerate(games):
        game.reset("game", index, PROMPT)
    assert [game.step("2") is None for game in games] == [False, False, True, False]
    assert [game.step("3") is None for game in (games[0], games[3])] == [False, True]
    assert [game.get_reward() for game in games] == [0.25, 0.25, 1.0, 1.0]


def test_messages_beyond_the_prompt_of_the_data_are_appended_to_it(conversation):
    async def longer(env, index, ask):
        await ask([*PROMPT, {"role": "user", "content": "Now."}])
        return 1.0

    assert conversation(longer).reset("game", 0, PROMPT) == [{"role": "user", "content": "Now."}]


def test_an_environment_that_rewrites_the_history_raises_or_writes_pictures_fails_its_conversation(
    conversation,
):
    async def rewrites(env, index, ask):
        await ask(PROMPT)
        other = {"role": "user", "content": "Something else."}
        await ask([other, *PROMPT[1:], {"role": "assistant", "content": "a"}, other])
        return 1.0

    async def forgets(env, index, ask):
        await ask(PROMPT)
        await ask(PROMPT)
        return 1.0

    async def raises(env, index, ask):
        await ask(PROMPT)
        raise KeyError("no such door")

    async def draws(env, index, ask):
        await ask([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        return 1.0

    for changes in (rewrites, forgets):
        game = conversation(changes)
        game.reset("game", 0, PROMPT)
        with pytest.raises(ValueError, match="rewrote the history"):
            game.step("a")
    game = conversation(raises)
    game.reset("game", 0, PROMPT)
    with pytest.raises(KeyError, match="no such door"):
        game.step("a")
    with pytest.raises(ValueError, match="not texts"):
        conversation(draws).reset("game", 0, PROMPT)


def test_close_ends_an_environment_that_waits_and_what_it_holds_is_released(conversation):
    is_released = threading.Event()

    async def holds(env, index, ask):
        try:
            await ask(PROMPT)
        finally:
            is_released.set()
        return 1.0

    game = conversation(holds)
    game.reset("game", 0, PROMPT)
    game.close()
    assert is_released.wait(20)
