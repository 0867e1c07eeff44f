"""vLLM servers as an engine."""

from gruppo.engines.vllm.engine import VllmEngine
from gruppo.engines.vllm.weights import WeightCheck

__all__ = ["VllmEngine", "WeightCheck"]
