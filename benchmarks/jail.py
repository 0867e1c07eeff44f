"""What running a model's program costs: one program in the jail, and a batch of 64 as the reward
scores it.

    python -m benchmarks.jail

Seconds. Linux only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from gruppo.rewards import code_tests
from gruppo.rewards.sandbox.jail import Jail

PROGRAM = "def f(x):\n    return 2 * x\n"
TESTS = ["assert f(2) == 4", "assert f('a') == 'aa'", "assert f(1.5) == 3"]
CALLS = [("f(2)",), ("f('a')",), ("f(1.5)",)]
SCRIPT = "print(2 * int(input()))"


def median_ms(what: Callable[[], object], times: int) -> float:
    """Median milliseconds of a call, after three that do not count."""
    found = []
    for _ in range(times + 3):
        began = time.perf_counter()
        what()
        found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found[3:])


def main(times: int = 100, batch: int = 64) -> dict[str, float]:
    """Measure and print; milliseconds by name."""
    began = time.perf_counter()
    reward = code_tests()
    probe_ms = 1000 * (time.perf_counter() - began)
    texts = [
        f"```python\n{PROGRAM}# {n}\n```" for n in range(batch)
    ]  # no two alike, of which one would be run
    tests = [TESTS] * batch
    assert reward(texts, tests=tests) == [1.0] * batch
    found = {
        "probe": probe_ms,
        "start of an interpreter": median_ms(lambda: Jail().close(), max(times // 10, 1)),
    }
    with Jail() as jail:
        found["a program with three calls"] = median_ms(lambda: jail.calls(PROGRAM, CALLS), times)
        found["a script with one input"] = median_ms(lambda: jail.script(SCRIPT, ["21\n"]), times)
    found[f"{batch} programs, {reward.workers} at once"] = median_ms(
        lambda: reward(texts, tests=tests), max(times // 10, 1)
    )
    for name, ms in found.items():
        print(f"{name:32} {ms:8.1f} ms")
    return found


if __name__ == "__main__":
    main()
