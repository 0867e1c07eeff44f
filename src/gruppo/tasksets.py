"""Tasksets of the package verifiers, version 0.4 (``verifiers.v1``)."""

from __future__ import annotations

import importlib
import json
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any

from gruppo.errors import DataError, GruppoError
from gruppo.loading import check_listed, import_extra

MAX_TASKS = 10_000
"""Tasks that are read of an infinite taskset."""


def is_taskset(data: str) -> bool:
    """Whether ``--data`` names a taskset, verifiers:NAME."""
    return data.startswith("verifiers:") and data != "verifiers:"


@lru_cache(maxsize=4)
def open_taskset(spec: str) -> Any:
    """The taskset that ``NAME`` or ``NAME:key=value,key=value`` names, with its ``tasks``."""
    name = f"verifiers:{spec}"
    check_listed(name)
    import_extra("verifiers", "verifiers", name)
    identity, _, settings = spec.partition(":")
    options: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, is_given, value = setting.partition("=")
        if not is_given:
            raise GruppoError(
                f"cannot read {setting!r} in {name}; write verifiers:NAME:key=value,key=value."
            )
        options[key] = value
        with suppress(json.JSONDecodeError):
            options[key] = json.loads(value)
    try:
        package = importlib.import_module("verifiers.v1")
        taskset = package.load_taskset(
            package.taskset_config_type(identity)(id=identity, **options)
        )
        taskset.tasks = list(islice(taskset, MAX_TASKS))
        return taskset
    except Exception as problem:  # code of other people, which can raise anything
        text = " ".join(str(problem).split())
        raise GruppoError(
            f"{name} cannot be opened: {type(problem).__name__}: {text:.300}"
        ) from problem


def rows_of_taskset(spec: str) -> list[dict[str, Any]]:
    """One row for each task: its prompt, its ``taskset`` and number in it, and its answer if it has
    one."""
    rows = []
    for index, task in enumerate(open_taskset(spec).tasks):
        facts = {"system_prompt": None, **dict(task.data)}
        prompt = facts["prompt"]
        if prompt is None:
            raise DataError(
                f"task {index} of verifiers:{spec} has no prompt: another agent opens its "
                f"conversation."
            )
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [{"role": m["role"], "content": m["content"]} for m in map(dict, prompt)]
        if facts["system_prompt"]:
            messages.insert(0, {"role": "system", "content": facts["system_prompt"]})
        rows.append({"prompt": messages, "taskset": spec, "task_index": index})
        if facts.get("answer") not in (None, ""):
            rows[-1]["answer"] = facts["answer"]
    return rows
