"""Three updates by the trainer's own code, on one process or on one rank of several with sharded
weights.

Started on several ranks by test_sharding.py, and called in its process for the numbers of one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tests import fakes, fakes_diffusion
from tests.modalities.restoration import fakes as pictures
from tests.modalities.updates import SAMPLING, Case, Variant, batch_of, disturb, run_of
from torch import Tensor

from gruppo import distributed as dist
from gruppo.build import adamw
from gruppo.config.schema import Stage
from gruppo.core.objective import PRESETS
from gruppo.distributed import sharding
from gruppo.modalities.common.critic import SharedCritic
from gruppo.modalities.common.lora import adapter_weights
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.modalities.diffusion.policy import DenoiserCritic, DenoiserPolicy
from gruppo.modalities.diffusion.unet import DenoisingUNet
from gruppo.modalities.text.critic import SeparateCritic
from gruppo.protocols import ValueHeadMixin
from gruppo.trainer.run import Run
from gruppo.trainer.update import update
from gruppo.types import Rollouts, Sampling

CPU = torch.device("cpu")
STEPS = 3
ROWS = 9
DEALS: dict[str, dict[int, list[list[int]]]] = {
    "unequal rows": {2: [[8, 0, 5, 2, 4, 6], [3, 7, 1]], 4: [[8, 0, 5], [2, 4, 6], [3], [7, 1]]},
    "one rank keeps nothing": {
        2: [[0, 1, 2, 3, 4, 5, 6, 8], [7]],
        4: [[0, 1, 2], [7], [3, 4, 5, 6], [8]],
    },
}
"""Rows of each rank; row 7 is not scored. With a small budget, a rank with more rows has more
micro-batches."""


@dataclass(frozen=True)
class Setup:
    """What is trained, and on which rows."""

    make: Callable[[torch.dtype], tuple[Any, Rollouts]]
    objective: str = "grpo"
    critic: str = "none"
    rule: Any = "frozen"
    kl: Any = "k3"
    deal: str = "unequal rows"
    budget: int = 60
    dtype: torch.dtype = torch.float64
    mode: Any = "fsdp"
    is_recomputed: bool = False
    is_offloaded: bool = False
    limits: tuple[float, float] | None = None
    """Relative to the largest entry: of the first gradients, and of all numbers; None for those of
    the dtype."""


def text(
    make: Callable[[], Any], dtype: torch.dtype, *, sampling: Sampling = SAMPLING
) -> tuple[Any, Rollouts]:
    policy = make() if dtype == torch.float32 else fakes.doubled(make())
    return policy, fakes.ragged(policy.sample(fakes.requests(4, 2, 3), sampling, seed=3))


def denoised(make: Callable[[], Any], dtype: torch.dtype) -> tuple[Any, Rollouts]:
    fake = make() if dtype == torch.float32 else fakes_diffusion.doubled(make())
    return fake.policy, fakes_diffusion.sampled(fake)


def pipeline(kind: str, dtype: torch.dtype, *, lora: bool = False) -> tuple[Any, Rollouts]:
    """A diffusers pipeline, or an adapter on one."""
    from tests.modalities.diffusion import test_pipelines

    fake = test_pipelines.made(getattr(test_pipelines, kind), dtype=dtype)
    if lora:
        test_pipelines.add_adapter(fake.policy, rank=2, alpha=4)
        for number, weight in enumerate(adapter_weights(fake.policy.module).values()):
            torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(number))
    return fake.policy, test_pipelines.sampled(fake, 4, 2, 3)


def unet() -> Any:
    """gruppo's own UNet, whose blocks are no list, with weights that are not 0."""
    fake = fakes_diffusion.flow_sde()
    torch.manual_seed(0)
    module = DenoisingUNet(
        (1, 8, 8), fakes_diffusion.CLASSES, width=16
    )  # 2 channels a group: of 1, biases would have no gradient
    with torch.no_grad():
        module.conv_out[2].weight.normal_(std=0.1)
    old = fake.policy.denoiser
    policy = DenoiserPolicy(
        module,
        (1, 8, 8),
        predicts="velocity",
        schedule=old.schedule,
        condition=old.condition,
        middle="middle",
    )
    return replace(fake, policy=policy)


def restored(make: Callable[[], Any], dtype: torch.dtype) -> tuple[Any, Rollouts]:
    policy = make() if dtype == torch.float32 else pictures.doubled(make())
    return policy, pictures.sampled(policy)


SETUPS: dict[str, Setup] = {
    "tied head": Setup(partial(text, fakes.llama), budget=30),
    "tied head, float32": Setup(partial(text, fakes.llama), dtype=torch.float32),
    "untied head": Setup(partial(text, fakes.qwen2)),
    "truncated sampling": Setup(
        partial(text, fakes.qwen2, sampling=replace(SAMPLING, top_k=20, top_p=0.9))
    ),
    "own forward, packed rows": Setup(partial(text, fakes.gpt2), is_recomputed=True),
    "own forward, padded rows": Setup(partial(text, fakes.plain)),
    "one rank keeps nothing": Setup(partial(text, fakes.llama), deal="one rank keeps nothing"),
    "one piece on each rank": Setup(partial(text, fakes.qwen3), budget=10**9),
    "adapter": Setup(partial(text, fakes.adapted), rule="adapter_off"),
    "adapter, mixed reference, separate critic": Setup(
        partial(text, fakes.adapted), "ppo", "separate", "ema"
    ),
    # this model amplifies rounding: cut into other micro-batches on one process, the third
    # gradients differ by 8e-4
    "adapter on 4 bits": Setup(
        partial(text, fakes.four_bit), rule="adapter_off", dtype=torch.float32, limits=(1e-5, 5e-3)
    ),
    "mixed reference": Setup(partial(text, fakes.llama), rule="ema"),
    # one row per micro-batch, however many ranks there are: then the first gradients are sums of
    # the same numbers. Afterwards, weights that differ in float32 round to other numbers of
    # bfloat16.
    "bfloat16": Setup(
        partial(text, partial(fakes.of, "Qwen2", compute="bfloat16")),
        dtype=torch.float32,
        budget=1,
        limits=(1e-5, 1e-2),
    ),
    "weights on the CPU": Setup(partial(text, fakes.qwen2), "ppo", "separate", is_offloaded=True),
    "diffusers unet": Setup(partial(pipeline, "sd15"), kl="exact", budget=8),
    "diffusers transformer, adapter": Setup(
        partial(pipeline, "sd3", lora=True),
        rule="adapter_off",
        kl="exact",
        budget=8,
        dtype=torch.float32,
    ),
    "shared critic": Setup(partial(text, fakes.llama), "ppo", "shared", is_recomputed=True),
    "separate critic": Setup(
        partial(text, fakes.qwen2), "ppo", "separate", deal="one rank keeps nothing"
    ),
    "shared critic, float32": Setup(
        partial(text, fakes.qwen2), "ppo", "shared", dtype=torch.float32
    ),
    "denoiser": Setup(partial(denoised, fakes_diffusion.flow_sde), kl="exact", budget=4),
    "unet with a separate critic": Setup(
        partial(denoised, unet), "ppo", "separate", kl="exact", budget=8
    ),
    "restoration": Setup(partial(restored, pictures.pixels), kl="exact", budget=1),
    "restoration, one rank keeps nothing": Setup(
        partial(restored, pictures.low_resolution),
        kl="exact",
        budget=1,
        deal="one rank keeps nothing",
    ),
    "restoration, the action alone": Setup(
        partial(restored, pictures.band_gains), kl="exact", budget=2
    ),
    "hybrid": Setup(partial(text, fakes.qwen2), mode="hybrid"),
}
if find_spec("bitsandbytes") is None:
    del SETUPS["adapter on 4 bits"]
if find_spec("diffusers") is None or find_spec("PIL") is None:
    del SETUPS["diffusers unet"], SETUPS["diffusers transformer, adapter"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    # a small eps makes steps of full size of gradients that are rounding errors; at a rate of 1e-2,
    # float32's rounding grows to 2e-5 in the third gradient
    "adamw": partial(torch.optim.AdamW, lr=3e-3, eps=1e-3, weight_decay=0.1, fused=True),
}

_FIRST = ("tied head", "one rank keeps nothing", "shared critic", "denoiser")
_ADAMW = (
    "tied head, float32",
    "adapter, mixed reference, separate critic",
    "own forward, padded rows",
)
_ADAMW += ("restoration", "unet with a separate critic", "weights on the CPU")
_LATER = ("mixed reference", "bfloat16", "weights on the CPU", "adapter on 4 bits")
_LATER += ("diffusers unet", "diffusers transformer, adapter")
_FOUR = (
    "tied head",
    "one rank keeps nothing",
    "adapter, mixed reference, separate critic",
    "denoiser",
    "hybrid",
)
CASES: dict[tuple[int, str], list[tuple[str, str]]] = {
    (2, "first"): [("tied head", "adamw"), *((name, "sgd") for name in _FIRST)],
    (2, "more"): [
        (name, "adamw" if name in _ADAMW else "sgd")
        for name in SETUPS
        if name not in (*_FIRST, *_LATER, "hybrid")
    ],
    (2, "later"): [
        (name, "adamw" if name in _ADAMW else "sgd") for name in _LATER if name in SETUPS
    ],
    (4, "first"): [("tied head", "adamw"), *((name, "sgd") for name in _FOUR)],
}
"""Setups and optimizers by number of ranks; the first part is soon over, and shows most faults."""


def run_for(setup: Setup) -> tuple[Run, Any, Batch]:
    """A run with whole weights, its step's parameters, and the batch of all ranks."""
    policy, rollouts = setup.make(setup.dtype)
    reference = ReferenceModel(policy, rule=setup.rule, rate=0.5, every=int(setup.rule == "ema"))
    critic: Any = SharedCritic(policy) if isinstance(policy, ValueHeadMixin) else None
    if not reference.shares_module:
        disturb(reference.module, 0.03 if setup.kl == "k3" else 0.01)
    if critic is not None:
        disturb(critic.module, 0.3)
    batch = replace(
        batch_of(policy, reference, rollouts, setup.dtype), ref=None
    )  # evaluated beside each micro-batch
    if setup.critic == "separate":
        policy.value_head = None
        is_denoiser = isinstance(policy, DenoiserPolicy)
        critic = DenoiserCritic(policy) if is_denoiser else SeparateCritic(policy)
        disturb(critic.module["head"], 0.3)
    objective = replace(PRESETS[setup.objective], kl=setup.kl, kl_in="loss")
    case = Case(policy, reference, critic, batch)
    stage = Stage(kl_coef=0.1, entropy_coef=0.05)
    run, step_params = run_of(case, Variant(batch, policy, setup.budget), objective, stage)
    return run, step_params, batch


def shard(run: Run, mode: Any, *, device: torch.device, is_offloaded: bool) -> None:
    """As ``build`` does."""
    apply = partial(sharding.shard, mode=mode, device=device, is_offloaded=is_offloaded)
    run.policy.shard(apply)
    if run.critic is not None:
        run.critic.shard(apply)
    assert run.reference is not None
    run.reference.shard(apply)


def move(run: Run, device: torch.device) -> None:
    run.policy.to(device)
    assert run.reference is not None
    run.reference.module.to(device)
    for module in (
        getattr(run.policy, "value_head", None),
        None if run.critic is None else run.critic.module,
    ):
        if module is not None:
            module.to(device)


def three_steps(
    name: str, optimizer: str, *, device: torch.device = CPU, is_forced: bool = False
) -> dict[str, Tensor]:
    """Gradients of each step and weights after them by name, whole; this rank's part of the batch
    is learned from.

    ``is_forced``: one rank is sharded too, over itself.
    """
    setup = SETUPS[name]
    run, step_params, batch = run_for(setup)
    if device != CPU:
        move(run, device)
    mode = setup.mode if dist.world_size() == 4 or setup.mode == "fsdp" else "fsdp"
    if mode == "hybrid":
        sharding._mesh = None  # of the cases before
    if dist.world_size() > 1 or is_forced:
        if setup.is_recomputed:
            run.policy.recompute()
        shard(run, mode, device=device, is_offloaded=setup.is_offloaded)
        for unit in sharding.sharded_units(run.policy.module):
            group = unit._get_fsdp_state()._fsdp_param_group
            assert all(
                parameter.offload_to_cpu == setup.is_offloaded for parameter in group.fsdp_params
            )
    if dist.world_size() > 1:
        batch = batch.take(torch.tensor(DEALS[setup.deal][dist.world_size()][dist.rank()]))
    found: dict[str, Tensor] = {}
    kind: Any = OPTIMIZERS[optimizer]

    class Recording(kind.func):  # type: ignore[name-defined, misc]
        def step(self, *args: Any) -> Any:
            for parameter_name, parameter in zip(run.parameter_names, run.parameters, strict=True):
                if parameter.grad is not None:
                    found[f"gradient {step} {parameter_name}"] = (
                        sharding.whole(parameter.grad).detach().clone()
                    )
            return super().step(*args)

    kept = ("params", "is_critic", "lr_factor", "norm")
    groups = [
        {key: group[key] for key in kept}
        for group in adamw(run.policy, run.critic, run.config).param_groups
    ]
    run.optimizer = Recording(groups, **kind.keywords)
    for step in range(STEPS):
        stats, _ = update(run, batch, step_params)
        found |= {
            f"stat {step} {stat}": torch.tensor([s.count, s.sum, s.min, s.max])
            for stat, s in stats.items()
        }
        assert run.reference is not None
        run.reference.update(run.policy, step + 1)
    for parameter_name, parameter in zip(run.parameter_names, run.parameters, strict=True):
        found[f"weight {parameter_name}"] = sharding.whole(parameter.detach()).clone()
    if run.reference.follows_policy:
        found |= {
            f"weight reference {n}": sharding.whole(t).clone()
            for n, t in run.reference.state_dict().items()
        }
        found["weight distance"] = torch.tensor(run.reference.distance(run.policy))
    cut = run.policy.micro_batches(batch.rollouts, batch.loss_mask, setup.budget)
    found["own micro-batches"] = torch.tensor(
        [int(n) for n in dist.all_gather(str(len(cut)).encode())]
    )
    assert all(
        math.isfinite(float(tensor.abs().max()))
        for key, tensor in found.items()
        if not key.startswith("stat")
    )
    return found


def main(out: str, part: str) -> None:
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) == 4:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    fakes.wide_folder()
    dist.init(60)
    cases = CASES[dist.world_size(), part]
    results = {f"{name} {optimizer}": three_steps(name, optimizer) for name, optimizer in cases}
    if dist.is_main():
        torch.save(results, Path(out) / f"{dist.world_size()} {part}.pt")
    dist.shutdown()
