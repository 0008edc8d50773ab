"""Blocks: how many there are, which are free, and how many hold each.

A `BlockGroup` is the blocks of the layers that keep the same tokens (full attention; a sliding
window of W). It hands out block numbers and counts their holders; block `b` of a group is the same
`block_size` slots in the K and V tensors of every layer of the group.

Two rules keep sharing safe: only a block with one holder is ever written, and a block returns to
the free list exactly when its count falls to zero (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023).

Counts and free lists follow from the block tables and the prefix index. So a change that an
exception has cut short (Ctrl-C comes after any call) is not undone: the pool counts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

from .storage import LayerStorage, is_debugging
from .transfer import upload

GROWTH = 1.5  # an unbounded group grows by half, so that growing costs O(1) a token


class PoolExhausted(RuntimeError):
    """The pool has too few free blocks for a step; nothing was written and the cache is as before.

    Attributes:
        needed, free, evictable, total: blocks of the layer group that ran out.
    """

    def __init__(self, needed: int, free: int, evictable: int, total: int, what: str):
        self.needed, self.free, self.evictable, self.total = needed, free, evictable, total
        self._what = what
        super().__init__(
            f"The block pool is full: this step needs {needed} more blocks for {what}, but {free} "
            f"of {total} are free and {evictable} can be evicted; raise num_blocks or max_memory, "
            "or lower the batch size or max_new_tokens."
        )

    def __reduce__(self) -> Any:
        numbers = self.needed, self.free, self.evictable, self.total
        return type(self), (*numbers, self._what), vars(self)


class BlockGroup:
    """The blocks of the layers that keep the same tokens.

    Args:
        window: tokens that a query of these layers may look back on, itself included; None is all.
        layers: indices of the layers.
        block_size: tokens in a block.
        num_blocks: how many blocks there are; None grows as needed.
    """

    def __init__(
        self, window: int | None, layers: Sequence[int], block_size: int, num_blocks: int | None
    ):
        self.window = window
        self.layers = tuple(layers)
        self.block_size = block_size
        self.max_blocks = num_blocks
        self.ref_counts = np.zeros(0, np.int32)
        self.storage: dict[int, LayerStorage] = {}
        # The free blocks are the first `num_free` of a stack; it pops the lowest numbers first.
        self._free = np.zeros(0, np.int64)
        self.num_free = 0
        if num_blocks is not None:
            self._set_capacity(num_blocks)

    def __str__(self) -> str:
        kind = "full attention" if self.window is None else f"a window of {self.window}"
        return f"{len(self.layers)} layers with {kind}"

    @property
    def capacity(self) -> int:
        return len(self.ref_counts)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def ensure_free(self, count: int) -> None:
        """Grow an unbounded group until `count` blocks are free."""
        missing = count - self.num_free
        if missing > 0 and self.max_blocks is None:
            capacity = max(self.capacity + missing, int(self.capacity * GROWTH))
            for storage in self.storage.values():
                storage.grow(capacity)
            self._set_capacity(capacity)

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` free blocks, each with one holder."""
        assert count <= self.num_free
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.ref_counts[blocks] = 1
        return blocks

    def incref(self, blocks: np.ndarray) -> None:
        """Count one more holder for each entry of `blocks` (an entry may repeat)."""
        np.add.at(self.ref_counts, blocks, 1)

    def decref(self, blocks: np.ndarray) -> None:
        """Count one holder fewer for each entry; a block without holders is free at once."""
        np.subtract.at(self.ref_counts, blocks, 1)
        freed = np.unique(blocks[self.ref_counts[blocks] == 0])[::-1]
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)
        self._poison(freed)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        indices: dict[torch.device, list[torch.Tensor]] = {}
        for storage in self.storage.values():
            device = storage.keys.device
            if device not in indices:
                indices[device] = upload([source, target], device)
            storage.copy_blocks(*indices[device])

    def check(self, holders: Sequence[np.ndarray]) -> None:
        """Raise AssertionError unless counts and free list agree with what `holders` hold."""
        held = self._counts(holders)
        wrong = np.flatnonzero(held != self.ref_counts)
        assert not len(wrong), f"blocks {wrong[:8]}: counts {self.ref_counts[wrong[:8]]}, " + (
            f"holders {held[wrong[:8]]}"
        )
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == len(free), "a block is on the free list twice"
        assert not self.ref_counts[free].any(), "a block is in a table and on the free list"
        assert self.num_free + np.count_nonzero(self.ref_counts) == self.capacity, "a block is lost"
        for layer, storage in self.storage.items():
            for stored in (storage.keys, storage.values):
                assert len(stored) >= self.capacity, f"layer {layer} has too few blocks"

    def recount(self, holders: Sequence[np.ndarray]) -> None:
        """Make counts and free list what `holders` hold."""
        counts = self._counts(holders)
        unheld = np.flatnonzero(counts == 0)[::-1]
        free, num_free = np.zeros(self.capacity, np.int64), len(unheld)
        free[:num_free] = unheld
        self.ref_counts, self._free, self.num_free = counts, free, num_free
        self._poison(unheld)

    def _poison(self, blocks: np.ndarray) -> None:
        if len(blocks) and is_debugging():
            for storage in self.storage.values():
                storage.poison(blocks)

    def _counts(self, holders: Sequence[np.ndarray]) -> np.ndarray:
        counts = np.zeros(self.capacity, np.int32)
        for blocks in holders:
            np.add.at(counts, blocks, 1)
        return counts

    def resize(self, num_blocks: int) -> None:
        """Start over with `num_blocks` blocks, while none is used and nothing is stored."""
        assert not self.num_used
        assert not self.storage
        counts, free = np.zeros(num_blocks, np.int32), np.arange(num_blocks)[::-1].copy()
        self.max_blocks, self.num_free = num_blocks, num_blocks
        self.ref_counts, self._free = counts, free

    def _set_capacity(self, capacity: int) -> None:
        fresh = np.arange(self.capacity, capacity, dtype=np.int64)[::-1]
        free = np.empty(capacity, np.int64)
        free[: len(fresh)] = fresh
        free[len(fresh) : len(fresh) + self.num_free] = self._free[: self.num_free]
        counts = np.concatenate([self.ref_counts, np.zeros(len(fresh), np.int32)])
        num_free = self.num_free + len(fresh)
        self.ref_counts, self._free, self.num_free = counts, free, num_free


class RecountGuard:
    """Around all that changes block tables or counts: `with pool.lock, pool.change:`.

    Args:
        recount: called before the next change where an exception has cut one short.
    """

    def __init__(self, recount: Callable[[], None]):
        self._recount, self._is_cut_short = recount, False

    def __enter__(self) -> None:
        if self._is_cut_short:
            self._recount()
            self._is_cut_short = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._is_cut_short = True
