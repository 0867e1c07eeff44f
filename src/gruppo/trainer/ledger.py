"""The ledger of asynchronous rollouts: every group that was sampled, and what each step learned from.

``ledger/NNNNNN-rR.ledger`` are segments of records of rank R, appended in the order in which groups were finished. A
record is a header (lengths and CRC-32), JSON, and tensors as safetensors. A process begins a new segment, so that a
record which a kill has cut off stays the last of its segment, and is ignored. A checkpoint names the segments that a
resumed run needs, with their sizes; segments of older draws are deleted where the ledger grows beyond its limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load, save
from torch import Tensor

from gruppo import distributed as dist
from gruppo.integrity import explained_failures, open_file, parse_json
from gruppo.platforms import sync_to_disk
from gruppo.types import GruppoError, Request, Rollouts

SEGMENT_BYTES = 1 << 26
_HEADER = struct.Struct("<4sIQI")
_MAGIC = b"GRL1"
_NAME = re.compile(r"(\d{6})-r(\d+)\.ledger")
_FIELDS = tuple(field.name for field in fields(Rollouts) if field.name != "prompts")

Key = tuple[int, int]
"""Position of the prompt in the stream of draws, and number of the first sample."""


@dataclass(frozen=True)
class Location:
    """Where a record is."""

    path: Path
    offset: int
    bytes: int


class Ledger:
    """The ledger of a run, with its folder and its config as JSON. One that is replayed is not written to."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        max_bytes: float = 1e9,
        is_replayed: bool = False,
    ) -> None:
        self.folder, self.max_bytes, self.is_replayed = folder / "ledger", max_bytes, is_replayed
        # the remedy where a ledger cannot be restored: a replay must not cost the other run its ledger
        delete = f"or delete {self.folder}: its draws are sampled again"
        self._otherwise = "or give another RUN" if is_replayed else delete
        settings = {
            name: config[name] for name in ("name", "seed", "model", "data", "prompts", "rollout")
        }
        self.run = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        """The run that the ledger belongs to."""
        self.groups: dict[Key, Location] = {}
        """The newest record of each group."""
        self.steps: dict[int, dict[str, Any]] = {}
        """To replay: the newest record of each step, with "positions" of the groups that it took, and "version"."""
        self._last: dict[str, int] = {}  # position up to which a segment has groups
        self._file: IO[bytes] | None = None
        sessions = {
            path: next((r.get("session", 0) for _, r in _records(path)), 0)
            for path in self.segments()
        }
        # not by name: another number of ranks gives a draw to another rank, whose segments have other numbers
        for path in sorted(sessions, key=lambda path: (sessions[path], path)):
            for location, record in _records(path):
                event = record["event"]
                if event == "begin" and record["run"] != self.run:
                    raise GruppoError(f"""{path} belongs to another run than {self.folder.parent}. Put this run's own
                        ledger {"and config.json " if self.is_replayed else ""}back, {self._otherwise}.""")
                if event == "step" and self.is_replayed:
                    self.steps[record["step"]] = record
                if event == "group":
                    self.groups[record["position"], record["first"]] = location
                    self._last[path.name] = max(self._last.get(path.name, -1), record["position"])
        self.session = 1 + max(sessions.values(), default=-1)
        """Number of the process that writes, counted over the run and its resumes."""
        self.size = sum(path.stat().st_size for path in self.segments(dist.rank()))
        """Size of this rank's segments, in bytes."""

    def segments(self, rank: int | None = None) -> list[Path]:
        """Segments of all ranks, or of one, in the order in which they were begun."""
        named = [
            (match, path)
            for path in self.folder.glob("*.ledger")
            if (match := _NAME.fullmatch(path.name))
        ]
        return sorted(path for match, path in named if rank is None or int(match[2]) == rank)

    # --- reading ---

    def check(self, needed: Mapping[str, int]) -> None:
        """Refuse a ledger that lacks segments, or parts of them, which ``state`` of a checkpoint has named.

        A replay needs a complete step, and each rank's segments from the first on.
        """
        run, numbers = self.folder.parent, dict[str, list[int]]()
        if self.is_replayed and not self.steps:
            raise GruppoError(
                f"{run} has no complete step in its ledger; it needs a run with engine.lag above 0",
                advice="Give another RUN",
            )
        for path in self.segments() if self.is_replayed else ():
            numbers.setdefault(path.name[6:], []).append(int(path.name[:6]))
        for rank, found in numbers.items():
            lost = sorted({*range(found[-1] + 1)} - {*found})
            if lost and lost == [*range(found[0])]:
                raise GruppoError(
                    f"""the ledger of {run} begins after its first steps, which were deleted: a replay needs
                    all of it""",
                    advice="Give the run a higher $saving.ledger_gb",
                )
            if lost:
                path = self.folder / f"{lost[0]:06d}{rank}"
                raise GruppoError(f"{path} is missing. Put it back, or give another RUN.")
        for name, size in needed.items():
            path = self.folder / name
            if self.folder.is_dir() and (not path.is_file() or path.stat().st_size < size):
                state = (
                    f"has {path.stat().st_size} of {size} bytes" if path.is_file() else "is missing"
                )
                raise GruppoError(
                    f"{path} {state}, and the checkpoint needs it. Put it back, {self._otherwise}."
                )

    def find(self, position: int, request: Request, sampling: Any) -> Rollouts | None:
        """The samples of a request; None where it was not sampled, or was for other settings."""
        location = self.groups.get((position, request.first))
        if location is None:
            return None
        with open_file(location.path) as file:
            file.seek(location.offset)
            whole = file.read(location.bytes)
        begin = _HEADER.size + _HEADER.unpack_from(whole)[1]  # of the tensors, after the JSON
        record, prompt = parse_json(whole[_HEADER.size : begin]), request.prompt
        if record["settings"] != _settings(request, sampling):
            return None
        if (record["id"], record["draw"]) != (prompt.id, prompt.draw):
            raise GruppoError(f"""{location.path} has samples of prompt {record["id"]!r} at position {position}, where
                the data have {prompt.id!r}. Use the data of the run {self.folder.parent}.""")
        tensors = load(whole[begin:])
        return Rollouts(
            prompts=(prompt,),
            **{name: _unpack(record["rollouts"][name], tensors) for name in _FIELDS},
        )

    # --- writing ---

    def append_group(
        self, position: int, request: Request, sampling: Any, rollouts: Rollouts
    ) -> None:
        """Append the samples of a group."""
        tensors: dict[str, Tensor] = {}
        packed = {name: _pack(getattr(rollouts, name), tensors, name) for name in _FIELDS}
        record = {
            "event": "group",
            "position": position,
            "first": request.first,
            "id": request.prompt.id,
        }
        record |= {
            "draw": request.prompt.draw,
            "settings": _settings(request, sampling),
            "rollouts": packed,
        }
        location = self.append(record, save(tensors))
        if location is not None:
            self.groups[position, request.first] = location
            self._last[location.path.name] = max(self._last.get(location.path.name, -1), position)

    def append(self, record: Mapping[str, Any], data: bytes = b"") -> Location | None:
        """Append a record: the samples of a group, or what a step has learned from. None in a replay."""
        if self.is_replayed:
            return None
        written = _bytes(record, data)
        with explained_failures(self.folder):
            try:
                if self._file is None or self._file.tell() > min(SEGMENT_BYTES, self.max_bytes / 8):
                    self.close()
                    self.folder.mkdir(parents=True, exist_ok=True)
                    number = 1 + max(
                        (int(path.name[:6]) for path in self.segments(dist.rank())), default=-1
                    )
                    self._file = (self.folder / f"{number:06d}-r{dist.rank()}.ledger").open("xb")
                    self._file.write(
                        _bytes({"event": "begin", "run": self.run, "session": self.session})
                    )
                location = Location(Path(self._file.name), self._file.tell(), len(written))
                self._file.write(written)
                self._file.flush()  # what a killed process has handed to the system stays
            except BaseException:  # no record is read after a torn one: the next begins a segment
                file, self._file = self._file, None
                if file is not None:
                    with suppress(OSError):
                        file.close()
                raise
            self.size += len(written)
            return location

    def sync(self) -> None:
        """Wait until everything has reached the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            sync_to_disk(self.folder)

    def state(self, position: int) -> dict[str, int]:
        """This rank's segments with groups from ``position`` on, and their sizes, for ``check``."""
        own = self.segments(dist.rank())
        return {
            path.name: path.stat().st_size
            for path in own
            if self._last.get(path.name, -1) >= position
        }

    def prune(self, position: int) -> None:
        """Delete this rank's oldest segments while they exceed the limit, none with groups from ``position`` on."""
        deleted = set[str]()
        for path in self.segments(dist.rank())[:-1]:
            if self.size <= self.max_bytes or self._last.get(path.name, -1) >= position:
                break
            self.size -= path.stat().st_size
            path.unlink()
            deleted.add(path.name)
        kept = ((key, location) for key, location in self.groups.items() if key[0] >= position)
        self.groups = {key: location for key, location in kept if location.path.name not in deleted}

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None


# --- records ----------------------------------------------------------------------------------------------------------


def _bytes(record: Mapping[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(record).encode()
    return (
        _HEADER.pack(_MAGIC, len(text), len(data), zlib.crc32(data, zlib.crc32(text))) + text + data
    )


def _records(path: Path) -> Iterator[tuple[Location, dict[str, Any]]]:
    """The records of a segment up to the first that is not whole."""
    with open_file(path) as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            magic, length, size, crc = _HEADER.unpack(header)
            offset = file.tell() - _HEADER.size
            if magic != _MAGIC or offset + _HEADER.size + length + size > path.stat().st_size:
                return
            body = file.read(length + size)
            if zlib.crc32(body) != crc:
                return
            yield Location(path, offset, len(header) + len(body)), parse_json(body[:length])


def _settings(request: Request, sampling: Any) -> dict[str, Any]:
    """Group size and sampling options of a request, as JSON returns them."""
    return json.loads(json.dumps({"size": request.size, "sampling": asdict(sampling)}, default=str))


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """A value as JSON, its tensors in ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name := f"t{len(tensors)}"] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, tuple | list | set | frozenset):
        return {type(value).__name__: [_pack(one, tensors, where) for one in value]}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [_pack(key, tensors, where), _pack(one, tensors, where)]
                for key, one in value.items()
            ]
        }
    if value is None or isinstance(value, str | int | float):
        return value
    raise GruppoError(
        f"rollouts.{where} holds a {type(value).__name__}, which the ledger cannot keep",
        advice="Use texts, numbers, tensors, lists and dicts, or set $engine.lag 0",
    )


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    (form, content), *_ = value.items()
    if form == "tensor":
        return tensors[content]
    if form == "dict":
        return {_unpack(key, tensors): _unpack(one, tensors) for key, one in content}
    items = [_unpack(one, tensors) for one in content]
    return {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}[form](items)


def split(rollouts: Rollouts) -> list[Rollouts]:
    """The groups of a batch, each as wide as its longest row, so that it does not depend on the others."""
    groups = []
    for number in range(len(rollouts.prompts)):
        group = rollouts.take((rollouts.group_ids == number).nonzero()[:, 0])
        width = max(int(group.lengths.max()), 1)
        columns = ("actions", "mask", "sampler_logprobs", "policy_version")
        groups.append(
            replace(group, **{name: getattr(group, name)[:, :width].clone() for name in columns})
        )
    return groups
