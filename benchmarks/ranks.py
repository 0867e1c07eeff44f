"""Memory, step time and saves of several ranks: weights sharded with FSDP2 against whole replicas.

``python -m benchmarks.ranks``: a Llama of 350M random weights on 1, 2 and 4 ranks of this machine
(gloo, one thread each). Memory is what a process holds after an optimizer step, with gradients and
optimizer state there, less what it held after its imports and the start of its process group; the
ideal saving of n ranks is 1 - 1/n of what one process holds. A save is timed by what the step waits
for it and until the checkpoint is complete. ``--document docs/guides/many-gpus.md`` writes the
table between its marks.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.report import heading, machine
from benchmarks.tables import markdown

VARIANTS = ((1, "none"), (2, "none"), (2, "fsdp"), (4, "fsdp"))
SIZES = {
    "350M": {
        "hidden_size": 1024,
        "intermediate_size": 2944,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}
VOCABULARY = {"350M": 32_000, "tiny": 64}
BEGIN, END = "<!-- ranks -->", "<!-- end ranks -->"


def policy_of(size: str) -> Any:
    """A chat model of random weights, of which no row ends before its last token."""
    import torch
    from tests.tiny import character_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    from gruppo.modalities.text.load import from_transformers

    shape = LlamaConfig(vocab_size=VOCABULARY[size], tie_word_embeddings=True, **SIZES[size])
    with no_init_weights():  # which takes longer than a step
        module = LlamaForCausalLM(shape)
    module.tie_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(
                std=0.02, generator=generator
            )
    policy = from_transformers(module, character_tokenizer(), compute="float32")
    policy.chat.eos_ids = ()
    return policy


def held() -> int:
    """Bytes resident now, without what was freed and the allocator keeps."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return memory.held()


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Steps and a save on this rank."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import transformers.models.llama.modeling_llama  # noqa: F401  # part of the imports, not of the model

    from benchmarks.runs import one_step
    from benchmarks.workloads import alternating
    from gruppo import distributed as dist
    from gruppo.build import Parts, build
    from gruppo.config.schema import Config, DistributedConfig, OptimConfig, RolloutConfig
    from gruppo.trainer.run_dir import RunFolder, boundary_state

    torch.set_num_threads(1)
    config = Config(
        model="given",
        data="given",
        reward=("given",),
        name="run",
        runs_dir=spec["folder"],
        compute="float32",
        rollout=RolloutConfig(prompts=4, group_size=2, max_new_tokens=4),
        optim=OptimConfig(lr=1e-6, token_budget=256),
        distributed=DistributedConfig(shard=spec["shard"]),
    )
    dist.init(600)
    dist.all_max(0)
    fixed = held()
    rows = [{"prompt": f"{n} + {n} = "} for n in range(64)]
    run, _ = build(config, Parts(model=policy_of(spec["size"]), data=rows, rewards=[alternating]))
    after_update, real = [0], run.optimizer.step

    def step() -> None:
        real()
        after_update.append(held() - fixed)

    run.optimizer.step = step  # type: ignore[method-assign]
    steps = [one_step(run) for _ in range(spec["steps"] + 1)]
    folder = RunFolder(Path(spec["folder"]) / "run")
    with dist.fail_together():
        folder.create(config)
    boundary = boundary_state(run)
    began = time.perf_counter()
    folder.save(run, boundary)
    waited = time.perf_counter() - began
    folder.finish_saving()
    written = time.perf_counter() - began
    folder.close()
    parameters = sum(p.numel() for p in run.policy.module.parameters())
    dist.shutdown()
    return {
        "held_gb": after_update[-1] / memory.GB,
        "step_s": [one["seconds"] for one in steps[1:] or steps],
        "save_waited_s": waited,
        "save_written_s": written,
        "parameters": parameters,
    }


def on_ranks(count: int, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each of several processes measured."""
    with tempfile.TemporaryDirectory(prefix="gruppo-ranks-") as folder:
        text = json.dumps({**spec, "folder": folder})
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={count}",
        ]
        command += ["-m", "benchmarks.ranks", "--spec", text]
        # large tensors are given back to the system when they are freed, and are not kept by the
        # allocator
        quiet = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        }
        here = Path(__file__).parents[1]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | quiet, cwd=here, check=False
        )
        files = sorted(Path(folder).glob("rank-*.json"))
        if done.returncode or len(files) != count:
            raise SystemExit(f"{count} ranks of {spec} ended early. {done.stderr[-3000:]}")
        return [json.loads(file.read_text()) for file in files]


def summary(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each variant ``COUNT SHARD``: what the rank that has most holds, and the slowest rank's
    median step."""
    alone = max(rank["held_gb"] for rank in measured["1 none"])
    found = {}
    for name, ranks in sorted(
        measured.items(), key=lambda item: (int(item[0].split()[0]), "fsdp" in item[0])
    ):
        count, most = int(name.split()[0]), max(rank["held_gb"] for rank in ranks)
        ideal = 1 - 1 / count
        found[name] = {
            "held_gb": most,
            "ideal_gb": memory.STATE_BYTES * ranks[0]["parameters"] / count / memory.GB,
            "saving_frac": (1 - most / alone) / ideal if ideal else 0.0,
            "step_s": max(statistics.median(rank["step_s"]) for rank in ranks),
            "save_waited_s": max(rank["save_waited_s"] for rank in ranks),
            "save_written_s": max(rank["save_written_s"] for rank in ranks),
        }
    return found


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for name, s in found.items():
        count, shard = name.split()
        is_sharded = shard != "none"
        share = (
            f"{s['ideal_gb']:.2f}"
            if is_sharded or count == "1"
            else f"{s['ideal_gb'] * int(count):.2f}"
        )
        saving = f"{s['saving_frac']:.0%}" if is_sharded else ""
        saves = (f"{s['save_waited_s']:.1f}", f"{s['save_written_s']:.1f}")
        rows.append(
            (count, shard, f"{s['held_gb']:.2f}", share, saving, f"{s['step_s']:.1f}", *saves)
        )
    head = (
        "ranks",
        "shard",
        "held per rank, GB",
        "16 bytes per weight, GB",
        "of the ideal saving",
        "s a step",
    )
    return markdown((*head, "a save stops the step, s", "and is complete after, s"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="350M", choices=[*SIZES])
    parser.add_argument(
        "--variants", nargs="*", default=[], help="1:none, or some of 1:none 2:none 2:fsdp 4:fsdp"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="that are timed, after one that is not"
    )
    parser.add_argument(
        "--json", type=Path, default=None, help="write the numbers here, and keep those it has"
    )
    parser.add_argument(
        "--document", type=Path, default=None, help="write the table into this page"
    )
    parser.add_argument("--spec", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.spec:
        spec = json.loads(options.spec)
        text = json.dumps(measure(spec))
        (Path(spec["folder"]) / f"rank-{os.environ['RANK']}.json").write_text(
            text, encoding="utf-8"
        )
        return
    measured: dict[str, list[dict[str, Any]]] = {}
    if options.json is not None and options.json.is_file():
        measured = json.loads(options.json.read_text(encoding="utf-8"))["measured"]
    about = machine() | {"threads": 1}
    chosen = [
        (int(count), shard) for count, shard in (name.split(":") for name in options.variants)
    ] or VARIANTS
    for count, shard in chosen:
        if (name := f"{count} {shard}") not in measured:
            measured[name] = on_ranks(
                count, {"size": options.size, "steps": options.steps, "shard": shard}
            )
            print(f"{name}: {measured[name][0]['held_gb']:.2f} GB", file=sys.stderr, flush=True)
        if options.json:  # after each, so that what is measured is not lost
            record = {
                "benchmark": "ranks",
                "machine": about,
                "results": summary(measured),
                "measured": measured,
            }
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    found = summary(measured)
    text = (
        f"{about['date']}, {heading(about)}, {measured['1 none'][0]['parameters'] / 1e6:.0f}M "
        f"weights, float32:"
    )
    text = f"{text}\n\n{table(found)}"
    print(text)
    if options.document:
        page = options.document.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, found_end, after = rest.partition(END)
        if not found_end:
            raise SystemExit(f"{options.document} has no place {BEGIN} ... {END} for the table.")
        options.document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
