"""Rewards that fail in ways that only another process survives. Loaded by name."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import re
import signal
import time


def _fails_on_bad(fail):
    def reward(completions):
        if "bad" in completions:
            fail()
        return [float(len(text)) for text in completions]

    return reward


holds_the_lock = _fails_on_bad(lambda: re.match(r"(a+)+$", "a" * 34 + "b"))
leaves = _fails_on_bad(lambda: os._exit(0))
crashes = _fails_on_bad(lambda: ctypes.string_at(0))
sleeps = _fails_on_bad(lambda: time.sleep(60))


def sets_a_signal(completions):
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, before)
    return [1.0] * len(completions)


def draws(completions):
    return [random.random() for _ in completions]


def reads_everything(
    prompts, completions, completion_ids, answer, cell, image, trainer_state, log_metric, log_extra
):
    print("seen", flush=True)
    log_metric("mean", sum(map(len, completions)) / len(completions))
    log_extra("ids", completion_ids)
    log_extra(
        "read", [repr((*row, trainer_state)) for row in zip(prompts, answer, cell, strict=True)]
    )
    return [
        None if text == "none" else float(x.sum())
        for text, x in zip(completions, image, strict=True)
    ]


async def awaits(completions, **columns):
    await asyncio.sleep(0)
    return [float(len(columns["answer"]))] * len(completions)


def steps(completions, steps):
    return [[float(len(step)) for step in row] for row in steps]


steps.step_separator = "\n"  # what the decorator sets, without an import of torch


def refuses(completions, answer):
    return [1.0 / len(text) for text in completions]


def checked(completions):
    return [0.0] * len(completions)


def _check(columns):
    if "answer" not in columns:
        from gruppo.types import DataError

        raise DataError("checked needs answers")


checked.check = _check
checked.timeout_s = None


class _Object:
    name = "object"

    def __call__(self, rollouts):
        return rollouts.lengths.float() + os.getpid() * 0


an_object = _Object()


def process(completions):
    return [float(os.getpid())] * len(completions)
