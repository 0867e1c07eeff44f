"""Fill the caches that every run of a child would fill again. Imported by the fork server; starts
no thread."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from gruppo.config import serialization
from gruppo.config.schema import Config

get_checkpoint_conversion_mapping("llama")
serialization.from_dict(serialization.to_dict(Config()))
gc.freeze()  # and no child copies the pages of what was imported when it collects garbage
