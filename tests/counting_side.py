"""A side of a benchmark that imports nothing heavy and counts its turns; beyond the last one it
says nothing."""

import os
import sys

from benchmarks.turns import say, wait_for_turn

say(pid=os.getpid())
for turn in range(int(sys.argv[1])):
    wait_for_turn()
    say(turn=turn)
sys.exit("no further turn")
