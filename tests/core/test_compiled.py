"""What is compiled on CUDA, run on the CPU as it is or through aot_eager, gives the numbers of the
plain path."""

from __future__ import annotations

import pytest
import torch
from tests.core.test_linear_head import ROWS, WIDTH, a_head, both, inputs
from torch.utils.checkpoint import checkpoint

from gruppo.core import compiled, linear_head
from gruppo.core.compiled import Compiled
from gruppo.core.linear_head import _gradient, _summary


@pytest.fixture(params=["as it is", "aot_eager"])
def compiled_tiles(request, monkeypatch):
    monkeypatch.setattr(linear_head, "TILE_ON_CPU", (4, 8))
    monkeypatch.setattr(compiled, "DEVICES", {"cpu"})
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    if request.param == "as it is":
        monkeypatch.setattr(Compiled, "_compiled", property(lambda self: self.function))
    tiles = Compiled(_summary, "log-probs"), Compiled(_gradient, "gradient")
    monkeypatch.setattr(linear_head, "compiled_summary", tiles[0])
    monkeypatch.setattr(linear_head, "compiled_gradient", tiles[1])
    yield
    assert not any(tile.has_failed for tile in tiles)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_fused_tiles_of_the_head_have_the_log_probs_entropies_and_gradients_of_whole_logits(
    bias, entropy, compiled_tiles
):
    features, actions, temperature = inputs(ROWS)
    head = a_head(bias=bias, scale=3.0)
    for ours, theirs in both(head, features.requires_grad_(), actions, temperature, entropy):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


def test_a_token_that_a_bias_forbids_has_no_mass_and_no_gradient(compiled_tiles):
    features, actions, temperature = inputs(ROWS)
    head = a_head()
    with torch.no_grad():
        head.bias[3] = -torch.inf
    actions[actions == 3] = 4
    found = list(both(head, features.requires_grad_(), actions, temperature, "value"))
    assert all(bool(ours.isfinite().all()) for ours, _ in found)
    assert found[-2][0].shape[-1] == WIDTH and float(found[-2][0][3].abs().max()) == 0


@pytest.mark.parametrize(
    "error", [RuntimeError("Cannot find a working triton installation.\nmore"), KeyError("sm_50")]
)
def test_a_function_that_does_not_compile_runs_as_it_is_with_one_warning(
    error, monkeypatch, caplog
):
    def failing(*args):
        raise error

    monkeypatch.setattr(compiled, "DEVICES", {"cpu"})
    doubled = Compiled(lambda x: 2 * x, "doubling")
    monkeypatch.setattr(Compiled, "_compiled", property(lambda self: failing))
    assert [float(doubled(torch.tensor(n))) for n in (1.0, 2.0)] == [2, 4]
    (record,) = caplog.records
    assert "doubling: the compiled form failed, so the plain path is used" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_recomputation_that_ends_early_is_no_failure_to_compile(monkeypatch):
    monkeypatch.setattr(compiled, "DEVICES", {"cpu"})
    monkeypatch.setattr(Compiled, "_compiled", property(lambda self: self.function))
    function = Compiled(lambda x: x.sin().exp().mul(2), "a layer", needs_compiling=True)
    x = torch.tensor([0.3, 1.0], requires_grad=True)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.sin().exp().detach() * x.cos().detach())
    assert not function.has_failed


def test_nothing_is_compiled_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **options: pytest.fail("compiled"))
    assert float(Compiled(torch.sin, "sine")(torch.zeros(()))) == 0
