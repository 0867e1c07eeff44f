"""``GRPOConfig`` and ``RLOOConfig`` with the names and defaults of TRL 1.16, from ``arguments.toml``."""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

from gruppo.config import peer_options
from gruppo.types import GruppoError

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_TYPES: list[Any] = [int, float, str, bool, str | None, bool | None, int | None, float | None, dict | str | None]
_TYPES += [None | str | list[str], list[str] | None, list[float] | None]
_TYPE = {kind.__name__ if isinstance(kind, type) else str(kind): kind for kind in _TYPES}
"""By the name in the table, as ``make_dataclass`` and the parsers that read the dataclass need them."""


def _arguments(*sections: str) -> list[tuple[str, Any, Any]]:
    """Name, type and default of the arguments in sections of the table."""
    found = []
    for kind, table in (item for section in sections for item in _TABLE[section].items()):
        values = dict.fromkeys(table.get("unset", ())) | table
        found += [(name, _TYPE[kind], values[name]) for name in values if name != "unset"]
    return found


WITHOUT_EFFECT = {name for name, _, _ in _arguments("without_effect", "without_effect_GRPO")}
"""Arguments that change nothing that is learned here."""


class TrlArguments:
    """What both configs do beyond holding values: refuse unknown names, and derive the generation batch as TRL does."""

    def __new__(cls, *_: Any, **arguments: Any) -> Any:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        # Here and not in __init__, which a dataclass writes itself and whose TypeError names no alternative.
        if unknown := [name for name in arguments if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, 1)
            ours = f"Did you mean {near[0]}?" if near else peer_options.hint(unknown[0], lambda n: n.replace(".", "__"))
            raise GruppoError(f"{cls.__name__} of TRL 1.16 has no argument {unknown[0]!r}. {ours}".rstrip())
        return super().__new__(cls)

    def __post_init__(self) -> None:
        args: Any = self
        for name in ("lr_scheduler_type", "eval_strategy", "save_strategy", "logging_strategy", "optim"):
            setattr(args, name, getattr(getattr(args, name), "value", getattr(args, name)))  # an enum of transformers
        if hasattr(args, "scale_rewards"):  # True and False were its values before, and TRL still takes them
            args.scale_rewards = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
        if args.generation_batch_size is not None and args.steps_per_generation is not None:
            raise GruppoError("generation_batch_size and steps_per_generation are both set; leave one of them out.")
        # As in TRL: a generation is steps_per_generation micro-batches of each process.
        rows = args.per_device_train_batch_size * self.world_size
        if args.generation_batch_size is None:
            args.steps_per_generation = args.steps_per_generation or args.gradient_accumulation_steps
            args.generation_batch_size = rows * args.steps_per_generation
        elif args.generation_batch_size % rows:
            raise GruppoError(f"""generation_batch_size={args.generation_batch_size} is no multiple of the {rows} rows
                of per_device_train_batch_size on all processes, as in TRL. Set one of the two to a divisor of the
                other.""")
        else:
            args.steps_per_generation = args.generation_batch_size // rows
        if args.generation_batch_size % args.num_generations:
            raise GruppoError(f"""a generation batch of {args.generation_batch_size} rows is no multiple of
                num_generations={args.num_generations}, as in TRL. Set per_device_train_batch_size to one.""")

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))


def _config(name: str, *sections: str) -> Any:
    """A dataclass of the arguments in sections, which a parser of TRL or transformers reads too."""
    arguments = [(argument, kind, field(default=default)) for argument, kind, default in _arguments(*sections)]
    made = make_dataclass(name, arguments, bases=(TrlArguments,))
    made.__module__, made.__doc__ = __name__, f"Arguments of TRL 1.16's {name}, with its defaults."
    return made


GRPOConfig: Any = _config("GRPOConfig", "both", "GRPO", "without_effect", "without_effect_GRPO")
RLOOConfig: Any = _config("RLOOConfig", "both", "RLOO", "without_effect")
