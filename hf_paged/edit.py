"""Changing what a cache holds: K/V go out as ordinary tensors and come back into the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .core.forward import CacheState
from .core.rows import can_read, overwrite, settled_tables, shown_slots
from .core.storage import gather


@contextmanager
def edit(state: CacheState, layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A layer's (keys, values) to change in place; see `PagedCache.edit`."""
    paged = state.storage.group_of_layer
    if layer not in paged:
        raise ValueError(
            f"Layer {layer!r} keeps no K/V in blocks; those of {sorted(paged)} can be edited, and "
            "what other layers keep is in attributes of theirs."
        )
    tokens, storage = settled_tables(state).tokens, state.storage.stored(layer)
    if storage is None or not can_read(state, layer):
        raise RuntimeError(f"Layer {layer} has had no K/V yet; edit it behind a forward.")
    slots = shown_slots(state, layer)
    before = [
        gather(blocks, slots).to(storage.given_dtype) for blocks in (storage.keys, storage.values)
    ]
    keys, values = (states.clone(memory_format=torch.contiguous_format) for states in before)
    yield keys, values
    is_edited = torch.zeros(slots.shape, dtype=torch.bool, device=keys.device)
    for new, old in zip((keys, values), before, strict=True):
        if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            raise ValueError(
                f"An edit leaves shape, dtype and device as they are: those of layer {layer} were "
                f"{tuple(old.shape)}, {old.dtype}, {old.device}, and became {tuple(new.shape)}, "
                f"{new.dtype}, {new.device}; nothing was written."
            )
        is_edited |= (new != old).any(3).any(1)
    overwrite(state, layer, tokens, is_edited.cpu().numpy(), keys.detach(), values.detach())


def assign(stored: torch.Tensor, states: torch.Tensor | None) -> None:
    """Put `states` in the place of all that is `stored`.

    Raises:
        ValueError: they are of another shape or dtype.
    """
    if not isinstance(states, torch.Tensor) or (states.shape, states.dtype) != (
        stored.shape,
        stored.dtype,
    ):
        what = type(states).__name__
        if isinstance(states, torch.Tensor):
            what = f"{tuple(states.shape)} in {states.dtype}"
        raise ValueError(
            f"A PagedCache's K/V keep their shape {tuple(stored.shape)} and {stored.dtype}, so "
            f"{what} cannot be assigned; cache.edit(layer) changes them in place, and cache.crop "
            "and cache.batch_select_indices drop tokens and rows."
        )
    stored.copy_(states)
