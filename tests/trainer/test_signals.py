"""Signals that arrive where Python drops the exceptions of their handlers."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from gruppo.trainer.signals import Interrupted, Stopper


class SignalsWhenDeleted:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        if self.error:
            raise self.error


def test_a_signal_within_del_leaves_at_once_and_silently(capfd):
    stopper, started = Stopper(), time.monotonic()
    with pytest.raises(Interrupted), stopper.listening(), stopper.may_leave():
        SignalsWhenDeleted()
        time.sleep(40)
    assert time.monotonic() - started < 20 and stopper.requested
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the system has no SIGUSR1")
def test_a_signal_within_del_that_is_raised_again_is_not_a_second_one():
    stopper = Stopper()
    with stopper.listening():
        with pytest.raises(KeyboardInterrupt) as raised, stopper.may_leave():
            SignalsWhenDeleted()
            time.sleep(40)
        assert raised.type is Interrupted
        signal.raise_signal(signal.SIGUSR1)  # raises nothing
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # the second


def test_other_errors_of_del_are_printed_as_ever(capfd):
    stopper, dropped = Stopper(), []
    sys.unraisablehook, before = dropped.append, sys.unraisablehook
    try:
        with stopper.listening():
            SignalsWhenDeleted(ValueError("its own"))
    finally:
        sys.unraisablehook = before
    assert [type(one.exc_value) for one in dropped] == [ValueError] and stopper.requested
