"""The TOML file of a judge: endpoint, rubric, budget. A mistake is one line, before the first
step."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from gruppo.config.options import Count, NoneOr, NonNegative, Positive, Range
from gruppo.config.serialization import build, read
from gruppo.rewards.functions import PROVIDED
from gruppo.types import GruppoError

REASON = "reason"
"""Field in which the judge gives its reasons before its points; no criterion has this name."""
OWN_FIELDS = ("model", "messages", "response_format", "seed", "stream", "n")
"""Fields of a request that ``request`` does not set."""
WITHOUT_EFFECT = ("key_env", "concurrency", "timeout_s", "retries", "cache", "budget", "price")
"""Entries that change no reward: a run is resumed with others."""


@dataclass(frozen=True)
class Criterion:
    """An item of the rubric."""

    name: str = ""
    text: str = ""
    """What earns the points."""
    weight: Annotated[float, Range(gt=0)] = 1.0
    """Share in the reward, relative to the other items."""
    points: Annotated[int, Range(ge=1, le=100)] = 5
    """Highest grade; the lowest is 0. Not used by pairs."""


@dataclass(frozen=True)
class JudgeBudget:
    """Budget of a run over all ranks; no request is sent beyond it."""

    calls: Annotated[int | None, Range(ge=1)] = None
    tokens: Annotated[int | None, Range(ge=1)] = None
    """Of prompts and answers. Requests in flight may exceed it by their own."""


@dataclass(frozen=True)
class JudgePrice:
    """Price of a million tokens."""

    input: NonNegative = 0.0
    output: NonNegative = 0.0
    currency: str = "USD"


@dataclass(frozen=True)
class JudgeConfig:
    """The entries of a judge's file."""

    endpoint: str = ""
    """Address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    key_env: str = ""
    """Environment variable that holds the key."""
    mode: Literal["score", "pairs"] = "score"
    """score: each completion is graded. pairs: the completions of a group are compared."""
    rubric: tuple[Criterion, ...] = ()
    instructions: str = ""
    """Added to the judge's system prompt."""
    reference: str = ""
    """Column of the data that the judge sees as the reference answer."""
    reason: bool = True
    """Whether the judge writes a reason before its points."""
    samples: Positive = 1
    """Answers for each question; their mean counts."""
    opponents: Count = 0
    """Of each completion in pairs; 0: all others of its group."""
    seed: Count = 0
    concurrency: Positive = 16
    """Requests at the same time."""
    timeout_s: Annotated[float, Range(gt=0)] = 60.0
    """Of each attempt."""
    retries: Count = 4
    """Further attempts after a timeout, 408, 409, 429 or 5xx, or without a connection."""
    cache: NoneOr[str] = ""
    """Folder of the answers, relative to the file; "none" keeps none. Default: in the state
    folder."""
    budget: JudgeBudget = field(default_factory=JudgeBudget)
    price: JudgePrice = field(default_factory=JudgePrice)
    request: dict = field(default_factory=dict)
    """Further fields of each request; temperature is 0 and max_tokens 1024 unless set."""

    @property
    def digest(self) -> str:
        """SHA-256 of all that rewards depend on."""
        entries = {
            name: value for name, value in asdict(self).items() if name not in WITHOUT_EFFECT
        }
        return hashlib.sha256(json.dumps(entries, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a request beside its own."""
        limit = {} if "max_completion_tokens" in self.request else {"max_tokens": 1024}
        return {"temperature": 0.0, **limit, **self.request}


def load_judge(path: Path) -> JudgeConfig:
    """Read and check a judge's file."""
    return read(path, _checked, "a judge's TOML file is needed, such as examples/judge.toml.")


def _checked(data: Mapping[str, Any]) -> JudgeConfig:
    config: JudgeConfig = build(JudgeConfig, data)
    names, url = [item.name for item in config.rubric], urlsplit(config.endpoint)
    has_more = bool(
        "@" in url.netloc or url.query or url.fragment
    )  # which may be a key, and is not shown
    mistakes = dict[str, str]()  # by entry; the first one is raised
    if url.scheme not in ("http", "https") or not url.hostname or has_more:
        mistakes[
            "endpoint"
        ] = f"""endpoint is {url.scheme + "://..." if has_more else config.endpoint!r}; it needs the
            address of an OpenAI-compatible server, without a user, a key or a query in it, such as
            http://127.0.0.1:8000/v1."""
    if not config.model:
        mistakes["model"] = (
            "no model is named; it needs the name by which the endpoint serves it. Set model."
        )
    if config.key_env and not re.fullmatch(
        r"[A-Z_][A-Z0-9_]*", config.key_env
    ):  # never shown: it may be the key
        mistakes[
            "key_env"
        ] = """key_env is no name of an environment variable; it needs one in capitals, such as
            JUDGE_API_KEY, that holds the key. Do not write the key itself."""
    if not names:
        mistakes[
            "rubric"
        ] = """there is no rubric; it needs at least one item. Add [[rubric]] with name, text and
            weight."""
    for n, item in enumerate(config.rubric):
        if not (item.name and item.text):
            mistakes[f"rubric.{n}"] = f"rubric item {n + 1} needs both a name and a text."
    for n, name in enumerate(names):
        if name == REASON or name in names[:n]:
            mistakes[f"rubric.{n}.name"] = f"the rubric has {name!r} already; rename it."
    own = [f"request.{name}" for name in config.request if name in OWN_FIELDS]
    mistakes |= {entry: f"{entry} is set by gruppo; remove it." for entry in own}
    if config.samples > 1 and not config.sampling["temperature"]:
        mistakes[
            "samples"
        ] = f"""samples={config.samples} at temperature 0 asks for one answer several times. Set
            request.temperature above 0, or samples to 1."""
    if config.opponents and config.mode == "score":
        mistakes[
            "opponents"
        ] = f"""opponents={config.opponents} has no effect with mode="score". Remove it, or set
            mode="pairs"."""
    if config.reference in PROVIDED:
        mistakes["reference"] = f"reference={config.reference!r} is no column of data; name one."
    if mistakes:
        entry, problem = next(iter(mistakes.items()))
        raise GruppoError(problem, option=entry)
    return config
