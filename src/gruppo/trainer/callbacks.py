"""Callbacks: objects that follow a run, and may stop it or change its step parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gruppo.rewards.scoring import Scores
from gruppo.trainer.evaluate import Evaluated
from gruppo.types import GruppoError, Rollouts

EVENTS = ("on_rollouts", "on_step", "on_evaluate")


@dataclass(frozen=True, eq=False)
class Step:
    """A complete step: what ``Trainer.step`` returns and ``on_step`` receives."""

    step: int
    """Complete steps, this one included."""
    metrics: Mapping[str, float]
    """As in metrics.jsonl; from ``Trainer.step``, with those of an evaluation at this step."""
    rollouts: Rollouts | None
    """This rank's samples, discarded ones included; None where nothing was sampled."""
    scores: Scores | None
    """The rewards of ``rollouts``."""
    evaluation: Evaluated | None = None
    """The evaluation at this step, if there was one; from ``Trainer.step`` only, as ``on_evaluate``
    comes later."""


class Callback:
    """Follows a run. Override what you need; an object with any of the three methods is a callback
    too.

    ``trainer`` is the ``gruppo.Trainer``: ``trainer.stop()`` ends the run after this step,
    ``trainer.set(lr=1e-6)`` changes step parameters from the next step on. With several ranks, each
    rank calls its own callbacks: decide by ``metrics``, which are the same on all of them. An
    exception ends the run; complete steps are saved.
    """

    def on_rollouts(self, trainer: Any, rollouts: Rollouts | None, scores: Scores | None) -> None:
        """After sampling and scoring, before the update."""

    def on_step(self, trainer: Any, step: Step) -> None:
        """After a complete step, before the evaluation at it and its checkpoint."""

    def on_evaluate(self, trainer: Any, evaluation: Evaluated) -> None:
        """After an evaluation."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a resumed run needs to know, as JSON; saved in each checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict`` of a checkpoint."""


class Callbacks:
    """The callbacks of a run, checked once and called in order."""

    def __init__(self, callbacks: Sequence[Any], trainer: Any) -> None:
        if not isinstance(callbacks, list | tuple):
            raise GruppoError(
                f"callbacks is a {type(callbacks).__name__}; it needs a list of objects."
            )
        for callback in callbacks:
            name, named = type(callback).__name__, [n for n in dir(callback) if n.startswith("on_")]
            if isinstance(callback, type):
                own = callback.__name__
                raise GruppoError(f"the callback {own} is a class; pass an object, {own}().")
            # a mistyped name would be silently ignored
            unknown = [n for n in named if n not in EVENTS]
            if unknown or not named:
                problem = (
                    f"a method {unknown[0]}, which is never called" if unknown else "no method"
                )
                hint = " gruppo.trl takes those of transformers." if "on_step_end" in named else ""
                raise GruppoError(
                    f"the callback {name} has {problem}. Methods: {', '.join(EVENTS)}.{hint}"
                )
        self._trainer = trainer
        # numbered, since two of one class keep their own states in a checkpoint
        self._callbacks = {f"{n} {type(c).__name__}": c for n, c in enumerate(callbacks)}

    def notify(self, event: str, *what: Any) -> None:
        """Call the method of this name of each callback that has it."""
        for callback in self._callbacks.values():
            method = getattr(callback, event, None)
            if method is not None:
                method(self._trainer, *what)

    def state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, callback in self._callbacks.items():
            method = getattr(callback, "state_dict", None)
            if method is not None:
                try:
                    # a copy: the callback may change its own
                    states[name] = json.loads(json.dumps(dict(method())))
                except (TypeError, ValueError) as error:
                    raise GruppoError(f"""state_dict of the callback {name.split()[-1]} does not fit
                        into a checkpoint ({error}); it needs a dict of numbers, strings, lists and
                        dicts.""") from None
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            if name not in self._callbacks:
                raise GruppoError(f"the run had the callback {name}; resume it with the same ones.")
            self._callbacks[name].load_state_dict(state)
