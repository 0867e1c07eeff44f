"""Annotations of tensors by dtype and shape: ``FloatBT`` is a floating point tensor [B, T].

B rows, T actions, N selected actions, V vocabulary, P groups; see ``gruppo.types``.
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

Scalar = Float[Tensor, ""]
FloatB = Float[Tensor, "B"]
IntB = Int[Tensor, "B"]
FloatBT = Float[Tensor, "B T"]
BoolBT = Bool[Tensor, "B T"]
FloatN = Float[Tensor, "N"]
IntN = Int[Tensor, "N"]
FloatNV = Float[Tensor, "N V"]
FloatP = Float[Tensor, "P"]
