"""Decoding by the parts of a decoder gives what reading every row again gives, whoever comes and
leaves."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.fakes import biased_llama, llama, qwen2, qwen3
from torch import nn

from gruppo.modalities.text.backbones import Backbone, CachedDecoding, RereadDecoding
from gruppo.modalities.text.decoder import read_decoder
from gruppo.modalities.text.decoding import FusedDecoder, LayeredDecoding, fused, lean_norm


def multi_head():
    """A head of keys for each head of queries."""
    return qwen2(num_key_value_heads=4)


def one_head_of_keys():
    return llama(num_key_value_heads=1)


KINDS = [llama, qwen2, qwen3, biased_llama, multi_head, one_head_of_keys]

PROMPTS = [torch.arange(7, 7 + length) * 37 % 250 for length in (5, 1, 17)]
OWNERS = torch.tensor([2, 0, 0, 1, 0, 2, 0])
"""Groups of unequal size whose rows do not lie side by side."""
COLUMNS = 8
LEAVING = {3: [6, 5, 4, 3, 2, 1], 6: [5, 0, 2, 4], COLUMNS + 2: [1, 0, 3], COLUMNS + 5: [1]}
"""Which slots go on after which step: first one leaves a hole in the grid, then groups vanish."""


@pytest.fixture(autouse=True)
def buffers_that_grow_often(monkeypatch):
    monkeypatch.setattr(LayeredDecoding, "columns", COLUMNS)


def layered(module, prompts=PROMPTS, owners=OWNERS, prefixes=None):
    fused_decoder = FusedDecoder(read_decoder(module), module.get_output_embeddings())
    return LayeredDecoding(fused_decoder, prompts, owners, prefixes)


@torch.no_grad()
def worst_errors(made, needed, steps=2 * COLUMNS + 3):
    """Of each step's logits: root mean square of the difference over that of the logits about their
    mean."""
    errors, generator = [], torch.Generator().manual_seed(0)
    for step in range(steps):
        of = needed.logits.float()
        scale = (of - of.mean(dim=-1, keepdim=True)).norm()
        errors.append(float((made.logits.float() - of).norm() / scale))
        if step in LEAVING:
            for decoding in (made, needed):
                decoding.select(torch.tensor(LEAVING[step]))
        tokens = torch.randint(250, (len(needed.logits),), generator=generator)
        for decoding in (made, needed):
            decoding.advance(tokens)
    return errors


@pytest.mark.silent_bug(4)
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_the_logits_are_those_of_reading_every_row_again(make):
    """Ragged prompts and groups, rows that leave, and buffers that grow twice."""
    policy = make()
    module = policy.module
    errors = worst_errors(
        layered(module), RereadDecoding(Backbone(module, splits=True), PROMPTS, OWNERS)
    )
    assert max(errors) < 5e-6


@pytest.mark.silent_bug(4)
@pytest.mark.parametrize("owners", [[1, 0], [2, 0, 1], [1, 1, 0, 0]])
def test_rows_of_a_full_grid_may_lie_in_any_order(owners):
    """Two that change places are where their inverse puts them: that alone does not make the grid's
    order theirs."""
    module, owners = llama().module, torch.tensor(owners)
    prompts = PROMPTS[: int(owners.max()) + 1]
    made = layered(module, prompts, owners)
    needed = RereadDecoding(Backbone(module, splits=True), prompts, owners)
    with torch.no_grad():
        for step in range(3):
            torch.testing.assert_close(made.logits, needed.logits, rtol=0, atol=2e-5)
            for decoding in (made, needed):
                decoding.advance(torch.arange(len(owners)) + step)


def test_in_bfloat16_it_is_as_near_to_the_exact_logits_as_the_cached_decoding_is():
    module = qwen3().module
    narrow = copy.deepcopy(module)
    for parameter in narrow.parameters():
        parameter.data = parameter.data.bfloat16()
    for exact, rounded in zip(module.parameters(), narrow.parameters(), strict=True):
        exact.data = rounded.data.float()  # one model in two precisions
    plain = Backbone(narrow, splits=True, caches=True)
    made = layered(narrow)
    ours = worst_errors(made, layered(module))
    theirs = worst_errors(CachedDecoding(plain, PROMPTS, OWNERS), layered(module))
    assert sum(ours) < 1.3 * sum(theirs)


BEHIND = [torch.arange(3, 3 + length) * 11 % 250 for length in (3, 1, 9, 2, 40, 5, 1)]
"""What the rows of OWNERS have after their prompts."""


@pytest.mark.parametrize("make", [llama, qwen3], ids=lambda make: make.__name__)
@pytest.mark.parametrize("at_once", [1, 60, 1024])
def test_rows_that_have_begun_go_on_as_from_a_prompt_of_their_own(make, at_once, monkeypatch):
    """Each prompt is read once for its rows; how many are read together changes nothing."""
    monkeypatch.setattr("gruppo.modalities.text.decoding.READ_AT_ONCE", at_once)
    module = make().module.double()
    begun = [
        torch.cat([PROMPTS[owner], prefix])
        for owner, prefix in zip(OWNERS.tolist(), BEHIND, strict=True)
    ]
    made = layered(module, PROMPTS, OWNERS, BEHIND)
    needed = layered(module, begun, torch.arange(len(begun)))
    assert made.prompts[0].shape[1] == len(PROMPTS), "each prompt is held once"
    assert max(worst_errors(made, needed)) < 1e-7


def test_a_row_that_is_not_finite_harms_no_other():
    """Not in its group, not in the others, and not once it is gone and its place in the grid is
    empty."""
    module = llama().module
    good, bad = layered(module), layered(module)
    with torch.no_grad():
        module.model.embed_tokens.weight[100] = torch.nan
    for step in range(4):
        tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7]) + step
        good.advance(tokens)
        bad.advance(torch.where(torch.arange(7) == 4, 100, tokens) if step == 1 else tokens)
    assert bad.logits.isfinite().all(dim=1).tolist() == [True] * 4 + [False] + [True] * 2
    rest = torch.tensor([0, 1, 2, 3, 5, 6])
    for decoding in (good, bad):
        decoding.select(rest)
        decoding.advance(torch.arange(6))
    assert torch.equal(bad.logits, good.logits) and good.logits.isfinite().all()


# --- parts that cannot be fused -------------------------------------------------------------------


class Adapter(nn.Module):
    """A product with something added, as an adapter does."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_products_with_something_added_are_called_as_they_are():
    module = qwen2().module
    torch.manual_seed(1)
    for block in module.model.layers:
        block.self_attn.v_proj, block.mlp.down_proj = (
            Adapter(block.self_attn.v_proj),
            Adapter(block.mlp.down_proj),
        )
    needed = RereadDecoding(Backbone(module, splits=True), PROMPTS, OWNERS)
    assert max(worst_errors(layered(module), needed, steps=12)) < 5e-6


def test_a_product_with_a_hook_is_called_so_that_its_hook_is():
    linear = nn.Linear(8, 8)
    linear.register_forward_hook(lambda module, inputs, output: output + 1)
    x = torch.ones(2, 8)
    assert torch.equal(fused(linear)(x), linear(x))


def test_without_the_operation_for_packed_weights_the_products_are_the_plain_ones(monkeypatch):
    module = llama().module
    packed = layered(module)
    monkeypatch.setattr("gruppo.modalities.text.decoding._packs", lambda weight: False)
    assert max(worst_errors(packed, layered(module), steps=8)) < 5e-6


def test_a_norm_of_another_form_is_called_as_it_is():
    class Shifted(nn.Module):
        """One plus the weight, as in Gemma."""

        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.linspace(0, 1, 8)), 1e-6

        def forward(self, x):
            return nn.functional.rms_norm(x, (8,), 1 + self.weight, self.eps)

    shifted, x = Shifted(), torch.randn(3, 8)
    assert torch.equal(lean_norm(shifted)(x), shifted(x))
    plain = llama().module.model.norm
    x = torch.randn(3, 32)
    assert lean_norm(plain) is not plain
    torch.testing.assert_close(lean_norm(plain)(x), plain(x), rtol=1e-6, atol=1e-6)
