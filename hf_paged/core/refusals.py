"""What cannot be the next K/V of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .block_table import BlockTables
from .metadata import AttentionMetadata, MaskFacts
from .row_layout import RowLayout
from .storage import LayerStorage
from .transfer import upload


def checked_states(
    layer: int, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in one dtype; ValueError unless both are [batch, kv_heads, tokens, head_dim]."""
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"Layer {layer} got K of shape {tuple(keys.shape)} and V of {tuple(values.shape)}; "
            "both must be [batch, kv_heads, tokens, head_dim]."
        )
    if keys.dtype == values.dtype:
        return keys, values
    wider = torch.promote_types(keys.dtype, values.dtype)
    return keys.to(wider), values.to(wider)  # under autocast rotary embeddings leave K in float32


def check_rows(
    before: RowLayout, rows: int, mask: MaskFacts | None, stateful_layers: Sequence[int]
) -> None:
    """Raise ValueError where `rows` rows, or those of the 2-D mask, cannot follow those held.

    Args:
        before: the rows held, in a first step as many as are given.
        stateful_layers: layers with other states than K/V.
    """
    held = len(before)
    shown = rows if mask is None or mask.padding is None else len(mask.padding)
    given = shown if held in (1, rows) else rows
    if given != rows and not before.columns:
        return
    if given != rows or held not in (1, rows):
        repeats, rest = divmod(given, held)
        if rest or not repeats:
            what = "a cache of one row serves any number, any other must get the rows that it holds"
        else:
            what = f"call batch_repeat_interleave({repeats}) first, for beams or return sequences"
        raise ValueError(f"The cache holds {held} rows, the input has {given}; {what}.")
    if held != rows and stateful_layers:
        raise ValueError(
            f"Layers {stateful_layers} keep other states than K/V, so one row cannot serve {rows}; "
            f"call batch_repeat_interleave({rows}) first."
        )


def check_not_repeated(
    tables: BlockTables, group: int, storage: LayerStorage, keys: torch.Tensor
) -> None:
    """Raise ValueError if a forward's tokens are those that the cache begins with.

    They are if most of its keys ([rows, kv_heads, columns, head_dim]) are the stored ones, up to
    rounding: the same tokens in the same positions.
    """
    tokens = tables.tokens
    if len(keys) != len(tokens):
        return
    slots = tables.column_slots(group, tokens, tokens.columns)[:, : keys.shape[2]]
    where = np.nonzero(slots >= 0)
    slot, row, column = upload([slots[where], *where], keys.device)
    stored = storage.key_slots
    held, again = stored[slot].float(), keys.detach()[row, :, column].float()
    near = max(1 / 32, torch.finfo(stored.dtype).eps)
    is_near = (again - held).abs() <= near * held.abs()
    if 2 * int((is_near.flatten(1).float().mean(1) > 0.9).sum()) > len(slot):
        raise ValueError(
            f"The forward begins anew with the first of the {tokens.columns} tokens that are in "
            "the cache; assisted decoding and prompt lookup compute all of input_ids, so pass a "
            "fresh cache, or only the new input_ids with the attention_mask of all."
        )


def is_step_again(metadata: AttentionMetadata, storage: LayerStorage, keys: torch.Tensor) -> bool:
    """Whether keys ([rows, kv_heads, columns, head_dim]) are of the step that is there."""
    step = metadata.step
    if (keys.shape[0], keys.shape[2]) != (len(step), step.columns):
        return False
    return metadata.holds(storage, step.unpad(keys.detach()))
