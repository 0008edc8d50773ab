"""Prompts that begin alike within a batch, found by their first layer's K/V.

generate repeats each prompt `num_beams` or `num_return_sequences` times before it calls the model.
Rows whose first layer has the same K/V have the same tokens at the same positions. Deeper layers
may differ all the same (cross-attention to different inputs), so each layer is compared in turn,
and rows that differ part ways there. K/V are compared where they are: one answer for all rows comes
to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .block_table import Sharing
from .metadata import Step
from .transfer import upload


def differing(sharing: Sharing, step: Step, keys: torch.Tensor, values: torch.Tensor) -> np.ndarray:
    """The sharing rows whose K/V ([tokens, kv_heads, dim]) are not those of their leader."""
    rows = sharing.rows
    pairs = [(row, sharing.leader[row], sharing.tokens[row]) for row in rows]
    return rows[_common(step, pairs, keys, values) < sharing.tokens[rows]]


def find_sharing(
    step: Step, keys: torch.Tensor, values: torch.Tensor, block_size: int
) -> Sharing | None:
    """The sharing of a first step by its first layer's K/V ([tokens, kv_heads, dim]), if any."""
    rows, starts, counts = len(step), step.token_starts, step.counts
    sharing = Sharing(np.arange(rows), np.zeros(rows, np.int64))
    sums = torch.stack([states.float().flatten(1).sum(1) for states in (keys, values)], 1)
    tokens, pairs = sums.cpu().numpy(), []
    leaders: dict[bytes, int] = {}
    for row, count in enumerate(counts.tolist()):
        beginning = tokens[starts[row] : starts[row] + min(count, block_size)]
        leader = leaders.setdefault(beginning.tobytes(), row)
        if leader != row and count:
            pairs.append((row, leader, min(count, counts[leader])))
    for (row, leader, _), common in zip(
        pairs, _common(step, pairs, keys, values).tolist(), strict=True
    ):
        if common < max(counts[row], counts[leader]):
            common -= common % block_size
        sharing.leader[row], sharing.tokens[row] = (leader, common) if common else (row, 0)
    return sharing if len(sharing.rows) else None


def _common(
    step: Step, pairs: Sequence[tuple[int, int, int]], keys: torch.Tensor, values: torch.Tensor
) -> np.ndarray:
    """int64 [pairs], of each (row, other row, tokens) how many of the first tokens are the same."""
    if not pairs:
        return np.zeros(0, np.int64)
    row, other, count = np.array(pairs).T
    rank = np.concatenate([np.arange(n) for n in count])
    tokens = [np.repeat(step.token_starts[rows], count) + rank for rows in (row, other)]
    mine, theirs = upload(tokens, keys.device)
    differs = torch.zeros(len(rank), dtype=torch.bool, device=keys.device)
    for states in (keys, values):
        differs |= (states[mine] != states[theirs]).flatten(1).any(1)
    # The first mark of each pair is at a token that differs, or behind its last one.
    marks = np.flatnonzero(np.insert(differs.cpu().numpy(), count.cumsum(), True))
    begins = (count + 1).cumsum() - (count + 1)
    return marks[np.searchsorted(marks, begins)] - begins
