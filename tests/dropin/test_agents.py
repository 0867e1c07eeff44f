"""TRL's documented examples of tools and environments, with one import changed.

Functions and classes are those of TRL's pages (GRPO, "Agent Training"; OpenEnv). The environments'
servers are replaced by objects with the same methods, the models by one that has learned a call of
each by heart.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.dropin.agents import agent, calls, said
from tests.environments.scripted import multiply

from gruppo.types import GruppoError

pytest.importorskip("trl", reason="TRL is not installed; `make test` installs it")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SHORT: dict[str, Any] = {
    **{
        "max_completion_length": 96,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
    },
    **{"use_cpu": True, "bf16": False, "learning_rate": 1e-4},
}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- as on TRL's pages ----------------------------------------------------------------------------


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    return a + b


ENV_URL = "https://openenv-echo-env.hf.space"


class EchoToolEnv:
    def __init__(self):
        from echo_env import EchoEnv

        self.env = EchoEnv(base_url=ENV_URL)
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        from echo_env.models import EchoAction

        observation = self.env.step(EchoAction(message=message))
        self.reward = observation.observation.reward
        return observation.observation.echoed_message


class WordleEnv:
    def __init__(self):
        from textarena_env import TextArenaEnv

        self.client = TextArenaEnv(base_url="https://openenv-wordle.hf.space")

    def reset(self, **kwargs) -> str | None:
        result = self.client.reset()
        self._last_full_feedback = result.observation.messages[0].content
        self.reward = 0.0
        self.done = False
        return self._last_full_feedback

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        from textarena_env import TextArenaAction

        if self.done:
            raise ValueError("Game over.")
        result = self.client.step(TextArenaAction(message=guess))
        _full_feedback = result.observation.messages[0].content
        feedback = _full_feedback[len(self._last_full_feedback) :]
        self._last_full_feedback = _full_feedback
        if "You attempted an invalid move" in feedback:
            self.reward = 0.0
        else:
            self.reward = result.reward
        self.done = result.done
        return feedback


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


# --- in place of the servers, and the model -------------------------------------------------------


class EchoEnv:
    def __init__(self, base_url: str) -> None:
        assert base_url == ENV_URL

    def step(self, action: Any) -> Any:
        reward = len(action.message) / 10
        return SimpleNamespace(
            observation=SimpleNamespace(reward=reward, echoed_message=action.message)
        )


class TextArenaEnv:
    def __init__(self, base_url: str) -> None:
        self.feedback = ""

    def _result(self, reward: float, done: bool) -> Any:
        messages = [SimpleNamespace(content=self.feedback)]
        return SimpleNamespace(
            observation=SimpleNamespace(messages=messages), reward=reward, done=done
        )

    def reset(self) -> Any:
        self.feedback = " Guess a word."
        return self._result(0.0, False)

    def step(self, action: Any) -> Any:
        self.feedback += " XGY"
        return self._result(1.0, True)


@pytest.fixture(autouse=True)
def servers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    action = {"EchoAction": SimpleNamespace, "TextArenaAction": SimpleNamespace}
    for name, content in {
        "echo_env": {"EchoEnv": EchoEnv},
        "echo_env.models": action,
        "textarena_env": {"TextArenaEnv": TextArenaEnv, **action},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


PRODUCT, ECHO = "What is 6 * 7?", "Try to echo 'Hello World!' in the environment."
WORDLE = "You are an expert Wordle solver. Use the tool `guess` to make a guess."


@pytest.fixture(scope="module")
def by_heart() -> Any:
    def result(name: str, content: str) -> dict[str, str]:
        return {"role": "tool", "name": name, "content": content}

    echo, guess = EchoToolEnv.echo.__get__(object()), WordleEnv.guess.__get__(object())
    conversations = {
        (multiply, async_add): [
            *(*user(PRODUCT), calls("multiply", a=6, b=7), result("multiply", "42"), said("42")),
        ],
        (echo,): [
            *user(ECHO),
            calls("echo", message="Hello World!"),
            result("echo", "Hello World!"),
            said("done"),
        ],
        (guess,): [
            *(
                *user(WORDLE + " Guess a word."),
                calls("guess", guess="[crane]"),
                result("guess", " XGY"),
            ),
            *(
                calls("guess", guess="[crane]"),
                result("guess", "error: ValueError: Game over."),
                said("done"),
            ),
        ],
    }
    return agent(list(conversations.values()), list(conversations))


def trained(
    by_heart: Any, prompt: str, reward: Any = None, steps: int = 2, **arguments: Any
) -> Any:
    from gruppo.trl import GRPOConfig, GRPOTrainer

    model, tokenizer = by_heart
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": [user(prompt)] * 64}),
        args=GRPOConfig(
            "out", chat_template_kwargs={"enable_thinking": False}, log_completions=True, **SHORT
        ),
        **arguments,
    )
    trainer.train()
    return trainer


@pytest.mark.slow
def test_the_tools_of_the_page_on_agents(by_heart):
    seen = []

    def correct(completions, **kwargs):
        seen.extend(completions)
        return [float(messages[-1]["content"] == "42") for messages in completions]

    trainer = trained(by_heart, PRODUCT, correct, tools=[multiply, async_add])
    history = trainer.state.log_history
    assert history[0]["tools/call_frequency"] > 0.5 and history[0]["reward"] > 0.5
    assert history[0]["tools/failure_frequency"] < 0.5
    played = [messages for messages in seen if len(messages) == 3]
    assert len(played) > len(seen) / 2
    assert played[0][0]["tool_calls"][0]["function"] == {
        "name": "multiply",
        "arguments": {"a": 6, "b": 7},
    }
    assert played[0][1] == {"role": "tool", "name": "multiply", "content": "42"}


def test_the_quick_start_of_the_page_on_openenv(by_heart):
    trainer = trained(by_heart, ECHO, reward_func, environment_factory=EchoToolEnv)
    history = trainer.state.log_history
    assert history[0]["rewards/reward_func/mean"] > 0.6  # 1.2 where it has echoed
    assert history[0]["tools/call_frequency"] > 0.5


def test_the_wordle_environment_tells_the_policy_that_the_game_is_over(by_heart):
    seen = []

    def watched(environments, prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions, strict=True))
        return reward_func(environments)

    trainer = trained(by_heart, WORDLE, watched, environment_factory=WordleEnv)
    assert trainer.state.log_history[0]["rewards/watched/mean"] > 0.5
    whole = [(prompt, messages) for prompt, messages in seen if len(messages) == 5]
    assert whole and whole[0][0] == user(WORDLE + " Guess a word.")
    assert whole[0][1][3]["content"] == "error: ValueError: Game over."


class Owner(EchoToolEnv):
    def step(self, message: str) -> str:
        """
        A tool in TRL, which knows no other step.

        Args:
            message: What.
        """
        return message

    async def get_reward(self) -> float:
        return self.reward


def test_an_environment_owns_its_reward_and_its_data(by_heart):
    from gruppo.trl import GRPOConfig, GRPOTrainer

    class Asks(Owner):
        def reset(self, **kwargs) -> str:
            super().reset()
            return ECHO

    model, tokenizer = by_heart
    trainer = GRPOTrainer(
        model, args=GRPOConfig("out", **SHORT), processing_class=tokenizer, environment_factory=Asks
    )
    trainer.train()
    assert "rewards/Asks/mean" in trainer.state.log_history[0]
    names = {schema["function"]["name"] for schema in trainer.run.run.environment.tools}
    assert names == {"echo", "step"}


def test_several_environments_by_a_column(by_heart):
    from gruppo.trl import GRPOConfig, GRPOTrainer

    model, tokenizer = by_heart
    rows = [
        {"prompt": user(ECHO), "environment": "echo"},
        {"prompt": user(WORDLE), "environment": "wordle"},
    ] * 8
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda environments, **kwargs: [
            type(env).__name__ == "EchoToolEnv" for env in environments
        ],
        args=GRPOConfig("out", **SHORT),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory={"echo": EchoToolEnv, "wordle": WordleEnv},
    )
    policy = trainer.run.policy
    shown = {
        name: [
            tool in policy.format_prompt(prompt) for tool in ("Echo the message", "Make a guess")
        ]
        for prompt in trainer.run.run.source.all_prompts()
        for name in [prompt.meta["environment"]]
    }
    assert shown == {"echo": [True, False], "wordle": [False, True]}
    trainer.train()


def test_a_model_whose_template_ignores_tools_is_refused_before_the_first_step(by_heart):
    from tests.fakes import bpe_tokenizer

    from gruppo.trl import GRPOConfig, GRPOTrainer

    model, _ = by_heart
    data = datasets.Dataset.from_dict({"prompt": [user(PRODUCT)] * 8})
    options = {"processing_class": bpe_tokenizer(), "train_dataset": data, "tools": [multiply]}
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0], GRPOConfig("out", **SHORT), **options
    )
    with pytest.raises(GruppoError, match="template"):
        trainer.train()
