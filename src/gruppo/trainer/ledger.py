"""The ledger of asynchronous rollouts: the samples of every finished group, and what each step
learned from.

``ledger/step_NNNNNN-rR.safetensors`` has the groups that rank R finished during step N, whichever
step learns from them. A file is written where a step ends and where the run ends. So a resumed run
samples only what was unfinished then, and a replay finds every sample of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gruppo import distributed as dist
from gruppo.integrity import parse_json, replace_file
from gruppo.packing import NotEncodable, decode, encode
from gruppo.types import GruppoError, Request, Rollouts

_NAME = re.compile(r"step_(\d+)-r(\d+)\.safetensors")


class Ledger:
    """The ledger of a run. Each rank reads and writes its own files; a replay reads all of them and
    writes none."""

    def __init__(self, folder: Path, *, is_replayed: bool = False) -> None:
        self.folder = folder / "ledger"
        self.is_replayed = is_replayed
        self.steps: dict[int, list[int]] = {}
        """Complete steps, with the positions of the prompts that each took."""
        self._path_of: dict[str, Path] = {}
        """File of each group, by ``_key``."""
        self._current: dict[str, list[Tensor]] = {}
        """Groups of the step under way: a record as JSON, and the buffers of its rollouts."""
        self._index()

    def paths(self, after: int = -1) -> list[Path]:
        """Files of the steps after ``after``, in order of steps."""
        found: list[tuple[int, int, Path]] = []
        for path in self.folder.glob("*.safetensors"):
            name = _NAME.fullmatch(path.name)
            if name is not None and int(name[1]) > after and path.is_file():
                step, rank = map(int, name.groups())
                if self.is_replayed or rank % dist.world_size() == dist.rank():
                    found.append((step, rank, path))
        return [path for _, _, path in sorted(found)]

    def _index(self) -> None:
        self.steps = {}
        self._path_of = {}
        for path in self.paths():
            with self._opened(path) as file:
                self._path_of |= dict.fromkeys(_keys(file), path)
                positions = file.metadata().get("positions")
                if positions is not None:
                    self.steps[int(path.name[5:].partition("-")[0])] = parse_json(positions)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError, ValueError, AttributeError, KeyError, TypeError) as error:
            advice = "Delete it: its groups are sampled again."
            if self.is_replayed:
                advice = "Give another RUN."
            raise GruppoError(f"{path} cannot be read: {error}. {advice}") from error

    def find(self, position: int, request: Request, sampling: Any) -> Rollouts | None:
        """The samples of a request; None if it was not sampled, or was for other settings."""
        key, prompt = _key(position, request), request.prompt
        path = self._path_of.get(key)
        if path is None:
            return None
        with self._opened(path) as file:
            record, buffers = _read(file, key)
            if record["settings"] != _settings(request, sampling):
                return None
            if (record["id"], record["draw"]) == (prompt.id, prompt.draw):
                packed = [buffer.numpy().tobytes() for buffer in buffers]
                return Rollouts(prompts=(prompt,), **decode(record["rollouts"], packed))
        raise GruppoError(f"""{path} has samples of prompt {record["id"]!r} at position {position},
            where the data have {prompt.id!r}. Use the data of the run {self.folder.parent}.""")

    # --- writing ---

    def append(self, position: int, request: Request, sampling: Any, rollouts: Rollouts) -> None:
        """Add the samples of a group to the file of the step under way."""
        buffers: list[bytes] = []
        values: dict[str, Any] = {}
        for field in fields(Rollouts):
            value = getattr(rollouts, field.name)
            values[field.name] = dict(value) if isinstance(value, Mapping) else value
        del values["prompts"]
        try:
            packed = encode(values, buffers)
        except NotEncodable as error:
            raise GruppoError(
                f"the rollouts hold a {error}, which the ledger cannot keep",
                advice="Use strings, numbers, tensors, lists and dicts, or set $engine.lag 0",
            ) from None
        versions = rollouts.policy_version[rollouts.mask]  # [chosen actions]
        record = {
            "id": request.prompt.id,
            "draw": request.prompt.draw,
            "settings": _settings(request, sampling),
            "version": int(versions.max()) if len(versions) else 0,
            "rollouts": packed,
        }
        parts = [json.dumps(record).encode(), *buffers]
        # in place of samples that were too old
        self._current[_key(position, request)] = [
            torch.from_numpy(np.frombuffer(bytearray(part), np.uint8)) for part in parts
        ]

    def write(self, step: int, positions: Collection[int] | None = None) -> None:
        """Write the file of a step; ``positions``: the step is complete, and took the prompts
        there."""
        if self.is_replayed or not (self._current or positions):
            return
        metadata = {"world_size": str(dist.world_size())}
        if positions is not None:
            metadata["positions"] = json.dumps([*positions])
        groups = self._current.items()
        tensors = {f"{key}/{n}": part for key, parts in groups for n, part in enumerate(parts)}
        replace_file(self._path(step), save(tensors, metadata))
        if positions is not None:
            self._current = {}

    def resume(self, step: int, version: int) -> None:
        """Continue after ``step``, whose weights are ``version``.

        Of what a killed process finished later, only samples of weights that this run has too are
        kept, in one file. With another number of ranks, groups have other ranks, and are sampled
        again.
        """
        later = self.paths(after=step)
        for path in later:
            with self._opened(path) as file:
                if file.metadata().get("world_size") != str(dist.world_size()):
                    continue
                for key in _keys(file):
                    record, _ = _read(file, key)
                    self._current.pop(key, None)
                    if record["version"] <= version:
                        self._current[key] = _parts(file, key)
        self.write(step + 1)
        for path in later:
            if not self._current or path != self._path(step + 1):
                path.unlink()
        self._index()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}-r{dist.rank()}.safetensors"


# --- records --------------------------------------------------------------------------------------


def _key(position: int, request: Request) -> str:
    """Name of a group's tensors: position of its prompt in the stream of draws, number of its first
    sample."""
    return f"{position}.{request.first}"


def _keys(file: Any) -> list[str]:
    return [name.removesuffix("/0") for name in [*file.keys()] if name.endswith("/0")]


def _parts(file: Any, key: str) -> list[Tensor]:
    count = sum(name.startswith(f"{key}/") for name in [*file.keys()])
    return [file.get_tensor(f"{key}/{number}") for number in range(count)]


def _read(file: Any, key: str) -> tuple[Any, list[Tensor]]:
    """The record of a group, and its buffers."""
    text, *buffers = _parts(file, key)
    return parse_json(text.numpy().tobytes()), buffers


def _settings(request: Request, sampling: Any) -> dict[str, Any]:
    """Group size and sampling options of a request, as JSON returns them."""
    return json.loads(json.dumps({"size": request.size, "sampling": asdict(sampling)}, default=str))


def split(rollouts: Rollouts) -> list[Rollouts]:
    """The groups of a batch, each as wide as its longest row, so that it does not depend on the
    others."""
    groups = []
    for number in range(len(rollouts.prompts)):
        group = rollouts.take((rollouts.group_ids == number).nonzero()[:, 0])
        width = max(int(group.lengths.max()), 1)
        columns = ("actions", "mask", "sampler_logprobs", "policy_version")
        narrow = {name: getattr(group, name)[:, :width].clone() for name in columns}
        groups.append(replace(group, **narrow))
    return groups
