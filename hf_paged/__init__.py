"""A paged KV cache for every Hugging Face model.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="hf_paged")
    model.generate(**inputs, past_key_values=PagedCache(config=model.config))

Importing this package registers "hf_paged" with transformers as an attention and mask function.
"""

from .attention import register
from .batching import PromptBatch
from .cache import PagedCache, encoder_decoder_cache
from .core.allocator import PoolExhausted
from .pool import BlockPool
from .report import CacheReport
from .stopping import FreeFinishedRows

__all__ = [
    "BlockPool",
    "CacheReport",
    "FreeFinishedRows",
    "PagedCache",
    "PoolExhausted",
    "PromptBatch",
    "encoder_decoder_cache",
]
__version__ = "0.1.0"

register()
