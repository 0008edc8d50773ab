"""Attention on ordinary tensors: the reference for everything, and the way out where paging stops.

Supports any mask, softcap, sinks, position bias and grouped heads, in plain torch, with the same
order of operations as transformers' eager attention.
"""

from __future__ import annotations

import torch


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(softcap(q k^T * scaling) + position_bias + mask, sinks) v.

    Args:
        query: [batch, heads, queries, head_dim].
        key, value: [batch, kv_heads, columns, head_dim]; heads is a multiple of kv_heads.
        mask: bool (True may be seen) or additive, broadcastable to [batch, heads, queries,
            columns].
        scaling: factor on q k^T; None is head_dim ** -0.5.
        softcap: logits become softcap * tanh(logits / softcap).
        sinks: [heads] or [batch, heads, queries, n], more logits that take part in the softmax and
            have no value.
        position_bias: broadcastable to the logits, added to them.
        dropout: probability on the weights.

    Returns:
        Output [batch, queries, heads, value_dim] and weights [batch, heads, queries, columns].
    """
    batch, heads, queries, _ = query.shape
    group = heads // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if position_bias is not None:
        logits = logits + position_bias
    hidden = None
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        hidden = ~mask.any(-1, keepdim=True)
    elif mask is not None:
        logits = logits + mask
    if sinks is not None:
        if sinks.ndim == 1:
            sinks = sinks.view(1, -1, 1, 1).expand(batch, heads, queries, 1)
        logits = torch.cat([logits, sinks.to(logits.dtype)], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., : key.shape[2]]
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0)  # as sdpa: a query that sees nothing gets zeros
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def causal_mask(queries: int, columns: int, device: torch.device) -> torch.Tensor:
    """bool [queries, columns], aligned so that the last query sees the last column."""
    ones = torch.ones(queries, columns, dtype=torch.bool, device=device)
    return ones.tril(columns - queries)
