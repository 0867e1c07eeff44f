"""The moving average with a decay other than a half, where old and new are told apart."""

from __future__ import annotations

import pytest

from gruppo.core.running import Ema


@pytest.mark.silent_bug(21)
def test_the_newest_number_has_the_smaller_share():
    """After 1 and 11 at decay 0.9: (0.9 * 0.1 * 1 + 0.1 * 11) / (1 - 0.81) = 1.19 / 0.19."""
    average = Ema().after(1.0, 0.9).after(11.0, 0.9)
    assert average.value == pytest.approx(1.19 / 0.19, rel=1e-12)
    assert Ema().after(5.0, 0.9).value == pytest.approx(5.0, rel=1e-12)
