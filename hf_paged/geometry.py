"""What a config says about its layers: which keep their K/V in blocks, and how large those are."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# The layers whose K/V we keep in blocks; all others keep transformers' own cache layer.
PAGED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def dynamic_layers(config: PreTrainedConfig) -> list[Any]:
    """The cache layers that transformers itself makes for a decoder's config, empty."""
    return DynamicCache(config=config).layers


def paged_windows(config: PreTrainedConfig) -> dict[int, int | None]:
    """The layers to keep in blocks, and the tokens that a query of each may look back on.

    Chunked attention is a window here: a query never needs more than a chunk.
    """
    return {
        index: getattr(layer, "sliding_window", None)
        for index, layer in enumerate(dynamic_layers(config))
        if type(layer) in PAGED_LAYERS
    }


def layer_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The config of one layer, where a model's layers differ."""
    configs = getattr(config, "per_layer_config", None)
    return configs[layer] if configs else config


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
        itemsize * elements_per_token(layer_config(config, layer))
        for layer in paged_windows(config)
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
