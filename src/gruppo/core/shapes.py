"""Types of the tensors that most functions of core take, named after their shape.

B rows with T actions each; N rows of logits over V actions.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

FloatB = Float[Tensor, "B"]
FloatBT = Float[Tensor, "B T"]
BoolBT = Bool[Tensor, "B T"]
IntB = Int[Tensor, "B"]
FloatN = Float[Tensor, "N"]
FloatNV = Float[Tensor, "N V"]
IntN = Int[Tensor, "N"]
