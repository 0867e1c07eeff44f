"""The TOML file of a judge: endpoint, rubric, budget. A mistake is one line, before the first
step."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from gruppo.config.options import Count, NoneOr, Positive, Range
from gruppo.config.serialization import build, read
from gruppo.rewards.functions import PROVIDED
from gruppo.types import GruppoError

REASON = "reason"
"""Field in which the judge gives its reasons before its points; no criterion has this name."""
OWN_FIELDS = {"model", "messages", "response_format", "seed", "stream", "n"}
"""Fields of a request that ``request`` does not set."""
WITHOUT_EFFECT = ("key_env", "concurrency", "timeout_s", "retries", "max_calls")
"""Entries that change no reward: a run can be resumed with other values."""
ENDPOINT = re.compile(r"https?://[^\s@?#/:][^\s@?#/]*(/[^\s@?#]*)?")
"""Without a user or a query, which may be a key."""


@dataclass(frozen=True)
class Criterion:
    """An item of the rubric."""

    name: str = ""
    text: str = ""
    """What earns the points."""
    weight: Annotated[float, Range(gt=0)] = 1.0
    """Share in the reward, relative to the other items."""
    points: Annotated[int, Range(ge=1, le=100)] = 5
    """Highest grade; the lowest is 0."""


@dataclass(frozen=True)
class JudgeConfig:
    """The entries of a judge's file."""

    endpoint: str = ""
    """Address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    key_env: str = ""
    """Environment variable that holds the key."""
    rubric: tuple[Criterion, ...] = ()
    instructions: str = ""
    """Added to the judge's system prompt."""
    reference: str = ""
    """Column of the data that the judge sees as the reference answer."""
    reason: bool = True
    """Whether the judge writes a reason before its points."""
    samples: Positive = 1
    """Answers for each question; their mean counts."""
    seed: Count = 0
    concurrency: Positive = 16
    """Requests at the same time."""
    timeout_s: Annotated[float, Range(gt=0)] = 60.0
    """Of each attempt."""
    retries: Count = 4
    """Further attempts after a timeout, 408, 409, 429 or 5xx, or without a connection."""
    max_calls: NoneOr[Positive] = None
    """Requests of a run over all ranks, further attempts included; none is sent beyond it."""
    request: dict = field(default_factory=dict)
    """Further fields of each request; temperature is 0 and max_tokens 1024 unless set."""

    @property
    def digest(self) -> str:
        """SHA-256 of all that rewards depend on."""
        entries = asdict(self)
        for name in WITHOUT_EFFECT:
            del entries[name]
        return hashlib.sha256(json.dumps(entries, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a request besides its own."""
        limit = {} if "max_completion_tokens" in self.request else {"max_tokens": 1024}
        return {"temperature": 0.0, **limit, **self.request}


def load_judge(path: Path) -> JudgeConfig:
    """Read and check a judge's file."""
    return read(path, _checked, "a judge's TOML file is needed, such as examples/judge.toml.")


def _checked(entries: Mapping[str, Any]) -> JudgeConfig:
    config: JudgeConfig = build(JudgeConfig, entries)
    names = [item.name for item in config.rubric]
    # Values are not shown: endpoint and key_env may hold a key by mistake.
    checks = [
        (
            "endpoint",
            ENDPOINT.fullmatch(config.endpoint),
            "endpoint needs the address of an OpenAI-compatible server, without a user, a key or a"
            " query in it, such as http://127.0.0.1:8000/v1.",
        ),
        ("model", config.model, "model needs the name by which the endpoint serves it."),
        (
            "key_env",
            re.fullmatch("([A-Z_][A-Z0-9_]*)?", config.key_env),
            "key_env needs the name of an environment variable in capitals, such as JUDGE_API_KEY,"
            " that holds the key. Do not write the key itself.",
        ),
        (
            "rubric",
            names and all(item.name and item.text for item in config.rubric),
            "rubric needs at least one item, each with a name and a text. Add [[rubric]].",
        ),
        (
            "rubric",
            len({REASON, *names}) > len(names),
            f"rubric needs names that differ from each other and from {REASON!r}; it has"
            f" {', '.join(names)}.",
        ),
        (
            "request",
            OWN_FIELDS.isdisjoint(config.request),
            f"request cannot set {', '.join(sorted(OWN_FIELDS))}, which gruppo sets itself.",
        ),
        (
            "samples",
            config.samples == 1 or config.sampling["temperature"],
            f"samples={config.samples} at temperature 0 asks for one answer several times. Set"
            " request.temperature above 0, or samples to 1.",
        ),
        (
            "reference",
            config.reference not in PROVIDED,
            f"reference={config.reference!r} is not a column of the data; name one.",
        ),
    ]
    for entry, is_fine, problem in checks:
        if not is_fine:
            raise GruppoError(problem, option=entry)
    return config
