"""gruppo: GRPO and PPO for anything that samples

usage: gruppo COMMAND ...

  train RECIPE [--options]    train; RECIPE is a built-in name, file.py:function, or a config file
                              (TOML, JSON)
  train --replay RUN          train again from the ledger of a run with --engine.lag, without its
                              engine
  launch RECIPE --trainers N --servers M [--slurm FILE]
                              train with vLLM servers, all started and kept running
  resume RUN                  continue a stopped or killed run, to the bit
  eval RUN                    greedy answers of a run's model to its held-out prompts
  sample RUN "PROMPT" ...     completions of a run's (or any) model
  export RUN FOLDER           a run's model as a folder for transformers; an adapter is merged into
                              its base
  export RUN --push OWNER/NAME
                              upload it to the Hugging Face hub with a model card
  explain RECIPE [--options]  what train would do: objective, tokens, memory, a real prompt and its
                              reward
  explain --names trl RECIPE  its options under TRL's names (or verl, ddpo, sources); trl:beta for
                              one
  plan RECIPE --gpus N        step time, memory and best split on N GPUs, in closed form
  doctor RUN                  diagnose a run: measurements, their meaning, options to change
  view RUN [RUN ...]          runs in the browser, while they train: curves, every completion, the
                              doctor
  report RUN [RUN ...]        the same page as one HTML file
  serve MODEL [-- OPTIONS]    a vLLM server for --engine vllm; OPTIONS are vLLM's own
  config RECIPE [--options]   print the config as TOML, to edit and train
  recipes [NAME]              list the built-in recipes, or describe one
  completion bash|zsh|fish    print a script for shell completion

  gruppo COMMAND --help       the options of a command; --help-all for all of them
  --debug                     with any command: show the traceback of an error

exit codes: 0 done, 2 usage, 3 data or reward check failed, 4 numerical stop;
            gruppo resume continues after 5 no server left, 75 stopped by a signal

start here:  gruppo train arithmetic
your data:   gruppo train plain --model smollm2-135m --data mine.jsonl --reward my.py:f
in stages:   gruppo train arithmetic-format --stages supervised:6,ramp:10,full --steps 80
"""

# The module's docstring is what --help prints. Nothing heavy is imported before a command needs it,
# so that help answers at once.

from __future__ import annotations

import faulthandler
import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

EXIT_USAGE, EXIT_STOPPED = 2, 75

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Read by the libraries when they are imported; variables that the user has set keep their
value."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit. A user's mistake is one line."""
    args = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in args
    name, *rest = [arg for arg in args if arg != "--debug"] or [""]
    if name in ("", "-h", "--help", "help"):
        print(__doc__, end="")
        sys.exit(0 if name else EXIT_USAGE)
    if name in ("-V", "--version"):
        from gruppo import __version__

        print(f"gruppo {__version__}")
        sys.exit(0)
    # Within the context manager an import that is interrupted, or fails, is one line too.
    with _exit_codes(is_debug):
        from gruppo.cli.commands import COMMANDS, TAKING_RECIPE
        from gruppo.cli.options import parse_command
        from gruppo.loading import did_you_mean
        from gruppo.types import GruppoError

        if name not in COMMANDS:
            hint = did_you_mean(name, COMMANDS, f" Commands: {', '.join(COMMANDS)}.")
            raise GruppoError(f"unknown command {name!r}.{hint}")
        if name in TAKING_RECIPE:
            COMMANDS[name](rest)
        else:
            COMMANDS[name](**parse_command(name, COMMANDS[name], rest))
    sys.exit(0)


@contextmanager
def _exit_codes(is_debug: bool) -> Iterator[None]:
    """Within, exceptions become exit codes, other signals act like Ctrl-C, and only our own log
    lines are shown."""
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, AttributeError):  # a standard error that is no file
            faulthandler.enable()  # a crash shows where it was
    warnings.filterwarnings("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe of Windows knows few characters
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ |= QUIET | os.environ
    log = logging.getLogger("gruppo")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False  # a library that configures the root logger would print our lines twice
    from gruppo.platforms import stop_signals

    previous = dict[signal.Signals, Any]()
    if threading.current_thread() is threading.main_thread():  # another one may handle no signals
        for number in stop_signals():
            previous[number] = signal.signal(number, signal.default_int_handler)
    message, code = "", 0
    try:
        yield
    except KeyboardInterrupt:
        message, code = "interrupted.", EXIT_STOPPED
    except BrokenPipeError:  # nobody reads: let the last flush succeed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if is_debug:
            raise
        from gruppo.loading import describe_error

        message, code = describe_error(error)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from gruppo import distributed as dist

            if dist.is_reported(error):
                message = ""
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if (joined := sys.modules.get("gruppo.distributed")) is not None:
            joined.shutdown()
    if message:
        print(f"gruppo: {message}", file=sys.stderr)
    if code:
        sys.exit(code)
