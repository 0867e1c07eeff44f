"""Command line."""

from gruppo.cli.app import main

__all__ = ["main"]
