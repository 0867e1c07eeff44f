"""Turns a second of conversations: keys and values kept between turns, or every history read again,
in turns.

``python -m benchmarks.conversations``: SmolLM2-135M, 4 prompts of 55 tokens x 8 rows, 8 turns of 24
tokens, replies of
40. All turns are of one length, so that both sides do the same work. ``--against FOLDER`` adds
    another checkout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.generate import spread
from benchmarks.turns import Side, in_turns, say, wait_for_turn
from benchmarks.workloads import WORDS, prompts

GROUP = 8


def take_turns(side: str, spec: Mapping[str, Any]) -> None:
    """A side: it converses with new prompts whenever it is its turn."""
    from gruppo.environments import Environment, converse
    from gruppo.modalities.text import generation
    from gruppo.modalities.text.load import from_pretrained
    from gruppo.platforms import peak_memory_gib
    from gruppo.types import Prompt, Request, Sampling

    policy = from_pretrained(spec["model"], compute=spec["compute"])
    if side == "reencoded":
        generation.KEPT_FRAC = 0.0
    force_turns(generation, policy, spec["new_tokens"])
    ids = policy.chat.encode_text(" the tool says that it is so," * spec["reply_tokens"])
    reply = policy.chat.text(ids[: spec["reply_tokens"]])
    environment = Environment(
        lambda: reply, turns=spec["turns"], max_reply_tokens=2 * spec["reply_tokens"]
    )
    sampling = Sampling(max_actions=spec["new_tokens"] * spec["turns"])
    say()
    for turn in range(10**9):
        wait_for_turn()
        conversations = prompts(spec["prompts"], spec["words"], first=turn * spec["prompts"])
        requests = [
            Request(Prompt(str(n), inputs, draw=turn), GROUP)
            for n, inputs in enumerate(conversations)
        ]
        began, cpu_began = time.perf_counter(), time.process_time()
        rollouts = converse(
            policy.sample, policy.continue_rollouts, environment, requests, sampling, seed=0
        )
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        turns = int(rollouts.per_row["turns"].sum())
        reread = rollouts.per_row.get("reencoded")
        say(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            turns=turns,
            reencoded=None if reread is None else int(reread.sum()),
            tokens=int(rollouts.lengths.sum()),
            peak_gib=peak_memory_gib(),
        )


def force_turns(generation: Any, policy: Any, length: int) -> None:
    """Let each turn end at its token number ``length``: all rows of a turn are sampled in one
    batch."""
    import torch

    plain, end, calls = generation.sample_categorical, policy.chat.eos_ids[0], [0]
    policy.chat.eos_ids = (end,)

    def sample(logits: Any, *inputs: Any, **options: Any) -> Any:
        calls[0] += 1
        sampled, logprobs = plain(logits, *inputs, **options)
        return torch.full_like(sampled, end) if calls[0] % length == 0 else sampled.where(
            sampled != end, 0
        ), logprobs

    generation.sample_categorical = sample


def measure(spec: Mapping[str, Any], rounds: int, against: str) -> dict[str, list[dict[str, Any]]]:
    started: list[Side] = []
    try:
        for name in ("kept", "reencoded", *(["before"] if against else [])):
            environment = {"PYTHONPATH": f"{against}/src"} if name == "before" else {}
            started.append(
                Side(
                    name,
                    ["benchmarks.conversations", name, json.dumps(spec)],
                    environment=environment,
                )
            )
        done = in_turns(started, rounds, warm=1)
    finally:
        for side in started:
            side.close()
    if len({turn["turns"] for turns in done.values() for turn in turns}) > 1:
        raise SystemExit(
            "the sides took different numbers of turns; their times cannot be compared."
        )
    return done


def summarize(done: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Turns a second of each side, and those with kept keys over it, round by round.

    The processor seconds of a side say the same on a machine that others use too.
    """
    rates = {
        name: [turn["turns"] / turn["seconds"] for turn in turns] for name, turns in done.items()
    }
    cpu = {name: [turn["cpu_seconds"] for turn in turns] for name, turns in done.items()}
    return {
        name: {
            **spread(values),
            "kept_over_it": spread([k / v for k, v in zip(rates["kept"], values, strict=True)]),
            "cpu_over_kept": spread(
                [own / k for own, k in zip(cpu[name], cpu["kept"], strict=True)]
            ),
            "reencoded": done[name][-1]["reencoded"],
            "tokens_per_row": done[name][-1]["tokens"] * 8 // done[name][-1]["turns"],
            "peak_gib": max(turn["peak_gib"] for turn in done[name]),
        }
        for name, values in rates.items()
    }


def table(sides: Mapping[str, Any]) -> str:
    heading = f"{'kept over it':<22}{'by CPU seconds':<16}{'re-encoded':>11}{'peak GiB':>10}"
    lines = [f"{'side':<10}{'turns/s':>8}{'(range)':>16}   {heading}"]
    for name, s in sides.items():
        ratio, read = s["kept_over_it"], "" if s["reencoded"] is None else s["reencoded"]
        shown = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        span = f"({s['min']:.1f} to {s['max']:.1f})"
        cpu = f"{s['cpu_over_kept']['median']:.2f}"
        lines.append(
            f"{name:<10}{s['median']:8.1f}{span:>16}   "
            f"{shown:<22}{cpu:<16}{read:>11}{s['peak_gib']:10.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    from gruppo.modalities.text.bundled import smollm2_135m

    parser = report.parser(__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="in groups of 8")
    parser.add_argument(
        "--words", type=int, default=WORDS[55], help="of filler in a prompt: 347 make 441 tokens"
    )
    parser.add_argument("--new-tokens", type=int, default=24, help="of each turn")
    parser.add_argument("--reply-tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--against", default="", help="folder of another checkout, as a further side"
    )
    options = parser.parse_args(arguments)
    names = ("compute", "words", "new_tokens", "reply_tokens", "turns")
    spec = {name: getattr(options, name) for name in names} | {
        "prompts": max(1, options.rows // GROUP)
    }
    spec["model"] = options.model or str(smollm2_135m().path)
    measured = measure(
        spec, min(options.rounds, 2) if options.short else options.rounds, options.against
    )
    results = summarize(measured)
    report.tell("conversations", results, table(results), options, measured=measured)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("kept", "reencoded", "before"):
        take_turns(sys.argv[1], json.loads(sys.argv[2]))
    else:
        main()
