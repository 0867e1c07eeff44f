"""The page in a real browser: what a reader sees, what hostile texts become, and what a live run
adds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from tests.view.browser import CHROMIUM, Browser
from tests.view.folders import log_steps, write_run
from tests.view.test_report import HOSTILE

from gruppo.view.report import write_report
from gruppo.view.run import open_runs
from gruppo.view.server import ViewServer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def show(browser: Browser) -> Iterator[object]:
    """Serve folders, and open their page."""
    servers: list[ViewServer] = []

    def serve(*folders: Path) -> Browser:
        servers.append(ViewServer(open_runs([str(folder) for folder in folders]), 0))
        Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        browser.errors.clear()
        browser.open(servers[-1].address)
        return browser

    yield serve
    browser.call("Page.navigate", url="about:blank")
    for server in servers:
        server.shutdown()
        server.server_close()
    assert browser.errors == []


def test_curves_zoom_together_and_hidden_runs_leave_them(show, tmp_path: Path) -> None:
    page = show(*(write_run(tmp_path / name, steps=40) for name in ("one", "two")))
    page.wait("document.querySelectorAll('.plot').length >= 6")
    assert (
        page.evaluate(
            "document.querySelectorAll('.card')[2].querySelectorAll('path.curve:not(.raw)').length"
        )
        >= 2
    )
    page.evaluate("setZoom([10, 20])")
    labels = page.evaluate(
        "[...document.querySelectorAll('.plot')[1].querySelectorAll('text')].map(t => "
        "+t.textContent)"
    )
    assert max(labels) <= 20 and "Show all steps" in page.text()
    page.click("two")
    page.wait("!document.querySelector('#main').textContent.includes('two')")


def test_completions_are_filtered_by_step_prompt_reward_and_ending_and_paged(
    show, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run", steps=120, prompts=3, group=4)
    page = show(path)
    page.tab("completions")
    page.wait("document.querySelectorAll('.group').length >= 20")
    shown = page.evaluate("document.querySelectorAll('.group').length")
    assert (
        shown < 360
        and page.evaluate("document.querySelector('.group h3').textContent") == "Step 120"
    )
    page.evaluate(
        "filter = {...empty, from: '7', to: '9', part: 'part exact_match', low: '1'}; render()"
    )
    page.wait("document.body.innerText.includes('no more')")
    steps = page.evaluate(
        "[...new Set([...document.querySelectorAll('.group h3')].map(h => h.textContent))]"
    )
    rewards = page.evaluate(
        "[...new Set([...document.querySelectorAll('.row .reward')].map(h => h.textContent))]"
    )
    assert set(steps) <= {"Step 9", "Step 8", "Step 7"} and rewards in (["1"], [])
    page.evaluate("filter = {...empty, finish: 'length', prompt: 'what is 3 +'}; render()")
    page.wait("document.body.innerText.includes('no more')")
    prompts = page.evaluate(
        "[...document.querySelectorAll('.prompt .text')].map(p => p.textContent)"
    )
    endings = page.evaluate(
        "[...new Set([...document.querySelectorAll('.row .small div:last-child')].map(p => "
        "p.textContent))]"
    )
    assert (
        prompts
        and all(prompt.startswith("What is 3 +") for prompt in prompts)
        and endings == ["ended by length"]
    )


def test_a_group_is_compared_word_by_word(show, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1)
    rows = [("the sum is nineteen, I am sure", 1.0), ("the sum is twenty, I am sure of it", 0.0)]
    with (path / "samples.jsonl").open("w") as file:
        for text, reward in rows:
            file.write(
                json.dumps({"step": 1, "prompt": "p", "completion": text, "reward": reward}) + "\n"
            )
    page = show(path)
    page.evaluate("chosen.source = 'samples'; go('completions')")
    page.wait("document.querySelector('.row')")
    page.click("Compare the group")
    page.wait("document.querySelector('ins')")
    marked = page.evaluate(
        "[...document.querySelectorAll('ins, del')].map(e => [e.tagName, e.textContent])"
    )
    assert marked == [["DEL", "nineteen"], ["INS", "twenty"], ["INS", " of it"]]


@pytest.mark.parametrize("is_report", [False, True])
def test_hostile_texts_are_shown_as_text_with_invisible_characters_named(
    browser: Browser, show, tmp_path: Path, is_report: bool
) -> None:
    path = write_run(tmp_path / "run", steps=3)
    config = json.loads((path / "config.json").read_text()) | {
        "model": HOSTILE,
        "reward": [HOSTILE],
    }
    (path / "config.json").write_text(json.dumps(config))
    messages = [{"role": HOSTILE, "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
    row = {
        "step": 3,
        "prompt": messages,
        "completion": messages,
        "reward": 1.0,
        "parts": {HOSTILE: 1.0, "__proto__": 2.0},
        "target": HOSTILE,
        "finish": HOSTILE,
        "failures": HOSTILE,
        "group": HOSTILE,
        "tokens": HOSTILE,
        "advantage": HOSTILE,
    }
    picture = {
        "file": "images/../" + HOSTILE,
        "line": 1,
        "column": 1,
        "box": [HOSTILE, -1, 1e300, None],
    }
    with (path / "samples.jsonl").open("w") as file:
        file.write(json.dumps(row) + "\n" + json.dumps({**row, "completion": picture}) + "\n")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 4, HOSTILE: 1.0, "__proto__": 1.0, "constructor": "<b>"}) + "\n"
        )
    if is_report:
        browser.errors.clear()
        browser.open(write_report([path]).as_uri())
    else:
        show(path)
    page = browser
    for name in ("curves", "distributions", "completions", "doctor", "config"):
        page.evaluate(f"chosen.source = 'samples'; go({name!r})")
        page.evaluate("new Promise(r => setTimeout(r, 150))")
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        if name == "completions":
            page.wait("document.querySelector('.row, figure')")
            assert (
                "<script>alert(1)</script>" in page.text()
                and "U+202E" in page.text()
                and "U+001B" in page.text()
            )
            assert not set("\u202e\u200f\x1b\x00") & set(page.text())
    assert (
        page.evaluate(
            "document.querySelectorAll('main script, main [onerror], main img[src=x]').length"
        )
        == 0
    )
    page.errors[:] = [error for error in page.errors if "404" not in error and "400" not in error]


def test_the_page_follows_a_run_that_trains_and_says_when_the_server_has_gone(
    show, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run", steps=5)
    page = show(path)
    log_steps(path, 6, 9)
    page.wait("runs[0].rows.at(-1).step == 9")
    page.wait("document.body.innerText.includes('9 of 50')")


def test_a_report_opens_without_a_server_and_shows_every_tab(
    browser: Browser, tmp_path: Path
) -> None:
    browser.errors.clear()
    browser.open(write_report([write_run(tmp_path / "run", steps=30)]).as_uri())
    for name, script in {
        "curves": "document.querySelectorAll('path.curve').length > 3",
        "distributions": "document.querySelectorAll('rect.cell').length > 20",
        "completions": "document.querySelectorAll('.row').length > 20",
        "doctor": "document.body.innerText.includes('rules')",
        "config": "document.body.innerText.includes('a CPU')",
    }.items():
        browser.tab(name)
        browser.wait(script)
    assert browser.errors == []


def test_a_wrong_token_is_a_sentence(browser: Browser, show, tmp_path: Path) -> None:
    show(write_run(tmp_path / "run", steps=1))
    address = browser.evaluate("location.origin")
    browser.open(f"{address}/#wrong")
    assert "Open the address that gruppo view printed" in browser.text()
    browser.errors.clear()  # the browser logs the refused request
