"""Diagnose a run from its folder: what was measured, what it means, and which options to change."""
