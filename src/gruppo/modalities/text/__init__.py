"""Language models as policies: any Hugging Face causal LM, or any module from ids to logits."""

from gruppo.modalities.text.load import from_module, from_pretrained, from_transformers
from gruppo.modalities.text.modality import TEXT
from gruppo.modalities.text.policy import TextPolicy

__all__ = ["TEXT", "TextPolicy", "from_module", "from_pretrained", "from_transformers"]
