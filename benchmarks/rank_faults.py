"""Let one of two ranks fail, be killed and be stopped at each phase with a collective, and restart
the run.

    python -m benchmarks.rank_faults            # all phases, replicas and shards
    python -m benchmarks.rank_faults --only stop --jobs 4

The other rank must end within ``--timeout-s``, with one line that names the lost rank, and the run
that torchrun then starts again must end in the weights of one that nothing disturbed, to the bit.
Exit code 1 if a case does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import processes
from tests.distributed.faults import EXIT_CODES, Fault, Faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only cases whose name has this text")
    parser.add_argument("--victim", type=int, default=1, help="the rank that something happens to")
    parser.add_argument("--timeout-s", type=float, default=20)
    parser.add_argument("--jobs", type=int, default=4, help="cases at the same time")
    arguments = parser.parse_args()
    processes.TIMEOUT_S = 300
    with tempfile.TemporaryDirectory() as folder:
        faults, failed = Faults(Path(folder), arguments.timeout_s), 0
        cases = [
            Fault(action, phase, shard, arguments.victim)
            for shard in ("none", "fsdp")
            for phase in faults.whole(shard)[2]
            for action in EXIT_CODES
        ]

        def outcome(fault: Fault) -> tuple[bool, str]:
            try:
                return True, faults.disturb(fault)
            except AssertionError as error:
                return False, str(error)

        cases = [
            fault
            for fault in cases
            if arguments.only in f"{fault.shard} {fault.action} {fault.phase}"
        ]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for fault, (is_right, what) in zip(cases, pool.map(outcome, cases), strict=True):
                failed += not is_right
                print(
                    f"{'ok' if is_right else 'WRONG'} {fault.shard} {fault.action} {fault.phase}: "
                    f"{what}",
                    flush=True,
                )
    print(f"{len(cases) - failed} of {len(cases)} right")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
