"""Environments of Gymnasium whose observations and actions can be written as text: ``gymnasium:ID``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from gruppo.environments.episodes import MAX_CHARACTERS, SEEDS, ScoredEpisode, as_json, scored_by
from gruppo.loading import check_listed, import_extra
from gruppo.types import GruppoError

ACTIONS = ("Discrete", "Text", "MultiDiscrete", "MultiBinary", "Box")
"""Spaces whose actions can be written: as a number, a text, or a list of numbers."""
HIGHLIGHT = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)
"""A colored part of a text rendering: in FrozenLake, where the agent is."""


def gymnasium_factory(rest: str, config: Any) -> Callable[[], Any]:
    """Factory of episodes of ``gymnasium.make(rest)``, which may be ``module:ID`` to import the module first."""
    name = f"gymnasium:{rest}"
    check_listed(name)
    package = import_extra("gymnasium", "gymnasium", name)
    own = "wrap it, register what you get, and name it as gymnasium:MODULE:ID"
    try:
        with closing(package.make(rest)) as env:
            has_text = "ansi" in env.metadata.get("render_modes", ())
        make = partial(package.make, rest, **({"render_mode": "ansi"} if has_text else {}))
        with closing(Gymnasium(make)) as episode:
            actions = episode._kind
            length = len(episode.reset(seed=0)) if actions in ACTIONS else 0
    except GruppoError:  # of the module that it imports
        raise
    except Exception as problem:
        raise GruppoError(
            f"{name} cannot be started: {type(problem).__name__}: {problem}"
        ) from problem
    if actions not in ACTIONS:
        raise GruppoError(
            f"the actions of {name} are {actions}, not one of {', '.join(ACTIONS)}; {own}."
        )
    if length > MAX_CHARACTERS:
        raise GruppoError(f"""an observation of {name} is {length:,} characters as text; it needs at most
            {MAX_CHARACTERS:,}. To train on it, {own}.""")
    return partial(scored_by(Gymnasium, config), make)


class Gymnasium(ScoredEpisode):
    """One episode. An answer is the number of an action, or the text itself where actions are texts."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._env = make()
        space = self._space = self._env.action_space
        self._kind = type(space).__name__
        self._need = "a text" if self._kind == "Text" else f"a list of numbers, as JSON, of {space}"
        if self._kind == "Discrete":
            self._need = (
                f"a number from {int(space.start)} to {int(space.start) + int(space.n) - 1}"
            )

    def reset(self, seed: int) -> str:
        """Start the episode; every sample of a group starts alike."""
        observation, _ = self._env.reset(seed=seed % SEEDS)
        return (
            f"\n\n{self._text(observation)}\n\nAnswer with {self._need}."  # appended to the prompt
        )

    def step(self, text: str) -> str | None:
        try:
            if self._kind == "Discrete":  # the last number, after any reasoning
                action: Any = int(re.findall(r"-?\d+", text)[-1])
            else:
                action = (
                    text.strip()
                    if self._kind == "Text"
                    else self._space.from_jsonable([json.loads(text)])[0]
                )
            is_action = self._space.contains(action)
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
            is_action = False
        if not is_action:
            self.rewards.append(0.0)
            return f"That is no action. Answer with {self._need}."
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self.rewards.append(float(reward))
        return None if terminated or truncated else self._text(observation)

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: Any) -> str:
        """An observation as text, and the rendering as text below it, if there is one."""
        text = observation if isinstance(observation, str) else as_json(observation)
        has_text = self._env.render_mode == "ansi"
        return (
            text + "\n" + HIGHLIGHT.sub(r"[\1]", self._env.render()).strip() if has_text else text
        )
