"""Blocks: how many there are, which are free, and how many hold each.

A `BlockGroup` is the blocks of the layers that keep the same tokens (full attention; a sliding
window of W). It hands out block numbers and counts their holders; block `b` of a group is the same
`block_size` slots in the K and V tensors of every layer of the group. A `BlockAllocator` hands out
blocks of all groups, all of them or none, and knows every block table that holds some.

Two rules keep sharing safe: only a block with one holder is ever written, and a block returns to
the free list exactly when its count falls to zero (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023).

Counts and free lists follow from the block tables and the prefix index. So a change that an
exception has cut short (Ctrl-C comes after any call) is not undone: they are counted again.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

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
    """Around all that changes block tables or counts: `with allocator.lock, allocator.change:`.

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


class TableOwner(Protocol):
    """What holds blocks in tables of its own: the rows of a cache."""

    tables: list[np.ndarray]

    def drop_unfinished(self) -> None:
        """Forget what an append that was cut short has left."""
        ...

    def check(self) -> None: ...


class Reclaimable(Protocol):
    """What holds blocks that others get when they need them: prefixes that no cache uses."""

    def held(self, group: int) -> np.ndarray:
        """The blocks of a group that it holds, each as often as it counts as a holder."""
        ...

    def evictable(self) -> list[int]:
        """Blocks of each group that `evict` could free."""
        ...

    def evict(self, enough: Callable[[list[int]], bool]) -> int:
        """Give blocks back until `enough` of each group are free, or none; returns how many."""
        ...

    def mend(self) -> None:
        """Repair what an exception has cut short."""
        ...

    def check(self) -> None: ...


class BlockAllocator:
    """The blocks of all layer groups, and who holds them.

    Args:
        groups: the layer groups, of one block_size.
        reclaimable: what gives blocks back when a group runs out.

    Attributes:
        lock: held by whoever changes tables, counts or memory.
        change: the guard of such a change.
        copies, evictions: blocks that were copied on write, and taken from `reclaimable`.
        peak_used: the most blocks that were not free.
    """

    def __init__(self, groups: Sequence[BlockGroup], reclaimable: Reclaimable):
        self.groups, self.reclaimable = groups, reclaimable
        self.block_size = groups[0].block_size
        self.lock = threading.RLock()
        self.change = RecountGuard(self._recount)
        self.copies = self.evictions = self.peak_used = 0
        # The arrays of each owner's tables, which outlive it: the collector may run in the middle
        # of any other call, so it only queues the reference, and the next call returns the blocks.
        self._tables: dict[weakref.ref[TableOwner], list[np.ndarray]] = {}
        self._dropped: deque[weakref.ref[TableOwner]] = deque()

    def register(self, owner: TableOwner) -> None:
        """Count the blocks in the list `owner.tables` as held, for as long as `owner` lives."""
        self._tables[weakref.ref(owner, self._dropped.append)] = owner.tables

    def collect(self) -> None:
        """Return the blocks of owners that were garbage collected."""
        with self.lock, self.change:
            while self._dropped:
                tables = self._tables.pop(self._dropped.popleft(), None)
                for group, table in zip(self.groups, tables or [], strict=False):
                    group.decref(table[table >= 0])

    def allocate(self, counts: Sequence[int]) -> list[np.ndarray]:
        """Take `counts[g]` blocks of each group g, all of them or none, in a change.

        Raises:
            PoolExhausted: a bounded group has too few, also with all that can be reclaimed; no
                block was taken, nothing was evicted.
        """
        self.collect()
        short = [
            0 if group.max_blocks is None else max(count - group.num_free, 0)
            for group, count in zip(self.groups, counts, strict=True)
        ]
        if any(short) and not self.evict(
            lambda freed: all(f >= s for f, s in zip(freed, short, strict=True))
        ):
            evictable = self.reclaimable.evictable()
            at = next(index for index, count in enumerate(short) if count > evictable[index])
            group = self.groups[at]
            raise PoolExhausted(
                counts[at], group.num_free, evictable[at], group.capacity, str(group)
            )
        for group, count in zip(self.groups, counts, strict=True):
            group.ensure_free(count)
        taken = [group.allocate(count) for group, count in zip(self.groups, counts, strict=True)]
        self.peak_used = max(self.peak_used, sum(group.num_used for group in self.groups))
        return taken

    def evict(self, enough: Callable[[list[int]], bool]) -> int:
        """Reclaim blocks, in a change; returns how many are free now that were not."""
        freed = self.reclaimable.evict(enough)
        self.evictions += freed
        return freed

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken."""
        with self.lock:
            self.collect()
            for index, group in enumerate(self.groups):
                group.check(self._holders(index))
            for reference in list(self._tables):
                owner = reference()
                if owner is not None:
                    owner.check()
            self.reclaimable.check()

    def _recount(self) -> None:
        """Count the holders of every block, whatever a change that was cut short has done."""
        for reference in list(self._tables):
            owner = reference()
            if owner is None:
                self._tables.pop(reference, None)
            else:
                owner.drop_unfinished()
        self.reclaimable.mend()
        for index, group in enumerate(self.groups):
            group.recount(self._holders(index))

    def _holders(self, group: int) -> list[np.ndarray]:
        held = [tables[group] for tables in list(self._tables.values())]
        return [*(table[table >= 0] for table in held), self.reclaimable.held(group)]
