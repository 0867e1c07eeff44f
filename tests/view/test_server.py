"""The server of ``gruppo view`` answers this machine's browser with the token only, and survives
any folder."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests import processes
from tests.view.folders import write_run

from gruppo.tracking.files import MetricsFile
from gruppo.types import GruppoError
from gruppo.view import run as view
from gruppo.view.run import RunView, open_runs
from gruppo.view.server import ViewServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first", steps=60, prompts=2, group=3)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ViewServer]:
    with ViewServer(open_runs([str(folder)]), 0) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server: ViewServer, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.putrequest("GET", path, skip_host=True)
    headers = {"Host": "127.0.0.1:1", "Authorization": f"Bearer {server.token}"} | headers
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


PATHS = [
    "/state",
    "/metrics?run=0&start=0",
    "/rows?run=0&source=completions&before=9",
    "/image?run=0&name=step_000001.png",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer wrong"])
def test_without_the_token_nothing_of_a_run_is_sent(
    server: ViewServer, path: str, given: str
) -> None:
    reply = ask(server, path, Authorization=given)
    assert (reply.status, reply.read()) == (401, b"The token is missing or wrong.")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8642", 200),
        ("localhost:9", 200),
        ("[::1]:9", 200),
        ("LOCALHOST", 200),
        ("evil.example:8642", 403),
        ("localhost.evil.example", 403),
        ("", 403),
        ("127.0.0.1.nip.io:80", 403),
    ],
)
def test_a_name_that_another_site_made_to_mean_this_machine_is_refused(
    server: ViewServer, host: str, status: int
) -> None:
    assert [ask(server, path, Host=host).status for path in ("/", "/state")] == [status] * 2


def test_the_page_holds_no_data_and_its_policy_allows_its_own_script_alone(
    server: ViewServer,
) -> None:
    reply = ask(server, "/", Authorization="")
    rule, body = reply.headers["Content-Security-Policy"], reply.read().decode()
    assert reply.status == 200 and server.token not in body and "smollm2" not in body
    assert (
        "default-src 'none'" in rule
        and "frame-ancestors 'none'" in rule
        and "connect-src 'self'" in rule
    )
    assert (
        "unsafe" not in rule
        and body.count("<script>") == body.count("<style>") == 1
        and " style=" not in body
    )
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "http://",
        "https://",
    ):
        assert name not in body.replace('"http://www.w3.org/2000/svg"', ""), name


def test_the_server_listens_on_this_machine_only_and_its_address_ends_with_the_token(
    server: ViewServer,
) -> None:
    assert (
        server.server_address[0] == "127.0.0.1" and server.address.partition("#")[2] == server.token
    )


@pytest.mark.parametrize(
    "path",
    [
        "/rows?run=7&source=completions&before=9",
        "/rows?run=0&before=x",
        "/rows?run=0&before=9&x=1",
        "/image?run=0&name=../config.json",
        "/image?run=0&name=%2e%2e%2fconfig.json",
        "/image?run=0&name=step_000001.png",
        "/nothing",
        "/../config.json",
        "/rows",
    ],
)
def test_a_request_that_makes_no_sense_is_answered_in_one_line(
    server: ViewServer, path: str
) -> None:
    reply = ask(server, path)
    assert reply.status in (400, 404) and len(reply.read().splitlines()) == 1


def test_every_completion_is_reached_in_chunks_of_whole_steps_from_the_newest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "CHUNK_BYTES", 5000)
    run, before, seen, chunks = RunView(folder, "first"), 10**15, list[dict[str, Any]](), 0
    while True:
        text, first = run.rows("completions", before)
        if first is None:
            break
        rows = [json.loads(line) for line in text.splitlines()]
        assert {row["step"] for row in rows} == set(range(first, min(before, 61)))
        seen, before, chunks = rows + seen, first, chunks + 1
    assert (
        len(seen) == 60 * 6
        and [row["step"] for row in seen] == sorted(row["step"] for row in seen)
        and chunks > 5
    )


def test_a_page_that_is_open_receives_only_what_was_appended_and_all_of_a_file_that_was_replaced(
    tmp_path: Path,
) -> None:
    run, file = RunView(tmp_path, "run"), MetricsFile(tmp_path)
    file.log(1, {"reward/mean": 0.5})
    text, version = run.metrics()
    file.log(2, {"reward/mean": 0.6})
    more, same = run.metrics(version, len(text))
    assert [json.loads(line)["step"] for line in more.splitlines()] == [2] and same == version
    file.log(2, {"eval/reward_mean": 1.0})  # rewrites the file
    whole, other = run.metrics(version, len(text + more))
    assert len(whole.splitlines()) == 2 and other != version


def test_the_state_changes_when_a_step_is_logged_and_is_described_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = RunView(write_run(tmp_path / "run"), "run"), MetricsFile(tmp_path / "run")
    before, described = run.state(), []
    describe = run._describe
    monkeypatch.setattr(run, "_describe", lambda: described.append(1) or describe())
    file.log(7, {"reward/mean": 0.5})
    assert (
        run.state() is before and not described
    )  # it took a moment: a twentieth of the time may be spent on it
    run._not_before = 0.0
    after = run.state()
    assert (
        after["last"] == 7
        and after["version"] != before["version"]
        and run.state() is after
        and len(described) == 1
    )


# --- folders that are not as they should be ---


def half(path: Path) -> None:
    (path / "config.json").unlink()


def torn(path: Path) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "reward/me')
    newest = next(path.glob("completions/*"))
    newest.write_bytes(newest.read_bytes()[:-20])


def damaged(path: Path) -> None:
    (path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.5}\nno JSON\n[1]\n{"step": null}\n{"step": 2, "a": [1]}\n'
    )
    (path / "evaluations.json").write_text("{")
    (path / "manifest.json").write_text("[1]")


def older(path: Path) -> None:
    (path / "config.json").write_text('{"recipe": "arithmetic", "beta": 0.04}')
    for file in path.glob("completions/*"):
        file.unlink()


def begun(path: Path) -> None:
    (path / "metrics.jsonl").unlink()


def huge(path: Path) -> None:
    (path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1%s}\n' % ("0" * 400))


@pytest.mark.parametrize(
    ("change", "notice"),
    [
        (half, "no config.json"),
        (torn, None),
        (damaged, "metrics.jsonl, line 2 is not a JSON object"),
        (older, "completions/ is empty"),
        (begun, "No step has been logged yet"),
        (huge, None),
    ],
)
def test_a_folder_that_is_half_written_damaged_or_older_is_shown_with_a_notice(
    tmp_path: Path, change: Any, notice: str | None
) -> None:
    path = write_run(tmp_path / "run")
    change(path)
    (run,) = open_runs([str(path)])
    state = run.state()
    json.dumps(state, allow_nan=False)
    assert notice is None or any(notice in text for text in state["notices"])
    assert "findings" in state["doctor"] or "\n" not in state["doctor"]["error"]
    assert change in (begun, damaged, huge) or state["panels"]
    run.rows("completions", 100)


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(GruppoError, match=r"has no config.json|does not exist"):
            open_runs([str(folder)])
    with pytest.raises(GruppoError, match="no run was given"):
        open_runs([])


def test_a_port_in_use_is_one_line_with_what_to_do(
    server: ViewServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(server.server_address[1])
    assert processes.exit_code(["view", str(folder), "--port", port]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == f"gruppo: port {port} is in use. Choose another --port, or --port 0 for any free one.\n"
    )
    assert (
        processes.exit_code(["view", str(folder), "--port", "99999"]) == 2
        and "Choose another" in capsys.readouterr().err
    )


def test_the_command_prints_its_address_and_ends_with_ctrl_c(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: ViewServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ViewServer, "serve_forever", interrupt)
    assert processes.exit_code(["view", str(folder), "--port", "0"]) == 0
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")


def test_an_image_is_a_png_of_the_folder(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1)
    (path / "images").mkdir()
    (path / "secret.png").write_bytes(b"\x89PNG\r\n\x1a\n secret")
    (path / "images/step_000002.png").write_text("no image")
    (path / "images/step_000003.png").write_bytes(b"\x89PNG\r\n\x1a\n own")
    run = RunView(path, "run")
    for name in ("../secret.png", "step_000001.png", "step_000002.png"):
        with pytest.raises(GruppoError, match="has no image"):
            run.image(name)
    assert run.image("step_000003.png").endswith(b"own")
