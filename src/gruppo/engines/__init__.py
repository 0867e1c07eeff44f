"""Where samples come from."""

from gruppo.engines.local import LocalEngine

__all__ = ["LocalEngine"]
