"""vLLM servers as an engine."""

from gruppo.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
