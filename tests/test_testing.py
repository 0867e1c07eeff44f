"""The public checks: parts that keep their contract pass, and each way of breaking it is caught and
named."""

from __future__ import annotations

import copy
import json
import random
import time
from dataclasses import replace

import pytest
import torch
from tests.fakes import POLICIES, llama, plain, prompts
from torch import nn

import gruppo
from gruppo.engines import LocalEngine
from gruppo.modalities.text import TextPolicy
from gruppo.protocols import Policy
from gruppo.seeds import uniforms_at
from gruppo.testing import ContractError, check_engine, check_policy, check_reward
from gruppo.types import DataError, GruppoError, Likelihood, MicroBatch, Prompt, Rollouts, Sampling

PROMPTS = prompts()


def test_the_checks_are_public_and_their_error_is_ours_and_an_assertion():
    assert gruppo.check_policy is check_policy and gruppo.check_engine is check_engine
    assert gruppo.check_reward is check_reward
    assert issubclass(ContractError, GruppoError) and issubclass(ContractError, AssertionError)


# --- policies -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", POLICIES, ids=lambda make: make.__name__)
def test_every_policy_of_ours_keeps_the_contract(make):
    check_policy(make(), PROMPTS, sampling=Sampling(max_actions=4))


def test_an_outside_policy_that_shares_no_code_with_ours_keeps_it():
    check_policy(Bigram(), ["a", "bb"], sampling=Sampling(max_actions=4))


def test_the_module_is_restored():
    policy = plain()
    policy.module.train()
    policy.module.blocks[0].eval()
    policy.module.head.weight.grad = torch.full_like(policy.module.head.weight, 3.0)
    before = {name: value.clone() for name, value in policy.module.state_dict().items()}
    check_policy(policy, PROMPTS)
    assert all(
        torch.equal(value, before[name]) for name, value in policy.module.state_dict().items()
    )
    assert policy.module.head.weight.grad.eq(3).all() and policy.module.tokens.weight.grad is None
    assert policy.module.training and not policy.module.blocks[0].training


class Bigram(Policy):
    """The next token from the last one: a whole policy in thirty lines, and what the broken ones
    below start from."""

    def __init__(self):
        torch.manual_seed(0)
        self.module = nn.Embedding(64, 64)

    def sample(self, requests, sampling, *, seed):
        if sampling.top_k or sampling.top_p < 1:
            raise GruppoError("this policy has no top-k and no top-p; leave them out.")
        rows = [
            (g, request.first + i)
            for g, request in enumerate(requests)
            for i in range(request.size)
        ]
        actions = torch.zeros(len(rows), sampling.max_actions, dtype=torch.long)
        logprobs = torch.zeros(actions.shape)
        for row, (g, sample) in enumerate(rows):
            uniforms = self.uniforms(seed, requests[g].prompt, sample, row, sampling.max_actions)
            last = self.start(requests[g].prompt)
            for t in range(sampling.max_actions):
                logits = self.module.weight[last].detach().double()
                if sampling.temperature:
                    chances = (logits / sampling.temperature).softmax(0)
                    last = min(int(torch.searchsorted(chances.cumsum(0), uniforms[t])), 63)
                else:
                    chances, last = logits.softmax(0), int(logits.argmax())
                actions[row, t], logprobs[row, t] = last, chances[last].log()
        full = torch.ones(actions.shape, dtype=torch.bool)
        return Rollouts(
            prompts=tuple(request.prompt for request in requests),
            group_ids=torch.tensor([g for g, _ in rows]),
            actions=actions,
            mask=full,
            lengths=full.sum(1),
            completions=tuple("" for _ in rows),
            sampler_logprobs=logprobs,
            policy_version=torch.zeros(actions.shape, dtype=torch.long),
            temperature=torch.full((len(rows),), float(sampling.temperature)),
            finish=tuple("length" for _ in rows),
        )

    def start(self, prompt):
        return ord(prompt.inputs[-1]) % 64

    def uniforms(self, seed, prompt, sample, row, n):
        return uniforms_at(seed, prompt.draw, sample, n)

    def micro_batches(self, rollouts, loss_mask, budget):
        rows = loss_mask.any(1).nonzero()[:, 0]
        columns = slice(0, loss_mask.shape[1])
        return (
            [MicroBatch(row[None], columns) for row in rows]
            if budget < 100
            else [MicroBatch(rows, columns)]
        )

    def likelihood(self, rollouts, micro_batch, *, outputs=()):
        first = torch.tensor(
            [self.start(rollouts.prompts[g]) for g in rollouts.group_ids[micro_batch.rows].tolist()]
        )
        actions = micro_batch.of(rollouts.actions)
        before = torch.cat([first[:, None], actions[:, :-1]], dim=1)
        logits = self.module(before) / rollouts.temperature[micro_batch.rows][:, None, None]
        return Likelihood(logits.log_softmax(-1).gather(-1, actions[..., None])[..., 0])


def changed(**changes):
    """A sample() whose rollouts are changed: values, or functions of the rollouts."""

    def sample(self, requests, sampling, *, seed):
        rollouts = Bigram.sample(self, requests, sampling, seed=seed)
        return replace(
            rollouts, **{k: v(rollouts) if callable(v) else v for k, v in changes.items()}
        )

    return {"sample": sample}


def resampled(change):
    """A sample() whose arguments are changed first."""

    def sample(self, requests, sampling, *, seed):
        return Bigram.sample(
            self, *change(requests, sampling, seed)[:2], seed=change(requests, sampling, seed)[2]
        )

    return {"sample": sample}


def reevaluated(change):
    """A likelihood() of changed rollouts."""

    def likelihood(self, rollouts, micro_batch, *, outputs=()):
        return Bigram.likelihood(self, change(rollouts), micro_batch)

    return {"likelihood": likelihood}


def shifted(by):
    """Log-probs changed by what the function says of (policy, rollouts, piece)."""

    def likelihood(self, rollouts, micro_batch, *, outputs=()):
        logprobs = Bigram.likelihood(self, rollouts, micro_batch).logprobs
        return Likelihood(logprobs + by(self, rollouts, micro_batch))

    return {"likelihood": likelihood}


def drop_half(self, rollouts, micro_batch):
    return nn.functional.dropout(torch.ones(()), 0.5, self.module.training) - 1


def stale_likelihood(self, rollouts, micro_batch, *, outputs=()):
    if not hasattr(self, "first_weights"):
        self.first_weights = self.module.weight.detach().clone()
    frozen = Bigram()
    frozen.module.load_state_dict({"weight": self.first_weights})
    logprobs = Bigram.likelihood(frozen, rollouts, micro_batch).logprobs.detach()
    return Likelihood(logprobs + (self.module.weight - self.module.weight.detach()).sum())


def stale_sample(self, requests, sampling, *, seed):
    if not hasattr(self, "stale"):
        self.stale = Bigram()
        self.stale.module.load_state_dict(self.module.state_dict())
    return Bigram.sample(self.stale, requests, sampling, seed=seed)


def sample_with_dropout(self, requests, sampling, *, seed):
    if not self.module.training:
        return Bigram.sample(self, requests, sampling, seed=seed)
    noisy = Bigram()
    noisy.module.weight.data = nn.functional.dropout(self.module.weight.data, 0.5)
    return Bigram.sample(noisy, requests, sampling, seed=seed)


def wider(name):
    def change(rollouts):
        return nn.functional.pad(getattr(rollouts, name), (0, 1))

    return changed(**{name: change})


def unscored(rollouts):
    logprobs = rollouts.sampler_logprobs.clone()
    logprobs[0, 0] = torch.nan
    return logprobs


def half_mask(rollouts):
    return torch.arange(rollouts.mask.shape[1]) < rollouts.lengths[:, None] // 2


def sample_halves(self, requests, sampling, *, seed):
    """Every other row half as long, so that some are padded."""
    rollouts = Bigram.sample(self, requests, sampling, seed=seed)
    short = torch.arange(len(rollouts)) % 2 == 1
    mask = ~short[:, None] | half_mask(rollouts)
    kept = {
        "actions": rollouts.actions * mask,
        "sampler_logprobs": rollouts.sampler_logprobs * mask,
    }
    return replace(rollouts, mask=mask, lengths=mask.sum(1), **kept)


BROKEN = {
    "is not a module": (
        {"module": property(lambda self: "weights", lambda self, value: None)},
        "policy.module is a str",
    ),
    "has no pieces": ({"micro_batches": None}, "has no method micro_batches"),
    "returns a list": (
        {"sample": lambda self, *a, **k: []},
        "returned a list; it needs gruppo.types.Rollouts",
    ),
    "samples a row less": (
        changed(group_ids=lambda r: r.group_ids[1:]),
        r"group_ids has the shape \[4\]; 5 samples",
    ),
    "has wide log-probs": (wider("sampler_logprobs"), r"sampler_logprobs has the shape \[5, 5\]"),
    "lacks outputs": (changed(completions=()), "0 completions and 5 finish for 5 samples"),
    "mixes groups": (changed(group_ids=lambda r: r.group_ids * 0), "samples of each prompt"),
    "repeats a prompt": (changed(prompts=lambda r: (r.prompts[0],) * 2), "samples of each prompt"),
    "masks by number": (
        changed(mask=lambda r: r.mask.long()),
        r"mask is torch.int64; it needs torch.bool",
    ),
    "masks by weight": (
        changed(mask=lambda r: r.mask.float()),
        r"mask is torch.float32; it needs torch.bool",
    ),
    "masks beyond lengths": (
        changed(lengths=lambda r: r.lengths - 1),
        "mask is True at or beyond lengths",
    ),
    "reports NaN": (changed(sampler_logprobs=unscored), "sampler_logprobs needs finite nats"),
    "reports positive nats": (
        changed(sampler_logprobs=lambda r: r.sampler_logprobs * -1),
        "at most 0 for discrete",
    ),
    "reports masked nats": (changed(mask=half_mask), "and 0 elsewhere"),
    "forgets the temperature": (
        changed(temperature=lambda r: r.temperature * 0 + 0.5),
        "temperature is",
    ),
    "finishes oddly": (changed(finish=("eos",) * 5), "finish holds {'eos'}"),
    "chooses nothing": (
        changed(mask=lambda r: r.mask & False, sampler_logprobs=lambda r: r.sampler_logprobs * 0),
        "chose no action",
    ),
    "draws globally": (
        {"uniforms": lambda self, *a: torch.rand(9).double()},
        "other actions for the same seed",
    ),
    "ignores the seed": (
        resampled(lambda r, s, seed: (r, s, 0)),
        "same actions for the seeds 0 and 1",
    ),
    "keys by batch row": (
        {"uniforms": lambda self, seed, prompt, sample, row, n: uniforms_at(seed, 0, row, n)},
        "in another order",
    ),
    "keys by batch size": (
        resampled(lambda r, s, seed: (r, s, seed + 1000 * len(r))),
        "without the others",
    ),
    "ignores first": (
        resampled(lambda r, s, seed: ([replace(x, first=0) for x in r], s, seed)),
        "numbered by Request.first",
    ),
    "reads the target": (
        {"start": lambda self, prompt: len(prompt.target or "") + 5},
        "without their target",
    ),
    "draws at temperature 0": (
        resampled(
            lambda r, s, seed: (r, replace(s, temperature=s.temperature or 1e-9 + 1.0), seed)
        ),
        "at temperature 0 gave other actions",
    ),
    "loses a row": (
        {
            "micro_batches": lambda self, r, loss_mask, budget: Bigram.micro_batches(
                self, r, loss_mask, 1
            )[1:]
        },
        "leaves out 4 of 20 kept actions",
    ),
    "repeats a row": (
        {
            "micro_batches": lambda self, r, loss_mask, budget: (
                Bigram.micro_batches(self, r, loss_mask, 1)
                + Bigram.micro_batches(self, r, loss_mask, 1)[:1]
            )
        },
        "repeats 4",
    ),
    "cuts a column": (
        {
            "micro_batches": lambda self, r, loss_mask, budget: [
                MicroBatch(p.rows, slice(0, 3)) for p in Bigram.micro_batches(self, r, loss_mask, 1)
            ]
        },
        "leaves out 5 of 20",
    ),
    "returns the wrong shape": (
        {
            "likelihood": lambda self, r, p, *, outputs=(): Likelihood(
                Bigram.likelihood(self, r, p).logprobs.sum(1)
            )
        },
        r"log-probs of the shape \(1,\) for a micro-batch of the shape \(1, 4\)",
    ),
    "is off by one": (
        reevaluated(lambda r: replace(r, actions=r.actions.roll(1, dims=1))),
        r"\(as they are\) is not their sampler_logprobs",
    ),
    "scores at temperature 1": (
        reevaluated(lambda r: replace(r, temperature=torch.ones(len(r)))),
        r"\(temperature=0.7\) is not their sampler_logprobs",
    ),
    "accepts top-k and ignores it": (
        resampled(lambda r, s, seed: (r, replace(s, top_k=0, top_p=1.0), seed)),
        "top_k=1 starts as at temperature 0 in .* it is ignored",
    ),
    "detaches": (
        {
            "likelihood": lambda self, r, p, *, outputs=(): Likelihood(
                Bigram.likelihood(self, r, p).logprobs.detach()
            )
        },
        "sends no gradient",
    ),
    "depends on piece-mates": (
        shifted(lambda self, r, micro_batch: 0.01 * (len(micro_batch.rows) == 1)),
        "depend on which rows share a micro-batch",
    ),
    "depends on the place in the batch": (
        shifted(lambda self, r, micro_batch: 0.01 * (r.group_ids[0] != 0)),
        "depend on the order of the rows|is not their sampler_logprobs",
    ),
    "reads padding": (
        {"sample": sample_halves}
        | shifted(
            lambda self, r, micro_batch: (
                0.01
                * (micro_batch.of(r.actions)[:, -1:] == 1)
                * (r.lengths[micro_batch.rows] < 4)[:, None]
            )
        ),
        "depend on actions beyond lengths",
    ),
    "scores with dropout": (shifted(drop_half), r"after module.train\(\): dropout is on"),
    "samples with dropout": (
        {"sample": sample_with_dropout},
        r"start alike after module.train\(\)",
    ),
    "scores with stale weights": ({"likelihood": stale_likelihood}, "they are stale"),
    "samples with stale weights": ({"sample": stale_sample}, "are of different weights"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_policy_that_breaks_a_rule_is_caught(how):
    attributes, message = BROKEN[how]
    policy = type("Broken", (Bigram,), attributes)()
    with pytest.raises(ContractError, match=message) as caught:
        check_policy(policy, prompts("a", "bb"), sampling=Sampling(max_actions=4))
    assert len(str(caught.value)) > 40 and "\n" not in str(caught.value)


@pytest.mark.parametrize("left_out", ["top_k", "top_p"])
def test_truncation_in_sampling_alone_is_caught(left_out):
    class Untruncated(TextPolicy):
        def likelihood(self, rollouts, micro_batch, **options):
            whole = {"top_k": 0, "top_p": 1.0}[left_out]
            per_row = rollouts.per_row | {
                left_out: torch.full_like(rollouts.per_row[left_out], whole)
            }
            return super().likelihood(replace(rollouts, per_row=per_row), micro_batch, **options)

    policy = plain()
    policy.__class__ = Untruncated
    with pytest.raises(ContractError, match=rf"\({left_out}=.*\) is not their sampler_logprobs"):
        check_policy(policy, PROMPTS)


@pytest.mark.parametrize(
    ("unusable", "message"),
    [([], "no prompts"), ([Prompt("a", "x"), Prompt("a", "y")], "one id and draw")],
)
def test_prompts_that_show_nothing_are_refused(unusable, message):
    with pytest.raises(ContractError, match=message):
        check_policy(plain(), unusable)


# --- engines --------------------------------------------------------------------------------------


class Lazy(LocalEngine):
    """Samples from weights as they were when it was made, whatever sync is given."""

    def __init__(self, policy):
        super().__init__(copy.deepcopy(policy))

    def sync(self, policy, version):
        self.version = version


class Forgetful(LocalEngine):
    """Keeps the first version number."""

    def sync(self, policy, version):
        super().sync(policy, 0)


class Unseeded(LocalEngine):
    def generate(self, requests, sampling, *, seed):
        return super().generate(requests, sampling, seed=random.randrange(10**9))


class Hot(LocalEngine):
    """Reports log-probs at temperature 1 of what it samples at another."""

    def generate(self, requests, sampling, *, seed):
        rollouts = super().generate(requests, sampling, seed=seed)
        whole = MicroBatch(torch.arange(len(rollouts)), slice(0, rollouts.mask.shape[1]))
        cold = replace(rollouts, temperature=torch.ones(len(rollouts)))
        return replace(
            rollouts, sampler_logprobs=self.policy.likelihood(cold, whole).logprobs.detach()
        )


class Closed(LocalEngine):
    close = None


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Lazy, r"after sync\(policy, 2\) the engine's sampler_logprobs are not"),
        (Forgetful, r"after sync\(policy, 1\) reports policy_version \[0\]"),
        (Unseeded, "engine.generate gave other actions for the same seed"),
        (Hot, r"after sync\(policy, 1\) the engine's sampler_logprobs are not"),
        (Closed, "has no method close"),
    ],
)
def test_an_engine_that_breaks_a_rule_is_caught(engine, message):
    policy = plain()
    with pytest.raises(ContractError, match=message):
        check_engine(
            engine(policy), policy, PROMPTS, sampling=Sampling(temperature=0.6, max_actions=6)
        )


def test_an_engine_that_keeps_the_rules_passes_and_ends_with_the_weights_it_began_with():
    policy = llama()
    engine = LocalEngine(policy)
    before = {name: value.clone() for name, value in policy.module.state_dict().items()}
    check_engine(engine, policy, PROMPTS)
    assert engine.version == 3
    assert all(
        torch.equal(value, before[name]) for name, value in policy.module.state_dict().items()
    )


# --- rewards --------------------------------------------------------------------------------------


class Model:
    """A reward object."""

    name = "model"

    def __call__(self, rollouts):
        return torch.tensor([float(len(str(output))) for output in rollouts.completions])


async def slowly(completions, **columns):
    return [1.0 for _ in completions]


@pytest.mark.parametrize(
    "reward",
    [
        "exact_match",
        "numeric_match",
        "keywords",
        "repetition_penalty",
        "length_target:50",
        lambda completions, target, **columns: [
            float(c == t) for c, t in zip(completions, target, strict=True)
        ],
        lambda completions, **columns: [None if not c else 1.0 for c in completions],
        slowly,
        Model(),
    ],
    ids=lambda reward: reward if isinstance(reward, str) else type(reward).__name__,
)
def test_rewards_that_keep_the_contract_pass(reward):
    check_reward(reward)


def short_and_right(completions, answer, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(a in text) - 0.05 * len(text.split()) for text, a in zip(texts, answer, strict=True)
    ]


def test_a_reward_is_checked_with_all_that_training_takes_as_data(tmp_path):
    messages = [{"role": "user", "content": "How much is 2 plus 3?"}]
    row = {"prompt": messages, "answer": "5"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    for data in (None, [row, row], str(tmp_path / "data.jsonl"), tmp_path / "data.jsonl"):
        check_reward(short_and_right, data)
    check_reward(
        short_and_right,
        [{"q": messages, "a": 5, "answer": "5"}],
        prompt_column="q",
        target_column="a",
    )
    check_reward(
        lambda completions: [float(len(c.split())) for c in completions],
        ["1 + 1 =", "a longer prompt"],
    )
    with pytest.raises(ContractError, match="Completions were texts"):
        check_reward(short_and_right, [{"prompt": "2 + 3 =", "answer": "5"}])
    with pytest.raises(DataError, match="there is no file"):
        check_reward(short_and_right, "nowhere.jsonl")
    with pytest.raises(ContractError, match="there are no prompts to check with"):
        check_reward(short_and_right, [])


def crashes_on_empty(completions, **columns):
    return [1.0 / len(c[0]["content"]) for c in completions]


def crashes_on_empty_text(completions, **columns):
    return [1.0 / len(c.split(" ")[0]) for c in completions]


def crashes(completions, **columns):
    return [1 / 0 for _ in completions]


def returns_one_less(completions, **columns):
    return [1.0 for _ in completions][:-1]


def returns_inf(completions, **columns):
    return [1.0 if c[0]["content"] else float("inf") for c in completions]


def sleeps(completions, **columns):
    time.sleep(0.3)
    return [0.0 for _ in completions]


def scores_nothing(completions, **columns):
    return [None for _ in completions]


def is_random(completions, **columns):
    return [random.random() for _ in completions]


def scores_in_its_own_order(completions, **columns):
    return sorted(float(len(str(c))) for c in completions)


def edits_the_prompts(completions, tags, **columns):
    for tag in tags:
        tag.append("seen")
    return [1.0 for _ in completions]


def asks_for_more(completions, solutions):
    return [1.0 for _ in completions]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            crashes_on_empty,
            "for the completion .*'content': ''}]: ZeroDivisionError.*Completions were lists of "
            "messages",
        ),
        (
            crashes_on_empty_text,
            "exception for the completion '': ZeroDivisionError.*Completions were texts",
        ),
        (
            crashes,
            "Completions were lists of messages.*Completions were texts.*Give check_reward some of "
            "your data",
        ),
        (returns_one_less, "'returns_one_less', count for the completion"),
        (returns_inf, "'returns_inf', not_finite for the completion .*'content': ''"),
        (sleeps, "'sleeps', timeout for the completion"),
        (scores_nothing, "scored none of 12 completions"),
        (is_random, "the same completions need the same scores"),
        (scores_in_its_own_order, "came in reverse"),
    ],
)
def test_a_reward_that_breaks_a_rule_is_caught(reward, message):
    with pytest.raises(ContractError, match=message):
        check_reward(reward, timeout_s=0.1 if reward is sleeps else 5.0)


def test_a_reward_that_edits_what_others_read_is_caught():
    with pytest.raises(ContractError, match="changed the prompts"):
        check_reward(edits_the_prompts, [Prompt("a", "x", meta={"tags": []})])


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (asks_for_more, DataError, "asks for 'solutions'"),
        (7, DataError, "not callable"),
        ("exact_mach", GruppoError, "Did you mean exact_match"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_as_in_training(reward, error, message):
    with pytest.raises(error, match=message):
        check_reward(reward)
