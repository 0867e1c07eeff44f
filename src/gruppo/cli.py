"""The command line: ``gruppo train | resume | eval | sample | explain | recipes``.

Exit codes: 0 done, 2 usage, 3 data or reward check failed, 4 numerical stop, 75 stopped by a signal and resumable.
Nothing heavy is imported before a command needs it, so that help answers at once.
"""

from __future__ import annotations

import difflib
import logging
import sys
import warnings
from collections.abc import Sequence

EXIT_USAGE, EXIT_STOPPED = 2, 75

HELP = """gruppo: GRPO and PPO for anything that samples

usage: gruppo COMMAND ...

  train RECIPE [--options]    train; RECIPE is a built-in name, file.py:function, or a run's config.json
  resume RUN                  continue a stopped or killed run, to the bit
  eval RUN                    greedy answers of a run's model to its held-out prompts
  sample RUN "PROMPT" ...     completions of a run's (or any) model
  explain RECIPE [--options]  what train would do: objective, tokens, memory, a real prompt and its reward
  recipes                     the built-in recipes

  gruppo COMMAND --help       the options of a command
  --debug                     with any command: show the traceback of an error

exit codes: 0 done, 2 usage, 3 data or reward check failed, 4 numerical stop, 75 stopped by a signal (resume continues)

start here:  gruppo train arithmetic
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
    from gruppo import commands

    name, rest = args[0], args[1:]
    if name not in commands.COMMANDS:
        near = difflib.get_close_matches(name, commands.COMMANDS, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(commands.COMMANDS)}."
        return _fail(f"unknown command {name!r}. {hint}", EXIT_USAGE)
    return _guarded(name, rest, is_debug)


def _guarded(name: str, rest: list[str], is_debug: bool) -> int:
    from gruppo import commands
    from gruppo.types import GruppoError

    _quiet()
    try:
        return commands.COMMANDS[name](rest) or 0
    except GruppoError as error:
        if is_debug:
            raise
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted.", EXIT_STOPPED)
    except BrokenPipeError:
        return 0
    except Exception as error:
        if is_debug:
            raise
        kind = type(error).__name__
        return _fail(f"{kind}: {error} (this looks like a bug in gruppo; --debug shows where)", 1)


def _fail(message: str, code: int) -> int:
    print(f"gruppo: {' '.join(message.split())}", file=sys.stderr)
    return code


def _quiet() -> None:
    """Our own notes are shown; other libraries' chatter is not."""
    warnings.filterwarnings("ignore")
    log = logging.getLogger("gruppo")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
