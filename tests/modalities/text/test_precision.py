"""The bfloat16 copy: where gradients go, how they add up, and when it follows its master."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.fakes import TinyGPT, gpt2, llama, requests
from torch import nn

from gruppo.modalities.text import precision
from gruppo.modalities.text.precision import ComputeCopy, faster_dtype
from gruppo.types import Sampling


class Tied(nn.Module):
    """An embedding that is also the head, a frozen layer, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.frozen = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.0 + 2**-12]))  # not a bfloat16 number

    def forward(self, ids):
        return self.head(
            torch.tanh(self.frozen(self.embedding(ids)))
            * self.scale.to(self.embedding.weight.dtype)
        )


IDS = torch.tensor([[1, 5, 3], [2, 2, 9]])


@pytest.fixture
def master():
    return Tied()


def test_gradients_arrive_in_float32_at_the_master_and_nowhere_else(master):
    copied = ComputeCopy(master, torch.bfloat16)
    copied.module(IDS).float().square().sum().backward()
    by_hand = copy.deepcopy(master).bfloat16()
    by_hand(IDS).float().square().sum().backward()
    assert master.embedding.weight.grad.dtype == torch.float32
    assert torch.equal(master.embedding.weight.grad, by_hand.embedding.weight.grad.float())
    assert all(parameter.grad is None for parameter in copied.module.parameters())
    assert master.frozen.weight.grad is None


def test_gradients_of_micro_batches_add_up_in_float32(master):
    """1 + 64 pieces of 1/512 each is 1.125; in bfloat16 each of them would be rounded away."""
    copied = ComputeCopy(master, torch.bfloat16)
    for size in [1.0] + [1 / 512] * 64:
        (copied.module.embedding.weight[0, 0] * size).backward()
    assert master.embedding.weight.grad[0, 0] == 1.125
    assert (
        torch.tensor(1.0, dtype=torch.bfloat16) + torch.tensor(1 / 512, dtype=torch.bfloat16) == 1.0
    )


@pytest.mark.parametrize(
    "make", [lambda w: w, lambda w: w.t().contiguous().t()], ids=["rows", "columns"]
)
def test_large_gradients_are_added_in_pieces_which_change_no_bit(monkeypatch, make):
    monkeypatch.setattr(
        precision, "PIECE", 20
    )  # of 11 x 8: two rows at once, and one that is left over
    torch.manual_seed(0)
    gradients = [torch.randn(11, 8).bfloat16() for _ in range(3)]
    owner, parameter = (
        nn.Parameter(torch.zeros(11, 8)),
        nn.Parameter(torch.zeros(11, 8, dtype=torch.bfloat16)),
    )
    for gradient in gradients:
        parameter.grad = make(gradient)
        precision._add_gradient(owner, parameter)
        assert parameter.grad is None
    assert torch.equal(
        owner.grad, gradients[0].float() + gradients[1].float() + gradients[2].float()
    )


def test_tied_weights_stay_tied_and_their_gradients_meet(master):
    copied = ComputeCopy(master, torch.bfloat16)
    assert copied.module.head.weight is copied.module.embedding.weight
    one = (copied.module.embedding.weight[1] * 3).sum() + (copied.module.head.weight[1] * 4).sum()
    one.backward()
    assert master.embedding.weight.grad[1].eq(7).all()


def test_a_gradient_step_of_the_master_is_what_float32_would_do_to_the_rounded_weights():
    """Two roads: the copy's gradient, and autograd through a cast in the forward."""
    torch.manual_seed(0)
    master = TinyGPT()
    copied = ComputeCopy(master, torch.bfloat16)
    ids = torch.arange(6)[None]
    copied.module(ids).float().logsumexp(-1).sum().backward()
    cast = {name: value.bfloat16() for name, value in master.named_parameters()}
    out = torch.func.functional_call(master, cast, (ids,)).float().logsumexp(-1).sum()
    names = [name for name, _ in master.named_parameters()]
    for name, gradient in zip(
        names, torch.autograd.grad(out, list(master.parameters())), strict=True
    ):
        assert torch.equal(gradient, master.get_parameter(name).grad), name


@pytest.mark.silent_bug(9)
@pytest.mark.parametrize("fused", [True, False])
def test_the_copy_follows_an_optimizer_step_without_being_told(master, fused):
    copied = ComputeCopy(master, torch.bfloat16)
    copied.module(IDS).float().sum().backward()
    torch.optim.AdamW([master.embedding.weight], lr=0.5, fused=fused).step()
    copied.refresh()
    assert torch.equal(copied.module.embedding.weight, master.embedding.weight.bfloat16())


@pytest.mark.silent_bug(9)
def test_a_change_behind_autograds_back_is_seen_with_force(master):
    copied = ComputeCopy(master, torch.bfloat16)
    master.embedding.weight.data.mul_(2)
    copied.refresh(force=True)
    assert torch.equal(copied.module.embedding.weight, master.embedding.weight.bfloat16())


def test_buffers_keep_their_precision():
    policy = llama(compute="bfloat16")
    dtypes = {name: value.dtype for name, value in policy.copy.module.named_buffers()}
    assert dtypes and set(dtypes.values()) == {torch.float32}
    assert {p.dtype for p in policy.copy.module.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in policy.module.parameters()} == {torch.float32}


@pytest.mark.silent_bug(28)
@pytest.mark.parametrize("make", [llama, gpt2], ids=lambda make: make.__name__)
def test_a_step_too_small_for_bfloat16_moves_the_master(make):
    policy = make(compute="bfloat16")
    rollouts = policy.sample(requests(4), Sampling(max_actions=6), seed=0)
    before = [parameter.detach().clone() for parameter in policy.module.parameters()]
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, 10**9):
        policy.likelihood(rollouts, micro_batch).logprobs.sum().backward()
    torch.optim.AdamW(policy.module.parameters(), lr=1e-6, weight_decay=0.0).step()
    trained = [
        (old, new)
        for old, new in zip(before, policy.module.parameters(), strict=True)
        if new.grad is not None
    ]
    had_gradient = sum(int((new.grad != 0).sum()) for _, new in trained)
    moved = sum(int(((old != new) & (new.grad != 0)).sum()) for old, new in trained)
    in_bfloat16 = sum(int((old.bfloat16() != new.bfloat16()).sum()) for old, new in trained)
    assert moved / had_gradient > 0.9 and in_bfloat16 / had_gradient < 0.05


def test_the_faster_dtype_is_one_of_two():
    assert faster_dtype(8, rows=4) in (torch.float32, torch.bfloat16)
