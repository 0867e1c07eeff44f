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

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gruppo import distributed as dist
from gruppo.integrity import parse_json, replace_file
from gruppo.types import GruppoError, Request, Rollouts

_NAME = re.compile(r"step_(\d+)-r(\d+)\.safetensors")
_FIELDS = tuple(field.name for field in fields(Rollouts) if field.name != "prompts")


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
        self._current: dict[str, Tensor] = {}
        """Content of the file of the step under way."""
        for path in self.paths():
            self._index(path)

    def paths(self, after: int = -1) -> list[Path]:
        """Files of the steps after ``after``, in order of steps."""
        found: list[tuple[int, int, Path]] = []
        for path in self.folder.glob("*.safetensors"):
            name = _NAME.fullmatch(path.name)
            if name is None or int(name[1]) <= after or not path.is_file():
                continue
            if self.is_replayed or int(name[2]) % dist.world_size() == dist.rank():
                found.append((int(name[1]), int(name[2]), path))
        return [path for _, _, path in sorted(found)]

    def _index(self, path: Path) -> None:
        with self._opened(path) as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                if name.endswith(".json"):
                    self._path_of[name.removesuffix(".json")] = path
            positions = file.metadata().get("positions")
            if positions is not None:
                self.steps[int(path.name[5:].partition("-")[0])] = parse_json(positions)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError, ValueError, AttributeError, KeyError, TypeError) as error:
            advice = "Give another RUN."
            if not self.is_replayed:
                advice = "Delete it: its groups are sampled again."
            raise GruppoError(f"{path} cannot be read: {error}. {advice}") from error

    def find(self, position: int, request: Request, sampling: Any) -> Rollouts | None:
        """The samples of a request; None if it was not sampled, or was for other settings."""
        key, prompt = _key(position, request), request.prompt
        path = self._path_of.get(key)
        if path is None:
            return None
        with self._opened(path) as file:
            record = _record(file, key)
            if record["settings"] != _settings(request, sampling):
                return None
            if (record["id"], record["draw"]) == (prompt.id, prompt.draw):
                packed = record["rollouts"]
                values = {name: _unpack(packed[name], file) for name in _FIELDS}
                return Rollouts(prompts=(prompt,), **values)
        raise GruppoError(f"""{path} has samples of prompt {record["id"]!r} at position {position},
            where the data have {prompt.id!r}. Use the data of the run {self.folder.parent}.""")

    # --- writing ---

    def append(self, position: int, request: Request, sampling: Any, rollouts: Rollouts) -> None:
        """Add the samples of a group to the file of the step under way."""
        key, tensors = _key(position, request), dict[str, Tensor]()
        versions = rollouts.policy_version[rollouts.mask]  # [chosen actions]
        record = {
            "id": request.prompt.id,
            "draw": request.prompt.draw,
            "settings": _settings(request, sampling),
            "version": int(versions.max()) if len(versions) else 0,
            "rollouts": {
                name: _pack(getattr(rollouts, name), tensors, f"{key}.{name}") for name in _FIELDS
            },
        }
        text = bytearray(json.dumps(record).encode())
        self._drop(key)  # samples that were too old
        self._current[f"{key}.json"] = torch.frombuffer(text, dtype=torch.uint8)
        self._current |= tensors

    def _drop(self, key: str) -> None:
        for name in [name for name in self._current if name.startswith(f"{key}.")]:
            del self._current[name]

    def write(self, step: int, positions: Collection[int] | None = None) -> None:
        """Write the file of a step; ``positions``: the step is complete, and took the prompts
        there."""
        if self.is_replayed or not (self._current or positions):
            return
        metadata = {"world_size": str(dist.world_size())}
        if positions is not None:
            metadata["positions"] = json.dumps([*positions])
        replace_file(self._path(step), save(self._current, metadata))
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
                names = [*file.keys()]
                for key in [name.removesuffix(".json") for name in names if name.endswith(".json")]:
                    self._drop(key)
                    if _record(file, key)["version"] <= version:
                        own = [name for name in names if name.startswith(f"{key}.")]
                        self._current |= {name: file.get_tensor(name) for name in own}
        self.write(step + 1)
        for path in later:
            if not self._current or path != self._path(step + 1):
                path.unlink()
        self.steps = {}
        self._path_of = {}
        for path in self.paths():
            self._index(path)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}-r{dist.rank()}.safetensors"


# --- records --------------------------------------------------------------------------------------


def _key(position: int, request: Request) -> str:
    """Name of a group's tensors: position of its prompt in the stream of draws, number of its first
    sample."""
    return f"{position}.{request.first}"


def _record(file: Any, key: str) -> Any:
    return parse_json(file.get_tensor(f"{key}.json").numpy().tobytes())


def _settings(request: Request, sampling: Any) -> dict[str, Any]:
    """Group size and sampling options of a request, as JSON returns them."""
    return json.loads(json.dumps({"size": request.size, "sampling": asdict(sampling)}, default=str))


def _pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A value as JSON, with its tensors in ``tensors`` under names that begin with ``name``."""
    if isinstance(value, Tensor):
        unique = f"{name}.{len(tensors)}"
        tensors[unique] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": unique}
    if isinstance(value, tuple | list | set | frozenset):
        return {type(value).__name__: [_pack(one, tensors, name) for one in value]}
    if isinstance(value, Mapping):
        pairs = [(_pack(k, tensors, name), _pack(v, tensors, name)) for k, v in value.items()]
        return {"dict": pairs}
    if value is None or isinstance(value, str | int | float):
        return value
    field = name.rpartition(".")[2]
    raise GruppoError(
        f"rollouts.{field} holds a {type(value).__name__}, which the ledger cannot keep",
        advice="Use texts, numbers, tensors, lists and dicts, or set $engine.lag 0",
    )


def _unpack(value: Any, file: Any) -> Any:
    if not isinstance(value, dict):
        return value
    (form, content), *_ = value.items()
    if form == "tensor":
        return file.get_tensor(content)
    if form == "dict":
        return {_unpack(key, file): _unpack(one, file) for key, one in content}
    items = [_unpack(one, file) for one in content]
    return {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}[form](items)


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
