"""Rows of several turns: what the policy chose and what it was told, over every policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, zip_longest

import pytest
import torch
from tests import tiny
from tests.fakes import (
    END,
    POLICIES,
    ByteTokenizer,
    TinyGPT,
    doubled,
    gemma2,
    gpt2,
    llama,
    mistral,
    plain,
)

from gruppo.engines import LocalEngine
from gruppo.environments import (
    ConversationEngine,
    Environment,
    completion_lengths,
    converse,
    environment_failures,
)
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.modalities.text import from_module, from_pretrained
from gruppo.modalities.text.chat import Chat
from gruppo.modalities.text.generation import cut_at_stop
from gruppo.rewards import RewardSet
from gruppo.testing import check_engine
from gruppo.types import Prompt, Request, Sampling

STOPS = tuple("aeiou0123456789 ,.-")
SAMPLING = Sampling(max_actions=12, stop=STOPS)
"""Half of the first letters end a turn, so that there are several."""
ALL = 10**9


def echo(text, turn, state):
    """Says something of its own length to each answer; a conversation of a capital letter ends."""
    state["heard"] = [*state.get("heard", []), text]
    return None if text[:1].isupper() else "no " * (len(text) % 3) + str(turn)


def texts(count=3):
    return [Request(Prompt(str(n), f"{n} + {n} =", draw=n), 4) for n in range(count)]


def talks(count=3, system=False):
    first = [{"role": "system", "content": "be brief"}] if system else []
    return [
        Request(Prompt(str(n), [*first, {"role": "user", "content": f"{n} = ?"}], draw=n), 4)
        for n in range(count)
    ]


def conversed(policy, requests=None, sampling=SAMPLING, *, seed=1, reply=echo, **changes):
    environment = Environment(reply, **changes)
    return converse(
        policy.sample,
        policy.continue_rollouts,
        environment,
        requests or texts(),
        sampling,
        seed=seed,
    )


def tiny_policy():
    return doubled(from_pretrained(tiny.model(), compute="float32"))


def ids_of(rollouts, row):
    """All that the policy had read and written at the end of a row."""
    prompt = rollouts.shared["prompt_ids"][int(rollouts.group_ids[row])]
    return [*prompt.tolist(), *rollouts.actions[row, : int(rollouts.lengths[row])].tolist()]


def logprobs_of(policy, rollouts):
    found = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, ALL):
        columns = torch.arange(found.shape[1])[micro_batch.cols]
        found[micro_batch.rows[:, None], columns] = (
            policy.likelihood(rollouts, micro_batch).logprobs.double().detach()
        )
    return found


def policies(*makes):
    """Of ``POLICIES``, those between which the claim could differ: with and without a cache, with a
    sliding window."""
    return pytest.mark.parametrize("policy", makes, indirect=True, ids=lambda make: make.__name__)


@pytest.fixture(params=POLICIES, ids=lambda make: make.__name__)
def policy(request):
    return doubled(request.param())


def test_the_ratio_starts_at_one_in_every_turn(policy):
    rollouts = conversed(policy)
    assert rollouts.per_row["turns"].max() >= 3 and not rollouts.mask.all()
    assert torch.equal(rollouts.sampler_logprobs != 0, rollouts.mask)
    torch.testing.assert_close(
        logprobs_of(policy, rollouts), rollouts.sampler_logprobs.double(), rtol=0, atol=2e-5
    )


def segments(rollouts, row):
    """Runs of columns that one side wrote: (whether the policy did, ids)."""
    length = int(rollouts.lengths[row])
    columns = zip(
        rollouts.mask[row, :length].tolist(), rollouts.actions[row, :length].tolist(), strict=True
    )
    return [
        (own, [i for _, i in run]) for own, run in groupby(columns, key=lambda column: column[0])
    ]


@policies(plain, llama)
def test_columns_are_the_policys_words_and_the_replies_in_turn(policy):
    rollouts, result = conversed(policy), policy.chat.text
    for row in range(len(rollouts)):
        runs, heard = segments(rollouts, row), rollouts.per_row["state"][row].get("heard", [])
        turns = int(rollouts.per_row["turns"][row])
        assert [own for own, _ in runs] == [True, False] * (turns - 1) + [True]
        assert len(heard) in (turns, turns - 1)
        spoken = [cut_at_stop(result(ids), STOPS) for own, ids in runs if own]
        assert spoken[: len(heard)] == heard
        replies = [echo(text, turn, {}) for turn, text in enumerate(heard[: turns - 1], 1)]
        assert [ids for own, ids in runs if not own] == [
            policy.chat.encode_text(reply) for reply in replies
        ]
        whole = "".join(a + b for a, b in zip_longest(spoken, replies, fillvalue=""))
        assert rollouts.completions[row] == whole
        assert not rollouts.mask[row, int(rollouts.lengths[row]) :].any()


@policies(plain, llama, gpt2, mistral)
def test_turns_with_nothing_said_between_them_are_one_answer(policy):
    """The random numbers of a row go on where its last turn ended."""
    alone = policy.sample(texts(), replace(SAMPLING, stop=()), seed=1)
    rollouts = conversed(policy, reply=lambda: "", turns=99)
    assert rollouts.per_row["turns"].max() > 2
    for row in range(len(alone)):
        assert ids_of(rollouts, row)[: len(ids_of(alone, row))] == ids_of(alone, row)


@policies(plain, llama, gemma2)
def test_company_order_and_growth_change_no_conversation(policy):
    whole = conversed(policy)
    assert_rows(conversed(policy, texts()[::-1]), whole, [8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3])
    assert_rows(conversed(policy, texts()[1:2]), whole, [4, 5, 6, 7])
    grown = [Request(request.prompt, 2, first=2) for request in texts()]
    assert_rows(conversed(policy, grown), whole, [2, 3, 6, 7, 10, 11])


def assert_rows(part, whole, rows):
    expected = whole.take(rows)
    for row, own in enumerate(rows):
        assert ids_of(part, row) == ids_of(whole, own)
    assert part.completions == expected.completions and part.finish == expected.finish
    assert part.per_row["state"] == expected.per_row["state"]
    assert torch.equal(part.per_row["turns"], expected.per_row["turns"])


def test_the_environments_seed_is_of_the_row_and_stays():
    policy, seen = tiny_policy(), []

    def reply(seed, turn, prompt):
        seen.append((prompt[0]["content"], seed))
        return "1"

    conversed(policy, talks(), reply=reply)
    seeds = {seed for _, seed in seen}
    assert len(seeds) == 12
    first = sorted(seen)
    seen.clear()
    conversed(policy, talks()[::-1], reply=reply)
    assert sorted(seen) == first


@pytest.mark.parametrize("system", [False, True])
def test_between_two_answers_stands_what_the_template_writes_there(system):
    """A stop text ends a turn without the end token, which the template then writes before the
    reply."""
    policy, ends = tiny_policy(), set()
    rollouts = conversed(policy, talks(6, system=system))
    eos, show = policy.chat.eos_ids[0], policy.chat.text_with_specials
    for row in range(len(rollouts)):
        runs, output = segments(rollouts, row), rollouts.completions[row]
        own = [ids for is_own, ids in runs if is_own]
        between = [show(ids) for is_own, ids in runs if not is_own]
        result = [message["content"] for message in output[1::2]]
        closed = ["" if ids[-1] == eos else "<eos>" for ids in own[:-1]]
        assert between == [
            f"{end}<user>{text}<eos><assistant>" for end, text in zip(closed, result, strict=True)
        ]
        assert [m["role"] for m in output] == [*["assistant", "user"] * (len(own) - 1), "assistant"]
        ends |= set(closed)
    assert ends == {"", "<eos>"}


LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + "
    "' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] "
    "+ ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def sentencepiece(template, style):
    """A tokenizer that puts a space before what begins a text, in the two ways in which Llama 2 and
    Mistral do."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = dict.fromkeys("▁abcdefghijklmnopqrstuvwxyzINST0123456789 .[]/|\n:")
    tokenizer = Tokenizer(
        models.BPE(
            {t: n for n, t in enumerate(["<unk>", "<s>", "</s>", *letters])}, [], unk_token="<unk>"
        )
    )
    if style == "prepend":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    own = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **own)


ONE, TWO, THREE = (
    [{"role": r, "content": c}]
    for r, c in (("user", "one"), ("assistant", "two"), ("user", "three"))
)


@pytest.mark.parametrize("style", ["prepend", "first"])
@pytest.mark.parametrize("template", [LLAMA_2, MISTRAL], ids=["llama 2", "mistral"])
def test_the_tail_of_a_conversation_has_the_tokens_that_it_has_within_it(template, style):
    """A space before the end token, and one that the tokenizer puts before a text that is alone."""
    tokenizer = sentencepiece(template, style)
    chat = Chat(tokenizer, [tokenizer.eos_token_id])
    tokens = tokenizer.convert_ids_to_tokens
    whole = tokens(tokenizer.apply_chat_template([*ONE, *TWO, *THREE], return_dict=False))
    after = whole.index("</s>") + 1
    assert tokens(chat.encode_reply(ONE, TWO, THREE, is_closed=True)) == whole[after:]
    begins = after - 1 - (template is LLAMA_2)  # its space before the end token is the template's
    assert tokens(chat.encode_reply(ONE, TWO, THREE, is_closed=False)) == whole[begins:]
    assert tokens(chat.encode_reply("one", "two", "three", is_closed=False)) == list("three")
    assert tokens(chat.encode_reply("one", "two", " 3", is_closed=False)) == ["▁", "3"]


def test_a_template_without_the_assistants_words_costs_the_row_and_is_named():
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ "
        "m['content'] }}{% endif %}{% endfor %}"
    )
    why = set(environment_failures(conversed(policy, talks())).values())
    assert len(why) == 1 and "leaves the assistant's turn out of a conversation" in why.pop()


def own_module(render):
    torch.manual_seed(0)
    return doubled(
        from_module(TinyGPT(context=96), ByteTokenizer(), eos_ids=[END], context=96, render=render)
    )


def test_a_tokenizer_of_ones_own_writes_no_messages_after_an_answer():
    policy = own_module(lambda messages: list(messages[0]["content"].encode()))
    stop = tuple(map(chr, range(32, 110)))
    rollouts = conversed(policy, talks(), replace(SAMPLING, stop=stop))
    why = set(environment_failures(rollouts).values())
    assert len(why) == 1 and "writes no messages after an answer" in why.pop()


# --- ends -----------------------------------------------------------------------------------------


def test_the_environment_ends_a_conversation_and_the_last_answer_is_answered_by_nobody():
    policy = tiny_policy()
    rollouts = conversed(
        policy, talks(), reply=lambda turn, state: state.update(asked=turn) or "1", turns=2
    )
    assert int(rollouts.per_row["turns"].max()) == 2
    two = rollouts.per_row["turns"] == 2
    assert two.any() and not rollouts.per_row["ended"].any()
    for row in two.nonzero()[:, 0].tolist():
        if rollouts.finish[row] == "stop":
            assert rollouts.per_row["state"][row] == {"asked": 2}
            assert rollouts.completions[row][-1]["role"] == "assistant"
    over = conversed(policy, talks(), reply=lambda turn: None)
    assert over.per_row["turns"].max() == 1
    assert over.per_row["ended"].tolist() == [finish == "stop" for finish in over.finish]
    alone = policy.sample(talks(), SAMPLING, seed=1)
    assert over.completions == alone.completions and over.finish == alone.finish


def test_a_row_that_was_cut_is_shown_to_its_environment_and_goes_on_no_more():
    limited = replace(SAMPLING, max_actions=3, stop=("~",))
    rollouts = conversed(
        tiny_policy(), talks(), limited, reply=lambda text, state: state.update(text=text) or "1"
    )
    assert set(rollouts.finish) == {"length"} and rollouts.per_row["turns"].max() == 1
    assert [state["text"] for state in rollouts.per_row["state"]] == [
        o[-1]["content"] for o in rollouts.completions
    ]
    over = conversed(tiny_policy(), talks(), limited, reply=lambda: None)
    assert set(over.finish) == {"length"} and over.per_row["ended"].all()


def test_of_a_text_the_policys_own_words_are_kept_beside_what_was_said():
    rollouts = conversed(doubled(llama()), reply=lambda: " because ")
    result = [False, False]
    for row in range(len(rollouts)):
        own = [ids for is_own, ids in segments(rollouts, row) if is_own]
        words = "".join(cut_at_stop(doubled(llama()).chat.text(ids), STOPS) for ids in own)
        assert rollouts.per_row["policy_text"][row] == words
        result = [
            result[0] or " because " in rollouts.completions[row],
            result[1] or " because " in words,
        ]
    assert result == [True, False]
    seen = []
    RewardSet(lambda completions: seen.extend(completions) or [0.0] * len(completions)).score(
        rollouts
    )
    assert seen == list(rollouts.per_row["policy_text"])


def test_a_reward_that_changes_a_state_changes_its_own_copy():
    rollouts = conversed(tiny_policy(), talks())

    def changes(state):
        for own in state:
            own["heard"] = 3
        return [0.0] * len(state)

    before = [dict(state) for state in rollouts.per_row["state"]]
    RewardSet(changes).score(rollouts)
    assert list(rollouts.per_row["state"]) == before


@pytest.mark.parametrize("limit", [3, 5, 12])
def test_all_turns_of_a_row_share_max_actions(limit):
    rollouts = conversed(tiny_policy(), talks(), replace(SAMPLING, max_actions=limit), turns=40)
    count = rollouts.mask.sum(dim=1)
    assert int(count.max()) == limit
    for row, finish in enumerate(rollouts.finish):
        if finish == "length":
            assert count[row] == limit
        assert finish != "stop" or count[row] <= limit
    assert "length" in rollouts.finish
    assert torch.equal(completion_lengths(rollouts), count) and (rollouts.lengths > count).any()


def test_a_full_context_ends_a_row():
    policy = tiny_policy()
    rollouts = conversed(
        policy, talks(), replace(SAMPLING, max_actions=80), reply=lambda: "1" * 30, turns=20
    )
    lengths = [len(ids_of(rollouts, row)) for row in range(len(rollouts))]
    assert max(lengths) <= tiny.CONTEXT
    full = [row for row, finish in enumerate(rollouts.finish) if finish == "length"]
    assert full and all(lengths[row] > tiny.CONTEXT - 40 for row in full)
    assert all(rollouts.mask[row, int(rollouts.lengths[row]) - 1] for row in range(len(rollouts)))


def test_a_long_reply_is_cut_in_what_is_read_and_in_what_is_said():
    rollouts = conversed(
        tiny_policy(), talks(), reply=lambda: "12345678", turns=2, max_reply_tokens=3
    )
    replies = [
        m["content"] for output in rollouts.completions for m in output if m["role"] == "user"
    ]
    assert replies and set(replies) == {"123"}
    two = [{"role": "user", "content": "12"}, {"role": "user", "content": "345"}]
    rollouts = conversed(tiny_policy(), talks(), reply=lambda: two, turns=2, max_reply_tokens=3)
    replies = [
        m["content"] for output in rollouts.completions for m in output if m["role"] == "user"
    ]
    assert set(replies) == {"12", "3"}


def test_a_failure_ends_its_row_as_an_error_and_keeps_what_was_said():
    def reply(text, turn):
        if turn == 2:
            raise ValueError("the game is gone")
        return "1"

    rollouts = conversed(tiny_policy(), talks(), reply=reply)
    failed = environment_failures(rollouts)
    assert failed and all(
        why.startswith("ValueError: the game is gone (test_conversation.py:")
        for why in failed.values()
    )
    for row, finish in enumerate(rollouts.finish):
        assert (finish == "error") == (row in failed)
        assert (rollouts.per_row["environment_failure"][row] is not None) == (row in failed)
    row = next(iter(failed))
    assert len(rollouts.completions[row]) == 3 and rollouts.per_row["turns"][row] == 2


def test_a_role_that_the_template_refuses_costs_its_row():
    policy = from_pretrained(tiny.model(), compute="float32")
    refusing = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') "
        "}}{% endif %}{% endfor %}"
    )
    policy.chat.tokenizer.chat_template = refusing + tiny.CHAT_TEMPLATE
    rollouts = conversed(
        policy, talks(), reply=lambda seed: {"role": "tool", "content": "1"} if seed % 2 else "1"
    )
    failed = environment_failures(rollouts)
    assert failed and "cannot write a conversation of user, assistant, tool: no tools" in next(
        iter(failed.values())
    )
    assert any(turns > 1 for turns in rollouts.per_row["turns"].tolist())


# --- engines and references -----------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_that_converses_keeps_the_contract_of_engines():
    policy = tiny_policy()
    engine = ConversationEngine(
        LocalEngine(policy, version=3), Environment(echo), policy.check_prompt
    )
    rollouts = engine.generate(talks(), SAMPLING, seed=1)
    assert rollouts.completions == conversed(policy, talks()).completions
    assert torch.equal(rollouts.policy_version, rollouts.mask * 3)
    check_engine(engine, policy, [request.prompt for request in talks()], sampling=SAMPLING)


@pytest.mark.parametrize("make", [llama], ids=lambda make: make.__name__)
def test_a_reference_converses_as_the_policy_it_was(make):
    policy = make()
    reference = ReferenceModel(policy)
    first = conversed(policy)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(0.5) if parameter.requires_grad else None
    policy.refresh(force=True)
    with reference.active() as own:
        again = converse(
            own.sample, own.continue_rollouts, Environment(echo), texts(), SAMPLING, seed=1
        )
    assert again.completions == first.completions != conversed(policy).completions
