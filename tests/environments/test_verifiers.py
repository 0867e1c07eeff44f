"""Tasksets of verifiers as data and environments, with the package itself, version 0.4."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from tests.environments.adapted import said, trained

from gruppo.data.open import open_source
from gruppo.environments.verifiers import verifiers_factory
from gruppo.timeouts import awaited, call_inline
from gruppo.types import GruppoError

pytest.importorskip("verifiers")

TRACES = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class SumTask(vf.Task[Data]):
    @vf.reward
    async def correct(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        if "crash" in trace.last_reply:
            raise ValueError("boom")
        return float(len(trace.last_reply) < 5)

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4


class Config(vf.TasksetConfig):
    count: int = 4
    asks: bool = False
    broken: bool = False


class Sums(vf.Taskset[SumTask, Config]):
    def load(self):
        for i in range(self.config.count):
            data = Data(prompt=f"{i} + 1 = ?", system_prompt="Brief.", answer=str(i + 1))
            yield SumTask(data, self.config.task)


class SumsEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class SumsEnv(vf.Env[SumsEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while (
                self.taskset.config.asks
                and not segment.terminated
                and segment.last_reply != task.data.answer
            ):
                is_broken = self.taskset.config.broken and segment.last_reply[:1] in [*"abcdefg"]
                if "hang" in segment.last_reply or is_broken:
                    raise KeyError("the environment broke")
                segment = await talk.turn("Wrong, again.")


__all__ = ["Sums", "SumsEnv"]
"""


@pytest.fixture(autouse=True)
def package(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("package")
    (folder / "gruppo_sums.py").write_text(TRACES)
    monkeypatch.syspath_prepend(str(folder))


def opened(spec):
    config = SimpleNamespace(data=f"verifiers:{spec}", evaluation=SimpleNamespace(data=""))
    source = open_source(f"verifiers:{spec}", seed=0, held_out_fraction=0.0)
    prompts = sorted(source.all_prompts(), key=lambda prompt: prompt.meta["task_index"])
    return verifiers_factory(spec, config), prompts


def run(coroutine):
    return call_inline(lambda: awaited(coroutine))


def started(make, prompt):
    conversation = make()
    meta = prompt.meta
    assert run(conversation.reset(meta["taskset"], meta["task_index"], prompt.inputs)) is None
    return conversation


def test_tasks_are_prompts_with_their_answers_and_options_reach_the_taskset():
    _, prompts = opened("gruppo_sums:count=3")
    said = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "2 + 1 = ?"}]
    assert len(prompts) == 3 and prompts[2].inputs == said and prompts[2].target == "3"


@pytest.mark.parametrize(
    ("text", "score"), [("3", 1.5), ("the answer is 3", 1.0), ("4", 0.5), ("four, I think", 0.0)]
)
def test_the_reward_is_the_score_of_the_task(text, score):
    make, prompts = opened("gruppo_sums:count=3")
    conversation = started(make, prompts[2])
    assert run(conversation.step(text)) is None
    assert run(conversation.get_reward()) == score


def test_a_conversation_is_over_where_the_environment_ends_it_or_its_own_limit_does():
    make, prompts = opened("gruppo_sums:asks=true")
    again = [{"role": "user", "content": "Wrong, again."}]
    for texts, score in ((("7", "8", "2"), 1.5), (("7", "8", "9", "10"), 0.5)):
        conversation = started(make, prompts[1])
        replies = [run(conversation.step(text)) for text in texts]
        assert replies == [again] * (len(texts) - 1) + [None]
        assert run(conversation.get_reward()) == score


def test_an_exception_of_a_reward_or_an_environment_is_no_score():
    make, prompts = opened("gruppo_sums:asks=true")
    conversation = started(make, prompts[1])
    with pytest.raises(Exception, match="environment broke"):
        run(conversation.step("hang"))
    make, prompts = opened("gruppo_sums")
    conversation = started(make, prompts[1])
    with pytest.raises(Exception, match="boom"):
        run(conversation.step("2, or crash"))
        run(conversation.get_reward())


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gruppo_no_such_package", "gruppo_no_such_package"),
        ("json", "json"),
        ("gruppo_sums:count=many", "many|integer"),
        ("gruppo_sums:count", "verifiers:NAME:key=value"),
    ],
)
def test_what_is_no_taskset_is_one_line(spec, said):
    with pytest.raises(GruppoError) as error:
        opened(spec)
    assert re.search(said, str(error.value)) and "\n" not in str(error.value).strip()


@pytest.mark.parametrize("asks", ["false", "true"])
def test_ten_steps_are_trained_and_the_rewards_are_the_scores_of_the_tasks(tmp_path, asks):
    changes = {"rollout__stop": ("s", "t", "1", "2", "3"), "rollout__max_new_tokens": 12}
    data = f"verifiers:gruppo_sums:count=8,asks={asks}"
    metrics, rows = trained(tmp_path, data=data, **changes)
    assert len(metrics) == 10 and len(rows) == 120
    for row in rows:
        last = said(row)[-1].strip()
        assert row["reward"] == float(str(row["target"]) in last) + 0.5 * (len(last) < 5)
    assert max(len(said(row)) for row in rows) == (3 if asks == "true" else 1)
    assert all(
        own["environment/failed_count"] == own["reward/unscored_count"] == 0 for own in metrics
    )
