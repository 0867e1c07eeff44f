"""Peak memory of a training step: all weights or an adapter, and each kind of reference.

``python -m benchmarks.references``: steps of the arithmetic recipe (SmolLM2-135M), 12 prompts x 8
completions, each variant in processes of its own with one thread. Memory is the most that a process
held during its steps less what it held after its imports. ``--document docs/guides/references.md``
writes the table between its marks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.report import heading, machine
from benchmarks.tables import markdown
from benchmarks.workloads import alternating

RANK = 16
NONE, FROZEN, MIXED = {"kl_coef": 0.0}, {"kind": "frozen"}, {"kind": "mixed", "update_every": 1}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "all weights, no reference": NONE,
    "all weights, frozen": FROZEN,
    "all weights, frozen, on the CPU": FROZEN | {"place": "cpu"},
    "all weights, mixed": MIXED,
    "all weights, mixed, on the CPU": MIXED | {"place": "cpu"},
    f"LoRA {RANK}, no reference": NONE | {"rank": RANK},
    f"LoRA {RANK}, frozen: adapter off": FROZEN | {"rank": RANK},
    f"LoRA {RANK}, mixed: second adapter": MIXED | {"rank": RANK},
}
BEGIN, END = "<!-- references -->", "<!-- end -->"


def config(spec: Mapping[str, Any]) -> Any:
    """The recipe, smaller, with a reference or none."""
    from dataclasses import replace

    from gruppo.config.schema import LoraConfig, ReferenceConfig, Stage
    from gruppo.modalities.text.memory import TOKENS_ON_CPU
    from gruppo.recipes.arithmetic import arithmetic

    base = arithmetic()
    settings = {name: spec[name] for name in ("kind", "place", "update_every") if name in spec}
    return replace(
        base,
        model=spec["model"] or base.model,
        compute=spec["compute"],
        rollout=replace(base.rollout, prompts=spec["prompts"]),
        optim=replace(
            base.optim, token_budget=TOKENS_ON_CPU
        ),  # not fewer where others use the memory
        stage=Stage(kl_coef=spec.get("kl_coef", 0.05)),
        reference=ReferenceConfig(**settings),
        lora=LoraConfig(rank=spec.get("rank", 0)),
    )


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Steps of one variant in this process. What loading needed at most is not counted: it is
    before any step."""
    import transformers.models.llama.modeling_llama  # noqa: F401  # part of the imports, not of the model

    from gruppo.build import Parts, build
    from gruppo.trainer.checks import check

    if spec.get("rank"):
        import peft  # noqa: F401
    settings = config(spec)
    check(settings)
    after_imports = memory.begin()
    run, _ = build(
        settings, Parts(rewards=[alternating])
    )  # every row is learned from, with a KL and without
    memory.begin()
    seconds, kl = [], []
    for _ in range(spec["steps"]):
        began = time.perf_counter()
        kl.append(one_step(run).get("kl/ref_nats"))
        seconds.append(time.perf_counter() - began)
    peak, held = memory.most(after_imports), memory.held() - after_imports
    trained = sum(p.numel() for p in run.parameters)
    return {
        "peak_gb": peak / memory.GB,
        "held_gb": held / memory.GB,
        "seconds": seconds,
        "kl": kl,
        "trained": trained,
    }


def one_step(run: Any) -> dict[str, float]:
    """Collect, learn, and what a run does after it."""
    from gruppo.trainer.collect import collect
    from gruppo.trainer.update import learn

    step_params = run.stage_schedule.step_params(run.state.step)
    metrics = learn(run, collect(run, step_params).batch, step_params)
    run.state.step += 1
    run.engine.sync(run.policy, run.state.step)
    if run.reference is not None:
        run.reference.update(run.policy, run.state.step)
    return metrics


def in_own_process(spec: Mapping[str, Any]) -> dict[str, Any]:
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.references",
        "--spec",
        json.dumps(spec),
    ]
    here = Path(__file__).parents[1]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | quiet, cwd=here, check=False
    )
    if done.returncode:
        raise SystemExit(f"{spec} ended early. {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the processes, and the range of the peak. The first KL needs to be 0: the policy
    has not moved."""
    peaks = [run["peak_gb"] for run in runs]
    if odd := [run["kl"] for run in runs if run["kl"][0] not in (None, 0.0)]:
        raise SystemExit(f"the KL of an unchanged policy is {odd[0][0]}, not 0.")
    return {
        "peak_gb": statistics.median(peaks),
        "peak_gb_min": min(peaks),
        "peak_gb_max": max(peaks),
        "held_gb": statistics.median(run["held_gb"] for run in runs),
        "seconds": statistics.median(second for run in runs for second in run["seconds"][1:]),
        "trained": runs[0]["trained"],
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, s in results.items():
        alone = results[
            next(n for n in results if n.startswith(name.partition(",")[0]))
        ]  # without a reference
        more = "" if s is alone else f"{s['peak_gb'] - alone['peak_gb']:+.2f}"
        spread = f"{s['peak_gb']:.2f} ({s['peak_gb_min']:.2f} to {s['peak_gb_max']:.2f})"
        rows.append(
            (
                name,
                f"{s['trained'] / 1e6:.1f} M",
                spread,
                more,
                f"{s['held_gb']:.2f}",
                f"{s['seconds']:.1f}",
            )
        )
    head = (
        "policy and reference",
        "trained",
        "peak of a step, GB",
        "the reference",
        "held between, GB",
        "s a step",
    )
    return markdown(head, rows)


def written(document: str, about: str) -> str:
    """The document with the table between its marks."""
    changed, count = re.subn(
        f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{about}\n{END}", document, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the document has {count} places {BEGIN} ... {END}; it needs one.")
    return changed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="a Hugging Face folder; without it, the recipe's"
    )
    parser.add_argument("--compute", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of each process")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="processes of each variant, of which the median counts",
    )
    parser.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    parser.add_argument(
        "--document", type=Path, default=None, help="write the table into this page"
    )
    parser.add_argument("--spec", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.spec:
        print(json.dumps(measure(json.loads(options.spec))), flush=True)
        return
    shared = {name: getattr(options, name) for name in ("model", "compute", "prompts", "steps")}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    about = machine() | {"threads": 1}
    for _ in range(options.repeats):
        for name, variant in VARIANTS.items():
            runs[name].append(in_own_process(shared | dict(variant)))
            print(f"{name}: {runs[name][-1]['peak_gb']:.2f} GB", file=sys.stderr, flush=True)
        results = {name: summary(of) for name, of in runs.items()}
        if options.json:  # after each round, so that what is measured is not lost
            document = {
                "benchmark": "references",
                "machine": about,
                "workload": shared,
                "results": results,
            }
            options.json.write_text(
                json.dumps(document | {"measured": runs}, indent=1) + "\n", encoding="utf-8"
            )
    text = f"{about['date']}, {heading(about)}, {options.compute}:\n\n{table(results)}"
    print(text)
    if options.document:
        before = options.document.read_text(encoding="utf-8")
        options.document.write_text(written(before, text), encoding="utf-8")


if __name__ == "__main__":
    main()
