"""Prompts that begin alike within a batch, found by their first layer's K/V.

generate repeats each prompt `num_beams` or `num_return_sequences` times before it calls the model.
Rows whose first layer has the same K/V have the same tokens at the same positions. Deeper layers
may differ all the same (cross-attention to different inputs), so each layer is compared in turn,
and rows that differ part ways there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .metadata import Step


@dataclass
class Sharing:
    """Which rows of a batch's first step have their leading tokens in another row's blocks.

    Attributes:
        leader: int64 [rows], the row whose blocks a row shares; its own number if it shares none.
        tokens: int64 [rows], how many leading tokens it shares: whole blocks of them, or all that
            both rows have.
    """

    leader: np.ndarray
    tokens: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """The rows that share."""
        return np.flatnonzero(self.tokens)

    def followers(self, firsts: np.ndarray) -> np.ndarray:
        """The sharing rows that keep the same blocks as their leader, by each row's first one."""
        return np.flatnonzero((self.tokens > 0) & (firsts == firsts[self.leader]))

    def drop(self, rows: np.ndarray) -> None:
        self.tokens[rows], self.leader[rows] = 0, rows

    def differing(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> np.ndarray:
        """The sharing rows whose K/V ([tokens, kv_heads, dim]) are not those of their leader."""
        starts, differing = step.token_starts, []
        for row in self.rows:
            at, count = self.leader[row], self.tokens[row]
            mine, other = (slice(starts[r], starts[r] + count) for r in (row, at))
            if not all(torch.equal(states[mine], states[other]) for states in (keys, values)):
                differing.append(row)
        return np.array(differing, dtype=np.int64)


def find_sharing(
    step: Step, keys: torch.Tensor, values: torch.Tensor, block_size: int
) -> Sharing | None:
    """The sharing of a first step by its first layer's K/V ([tokens, kv_heads, dim]), if any."""
    rows, starts, counts = len(step), step.token_starts, step.counts
    sharing = Sharing(np.arange(rows), np.zeros(rows, np.int64))
    leaders: dict[bytes, int] = {}
    heads = [states.float().flatten(1).sum(1).cpu().numpy() for states in (keys, values)]
    for row in range(rows):
        count = int(counts[row])
        start = slice(starts[row], starts[row] + min(count, block_size))
        leader = leaders.setdefault(b"".join(sums[start].tobytes() for sums in heads), row)
        if leader == row or not count:
            continue
        most = min(count, int(counts[leader]))
        mine, other = (slice(starts[at], starts[at] + most) for at in (row, leader))
        same = (keys[mine] == keys[other]).flatten(1).all(1)
        same &= (values[mine] == values[other]).flatten(1).all(1)
        common = int(same.long().cumprod(0).sum())
        if common < count or common < counts[leader]:
            common -= common % block_size
        sharing.leader[row], sharing.tokens[row] = (leader, common) if common else (row, 0)
    return sharing if len(sharing.rows) else None
