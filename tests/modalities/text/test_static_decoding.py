"""Decoding in static buffers, run on the CPU without a graph, against decoding with buffers that
grow."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.fakes import STREAMING, llama

from gruppo.modalities.text import static_decoding
from gruppo.modalities.text.backbones import RereadDecoding
from gruppo.modalities.text.decoder import read_decoder
from gruppo.modalities.text.decoding import FusedDecoder, LayeredDecoding
from gruppo.modalities.text.static_decoding import StaticDecoding

named = {"ids": lambda make: make.__name__}
PROMPTS = [torch.tensor([5, 9, 2]), torch.tensor([7]), torch.tensor([3, 3, 8, 1, 6, 2])]
OWNERS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])


def opened(kind, policy, **options):
    module = policy.compute_module
    if kind is RereadDecoding:
        return RereadDecoding(policy.backbone, PROMPTS, OWNERS)
    fused = FusedDecoder(read_decoder(module), module.get_output_embeddings())
    return kind(fused, PROMPTS, OWNERS, **options)


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setattr(StaticDecoding, "columns", 4)


@pytest.mark.parametrize("make", STREAMING, **named)
@torch.no_grad()
def test_logits_are_those_of_rows_that_are_read_again_whichever_leave(make, small_buffers):
    policy = make()
    static, plain = opened(StaticDecoding, policy), opened(RereadDecoding, policy)
    sizes = set()
    for t in range(11):
        torch.testing.assert_close(static.logits, plain.logits, rtol=1e-3, atol=1e-3)
        if t in (2, 5, 6):  # one leaves, most leave (their buffers are moved), and one of the rest
            kept = torch.tensor({2: [0, 1, 2, 3, 5, 6, 7], 5: [1, 4, 6], 6: [0, 2]}[t])
            static.select(kept)
            plain.select(kept)
        tokens = (torch.arange(len(plain.logits)) * 5 + t) % 40
        static.advance(tokens)
        plain.advance(tokens)
        sizes.add(static.tokens.data_ptr())
    assert static.groups * static.width < len(OWNERS) and 1 < len(sizes) <= 5


@pytest.mark.parametrize("kind", [StaticDecoding, LayeredDecoding], **named)
def test_buffers_are_freed_with_the_decoding_before_the_collector_runs(kind):
    decoding = opened(kind, llama())
    decoding.advance(torch.arange(len(OWNERS)))
    buffer = weakref.ref(decoding.suffixes[0])
    gc.disable()
    try:
        del decoding
        assert buffer() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_step_reads_and_writes_the_same_memory_until_its_sizes_change(monkeypatch):
    """What a recorded step needs: its buffers stay, and no number of the host is in it."""
    policy = llama()
    static = opened(StaticDecoding, policy)
    static.advance(torch.zeros(len(OWNERS), dtype=torch.long))
    buffers = [static.tokens, static.column, static.slots, *static.suffixes, *static.prompts]
    places = [buffer.data_ptr() for buffer in buffers]
    run, numbers = static._step, []

    def counted():
        sizes = (static.suffixes[0].shape[2], static.prompts[0].shape[2])
        numbers.append((static.groups, static.width, *sizes))
        return run()

    monkeypatch.setattr(static, "_step", counted)
    for t in range(5):
        static.advance(torch.full((len(OWNERS),), t))
    static.select(torch.arange(7))
    static.advance(torch.full((7,), 3))
    assert [buffer.data_ptr() for buffer in buffers] == places
    assert static.column.tolist() == [6] and len(set(numbers)) == 1


@pytest.mark.parametrize("fault", [False, True])
def test_a_step_is_recorded_at_its_second_call_or_run_plainly_with_one_warning(
    fault, monkeypatch, caplog
):
    calls = []

    class Recorder:
        def __init__(self, graph, **options):
            assert options == {"capture_error_mode": "thread_local"}

        def __enter__(self):
            if fault:
                raise RuntimeError("operation not permitted when stream is capturing\nlong")

        def __exit__(self, *error):
            return None

    class Recorded:
        def replay(self):
            calls.append("replay")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", Recorder)
    monkeypatch.setattr(StaticDecoding, "can_record", True)
    step = StaticDecoding._step
    monkeypatch.setattr(StaticDecoding, "_step", lambda self: calls.append("step") or step(self))
    for _ in range(2):
        decoding = opened(StaticDecoding, llama())
        for _ in range(3):
            decoding.advance(torch.zeros(len(OWNERS), dtype=torch.long))
    if fault:
        assert calls == ["step"] * 6
        (warning,) = [r.getMessage() for r in caplog.records if r.name == static_decoding.log.name]
        assert "capturing" in warning and "\n" not in warning and "slower" in warning
    else:
        assert calls == ["step", "step", "replay", "replay"] * 2
