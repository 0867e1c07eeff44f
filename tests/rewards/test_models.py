"""Reward models: what they read, what they say of it, and that batches, padding and devices change
nothing."""

from __future__ import annotations

import math

import pytest
import torch
from tests.fakes import CHAT_TEMPLATE, bpe_tokenizer, causal_lm
from tests.rewards.classifiers import OTHER_MERGES, classifier, folder_of
from tests.rewards.test_step_rewards import read, written

from gruppo import check_reward
from gruppo.rewards import ProcessRewardModel, RewardModel, RewardSet, resolve_reward
from gruppo.types import DataError, GruppoError

NAN = math.nan
CHAT = [{"role": "user", "content": "ask"}]
TEXTS = ["es", "yes\n12 tes", "", "a" * 40, "12 is \u4f60\u597d", "no"]


def tokenizer_of(chats=True, **changes):
    tokenizer = bpe_tokenizer(OTHER_MERGES)
    tokenizer.chat_template = CHAT_TEMPLATE if chats else None
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def outcome(labels=1, *, chats=True, seed=0, tokenizer=None, model=None, **options):
    tokenizer = tokenizer or tokenizer_of(chats)
    return RewardModel(
        model or classifier("SequenceClassification", labels, seed=seed), tokenizer, **options
    )


def process(labels=2, *, chats=True, seed=0, **options):
    return ProcessRewardModel(
        classifier("TokenClassification", labels, seed=seed), tokenizer_of(chats), **options
    )


def alone(model, ids):
    """The module's own logits for one text, without padding."""
    with torch.no_grad():
        return model.network.module(input_ids=torch.tensor([ids])).logits[0]


def scores_of(model, completions, prompt="ask "):
    return model(prompts=[prompt] * len(completions), completions=completions)


# --- what an outcome model reads ------------------------------------------------------------------


def test_a_conversation_is_written_by_the_models_own_template():
    model = outcome()
    tokenizer = model.network.tokenizer
    text = "<|user|>ask<|end|><|assistant|>yes<|end|>"
    expected = float(alone(model, tokenizer(text)["input_ids"])[0])
    assert scores_of(model, [[{"role": "assistant", "content": "yes"}]], CHAT) == pytest.approx(
        [expected], abs=1e-5
    )
    assert scores_of(model, ["yes"], "ask") == pytest.approx([expected], abs=1e-5)
    begun = [*CHAT, {"role": "assistant", "content": "y"}]
    assert scores_of(model, ["es"], begun) == pytest.approx([expected], abs=1e-5)


def test_without_a_template_prompt_and_completion_are_one_text():
    model = outcome(chats=False)
    expected = float(alone(model, model.network.tokenizer("ask yes")["input_ids"])[0])
    assert scores_of(model, ["yes"], "ask ") == pytest.approx([expected], abs=1e-5)
    chat = float(alone(model, model.network.tokenizer("ask\nyes")["input_ids"])[0])
    assert scores_of(model, ["yes"], CHAT) == pytest.approx([chat], abs=1e-5)


@pytest.mark.silent_bug(10)
def test_the_text_is_read_by_the_models_own_tokenizer_whatever_the_policys_ids_are():
    rewards = RewardSet([outcome()])
    rollouts = written("yes", "no")
    other = written("yes", "no", end=3)
    assert rewards.score(rollouts).rewards.tolist() == rewards.score(other).rewards.tolist()
    assert rewards.names == ("reward_model",)


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.silent_bug(4)
@pytest.mark.silent_bug(24)
@pytest.mark.parametrize("pads", ["end", "own", "none"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_padding_and_order_change_no_score(pads, side):
    """Padding with the end token, with one of its own, and by a model that knows none; whatever the
    tokenizer says."""
    tokenizer = tokenizer_of(padding_side=side)
    pad = {
        "end": tokenizer.eos_token_id,
        "own": tokenizer.convert_tokens_to_ids("<|system|>"),
        "none": None,
    }[pads]
    module = classifier("SequenceClassification", pad_token_id=pad)
    model = outcome(model=module, tokenizer=tokenizer)
    expected = [float(alone(model, model.encode("ask ", text))[0]) for text in TEXTS]
    assert scores_of(model, TEXTS) == pytest.approx(expected, abs=2e-5)
    assert max(expected) - min(expected) > 1
    # transformers finds the end of a text by its padding: without padding, texts go one by one
    for model.network.batch in (1,) if pads == "none" else (1, 2, 4):
        assert scores_of(model, TEXTS[::-1])[::-1] == pytest.approx(expected, abs=2e-5)
    assert module.config.pad_token_id == pad


# --- what a model says ----------------------------------------------------------------------------


def test_one_label_is_its_logit_and_two_are_the_log_odds_of_the_second():
    one, two = outcome(1), outcome(2)
    logit = float(alone(one, one.encode("ask", "yes"))[0])
    assert scores_of(one, ["yes"], "ask") == pytest.approx([logit], abs=1e-5)
    assert scores_of(outcome(1, output="probability"), ["yes"], "ask") == pytest.approx(
        [1 / (1 + math.exp(-logit))], abs=1e-5
    )
    bad, good = alone(two, two.encode("ask", "yes")).tolist()
    assert scores_of(two, ["yes"], "ask") == pytest.approx([good - bad], abs=1e-5)
    for label in (0, "0", "LABEL_0"):
        assert scores_of(outcome(2, label=label), ["yes"], "ask") == pytest.approx(
            [bad - good], abs=1e-5
        )


def test_of_several_labels_the_odds_are_those_against_all_others():
    model = outcome(3, label=1, output="probability")
    logits = alone(model, model.encode("ask", "yes"))
    assert scores_of(model, ["yes"], "ask") == pytest.approx(
        [float(logits.softmax(-1)[1])], abs=1e-5
    )
    model.network.output = "logit"
    p = float(logits.double().softmax(-1)[1])
    assert scores_of(model, ["yes"], "ask") == pytest.approx([math.log(p / (1 - p))], abs=1e-4)
    with pytest.raises(GruppoError, match=r"it has LABEL_0, LABEL_1, LABEL_2.*label=2"):
        outcome(3)


@pytest.mark.silent_bug(27)
def test_a_model_does_not_learn_and_drops_nothing_out():
    model = outcome(model=classifier("SequenceClassification", attention_dropout=0.5).train())
    assert scores_of(model, TEXTS) == scores_of(model, TEXTS)
    assert not any(p.requires_grad for p in model.network.module.parameters())


# --- too long -------------------------------------------------------------------------------------


def test_what_is_too_long_loses_its_beginning_and_is_counted():
    tokenizer = tokenizer_of(chats=False, bos_token="<|system|>")
    model = outcome(tokenizer=tokenizer, max_length=8)
    long = [tokenizer.bos_token_id, *range(5, 25)]
    scores = RewardSet([model]).score(written("no way at all", "is"))
    assert scores.metrics["reward_metric/reward_model_truncated_frac"] == 0.5
    assert list(map(model.network.truncate, [long, long[1:], long[:8]])) == [
        [tokenizer.bos_token_id, *range(18, 25)],
        [*range(17, 25)],
        long[:8],
    ]
    end = tokenizer("no way at all")["input_ids"][-8:]
    assert scores.rewards[0] == pytest.approx(float(alone(model, end)[0]), abs=1e-5)


def test_the_longest_text_is_what_model_and_tokenizer_hold():
    assert outcome().network.max_length == 256
    assert outcome(tokenizer=tokenizer_of(model_max_length=99)).network.max_length == 99
    assert outcome(max_length=7).network.max_length == 7


# --- a process model ------------------------------------------------------------------------------


def test_each_step_is_scored_at_the_last_token_of_its_mark_in_trls_convention():
    """prompt, then each step and the separator, tokenised apart: "xt" is one token of this
    tokenizer otherwise."""
    model, tokenizer = process(separator="x"), tokenizer_of()
    ids = [
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in ("ask ", "yes", "x", "tes", "x")
    ]
    assert sum(map(len, ids)) > len(tokenizer("ask yesxtesx")["input_ids"])
    flat, ends = (
        [i for part in ids for i in part],
        [sum(map(len, ids[:3])) - 1, sum(map(len, ids)) - 1],
    )
    expected = alone(model, flat).softmax(-1)[ends, 1].tolist()
    (scores,) = scores_of(model, ["yesxtes"])
    assert scores == pytest.approx(expected, abs=1e-5)
    (alike,) = scores_of(model, ["yesx xtesx"])
    assert alike == scores  # blank parts are no steps
    (first,) = scores_of(model, ["yes"])
    assert first[0] == pytest.approx(scores[0], abs=1e-6)  # which has read nothing that came later


def test_steps_of_a_process_model_are_placed_on_the_policys_tokens():
    model = process(output="logit")
    rewards = RewardSet([model])
    rewards.set_decoder(read)
    scores = rewards.score(written("yes\nno", "12"))
    alone_scores = [row for text in ("yes\nno", "12") for row in scores_of(model, [text], "ask")]
    placed = scores.steps["process_reward"]
    assert placed.isfinite().nonzero().tolist() == [[0, 3], [0, 6], [1, 2]]
    assert placed[0, [3, 6]].tolist() == pytest.approx(alone_scores[0], abs=2e-5)
    assert placed[1, 2].item() == pytest.approx(alone_scores[1][0], abs=2e-5)


def test_steps_that_a_cut_text_has_lost_are_unscored():
    model = process(max_length=6)
    (scores,) = scores_of(model, ["yes\ntes\n12 12 12"])
    assert scores[:2] == [None, None] and scores[2] is not None
    rewards = RewardSet([model])
    rewards.set_decoder(read)
    scores = rewards.score(written("yes\ntes\n12 12 12"))
    assert scores.steps["process_reward"].isfinite().sum() == 1 and scores.failures == ()


# --- folders and options --------------------------------------------------------------------------


def test_a_folder_is_named_with_its_options_and_keeps_the_contract(tmp_path):
    path = folder_of(tmp_path / "rm", "SequenceClassification", 2)
    model = resolve_reward(f"reward_model:{path},label=0,output=probability,name=kind")
    network = model.network
    assert (network.label, network.output) == (0, "probability")
    assert RewardSet([model]).names == ("kind",)
    plain = outcome(2, label=0, output="probability")
    assert scores_of(model, TEXTS) == pytest.approx(scores_of(plain, TEXTS), abs=1e-6)
    check_reward(f"reward_model:{path},max_length=999")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("reward_model", "it needs model"),
        (
            "reward_model:{rm},lable=1",
            r"no option 'lable'\. Did you mean label\? It has model, output, name, label",
        ),
        ("reward_model:{rm},label=good", "got label='good'; it has LABEL_0, LABEL_1"),
        ("reward_model:{rm},label=2", "got label='2'"),
        ("reward_model:{rm},max_length=many", "max_length=many is no int"),
        ("reward_model:{rm},trust_remote_code=perhaps", "trust_remote_code=perhaps is no bool"),
        ("reward_model:{rm},output=odds", "output=odds is not one of logit, probability"),
        ("reward_model:{rm},dtype=int8", "dtype=int8 is not one of float32"),
        ("reward_model:{rm},separator=;", r"no option 'separator'\. It has model"),
        ("reward_model:{lm}", "holds a LlamaForCausalLM and lacks score.weight.*random weights"),
        ("reward_model:{prm}", "is a LlamaForTokenClassification.*Write process_reward:{prm}"),
        ("process_reward:{rm}", "is a LlamaForSequenceClassification.*Write reward_model:{rm}"),
        ("process_reward:{prm},separator=", "separator='' splits nothing"),
        ("reward_model:{none}", "could not be loaded"),
        ("reward_model:{bare}", r"could not be loaded: [^:]+\. Use a folder"),
        ("reward_model:{empty}", "could not be loaded"),
        ("reward_modle:x", "Did you mean reward_model"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(folders, spec, why):
    places = {name: str(path) for name, path in folders.items()}
    with pytest.raises(GruppoError, match=why.format(**places)):
        resolve_reward(spec.format(**places))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tokenizer_of().save_pretrained(root / "lm")
    causal_lm("Llama").save_pretrained(root / "lm")
    classifier("SequenceClassification").save_pretrained(root / "bare")  # without a tokenizer
    (root / "empty").mkdir()
    return {
        "rm": folder_of(root / "rm", "SequenceClassification", 2),
        "prm": folder_of(root / "prm", "TokenClassification", 2),
        **{name: root / name for name in ("lm", "bare", "empty", "none")},
    }


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(GruppoError, match="knows 5 token ids, and its tokenizer writes"):
        outcome(
            model=classifier("SequenceClassification", vocab_size=5, pad_token_id=0, eos_token_id=1)
        )
    with pytest.raises(GruppoError, match="needs its tokenizer"):
        RewardModel(classifier("SequenceClassification"))


def test_a_module_of_the_other_kind_is_found_out_when_it_speaks():
    with pytest.raises(GruppoError, match="or the reward process_reward"):
        scores_of(RewardModel(classifier("TokenClassification", 2), tokenizer_of()), ["yes"])
    with pytest.raises(GruppoError, match="or the reward reward_model"):
        scores_of(
            ProcessRewardModel(classifier("SequenceClassification", 2), tokenizer_of()), ["yes"]
        )


def test_a_mark_that_the_tokenizer_does_not_know_is_refused():
    class Deaf(type(tokenizer_of())):
        def __call__(self, text, **rest):
            return {"input_ids": []} if text == "\n" else super().__call__(text, **rest)

    tokenizer = tokenizer_of()
    tokenizer.__class__ = Deaf
    with pytest.raises(GruppoError, match="has no token for"):
        ProcessRewardModel(classifier("TokenClassification", 2), tokenizer)


def test_a_score_that_is_not_finite_costs_its_row_alone():
    model = outcome()
    with torch.no_grad():
        model.network.module.score.weight.fill_(NAN)
    scores = RewardSet([model]).score(written("a", "b"))
    assert scores.rewards.isnan().all() and {f.kind for f in scores.failures} == {"not_finite"}
    with pytest.raises(DataError, match="not callable"):
        resolve_reward(3)
