"""A small Hugging Face hub on a loopback port: the routes that creating a repository and uploading
a folder use.

Files are uploaded as the hub asks: small ones within the commit, large ones by the basic transfer
of Git LFS.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN, OWNER = "hf_right", "someone"
LARGE = (".safetensors", ".gguf", ".png")
"""Files that go through LFS, as by the hub's .gitattributes."""


@dataclass
class FakeHub:
    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by path; those of a branch are under OWNER/NAME@BRANCH."""
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Of LFS, by SHA-256."""
    commits: list[str] = field(default_factory=list)
    problem: str = ""
    """Beginning of the paths that are refused."""
    metadata: list[str] = field(default_factory=list)
    """Model cards that were sent to be validated."""


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, code: int, value: Any = None) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(code)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, text)
        if code >= 400:
            self.send_header("X-Error-Message", value["error"])
        self.end_headers()
        self.wfile.write(body)

    def do(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if hub.problem and path.startswith(hub.problem):
            return self.answer(403, {"error": "storage limit reached"})
        if path.startswith("/lfs/"):  # the storage, whose address is signed: without a token
            sha256 = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == sha256
            hub.objects[sha256] = body
            return self.answer(200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        value = json.loads(body) if body and "/commit/" not in path else {}
        if path == "/api/whoami-v2":
            return self.answer(200, {"name": OWNER, "type": "user"})
        if path == "/api/repos/create":
            name = f"{value.get('organization') or OWNER}/{value['name']}"
            if not name.startswith(f"{OWNER}/"):
                return self.answer(
                    403, {"error": f"You don't have the rights to create a model under {name}"}
                )
            if name in hub.repositories:
                return self.answer(
                    409,
                    {"error": "You already created this model repo", "url": f"{hub.url}/{name}"},
                )
            hub.repositories[name] = {".gitattributes": b""}
            hub.private |= (
                {name} if value.get("visibility") == "private" or value.get("private") else set()
            )
            return self.answer(200, {"url": f"{hub.url}/{name}"})
        if path == "/api/validate-yaml":
            hub.metadata.append(value["content"])
            return self.answer(200, {"errors": [], "warnings": []})
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            objects = [{**each, "actions": self.actions(each["oid"])} for each in value["objects"]]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(.*)", path):
            name, rest = match.groups()
            if name not in hub.repositories:
                return self.answer(404, {"error": "Repository not found"})
            action, revision = (*rest.split("/"), "", "")[1:3]
            if action == "branch":
                hub.repositories[f"{name}@{revision}"] = dict(hub.repositories[name])
                return self.answer(200)
            place = name if revision in ("", "main") else f"{name}@{revision}"
            files = hub.repositories[place]
            if action == "preupload":
                found = [{"path": each["path"], "shouldIgnore": False} for each in value["files"]]
                modes = [
                    {"uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular"}
                    for each in found
                ]
                return self.answer(
                    200, {"files": [each | mode for each, mode in zip(found, modes, strict=True)]}
                )
            if action == "commit":
                self.commit(place, [json.loads(line) for line in body.splitlines()])
                return self.answer(
                    200, {"commitUrl": f"{hub.url}/{name}/commit/{'a' * 40}", "commitOid": "a" * 40}
                )
            if action == "tree":
                tree = [
                    {"type": "file", "path": p, "size": len(b), "oid": "b" * 40}
                    for p, b in files.items()
                ]
                return self.answer(200, tree)
            if action in ("", "revision"):
                siblings = [{"rfilename": path} for path in files]
                is_private = name in hub.private
                found = {
                    "id": name,
                    "private": is_private,
                    "siblings": siblings,
                    "sha": "a" * 40,
                    "tags": [],
                }
                return self.answer(200, found)
        return self.answer(404, {"error": f"no route {self.command} {path}"})

    do_GET = do_POST = do_PUT = do

    def actions(self, sha256: str) -> dict[str, Any]:
        return {"upload": {"href": f"{self.hub.url}/lfs/{sha256}"}}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = self.hub.repositories[name]
        for kind, value in ((line["key"], line["value"]) for line in lines):
            if kind == "header":
                self.hub.commits.append(value["summary"])
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]


@contextmanager
def serving() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
