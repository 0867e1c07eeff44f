"""One thread and no network for every test: sums come out in one order, and a hub that answers
changes nothing."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so before any test is
os.environ["MPLBACKEND"] = "Agg"

import logging

import hypothesis
import pytest
import torch
from tests import fake_hub, memo, processes

from gruppo.tracking.plots import plot_run
from gruppo.view.report import write_report

os.environ["GRUPPO_STATE"] = tempfile.mkdtemp(
    prefix="gruppo-state-"
)  # children of the tests inherit it
atexit.register(shutil.rmtree, os.environ["GRUPPO_STATE"], ignore_errors=True)
os.environ["GRUPPO_TRUSTED_RUNS"] = (
    tempfile.gettempdir()
)  # tests copy runs; those of trust unset it
torch.set_num_threads(1)
hypothesis.settings.register_profile("gruppo", deadline=None, derandomize=True)
hypothesis.settings.load_profile("gruppo")


def pytest_collection_finish() -> None:
    """A collection of garbage need not visit what was imported: 0.25 s each time that memory runs
    out in a test."""
    gc.freeze()
    # pytest gives each logger that does not propagate two handlers, three times a test: torch has
    # over forty of them.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and not logger.name.startswith("gruppo"):
            logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def _no_fsync():
    """Nothing waits for the disk, 30 times a run and 4 ms each: a process that is killed loses
    nothing by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", processes.no_fsync)
        yield


@pytest.fixture(autouse=True)
def _log_propagates():
    """The command line ends it; pytest would collect each line of later tests of the process
    twice."""
    yield
    logging.getLogger("gruppo").propagate = True


@pytest.fixture(scope="session", autouse=True)
def _no_plots():
    """Finished runs draw nothing: a dozen plots take five times as long as a tiny run. ``plots``
    draws them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gruppo.api.plot_run", processes.no_plots)
        patch.setattr("gruppo.view.report.write_report", processes.no_plots)
        yield


@pytest.fixture(scope="session", autouse=True)
def _remembered():
    """Runs of the session share what each of them would compute again."""
    with pytest.MonkeyPatch.context() as patch:
        memo.remember(patch)
        yield


@pytest.fixture
def plots(monkeypatch):
    """Runs of the test and of its children draw their plots and write their report when they
    finish."""
    monkeypatch.setattr("gruppo.api.plot_run", plot_run)
    monkeypatch.setattr("gruppo.view.report.write_report", write_report)
    monkeypatch.setattr(processes, "draws_plots", True)


@pytest.fixture(autouse=True)
def _log_as_it_was():
    """A command line that runs within a test gives the log a handler, which the next test's would
    find."""
    log = logging.getLogger("gruppo")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.fixture
def hub(monkeypatch):
    """A small model hub on this machine, with a token for it."""
    import huggingface_hub.constants

    with fake_hub.serving() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
        yield hub
