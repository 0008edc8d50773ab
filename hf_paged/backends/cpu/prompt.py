"""Attention on the CPU: our kernel for decoding, torch's flash attention for prompts.

A prompt is computed row by row, on what is new and what is cached. torch's kernel returns the
log-sum-exp (LSE) of each query's logits, by which the results over disjoint sets of tokens merge
exactly (Dao et al., "FlashAttention", 2022). So a prompt behind a cached prefix runs as one call
without a mask on the prefix and one causal call on itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..base import AttentionCall
from ..dense import reference_attention
from . import runner

WINDOW_CHUNK = 512  # queries in one masked call, so that a mask has this times the window entries


class CPUBackend:
    """The compiled kernel for few queries a row, torch's flash attention for many."""

    name = "cpu"

    def stored_dims(self, dtype: torch.dtype, key_dim: int, value_dim: int) -> tuple[int, int]:
        return key_dim, value_dim

    def refusal(self, call: AttentionCall) -> str | None:
        """A softcap is the kernel's alone."""
        if call.softcap is None:
            return None
        reason = runner.refusal(call)
        return None if reason is None else f"softcap with {reason}"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if runner.refusal(call) is None:
            out = runner.attend(call)
            if out is not None:
                return out
        step = call.metadata.step
        is_even = step.num_tokens == len(step) * step.columns
        is_causal = call.softcap is None and not call.first_visible.any()
        if is_even and is_causal and not step.before.lengths.any():
            return _attend_prompts(call)
        return torch.cat([_attend_row(call, row) for row in range(len(step))])


def _attend_prompts(call: AttentionCall) -> torch.Tensor:
    """All rows at once, when they are equally long and nothing is cached."""
    rows = len(call.metadata.step)
    query, keys, values = (
        states.view(rows, -1, *states.shape[1:]) for states in (call.query, call.keys, call.values)
    )
    out, lse = _flash(query, keys, values, call.scaling, is_causal=True)
    return _with_sinks(out, lse, call.sinks).flatten(0, 1)


def _attend_row(call: AttentionCall, row: int) -> torch.Tensor:
    start, stop = call.metadata.step.token_starts[row : row + 2]
    if start == stop:
        return call.query.new_empty((0, call.query.shape[1], call.values.shape[2]))
    if call.softcap is not None:
        return _attend_capped(call, row, start, stop)
    begin = call.first_visible[start:stop]
    if begin[0] != begin[-1]:
        parts = [
            _attend_window(call, row, lower, min(lower + WINDOW_CHUNK, stop))
            for lower in range(start, stop, WINDOW_CHUNK)
        ]
        return torch.cat(parts)
    past = int(call.metadata.step.before.lengths[row])
    new = slice(start, stop)
    if stop - start == 1:
        return _attend_one(call, row, start, int(begin[0]), past)
    query = call.query[None, new]
    out, lse = _flash(
        query, call.keys[None, new], call.values[None, new], call.scaling, is_causal=True
    )
    keys, values = _cached(call, row, int(begin[0]), past)
    if keys.shape[1]:
        out, lse = _merge(out, lse, *_flash(query, keys, values, call.scaling))
    return _with_sinks(out, lse, call.sinks)[0]


def _attend_one(call: AttentionCall, row: int, at: int, first: int, past: int) -> torch.Tensor:
    """One new token: the heads that share a KV head go in as its queries, as they share its K/V."""
    keys, values = call.keys[None, at : at + 1], call.values[None, at : at + 1]
    if first < past:
        cached = _cached(call, row, first, past)
        keys, values = (torch.cat(pair, 1) for pair in zip(cached, (keys, values), strict=True))
    kv_heads, dim = keys.shape[2:]
    query = call.query[at].view(kv_heads, -1, dim).transpose(0, 1)[None]
    out, lse = (t.transpose(1, 2).flatten(1, 2) for t in _flash(query, keys, values, call.scaling))
    return _with_sinks(out[:, None], lse[:, None], call.sinks)[0]


def _attend_window(call: AttentionCall, row: int, start: int, stop: int) -> torch.Tensor:
    """New tokens `start` to `stop`, all of `row`, where they do not see the same first token."""
    keys, values, visible = _visible(call, row, start, stop)
    query = call.query[None, start:stop]
    mask = query.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    out, lse = _flash(query, keys, values, call.scaling, mask=mask[None, None])
    return _with_sinks(out, lse, call.sinks)[0]


def _attend_capped(call: AttentionCall, row: int, start: int, stop: int) -> torch.Tensor:
    """New tokens of `row` under a softcap, which torch's kernel lacks, where ours does not run."""
    keys, values, visible = _visible(call, row, start, stop)
    query, keys, values = (
        states.transpose(1, 2) for states in (call.query[None, start:stop], keys, values)
    )
    out, _ = reference_attention(
        query,
        keys,
        values,
        visible,
        scaling=call.scaling,
        softcap=call.softcap,
        sinks=call.sinks,
    )
    return out[0]


def _visible(call: AttentionCall, row: int, start: int, stop: int) -> tuple[torch.Tensor, ...]:
    """What new tokens `start` to `stop`, all of `row`, see in all, and which of it each.

    Returns:
        K and V, each [1, tokens, kv_heads, dim], and bool [stop - start, tokens].
    """
    step = call.metadata.step
    begin = torch.from_numpy(call.first_visible[start:stop])
    position = torch.from_numpy(step.token_position[start:stop])
    past, row_start = int(step.before.lengths[row]), int(step.token_starts[row])
    first = int(begin[0])
    new = slice(row_start + max(first - past, 0), stop)
    keys, values = call.keys[None, new], call.values[None, new]
    if first < past:
        cached = _cached(call, row, first, past)
        keys, values = (torch.cat(pair, 1) for pair in zip(cached, (keys, values), strict=True))
    seen = torch.from_numpy(step.visible(row, first, int(position[-1]) + 1))
    return keys, values, (seen >= begin[:, None]) & (seen <= position[:, None])


def _cached(call: AttentionCall, row: int, start: int, stop: int) -> tuple[torch.Tensor, ...]:
    """K and V of tokens `start` to `stop` of a row, each [1, tokens, kv_heads, dim]."""
    slots = call.metadata.row_slots(row, start, stop)
    return tuple(
        stored.index_select(0, slots).to(call.query.dtype)[None]
        for stored in (call.storage.key_slots, call.storage.value_slots)
    )


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's CPU flash attention.

    Args:
        query: [batch, queries, heads, dim].
        keys, values: [batch, tokens, kv_heads, dim].
        mask: additive, in the query's dtype.

    Returns:
        Output [batch, queries, heads, value_dim] and its LSE (natural), [batch, queries, heads, 1].
    """
    dims = query.shape[-1], values.shape[-1]
    # The kernel wants one head_dim for all three: zeros change neither logits nor output.
    padded = [F.pad(t, (0, max(dims) - t.shape[-1])) for t in (query, keys, values)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(t.transpose(1, 2) for t in padded), 0.0, is_causal, attn_mask=mask, scale=scaling
    )
    return out.transpose(1, 2)[..., : dims[1]], lse.transpose(1, 2)[..., None]


def _merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two disjoint sets of tokens, from that over each."""
    total = torch.logaddexp(lse, other_lse)
    merged = out * (lse - total).exp() + other * (other_lse - total).exp()
    return merged.to(out.dtype), total


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Let a sink take its share of the softmax of each head."""
    if sinks is None:
        return out
    return (out * torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])).to(out.dtype)
