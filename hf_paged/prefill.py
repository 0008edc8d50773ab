"""Prompts computed ahead of generate, in chunks and without the model's head."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from .arguments import check_count, padding_mask, token_ids
from .base_cache import BaseCache


def prefill(
    cache: BaseCache,
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    chunk_size: int | None,
    **kwargs: Any,
) -> None:
    """Compute all but the last token of the prompts; see `PagedCache.prefill`."""
    if chunk_size is not None:
        check_count("chunk_size", chunk_size)
    body = getattr(unwrapped(model), "base_model", None)
    if body is None:
        raise ValueError(f"model must be a transformers model, not {type(model).__name__}.")
    ids = token_ids("input_ids", input_ids)
    input_ids = ids if isinstance(input_ids, torch.Tensor) else ids.to(body.device)
    if attention_mask is not None:
        mask = padding_mask(attention_mask, tuple(ids.shape))
        attention_mask = mask.to(input_ids.device, torch.long)
    start, last = cache.get_seq_length(), input_ids.shape[1] - 1
    if start > input_ids.shape[1]:
        raise ValueError(
            f"input_ids has {input_ids.shape[1]} tokens, the cache holds {start}; pass whole "
            "prompts, in front what the cache holds."
        )
    numbers = ids.cpu().numpy()
    tokens = cache.state.tokens
    if len(tokens) in (1, len(numbers)):
        rows = np.arange(len(numbers)) % len(tokens)
        cache.state.provenance.check_ids(numbers, rows, tokens)
    # With M-RoPE an image takes positions of its own, which the model finds.
    finds_positions = bool(kwargs) and hasattr(body, "get_rope_index")
    if finds_positions and chunk_size is not None:
        raise ValueError(
            f"{type(body).__name__} counts the positions of images in whole prompts; leave out "
            "chunk_size."
        )
    if (
        attention_mask is not None
        and "position_ids" in argument_names(body)
        and not finds_positions
    ):
        kwargs.setdefault("position_ids", (attention_mask.cumsum(-1) - 1).clamp(min=0))
    of_tokens = [name for name in kwargs if name.endswith("_ids")]
    for name in of_tokens:
        kwargs[name] = torch.as_tensor(kwargs[name], dtype=torch.long, device=input_ids.device)
    while start < last:
        stop = last if chunk_size is None else min(start + chunk_size, last)
        inputs = {**kwargs, **cache_argument(body, cache)}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask[:, :stop]
        inputs |= {name: kwargs[name][..., start:stop] for name in of_tokens}
        with torch.no_grad():
            body(input_ids=input_ids[:, start:stop], **inputs)
        start = stop
    tokens = cache.state.tokens
    if len(tokens) == len(numbers):
        cache.state.provenance.note_ids(numbers, tokens.columns)


def unwrapped(model: torch.nn.Module) -> Any:
    """The model of transformers in which PEFT has put its layers, or the model itself."""
    get_base_model: Any = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def argument_names(model: torch.nn.Module) -> Iterable[str]:
    """What the forward of a model takes, below PEFT."""
    return signature(unwrapped(model).forward).parameters


def cache_argument(model: torch.nn.Module, cache: DynamicCache) -> dict[str, DynamicCache]:
    """`cache` under the name that the model's forward has for it: transformers has renamed it."""
    return {"cache" if "cache" in argument_names(model) else "past_key_values": cache}
