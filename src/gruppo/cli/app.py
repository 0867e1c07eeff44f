"""The command line, ``gruppo COMMAND``.

Exit codes: 0 done, 2 usage, 3 data or reward check failed, 4 numerical stop, 75 stopped by a signal and resumable.
Nothing heavy is imported before a command needs it, so that help answers at once.
"""

from __future__ import annotations

import difflib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence

EXIT_USAGE, EXIT_STOPPED = 2, 75

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Read by the libraries when they are imported; variables that the user has set keep their value."""

HELP = """gruppo: GRPO and PPO for anything that samples

usage: gruppo COMMAND ...

  train RECIPE [--options]    train; RECIPE is a built-in name, file.py:function, or a config file (TOML, YAML, JSON)
  resume RUN                  continue a stopped or killed run, to the bit
  eval RUN                    greedy answers of a run's model to its held-out prompts
  sample RUN "PROMPT" ...     completions of a run's (or any) model
  export RUN FOLDER           a run's model as a folder for transformers; an adapter is merged into its base
  explain RECIPE [--options]  what train would do: objective, tokens, memory, a real prompt and its reward
  explain --names trl RECIPE  its options under TRL's names (or verl, ddpo, sources); trl:beta for one
  doctor RUN                  diagnose a run: measurements, their meaning, options to change
  config RECIPE [--options]   print the config as TOML, to edit and train
  recipes [NAME]              list the built-in recipes, or describe one
  completion bash|zsh|fish    print a script for shell completion

  gruppo COMMAND --help       the options of a command; --help-all for all of them
  --debug                     with any command: show the traceback of an error

exit codes: 0 done, 2 usage, 3 data or reward check failed, 4 numerical stop, 75 stopped by a signal (resume continues)

start here:  gruppo train arithmetic
your data:   gruppo train plain --model smollm2-135m --data mine.jsonl --reward my.py:f
in stages:   gruppo train arithmetic-format --stages supervised:6,ramp:10,full --steps 80
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    args = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in args
    sys.exit(run([arg for arg in args if arg != "--debug"], is_debug=is_debug))


def run(args: list[str], *, is_debug: bool = False) -> int:
    """Run a command and return its exit code. A user's mistake is one line."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if args else EXIT_USAGE
    if args[0] in ("-V", "--version"):
        from gruppo import __version__

        print(f"gruppo {__version__}")
        return 0
    _quiet()
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if is_main_thread else None
    try:
        return _run_command(args[0], args[1:], is_debug)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _run_command(name: str, rest: list[str], is_debug: bool) -> int:
    from gruppo.cli.commands import COMMANDS
    from gruppo.types import GruppoError

    try:
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
            raise GruppoError(f"unknown command {name!r}. {hint}")
        return COMMANDS[name][0](rest)
    except KeyboardInterrupt:
        return _fail("interrupted.", EXIT_STOPPED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: let the last flush succeed
        return 0
    except Exception as error:
        if is_debug:
            raise
        if isinstance(error, GruppoError):
            return _fail(str(error), error.exit_code)
        if isinstance(error, OSError) and error.errno is not None:
            return _fail(f"{error.filename or 'the system'}: {error.strerror}. Fix that, then try again.", EXIT_USAGE)
        kind = type(error).__name__
        return _fail(f"{kind}: {error} (this looks like a bug in gruppo; --debug shows where)", 1)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    print(f"gruppo: {' '.join(message.split())}", file=sys.stderr)
    return code


def _quiet() -> None:
    """Show our own log lines and silence other libraries."""
    warnings.filterwarnings("ignore")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    log = logging.getLogger("gruppo")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


if __name__ == "__main__":
    main()
