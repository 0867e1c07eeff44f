"""How far a stream has been drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gruppo.types import DataError


class Cursor:
    """The next draw of a stream, and the identity of the stream that it counts.

    A stream is a pure function of its identity and the draw, so the position is all that a resume needs. A position
    in another stream would silently repeat or skip prompts; loading one is refused.
    """

    def __init__(self, name: str, identity: Mapping[str, Any]) -> None:
        self.position = 0
        self._name = name
        self._identity = dict(identity)

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.position, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        differs = [key for key, value in self._identity.items() if state.get(key) != value]
        if differs:
            said = "; ".join(f"{key} was {state.get(key)!r}, is {self._identity[key]!r}" for key in differs)
            raise DataError(
                f"the saved position does not belong to {self._name}: {said}. "
                "Resume with the data, seed and held-out share that the run began with, or start a new run."
            )
        position = state.get("cursor")
        if not isinstance(position, int) or position < 0:
            raise DataError(
                f"the saved position of {self._name} is {position!r}; it needs a whole number from 0 up. "
                "The save is damaged: resume from an earlier one."
            )
        self.position = position
