"""Keys and values that are kept between turns: the same conversations as reading each history
again."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.environments.test_conversation import (
    SAMPLING,
    conversed,
    ids_of,
    logprobs_of,
    talks,
    texts,
)
from tests.fakes import biased_llama, doubled, gpt2, llama, mistral, qwen3

from gruppo.engines import LocalEngine
from gruppo.environments import ConversationEngine, Environment
from gruppo.modalities.text import backbones, decoding, from_pretrained, generation
from gruppo.modalities.text.decoding import LayeredDecoding
from gruppo.modalities.text.static_decoding import StaticDecoding

LONG = replace(SAMPLING, max_actions=20)
named = {"ids": lambda value: getattr(value, "__name__", None)}


@pytest.fixture
def reads_again(monkeypatch):
    def set_limit():
        monkeypatch.setattr(generation, "KEPT_FRAC", 0.0)

    return set_limit


def assert_same(one, other, atol=1e-7):
    assert torch.equal(one.lengths, other.lengths) and torch.equal(one.mask, other.mask)
    assert torch.equal(one.actions, other.actions) and one.finish == other.finish
    assert one.completions == other.completions
    torch.testing.assert_close(one.sampler_logprobs, other.sampler_logprobs, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", [LayeredDecoding, StaticDecoding], **named)
@pytest.mark.parametrize("make", [llama, qwen3, biased_llama], **named)
@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 40}, {"top_p": 0.7}, {"temperature": 0.6}], ids=str
)
def test_every_turn_scores_as_it_was_sampled(make, changes, kind, monkeypatch):
    """In float64, with rows that end at different turns and replies of different lengths."""
    monkeypatch.setattr(backbones, "LayeredDecoding", kind)
    policy = doubled(make())
    rollouts = conversed(policy, texts(4), replace(LONG, **changes))
    turns = rollouts.per_row["turns"]
    assert turns.max() >= 4 and len(turns.unique()) >= 3 and not rollouts.per_row["reencoded"].any()
    torch.testing.assert_close(
        logprobs_of(policy, rollouts), rollouts.sampler_logprobs.double(), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("kind", [LayeredDecoding, StaticDecoding], **named)
@pytest.mark.parametrize("at_once", [1, 30, 1024])
def test_conversations_are_those_of_reading_each_history_again(
    kind, at_once, monkeypatch, reads_again
):
    """However many columns are read at once, and with buffers that grow within a turn."""
    monkeypatch.setattr("gruppo.modalities.text.decoding.READ_AT_ONCE", at_once)
    monkeypatch.setattr(backbones, "LayeredDecoding", kind)
    monkeypatch.setattr(kind, "columns", 2)
    policy = doubled(llama())
    fast = conversed(policy, texts(4), LONG)
    reads_again()
    slow = conversed(policy, texts(4), LONG)
    assert_same(fast, slow)
    assert not fast.per_row["reencoded"].any()
    assert torch.equal(slow.per_row["reencoded"], slow.per_row["turns"] - 1)


@pytest.mark.parametrize("make", [gpt2, mistral], **named)
def test_models_whose_layers_cannot_be_run_one_by_one_read_again(make):
    rollouts = conversed(make(), texts(4), LONG)
    assert torch.equal(rollouts.per_row["reencoded"], rollouts.per_row["turns"] - 1)


def test_what_does_not_fit_into_memory_is_read_again_and_counted(monkeypatch):
    policy = doubled(llama())
    whole = conversed(policy, texts(4), LONG)
    monkeypatch.setattr(generation, "free_bytes", lambda device: 120_000)
    some = conversed(policy, texts(4), LONG)
    assert_same(some, whole)
    assert 0 < some.per_row["reencoded"].sum() < (some.per_row["turns"] - 1).sum()


def tokens_read(policy, run):
    """Tokens that go through the model in ``run``."""
    count = [0]
    embedding = policy.compute_module.get_input_embeddings()
    handle = embedding.register_forward_hook(
        lambda module, inputs, out: count.__setitem__(0, count[0] + inputs[0].numel())
    )
    try:
        return run(), count[0]
    finally:
        handle.remove()


def test_a_prompt_is_read_once_for_its_group_and_each_further_token_once(reads_again):
    policy = doubled(llama())
    rollouts, count = tokens_read(policy, lambda: conversed(policy, texts(3), LONG))
    prompts = sum(map(len, rollouts.shared["prompt_ids"]))
    assert rollouts.per_row["turns"].max() >= 4
    # the last token of a row is not read; a stream is padded, and a finished row may wait until an
    # eighth has finished
    assert count <= prompts + int(rollouts.lengths.sum()) + 32
    reads_again()
    assert tokens_read(policy, lambda: conversed(policy, texts(3), LONG))[1] > 1.5 * count


@pytest.mark.parametrize("way", ["in place", "sync", "fused"])
def test_new_weights_drop_what_the_old_ones_read(way, reads_again):
    """Changed while the environment replies, as a publish between two turns would."""

    def run(limited):
        policy = from_pretrained(tiny.model(), compute="bfloat16" if way == "sync" else "float32")
        engine = ConversationEngine(
            LocalEngine(policy), Environment(change, turns=3), policy.check_prompt
        )
        state = {"policy": policy, "engine": engine, "turn": 0}
        change.state = state
        if limited:
            reads_again()
        return engine.generate(talks(), LONG, seed=1)

    def change(turn):
        state = change.state
        if turn > state["turn"]:
            state["turn"] = turn
            policy = state["policy"]
            if way == "fused":
                weights = list(policy.module.parameters())
                for weight in weights:
                    weight.grad = torch.ones_like(weight)
                torch.optim.AdamW(weights, lr=1e-2, fused=True).step()
            else:
                with torch.no_grad():
                    for weight in policy.module.parameters():
                        (weight if way == "in place" else weight.data).mul_(0.9)
                if way == "sync":
                    state["engine"].sync(policy, 1)
        return "1"

    fast, slow = run(False), run(True)
    assert_same(fast, slow, atol=1e-5)
    assert fast.per_row["turns"].max() == 3
    assert torch.equal(fast.per_row["reencoded"], fast.per_row["turns"] - 1)


def test_kept_keys_are_freed_at_the_end_and_when_a_row_has_no_further_turn(monkeypatch):
    alive, seen = weakref.WeakSet(), []

    class Watched(decoding.KeptRow):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            alive.add(self)

    monkeypatch.setattr(decoding, "KeptRow", Watched)

    def reply(turn, seed):
        seen.append((turn, len(alive)))
        return None if seed % 3 == 0 else "1"

    rollouts = conversed(doubled(llama()), talks(), LONG, reply=reply)
    assert len(alive) == 0 and "kept" not in rollouts.per_row
    assert max(n for turn, n in seen if turn == 1) > max(n for turn, n in seen if turn == 3) > 0


def test_kept_rows_of_all_batches_hold_one_copy_of_the_weights(monkeypatch):
    alive, seen = weakref.WeakSet(), []

    class Watched(decoding.FusedDecoder):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            alive.add(self)

    def reply(turn):
        seen.append(len(alive))
        return "1"

    policy = doubled(llama())
    whole = conversed(policy, texts(3), LONG, reply=lambda: "1")
    monkeypatch.setattr(backbones, "FusedDecoder", Watched)
    monkeypatch.setattr("gruppo.modalities.text.policy.BATCH_ROWS", 4)
    assert_same(conversed(policy, texts(3), LONG, reply=reply), whole)
    assert max(seen) == 1 and not alive  # 0 where no row has a further turn


def test_nothing_is_kept_where_no_further_turn_can_follow(monkeypatch):
    calls = []
    monkeypatch.setattr(decoding.LayeredDecoding, "keep", lambda self, *row: calls.append(row))
    policy = llama()
    assert "kept" not in policy.sample(texts(), SAMPLING, seed=1).per_row
    conversed(policy, turns=1)
    assert calls == []
    conversed(policy, turns=2)
    assert calls != []


def test_rollouts_that_are_continued_twice_go_on_alike_both_times():
    """Two branches of one history: the first takes what was kept, the second reads again."""
    policy = doubled(llama())
    requests = [replace(request, has_more_turns=True) for request in texts()]
    first = policy.sample(requests, SAMPLING, seed=1)
    zeros = torch.zeros(len(first), dtype=torch.long)
    own = {
        "sample": torch.arange(len(first)) % 4,
        "text": first.completions,
        "environment_failure": (None,) * len(first),
    }
    first = replace(
        first, per_row={**first.per_row, **own, "context_full": zeros, "reencoded": zeros}
    )
    replies = {row: "no" for row, finish in enumerate(first.finish) if finish == "stop"}
    one, two = (policy.continue_rollouts(first, replies, SAMPLING, seed=1) for _ in range(2))
    assert_same(one, two)
    assert not one.per_row["reencoded"].any() and two.per_row["reencoded"].sum() == len(replies) > 3
    # what was kept of other tokens is not used; of a turn of one token, only the prompt has been
    # read
    changed = policy.sample(requests, SAMPLING, seed=1)
    changed = replace(
        changed,
        per_row={**first.per_row, "kept": changed.per_row["kept"]},
        actions=first.actions + 1,
    )
    assert torch.equal(
        policy.continue_rollouts(changed, replies, SAMPLING, seed=1).per_row["reencoded"],
        (first.lengths > 1).long(),
    )


def test_threads_that_converse_at_once_do_not_mix_what_they_keep():
    policy = doubled(llama())
    seeds, done = (1, 2, 3), {}
    alone = {seed: conversed(policy, talks(), LONG, seed=seed) for seed in seeds}
    threads = [
        threading.Thread(
            target=lambda s=s: done.__setitem__(s, conversed(policy, talks(), LONG, seed=s))
        )
        for s in seeds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in seeds:
        assert_same(done[seed], alone[seed])
        assert not done[seed].per_row["reencoded"].any()


# --- the model's context --------------------------------------------------------------------------


def test_a_turn_that_does_not_fit_the_context_is_left_out_with_its_reply():
    """The row then ends behind its last whole turn; the turn would have gone beyond the context."""
    policy = doubled(from_pretrained(tiny.model(), compute="float32"))
    sampling = replace(SAMPLING, max_actions=80, stop=SAMPLING.stop[:6])
    options = {"sampling": sampling, "reply": lambda turn: "1" * (9 + turn), "turns": 20}
    rollouts = conversed(policy, talks(), **options)
    policy.context = None
    whole = conversed(policy, talks(), **options)
    full = rollouts.per_row["context_full"].bool()
    assert full.sum() > 3 and not whole.per_row["context_full"].any()
    has_room = []
    for row in range(len(rollouts)):
        length, ids, all_ids = int(rollouts.lengths[row]), ids_of(rollouts, row), ids_of(whole, row)
        assert ids == all_ids[: len(ids)] and rollouts.mask[row, length - 1]
        assert len(rollouts.completions[row]) == 2 * int(rollouts.per_row["turns"][row]) - 1
        if full[row]:
            following = [*whole.mask[row, length:].tolist(), False]
            begins = following.index(True)  # the reply, then the turn that was left out
            has_room.append(len(ids) + begins < tiny.CONTEXT)
            assert begins > 0 and rollouts.finish[row] == "length"
            assert len(ids) <= tiny.CONTEXT < len(ids) + following.index(False, begins)
        else:
            assert ids == all_ids
    assert any(has_room), "the context cuts a turn that has begun"
