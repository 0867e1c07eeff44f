"""What ``benchmarks.lora`` compares."""

from __future__ import annotations

import torch
from benchmarks import lora
from tests import tiny

from gruppo.modalities.text import decoding


def test_sides_write_the_same_number_of_tokens_and_one_calls_pefts_layers(monkeypatch, capsys):
    policy, packed = lora.opened(tiny.model(), "float32", 2), []
    block_diag = torch.block_diag  # of the adapters' B, once for each product
    monkeypatch.setattr(torch, "block_diag", lambda *parts: packed.append(1) or block_diag(*parts))
    assert (
        lora.sampling(policy, 3, 5)[0] == 3 * 5 and len(packed) == 2 * 4
    )  # qkv, o, gate and up, down of each layer
    packed.clear()
    before = decoding.low_rank
    assert lora.sampling(policy, 3, 5, is_called=True)[0] == 3 * 5 and not packed
    assert decoding.low_rank is before
    options = {
        "--model": tiny.model(),
        "--compute": "float32",
        "--rank": "2",
        "--rows": "2",
        "--new-tokens": "3",
    }
    lora.main([word for option in options.items() for word in option] + ["--turns", "1"])
    output = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in output if line[20:].startswith("no adapter")] == [
        "1.00",
        "1.00",
    ]
    assert len(output) == 2 + 3 + 2


def test_each_side_is_compared_with_the_turn_beside_it():
    result = lora.summarise({"no adapter": [10.0, 20.0, 40.0], "adapter": [5.0, 20.0, 30.0]})
    assert result["adapter"] == {"median": 20.0, "min": 5.0, "max": 30.0, "of_plain": 0.75}
