"""A decode step inside a compiled forward: one operator a layer.

For a cache that says it is compileable, generate has the mask made eagerly in front of each
forward, and compiles the forward of decode steps. In that a layer's `update` hands its new K/V on
as they are; our attention function recognises them and calls the operator here, which runs eagerly:
it writes the K/V to their blocks and attends, as in any other step. The rest of the model is one
graph.

The operator finds its cache by a number in a tensor. Numbers in Python, or the cache itself, would
be compiled into the graph, and each cache would need a graph of its own.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from .attention import paged_attention
from .layers import PagedLayer

_library = torch.library.Library("hf_paged", "DEF")
_library.define(
    "attend(Tensor query, Tensor keys, Tensor values, Tensor? mask, Tensor number, int layer, "
    "float scaling, float? softcap, Tensor? sinks) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),  # it plans on the host, so that no replay may hold it
)
_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[tuple[int, int], PagedLayer] = weakref.WeakValueDictionary()


class _Causal(torch.nn.Module):
    """As much of an attention layer as an attention function reads."""

    is_causal = True


_MODULE = _Causal()


def make_compileable(layers: list[Any]) -> None:
    """Let compiled forwards find these layers of a cache."""
    number = next(_numbers)
    tensor = torch.tensor(number, dtype=torch.long, device="cpu")
    for layer in layers:
        if isinstance(layer, PagedLayer):
            layer.number = tensor
            _layers[number, layer.index] = layer


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    number: torch.Tensor,
    layer: int,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Write K/V ([rows, kv_heads, 1, dim]) and attend: [rows, 1, heads, value_dim]."""
    own = _layers[int(number), layer]
    views = own.update(keys, values)
    own.reader.calls.compiled += 1
    step = own.state.step
    if step is not None and not step.is_unseen:
        step.is_unseen = True
        own.state.provenance.note_foreign(step)
    if mask is not None and not mask.numel():
        mask = own.reader.token  # itself, which the graph has not passed on
    out, _ = paged_attention(_MODULE, query, *views, mask, scaling, softcap=softcap, s_aux=sinks)
    return out.contiguous()


def _fake(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *args: Any
) -> torch.Tensor:
    rows, heads, queries, _ = query.shape
    return query.new_empty((rows, queries, heads, values.shape[3]))


_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("hf_paged::attend", _fake, lib=_library)
