"""The attention function that is registered with transformers under the name "hf_paged"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .backends import AttentionCall, Backend, backend_for
from .backends.dense import causal_mask, reference_attention
from .core.metadata import AttentionMetadata, LayerStates, Pattern, without_graph
from .core.model_spec import NAME
from .mask import paged_mask
from .view import (
    COMPILED,
    PAGED,
    TRACED,
    Densifying,
    LayerPages,
    LazyMask,
    PagedView,
    without_gradient,
)

MORE_THAN_A_PATTERN = "a mask that is more than causal, sliding or chunked"
OF_ANOTHER_STEP = "queries that are not this step's"


def register() -> None:
    """Make `attn_implementation="hf_paged"` known to transformers."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, paged_mask)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as transformers' `AttentionInterface` calls it.

    Args:
        module: the attention layer; `is_causal` is read from it where the argument is None.
        query: [rows, heads, queries, head_dim].
        key, value: [rows, kv_heads, columns, head_dim], paged views or ordinary tensors.
        attention_mask: a `LazyMask`, an ordinary mask, or None.
        scaling, dropout, softcap, position_bias: as models pass them.
        s_aux, sinks: logits without a value; [heads], or [rows, heads, queries, n] as `sinks`.
        indices: int [rows, queries, n], the columns that an indexer has chosen for each query; -1
            is none.

    Returns:
        Output [rows, queries, heads, value_dim]; weights only where they were asked for.

    Raises:
        ValueError: the model leaves a selection of blocks to the attention function.
    """
    if kwargs.get("block_indices") is not None:
        raise ValueError(
            f"{type(module).__name__} selects blocks of keys, which {NAME!r} does not read; load "
            'the model with attn_implementation="sdpa", a PagedCache works with that too.'
        )
    if TRACED.states is not None:
        return _traced(query, key, value, attention_mask, scaling, softcap, s_aux), None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    wants_weights = bool(kwargs.get("output_attentions", False))
    if isinstance(key, PagedView) and isinstance(value, PagedView) and key.pages is value.pages:
        pages = key.pages
        attention_mask = pages.reader.mask_for(pages.states.metadata, attention_mask)
        plan: LayerPlan | str | None = _undone(
            position_bias, sinks, indices, wants_weights, dropout > 0
        )
        if plan is None:
            plan = _plan(query, pages, attention_mask, causal, scaling, softcap, s_aux)
        if isinstance(plan, LayerPlan):
            pages.count(PAGED)
            return without_gradient(query, plan.run, query, pages.states, s_aux), None
        pages.count(plan)
        if attention_mask is not None and not isinstance(attention_mask, LazyMask):
            _check_custom(attention_mask, pages.states.metadata)
    key, value = _dense(key), _dense(value)
    mask = None if attention_mask is None else _dense(attention_mask)
    if indices is not None:
        mask = _chosen(indices, key.shape[2], mask)
    sinks = s_aux if sinks is None else sinks
    if softcap is None and sinks is None and not wants_weights:
        bias = {} if position_bias is None else {"position_bias": position_bias}
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, is_causal, **bias, **kwargs
        )
    if mask is None and causal and query.shape[2] > 1:
        mask = causal_mask(query.shape[2], key.shape[2], query.device)
    out, weights = reference_attention(
        query,
        key,
        value,
        mask,
        scaling=scaling,
        softcap=softcap,
        sinks=sinks,
        position_bias=position_bias,
        dropout=dropout,
    )
    return out, weights if wants_weights else None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What all layers of one kind do in one step.

    Attributes:
        backend: which reads the blocks.
        pattern: what the mask allows.
        first_visible: int64 [tokens], the first token of its row that each new token looks at.
        scaling, softcap: of the logits.
        mask: for which this was planned.
    """

    backend: Backend
    pattern: Pattern
    first_visible: np.ndarray
    scaling: float
    softcap: float | None
    mask: torch.Tensor | None

    def run(
        self, query: torch.Tensor, states: LayerStates, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """[rows, queries, heads, value_dim], for queries [rows, heads, queries, head_dim]."""
        return states.metadata.step.pad(self.backend.attend(self.call(query, states, sinks)))

    def call(
        self, query: torch.Tensor, states: LayerStates, sinks: torch.Tensor | None
    ) -> AttentionCall:
        """What the backend gets for one layer."""
        return AttentionCall(
            query=states.metadata.step.unpad(without_graph(query)),
            states=states,
            pattern=self.pattern,
            first_visible=self.first_visible,
            scaling=self.scaling,
            softcap=self.softcap,
            sinks=None if sinks is None else sinks.detach(),
        )


def _traced(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The attention of a decode step in a forward that is being compiled."""
    assert TRACED.states is not None
    keys, values, number, layer = TRACED.states
    TRACED.states = None
    if key is not keys or value is not values:
        raise RuntimeError(
            "This model changes its keys or values behind the cache, so its steps cannot be "
            "compiled; leave out compile=True."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.hf_paged.attend(
        query, key, value, mask, number, layer, scaling, softcap, sinks
    )


def _undone(
    position_bias: Any, sinks: Any, indices: Any, wants_weights: bool, has_dropout: bool
) -> str | None:
    """What the call asks for that no paged backend does, None if there is nothing."""
    if position_bias is not None:
        return "position bias"
    if sinks is not None:
        return "sinks of each query"
    if indices is not None:
        return "an indexer's choice"
    if wants_weights:
        return "output_attentions"
    return "dropout" if has_dropout else None


def _plan(
    query: torch.Tensor,
    pages: LayerPages,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> LayerPlan | str:
    """The plan of all layers that are like this one, or why no backend reads the blocks for it."""
    states = pages.states
    if not states.metadata.step.is_current:
        return OF_ANOTHER_STEP
    has_sinks = sinks is not None
    key = (id(mask), is_causal, scaling, softcap, has_sinks, query.shape, query.dtype)
    return states.metadata.memo(
        (*key, states.storage.kind),
        lambda: _make_plan(query, pages, mask, is_causal, scaling, softcap, sinks),
    )


def _make_plan(
    query: torch.Tensor,
    pages: LayerPages,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> LayerPlan | str:
    backend = backend_for(pages.reader.backend, query.device)
    if isinstance(backend, str):
        return backend
    states, metadata = pages.states, pages.states.metadata
    step, (_, kv_heads, _, head_dim) = metadata.step, states.keys.shape
    if (
        (query.shape[0], query.shape[2], query.shape[3]) != (len(step), step.columns, head_dim)
        or query.shape[1] % kv_heads
        or query.dtype != states.keys.dtype
    ):
        return OF_ANOTHER_STEP
    pattern = _pattern(mask, metadata, is_causal)
    if pattern is None:
        return COMPILED if pages.is_compiled else MORE_THAN_A_PATTERN
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    first_visible = metadata.first_visible(pattern)
    plan = LayerPlan(backend, pattern, first_visible, scaling, softcap, mask)
    return backend.refusal(plan.call(query, states, sinks)) or plan


def _pattern(
    mask: torch.Tensor | None, metadata: AttentionMetadata, is_causal: bool
) -> Pattern | None:
    """What the mask allows among the tokens that it shows, if no more than a pattern."""
    step = metadata.step
    if mask is None:
        is_plain = step.columns == 1 or (is_causal and metadata.kv_length == step.columns)
        return Pattern() if is_plain and step.hidden is None else None
    facts = mask.facts if isinstance(mask, LazyMask) else None
    if facts is None or facts.pattern is None:
        return None
    if (facts.kv_length, facts.kv_offset) != (metadata.kv_length, metadata.kv_offset):
        return None
    # transformers counts chunks from the first token that the mask shows.
    if facts.pattern.kind == "chunked" and step.hidden is not None:
        return None
    return facts.pattern if step.has_padding_of(facts) else None


def _check_custom(mask: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Note that K/V of this step depend on a mask of the caller's own.

    Raises:
        ValueError: it lets a token look at a column that is not stored.
    """
    step = metadata.step
    is_unknown = step.mask is None or not step.mask.is_read
    step.is_custom |= is_unknown
    if step.after.is_unpadded or not step.once(mask):
        return
    shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    shown = shown.any(1).expand(len(step), -1, -1).cpu()
    is_token = torch.from_numpy(step.after.mask())
    looks = shown & (is_token[:, -step.columns :, None] | is_unknown)
    if (looks.any(1) & ~is_token[:, metadata.kv_offset :]).any():
        raise ValueError(
            "The attention mask shows columns that were padding when they were computed, or that "
            "the last forward's mask hid if that failed; a PagedCache does not store padding, so "
            "mask these columns, or run the forward once more."
        )


def _chosen(indices: torch.Tensor, columns: int, mask: torch.Tensor | None) -> torch.Tensor:
    """`mask` without the columns that are not among `indices` [rows, queries, n]."""
    chosen = torch.zeros(*indices.shape[:2], columns + 1, dtype=torch.bool, device=indices.device)
    index = indices.long().where(indices >= 0, columns)  # -1 goes to a column that is cut off
    chosen = chosen.scatter(-1, index, True)[:, None, :, :columns]
    if mask is None:
        return chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Densifying):
        return without_gradient(tensor, tensor.densify)
    return tensor
