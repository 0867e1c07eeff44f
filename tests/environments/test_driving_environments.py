"""Environments that drive the conversation, such as those of verifiers, as objects that reply to
it."""

from __future__ import annotations

import asyncio

import pytest

from gruppo.environments.verifiers import ConversationOver, Verifiers

PROMPT = [{"role": "user", "content": "Guess."}]


class Game(Verifiers):
    """A conversation with the environment that a coroutine ``play(index, ask)`` is."""

    def __init__(self, play):
        super().__init__({"game": play})


def playing(test):
    """Run a test in an event loop, as conversations run."""

    def run():
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__ = test.__name__
    return run


async def guess(index, ask):
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


@playing
async def test_the_policy_is_asked_until_the_environment_ends_and_the_score_is_the_environments():
    game = Game(guess)
    assert await game.reset("game", 7, PROMPT) is None
    assert await game.step(" 3\n") == [{"role": "user", "content": "No."}]
    assert await game.step("7") is None
    assert await game.get_reward() == 1.0


@playing
async def test_an_environment_whose_policy_reached_a_limit_ends_and_scores_what_there_is():
    game = Game(guess)
    await game.reset("game", 7, PROMPT)
    await game.step("1")
    assert await game.get_reward() == 0.25


@playing
async def test_conversations_of_one_environment_do_not_meet():
    games = [Game(guess) for _ in range(4)]
    for index, game in enumerate(games):
        await game.reset("game", index, PROMPT)
    assert [await game.step("2") is None for game in games] == [False, False, True, False]
    assert [await game.step("3") is None for game in (games[0], games[3])] == [False, True]
    assert [await game.get_reward() for game in games] == [0.25, 0.25, 1.0, 1.0]


@playing
async def test_messages_beyond_the_prompt_of_the_data_are_appended_to_it():
    async def longer(index, ask):
        await ask([*PROMPT, {"role": "user", "content": "Now."}])
        return 1.0

    assert await Game(longer).reset("game", 0, PROMPT) == [{"role": "user", "content": "Now."}]


@playing
async def test_rewritten_histories_errors_and_pictures_fail_their_conversation():
    async def rewrites(index, ask):
        await ask(PROMPT)
        other = {"role": "user", "content": "Something else."}
        await ask([other, *PROMPT[1:], {"role": "assistant", "content": "a"}, other])
        return 1.0

    async def forgets(index, ask):
        await ask(PROMPT)
        await ask(PROMPT)
        return 1.0

    async def raises(index, ask):
        await ask(PROMPT)
        raise KeyError("no such door")

    async def draws(index, ask):
        await ask([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        return 1.0

    for changes in (rewrites, forgets):
        game = Game(changes)
        await game.reset("game", 0, PROMPT)
        with pytest.raises(ValueError, match="rewrote the history"):
            await game.step("a")
    game = Game(raises)
    await game.reset("game", 0, PROMPT)
    with pytest.raises(KeyError, match="no such door"):
        await game.step("a")
    with pytest.raises(ValueError, match="not texts"):
        await Game(draws).reset("game", 0, PROMPT)


@playing
async def test_close_ends_an_environment_that_waits_and_what_it_holds_is_released():
    is_released = asyncio.Event()

    async def holds(index, ask):
        try:
            await ask(PROMPT)
        finally:
            is_released.set()
        return 1.0

    game = Game(holds)
    await game.reset("game", 0, PROMPT)
    await game.close()
    await asyncio.wait_for(is_released.wait(), 20)
