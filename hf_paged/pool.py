"""Blocks: how many there are, which are free, who holds them, and the tensors behind them.

A `BlockPool` has one `BlockGroup` per set of layers that keep the same tokens (full attention;
sliding window of W). A group hands out block numbers and counts their holders; block `b` of a group
is the same `block_size` slots in the K and V tensors of every layer of the group.

Two rules keep sharing safe: only a block with one holder is ever written, and a block returns to
the free list exactly when its count falls to zero (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedConfig

from .geometry import bytes_per_token, elements_per_token, layer_config, paged_windows, parse_memory

if TYPE_CHECKING:
    from .table import BlockTables

GROWTH = 1.5  # an unbounded group grows by half, so that growing costs O(1) a token


class PoolExhausted(RuntimeError):
    """The pool has too few free blocks for a step; nothing was written and the cache is as before.

    Attributes:
        needed, free, evictable, total: blocks of the layer group that ran out.
    """

    def __init__(self, needed: int, free: int, evictable: int, total: int, what: str):
        self.needed, self.free, self.evictable, self.total = needed, free, evictable, total
        super().__init__(
            f"The block pool is full: this step needs {needed} more blocks for {what}, but {free} "
            f"of {total} are free and {evictable} can be evicted; raise num_blocks or max_memory, "
            "or lower the batch size or max_new_tokens."
        )


class LayerStorage:
    """K and V of one layer.

    Attributes:
        keys, values: [num_blocks, block_size, kv_heads, head_dim].
        key_slots, value_slots: the same memory as [slots, kv_heads, head_dim].
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self._set(keys, values)

    def _set(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.key_slots, self.value_slots = keys.flatten(0, 1), values.flatten(0, 1)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def grow(self, num_blocks: int) -> None:
        # One after the other, so that at most one tensor is held twice. If the second runs out of
        # memory, another try grows what is short.
        if self.keys.shape[0] < num_blocks:
            self._set(_grown(self.keys, num_blocks), self.values)
        if self.values.shape[0] < num_blocks:
            self._set(self.keys, _grown(self.values, num_blocks))

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        src, dst = (torch.from_numpy(a).to(self.keys.device) for a in (source, target))
        self.keys[dst] = self.keys[src]
        self.values[dst] = self.values[src]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write [tokens, kv_heads, head_dim] K and V to `slots` (int64 [tokens])."""
        if slots.device != self.keys.device:
            slots = slots.to(self.keys.device)
        for stored, new in ((self.key_slots, keys), (self.value_slots, values)):
            stored.index_copy_(0, slots, new if new.dtype == stored.dtype else new.to(stored.dtype))


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

    def take(self, count: int) -> np.ndarray:
        """Take `count` free blocks, each with one holder."""
        assert count <= self.num_free
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.ref_counts[blocks] = 1
        return blocks

    def retain(self, blocks: np.ndarray) -> None:
        """Count one more holder for each entry of `blocks` (an entry may repeat)."""
        np.add.at(self.ref_counts, blocks, 1)

    def release(self, blocks: np.ndarray) -> None:
        """Count one holder fewer for each entry; a block without holders is free at once."""
        np.subtract.at(self.ref_counts, blocks, 1)
        freed = np.unique(blocks[self.ref_counts[blocks] == 0])[::-1]
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        for storage in self.storage.values():
            storage.copy_blocks(source, target)

    def check(self, holders: Sequence[np.ndarray]) -> None:
        """Raise AssertionError unless counts and free list agree with what `holders` hold."""
        held = np.zeros(self.capacity, np.int32)
        for blocks in holders:
            np.add.at(held, blocks, 1)
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

    def resize(self, num_blocks: int) -> None:
        """Start over with `num_blocks` blocks, while none is used and nothing is stored."""
        assert not self.num_used
        assert not self.storage
        self.max_blocks, self.num_free = num_blocks, 0
        self.ref_counts, self._free = np.zeros(0, np.int32), np.zeros(0, np.int64)
        self._set_capacity(num_blocks)

    def _set_capacity(self, capacity: int) -> None:
        fresh = np.arange(self.capacity, capacity, dtype=np.int64)[::-1]
        free = np.empty(capacity, np.int64)
        free[: len(fresh)] = fresh
        free[len(fresh) : len(fresh) + self.num_free] = self._free[: self.num_free]
        self._free, self.num_free = free, self.num_free + len(fresh)
        self.ref_counts = np.concatenate([self.ref_counts, np.zeros(len(fresh), np.int32)])


class BlockPool:
    """Blocks of K/V for a model, shared by any number of caches.

    Args:
        config: the model's config (a composite model's is resolved to its decoder's).
        block_size: token slots in a block.
        num_blocks: blocks of each layer group. With neither this nor `max_memory` the pool grows.
        max_memory: bytes over all layers, as an int or as text such as "4GiB".
        dtype: dtype that the model's K/V must have; None takes that of the first K/V seen.
        device: device that the model's K/V must be on; None takes each layer's own.
        kv_dtype: dtype to store K/V in, if another than the model's.

    Raises:
        ValueError: naming the argument that is wrong or the two that contradict each other.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_memory: int | str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        kv_dtype: torch.dtype | None = None,
    ):
        _check_count("block_size", block_size)
        if num_blocks is not None:
            _check_count("num_blocks", num_blocks)
            if max_memory is not None:
                raise ValueError("num_blocks and max_memory both bound the pool; pass one of them.")
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(
                f"config must be a model's PreTrainedConfig, not {type(config).__name__}."
            )
        self.config = config.get_text_config(decoder=True)
        self.block_size = block_size
        self.max_memory = None if max_memory is None else parse_memory(max_memory)
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.device = None if device is None else torch.device(device)
        self.lock = threading.RLock()
        self.copies = 0
        self.peak_used = 0
        self._tables: weakref.WeakSet[BlockTables] = weakref.WeakSet()
        # Tables of caches that were garbage collected: the collector may run in the middle of any
        # other call, so it only queues them here and the next call returns their blocks.
        self._dropped: deque[list[np.ndarray]] = deque()
        if self.max_memory is not None:
            num_blocks = self._blocks_in_memory(bytes_per_token(self.config, kv_dtype or dtype))
        by_window: dict[int | None, list[int]] = {}
        for layer, window in paged_windows(self.config).items():
            by_window.setdefault(window, []).append(layer)
        # Full attention first: it is the group that `PagedCache.block_tables` shows.
        self.groups = [
            BlockGroup(window, by_window[window], block_size, num_blocks)
            for window in sorted(by_window, key=lambda window: window or 0)
        ]
        self.group_of_layer = {i: n for n, g in enumerate(self.groups) for i in g.layers}

    @property
    def num_blocks(self) -> int:
        """Blocks that exist now, over all layer groups."""
        return sum(group.capacity for group in self.groups)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, over all layer groups."""
        self.collect()
        return sum(group.num_free for group in self.groups)

    @property
    def num_used(self) -> int:
        """Blocks that a cache holds, over all layer groups."""
        self.collect()
        return sum(group.num_used for group in self.groups)

    def stats(self) -> dict[str, int]:
        """Counters since the pool was made: copies (on write), peak_used (blocks)."""
        return {"copies": self.copies, "peak_used": self.peak_used}

    def check(self) -> None:
        """Raise AssertionError where an invariant of the pool is broken."""
        with self.lock:
            self.collect()
            tables = list(self._tables)
            for index, group in enumerate(self.groups):
                group.check([table.held(index) for table in tables])
            for table in tables:
                table.check()

    def collect(self) -> None:
        """Return the blocks of caches that were garbage collected."""
        with self.lock:
            while self._dropped:
                for group, table in zip(self.groups, self._dropped.popleft(), strict=True):
                    group.release(table[table >= 0])

    def register(self, tables: BlockTables) -> None:
        self._tables.add(tables)

    def drop(self, tables: list[np.ndarray]) -> None:
        """Queue the block tables (one a group) of a cache that is gone; safe in a finalizer."""
        self._dropped.append(tables)

    def take(self, counts: Sequence[int]) -> list[np.ndarray]:
        """Take `counts[g]` blocks of each group g, all of them or none.

        Raises:
            PoolExhausted: a bounded group has too few; no block was taken.
        """
        self.collect()
        for group, count in zip(self.groups, counts, strict=True):
            if count > group.num_free and group.max_blocks is not None:
                raise PoolExhausted(count, group.num_free, 0, group.capacity, str(group))
        for group, count in zip(self.groups, counts, strict=True):
            group.ensure_free(count)
        taken = [group.take(count) for group, count in zip(self.groups, counts, strict=True)]
        self.peak_used = max(self.peak_used, sum(group.num_used for group in self.groups))
        return taken

    def layer_storage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerStorage:
        """The storage of `layer`, made at its first K/V ([batch, kv_heads, tokens, head_dim]).

        Raises:
            ValueError: K/V of another shape, dtype or device than the layer's or the pool's.
        """
        storage = self.groups[self.group_of_layer[layer]].storage.get(layer)
        if storage is None:
            storage = self._make_storage(layer, keys, values)
        for name, stored, new in (("K", storage.keys, keys), ("V", storage.values, values)):
            _, _, heads, dim = stored.shape
            if new.shape[1] != heads or new.shape[3] != dim:
                raise ValueError(
                    f"Layer {layer} stores {name} of (kv_heads, head_dim) {(heads, dim)}, got "
                    f"{(new.shape[1], new.shape[3])}; use a pool made for this model's config."
                )
            if self.kv_dtype is None and new.dtype != stored.dtype:
                raise ValueError(
                    f"Layer {layer} stores {name} as {stored.dtype}, got {new.dtype}; use one "
                    "dtype for all calls on a pool, or choose kv_dtype."
                )
            if new.device != stored.device:
                raise ValueError(
                    f"Layer {layer} stores {name} on {stored.device}, got a tensor on {new.device};"
                    " use one pool for each placement of the model."
                )
        return storage

    def _make_storage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerStorage:
        with self.lock:
            self._size_by(layer, keys, values)
            group = self.groups[self.group_of_layer[layer]]
            if layer not in group.storage:
                self._check_declared(layer, keys, values)
                storage = LayerStorage(*(self._empty_blocks(group, t) for t in (keys, values)))
                group.storage[layer] = storage
                self._check_budget(layer)
            return group.storage[layer]

    def _size_by(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before the first block is taken, correct what the config said by the first real K/V."""
        if self.max_memory is None or any(group.storage for group in self.groups):
            return
        dtype = self.kv_dtype or keys.dtype
        actual = sum(t.shape[1] * t.shape[3] for t in (keys, values))
        declared = elements_per_token(layer_config(self.config, layer))
        total = bytes_per_token(self.config, dtype) * actual // declared
        num_blocks = self._blocks_in_memory(total)
        for group in self.groups:
            if group.capacity != num_blocks and not group.num_used:
                group.resize(num_blocks)

    def _blocks_in_memory(self, bytes_per_token: int) -> int:
        assert self.max_memory is not None
        block = bytes_per_token * self.block_size
        if self.max_memory < block:
            raise ValueError(
                f"max_memory of {self.max_memory} bytes is less than one block over all layers "
                f"({block} bytes); raise it or lower block_size."
            )
        return self.max_memory // block

    def _check_declared(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for new in (keys, values):
            if self.dtype is not None and new.dtype != self.dtype:
                raise ValueError(
                    f"The pool was made for {self.dtype}, layer {layer} is {new.dtype}."
                )
            if self.device is not None and new.device.type != self.device.type:
                raise ValueError(
                    f"The pool was made for {self.device}, layer {layer} is on {new.device}."
                )

    def _check_budget(self, layer: int) -> None:
        held = sum(s.num_bytes for group in self.groups for s in group.storage.values())
        if self.max_memory is not None and held > self.max_memory:
            raise ValueError(
                f"Layer {layer} stores more than its config says, so max_memory cannot be kept; "
                "bound the pool by num_blocks."
            )

    def _empty_blocks(self, group: BlockGroup, new: torch.Tensor) -> torch.Tensor:
        shape = (group.capacity, self.block_size, new.shape[1], new.shape[3])
        return torch.empty(shape, dtype=self.kv_dtype or new.dtype, device=new.device)


def _grown(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    grown = tensor.new_empty((num_blocks, *tensor.shape[1:]))
    grown[: tensor.shape[0]] = tensor
    return grown


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}.")
