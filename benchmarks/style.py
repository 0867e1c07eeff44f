"""Colors and style of the plots of benchmarks."""

from __future__ import annotations

from pathlib import Path

COLORS = ("#2563a8", "#c2571a", "#3f8f4f", "#8b5fbf", "#b8901f", "#c44569", "#4a9a9a", "#7a7a7a")
INK, PAPER = "#222222", "#ffffff"
STYLE = Path(__file__).with_name("plots.mplstyle")
