"""The command line: ``gruppo train | resume | eval | sample | export | explain | doctor | recipes``.

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
from collections.abc import Callable, Sequence

EXIT_USAGE, EXIT_STOPPED = 2, 75

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Read by the libraries when they are imported; what the user has set stays."""

HELP = """gruppo: GRPO and PPO for anything that samples

usage: gruppo COMMAND ...

  train RECIPE [--options]    train; RECIPE is a built-in name, file.py:function, or a run's config.json
  resume RUN                  continue a stopped or killed run, to the bit
  eval RUN                    greedy answers of a run's model to its held-out prompts
  sample RUN "PROMPT" ...     completions of a run's (or any) model
  export RUN FOLDER           a run's model as a folder for transformers; an adapter is merged into its base
  explain RECIPE [--options]  what train would do: objective, tokens, memory, a real prompt and its reward
  explain --names trl RECIPE  its settings under TRL's names (or verl, ddpo, sources); trl:beta for one
  doctor RUN                  diagnose a run: measurements, their meaning, options to change
  recipes                     the built-in recipes

  gruppo COMMAND --help       the options of a command
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
    """Run a command; the exit code. A user's mistake is one line."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if args else EXIT_USAGE
    if args[0] in ("-V", "--version"):
        from gruppo import __version__

        print(f"gruppo {__version__}")
        return 0
    _quiet()
    before = signal.signal(signal.SIGTERM, _interrupt) if _is_main_thread() else None
    try:
        return _guarded(args[0], args[1:], is_debug)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _guarded(name: str, rest: list[str], is_debug: bool) -> int:
    try:
        return _command(name)(rest) or 0
    except KeyboardInterrupt:
        return _fail("interrupted.", EXIT_STOPPED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: let the last flush succeed
        return 0
    except Exception as error:
        if is_debug:
            raise
        return _explained(error)


def _command(name: str) -> Callable[[list[str]], int]:
    from gruppo.cli import commands
    from gruppo.types import GruppoError

    if name in commands.COMMANDS:
        return commands.COMMANDS[name]
    near = difflib.get_close_matches(name, commands.COMMANDS, 1)
    hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(commands.COMMANDS)}."
    raise GruppoError(f"unknown command {name!r}. {hint}")


def _explained(error: Exception) -> int:
    from gruppo.types import GruppoError

    if isinstance(error, GruppoError):
        return _fail(str(error), error.exit_code)
    if isinstance(error, OSError) and error.errno is not None:
        return _fail(f"{error.filename or 'the system'}: {error.strerror}. Mend that, then try again.", EXIT_USAGE)
    kind = type(error).__name__
    return _fail(f"{kind}: {error} (this looks like a bug in gruppo; --debug shows where)", 1)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _fail(message: str, code: int) -> int:
    print(f"gruppo: {' '.join(message.split())}", file=sys.stderr)
    return code


def _quiet() -> None:
    """Our own notes are shown; other libraries' chatter is not."""
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
