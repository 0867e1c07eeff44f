"""Writing rows token by token: what ends a row, what it then holds, and which rows the decoding
still carries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gruppo.modalities.text.generation import cut_at_stop, generate
from gruppo.types import Sampling

SIZE = 5


class Scripted:
    """Rows that are certain of their next token; None stands for logits that are not finite. Notes
    who is carried."""

    def __init__(self, *scripts):
        self.scripts, self.rows, self.t = scripts, list(range(len(scripts))), 0
        self.carried, self.fed = [], []

    @property
    def logits(self):
        self.carried.append(list(self.rows))
        logits = torch.full((len(self.rows), SIZE), -50.0)
        for slot, row in enumerate(self.rows):
            token = self.scripts[row][self.t] if self.t < len(self.scripts[row]) else 1
            if token is None:
                logits[slot, 2] = torch.nan
            else:
                logits[slot, token] = 50.0
        return logits

    def advance(self, tokens):
        self.fed.append(tokens.tolist())
        self.t += 1

    def select(self, slots):
        self.rows = [self.rows[slot] for slot in slots.tolist()]


def written(
    *scripts, columns=4, eos_ids=(0,), stop=(), text=lambda ids: "".join("abcde"[i] for i in ids)
):
    decoding = Scripted(*scripts)
    uniforms = torch.full((len(scripts), columns), 0.5, dtype=torch.float64)
    chat = SimpleNamespace(eos_ids=eos_ids, text_with_specials=text)
    return decoding, generate(decoding, uniforms, Sampling(stop=stop), chat)


@pytest.mark.silent_bug(14)
def test_the_end_token_is_counted_and_nothing_after_it_even_where_it_is_also_the_padding():
    _, got = written([1, 2, 0, 3], [0, 0, 0, 0], [1, 1, 1, 1])
    assert got.lengths.tolist() == [3, 1, 4]
    assert got.tokens.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert got.finish == ("stop", "stop", "length")


@pytest.mark.silent_bug(15)
def test_any_of_several_end_tokens_ends_a_row_and_one_in_the_last_column_is_no_truncation():
    _, got = written([1, 3, 2, 2], [1, 1, 1, 0], [2, 2, 2, 2], eos_ids=(0, 3))
    assert got.finish == ("stop", "stop", "length") and got.lengths.tolist() == [2, 4, 4]


@pytest.mark.silent_bug(15)
def test_a_stop_text_ends_a_row_also_where_it_spans_tokens():
    _, got = written([1, 2, 3, 4], [2, 1, 2, 1], [4, 4, 4, 4], stop=("cd", "bc"))
    assert got.lengths.tolist() == [2, 3, 4] and got.finish == ("stop", "stop", "length")


def test_a_row_that_is_not_finite_ends_as_an_error_with_what_it_had_and_harms_no_other():
    alone = written([1, 2, 3, 0])[1]
    _, got = written([4, None, 1, 1], [1, 2, 3, 0], [None, 1, 1, 1])
    assert got.finish == ("error", "stop", "error") and got.lengths.tolist() == [1, 4, 0]
    assert torch.equal(got.tokens[1], alone.tokens[0]) and torch.equal(
        got.logprobs[1], alone.logprobs[0]
    )
    assert got.logprobs.isfinite().all()


def test_finished_rows_leave_the_decoding_once_they_are_an_eighth_of_it():
    scripts = [[0]] + [[1, 0]] + [[1, 1, 1, 1]] * 15
    decoding, _ = written(*scripts)
    sizes = [len(rows) for rows in decoding.carried]
    assert (
        sizes[0] == 17 and min(sizes) == 15 and 16 not in sizes
    )  # one of 17 waits for company; two leave together
    assert decoding.fed[0][0] == 0, "a finished row that still waits is fed padding"


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (("##",), "one "),
        (("two", "##"), "one "),
        ((" ",), "one"),
        (("never",), "one ## two"),
        ((), "one ## two"),
    ],
)
def test_text_is_cut_at_the_first_of_the_stop_texts(stop, left):
    assert cut_at_stop("one ## two", stop) == left
