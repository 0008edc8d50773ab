"""What a config says about its layers: which keep their K/V in blocks, and how large those are."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

# transformers' names of the layers whose K/V we keep; all others keep transformers' own layer.
PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


class LayerType(NamedTuple):
    """A layer as transformers' caches see it: its type, and the arguments of its cache layer."""

    name: str
    kwargs: dict[str, Any]

    @property
    def is_paged(self) -> bool:
        return self.name in PAGED_LAYER_TYPES

    @property
    def window(self) -> int | None:
        """Tokens that a query may look back on; chunked attention never needs more than a chunk."""
        return self.kwargs.get("sliding_window")


def layer_types(config: PreTrainedConfig) -> list[LayerType]:
    """The type of every layer of a decoder's config, as `DynamicCache(config=...)` reads it."""
    names, kwargs = get_layer_types_and_kwargs(config)
    return [LayerType(*pair) for pair in zip(names, kwargs, strict=True)]


def elements_per_token(config: PreTrainedConfig) -> int:
    """K and V elements that one layer stores for a token, by the usual names of config fields."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # MLA models cache the expanded K and V
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return heads * (key_dim + config.v_head_dim)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim


def bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype | None) -> int:
    """Bytes of K and V that all paged layers of a decoder's config store for a token."""
    declared = dtype or config.dtype or torch.get_default_dtype()
    itemsize = getattr(torch, declared).itemsize if isinstance(declared, str) else declared.itemsize
    return sum(
        itemsize * elements_per_token(layer_config)
        for layer, layer_config in zip(layer_types(config), config.per_layer_config, strict=True)
        if layer.is_paged
    )


def parse_memory(memory: int | str) -> int:
    """Bytes in `memory`: an int, or text such as "512MiB", "4GiB" or "4GB" (both 1024-based).

    Raises:
        ValueError: it is neither, or not more than 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(memory), re.IGNORECASE)
    if isinstance(memory, bool) or match is None or float(match[1]) <= 0:
        raise ValueError(f'max_memory must be bytes or text such as "4GiB", not {memory!r}.')
    return int(float(match[1]) * UNITS[match[2].upper()])
