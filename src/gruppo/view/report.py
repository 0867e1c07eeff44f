"""The page as one file that needs no server: ``page.html`` with the data of the runs in it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gruppo.integrity import replace_file
from gruppo.types import GruppoError
from gruppo.view.run import NEWEST, RunView, open_runs

MAX_BYTES = 48 << 20
"""Of completions, and of images, in a report: the newest ones."""
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
"""The page, whose single script and style are the only ones that its policy allows to run."""


def content_security_policy(*, connect: str, images: str) -> str:
    """Content security policy: no code, style or request but the page's own, whatever a completion
    contains."""
    contents = (
        re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)[0] for tag in ("script", "style")
    )
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    script, style = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src {connect}; "
        f"img-src {images}; "
        "base-uri 'none'; form-action 'none'"
    )


def write_report(folders: Sequence[str | Path], path: Path | None = None) -> Path:
    """Write the page of runs as one file, by default ``report.html`` in the folder of a single run,
    and return it."""
    runs = open_runs([str(folder) for folder in folders])
    path = path or (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    content = json.dumps(
        {"made": time.time(), "runs": [_embedded(run, MAX_BYTES // len(runs)) for run in runs]}
    )
    data = base64.b64encode(gzip.compress(content.encode(), 6, mtime=0)).decode()
    title = html.escape(", ".join(run.name for run in runs))
    text = PAGE.replace("<title>gruppo</title>", f"<title>{title}</title>", 1)
    # The content of an element that is no script is not run, and base64 has no "<" that could end
    # it.
    block = f'<script type="application/octet-stream" id="data">{data}</script>\n<script>'
    text = text.replace("<script>", block, 1)
    # In a meta element, as a file has no server to send a header.
    rule = content_security_policy(connect="'none'", images="data: blob:")
    text = text.replace(
        "<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{rule}">', 1
    )
    replace_file(path, text)
    return path


def _embedded(run: RunView, max_bytes: int) -> dict[str, Any]:
    """What the server would send of a run, within ``max_bytes`` of completions and as many of
    images."""
    state, rows = run.state(), dict[str, list[tuple[int, str]]]()
    notices = list(state["notices"])  # the state is kept and shared; it must not change
    for source in state["sources"]:
        rows[source], size = [], 0
        text, first = run.rows(source, NEWEST)
        while first is not None:
            rows[source].append((first, text.decode("utf-8", "replace")))
            size += len(text)
            if size > max_bytes:
                notice = (
                    f"This report has the {source} from step {first} on: gruppo view shows all."
                )
                notices.append(notice)
                break
            text, first = run.rows(source, first)
    images, size = dict[str, str](), 0
    for name in reversed(state["sheets"]):
        with suppress(GruppoError):  # no PNG
            if size <= max_bytes:
                images[name] = base64.b64encode(run.image(name)).decode()
                size += len(images[name])
    return {
        "state": state | {"notices": notices},
        "metrics": run.metrics()[0].decode("utf-8", "replace"),
        "rows": rows,
        "images": images,
    }
