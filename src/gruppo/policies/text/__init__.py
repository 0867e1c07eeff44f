"""Language models as policies: any Hugging Face causal LM, or any module from ids to logits."""

from gruppo.policies.text.load import from_module, from_pretrained, from_transformers
from gruppo.policies.text.policy import TextPolicy

__all__ = ["TextPolicy", "from_module", "from_pretrained", "from_transformers"]
