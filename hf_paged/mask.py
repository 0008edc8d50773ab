"""The mask function that is registered with transformers under the name "hf_paged"."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from .core.metadata import MaskFacts, Pattern
from .core.model_spec import models_of
from .view import KVLength, LazyMask

# Models that attend without a mask where a step has one token.
UNMASKED_TOKENS = {"led"}


def paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask as transformers' `AttentionMaskInterface` asks for it.

    For a PagedCache it is a `LazyMask`, and the cache learns from it which columns are padding;
    otherwise it is what `sdpa_mask` returns, or `eager_mask` for a model that adds masks to scores.

    Raises:
        ValueError: the 2-D mask does not have one entry for each row and column, cached and new, or
            shows padding to a model that would look at it.
    """
    config: Any = kwargs.get("config")
    is_additive = _adds_masks(type(config))
    mask_dtype = kwargs.get("dtype", torch.float32) if is_additive else torch.bool

    def build(kv_length: int, skip: bool) -> torch.Tensor | None:
        return (eager_mask if is_additive else sdpa_mask)(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=None if attention_mask is None else attention_mask.to(device),
            local_size=local_size,
            allow_is_causal_skip=skip,
            device=device,
            **kwargs,
        )

    if not isinstance(kv_length, KVLength):
        # Where layers share K/V, a model may cut queries (Gemma 4): no mask cannot say which.
        shares = getattr(config, "num_kv_shared_layers", None)
        return build(kv_length, allow_is_causal_skip and not shares)
    state, reader, kv_length = kv_length.state, kv_length.reader, int(kv_length)
    if attention_mask is not None and len(attention_mask) != batch_size:
        raise ValueError(
            f"The attention_mask has {len(attention_mask)} rows for a batch of {batch_size}."
        )
    if attention_mask is None and not state.tokens.is_unpadded:
        # What was padding stays padding: it is not stored.
        past = torch.from_numpy(state.tokens.mask())
        attention_mask = F.pad(past, (0, q_length), value=True)
        if len(past) == 1:
            attention_mask = attention_mask.expand(batch_size, -1)
    kwargs["allow_is_bidirectional_skip"] = False
    facts = MaskFacts(batch_size, q_length, kv_length, kv_offset)
    # Of a compileable cache transformers never skips the mask of a decode step.
    is_decode = q_length == 1 and reader.eager_reason is None
    if allow_is_causal_skip or (is_decode and _is_pattern(mask_function)):
        facts.pattern = _ask_pattern(mask_function, local_size, config, device)
    if attention_mask is not None:
        if attention_mask.shape[-1] != kv_offset + kv_length:
            hint = "; assisted decoding and prompt lookup take a fresh cache"
            raise ValueError(
                f"The attention_mask covers {attention_mask.shape[-1]} tokens, but {q_length} new "
                f"ones follow {facts.past} in the cache; it must cover all"
                f"{hint if state.may_repeat else ''}."
            )
        if getattr(config, "model_type", None) in UNMASKED_TOKENS and not attention_mask.all():
            raise ValueError(
                f"A {config.model_type} model makes no mask for single tokens, so they would see "
                "the padding of its decoder's prompts; give prompts of one length."
            )
        facts.padding = attention_mask.to(torch.bool)
    mask = LazyMask(facts, mask_dtype, device, lambda: build(kv_length, False))
    state.note_mask(facts, mask)
    return reader.stand_in(mask) if is_decode else mask


@torch.compiler.disable
@cache
def _adds_masks(config_type: Any) -> bool:
    """Whether the models of a config add a mask to their scores, so that it must not be boolean.

    So do those that cannot run sdpa, and those that compute attention without the interface.
    """
    return any(
        not model._supports_sdpa or not model._can_set_attn_implementation()
        for model in models_of(config_type)
    )


def _is_pattern(mask_function: Callable[..., Any]) -> bool:
    """Whether a mask function is one of transformers' own, with nothing added to it."""
    return _codes(mask_function) in _PATTERNS


def _codes(function: Any) -> tuple[Any, ...]:
    """The code of a function, and of those that it calls from its closure."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    inner = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,))]
    return (function.__code__, *(_codes(part) for part in inner if inspect.isfunction(part)))


_PATTERNS = {
    _codes(causal_mask_function),
    _codes(sliding_window_causal_mask_function(1)),
    _codes(chunked_causal_mask_function(1, torch.zeros(1, dtype=torch.long, device="cpu"))),
}


def _ask_pattern(
    mask_function: Callable[..., Any], local_size: int | None, config: Any, device: Any
) -> Pattern:
    """Sliding and chunked masks come with the same arguments; where both may be, ask the mask."""
    if local_size is None:
        return Pattern()
    if getattr(config, "attention_chunk_size", None) != local_size:
        return Pattern("sliding", local_size)
    kinds = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" not in kinds or "sliding_attention" in kinds:
        # In a chunked mask one token in each `local_size` does not see the one in front of it.
        row = torch.zeros(1, dtype=torch.long, device=device)
        query = torch.arange(1, local_size + 1, dtype=torch.long, device=device)
        if bool(mask_function(row, row, query, query - 1).all()):
            return Pattern("sliding", local_size)
    return Pattern("chunked", local_size)
