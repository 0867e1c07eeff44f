"""Ranks of a sharded run without its forward passes: gradients that depend on the step and on the
parameter alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from gruppo import distributed as dist
from gruppo.build import Parts, adamw, build
from gruppo.config import serialization
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder, boundary_state, tensors_of


def sharded_run(config: dict[str, Any], kind: str) -> Run:
    """A run whose layers are sharded; ``kind`` "hybrid" replicates the shards, "none" has whole
    weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run, _ = build(serialization.from_dict(config), Parts())
    if dist.world_size() == 1 or kind == "none":
        return run
    world = dist.world_size()
    shape, names = (
        ((world,), ("shard",)) if kind == "fsdp" else ((2, world // 2), ("replicate", "shard"))
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    modules: list[Any] = (
        [run.policy.module] if run.critic is None else [run.policy.module, run.critic.trunk]
    )
    for module in modules:
        for layer in module.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    if run.critic is not None:
        head: Any = run.critic.module
        fully_shard(head["head"], mesh=mesh)
    run.engine.sync = lambda policy, version: None  # type: ignore[method-assign]  # nothing is sampled
    return replace(run, optimizer=adamw(run.policy, run.critic, run.config))


def learn(run: Run, steps: int) -> None:
    """Steps of AdamW, the same on any number of ranks to the bit, since all of it is per
    element."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for _ in range(steps):
        for number, parameter in enumerate(run.parameters):
            generator = torch.Generator().manual_seed(1000 * run.state.step + number)
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.state.step += 1


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}


def save(config: dict[str, Any], kind: str, learned: Sequence[int]) -> None:
    """Learn for some steps and save in the background, again and again, while one more step is
    learned from."""
    dist.init(60)
    run, folder = sharded_run(config, kind), RunFolder(Path(config["runs_dir"]) / config["name"])
    with dist.fail_together():
        folder.create(run.config)
    for steps in learned:
        learn(run, steps - run.state.step)
        folder.finish_saving()
        folder.save(run, boundary_state(run))
        learn(run, 1)  # must not be in what is saved
    folder.finish_saving()
    folder.close()
    dist.shutdown()


def compare(config: dict[str, Any], cases: Sequence[tuple[str, str, int]], expected: str) -> None:
    """Compare what is restored of (run, kind of sharding, step) with one process that learned as
    much.

    Then save it again, as ``RUN-KIND-RANKS``.
    """
    dist.init(60)
    for name, kind, step in cases:
        run, folder = sharded_run(config, kind), RunFolder(Path(config["runs_dir"]) / name)
        assert folder.restore(run) and run.state.step == step
        restored, tensors = everything(run), load_file(f"{expected}/{step}.safetensors")
        assert restored.keys() == tensors.keys()
        for tensor_name, tensor in tensors.items():
            assert torch.equal(restored[tensor_name], tensor), f"{kind}: {tensor_name}"
        again = RunFolder(Path(config["runs_dir"]) / f"{name}-{kind}-{dist.world_size()}")
        with dist.fail_together():
            again.create(run.config)
        again.save(run, boundary_state(run))
        again.finish_saving()
        again.close()
    dist.shutdown()


def everything(run: Run) -> dict[str, Tensor]:
    """Whole tensors of a run by name."""
    return {
        f"{file}:{n}": t
        for file, tensors in tensors_of(run).items()
        for n, t in whole(tensors or {}).items()
    }
