"""vLLM servers as an engine."""

from gruppo.engines.vllm.engine import VllmEngine
from gruppo.engines.vllm.nccl import NcclTransfer
from gruppo.engines.vllm.prove import Proof

__all__ = ["NcclTransfer", "Proof", "VllmEngine"]
