"""vLLM servers as an engine."""

from gruppo.engines.vllm.engine import VllmEngine
from gruppo.engines.vllm.prove import Proof

__all__ = ["Proof", "VllmEngine"]
