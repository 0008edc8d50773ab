"""Blocks: how many there are, which are free, who holds them, and the tensors behind them.

A `BlockPool` has one `BlockGroup` per set of layers that keep the same tokens (full attention;
sliding window of W). A group hands out block numbers and counts their holders; block `b` of a group
is the same `block_size` slots in the K and V tensors of every layer of the group.

Two rules keep sharing safe: only a block with one holder is ever written, and a block returns to
the free list exactly when its count falls to zero (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023).

Counts and free lists follow from the block tables and the prefix index. So a change that an
exception has cut short (Ctrl-C comes after any call) is not undone: the pool counts again.
"""

from __future__ import annotations

import copy
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from .arguments import check_count, token_ids
from .circumstances import Watched, autocast_dtype, may_change_states
from .fingerprint import (
    ExtraKey,
    config_facts,
    config_fingerprint,
    encode_extra_key,
    read_model,
)
from .geometry import (
    attending_config,
    bytes_per_token,
    check_cacheable,
    decoder_config,
    dynamic_layers,
    elements_per_token,
    layer_config,
    longest_prefix,
    media_tokens,
    paged_windows,
    parse_memory,
    stateful_layers,
)
from .prefix import Key, PrefixIndex
from .transfer import upload

if TYPE_CHECKING:
    from .admission import PromptBatch
    from .cache import PagedCache
    from .table import BlockTables

# (keys, values) -> the width of a head of each in memory.
StoredDims = Callable[[torch.Tensor, torch.Tensor], tuple[int, int]]

ENV_DEBUG = "HF_PAGED_DEBUG"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
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


class LayerStorage:
    """K and V of one layer.

    Args:
        keys, values: [num_blocks, block_size, kv_heads, stored_dim], the memory; where it is wider
            than head_dim, zeros follow each head.
        dims: head_dim of K and of V.
        given_dtype: dtype of the K/V as the model computes them.

    Attributes:
        keys, values: [num_blocks, block_size, kv_heads, head_dim].
        padded_keys, padded_values: the same memory with the zeros behind each head.
        key_slots, value_slots: the same memory as `keys` as [slots, kv_heads, head_dim].
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        dims: tuple[int, int],
        given_dtype: torch.dtype,
    ):
        self._dims, self.given_dtype = dims, given_dtype
        self._set(keys, values)

    def _set(self, padded_keys: torch.Tensor, padded_values: torch.Tensor) -> None:
        keys, values = padded_keys[..., : self._dims[0]], padded_values[..., : self._dims[1]]
        key_slots, value_slots = keys.flatten(0, 1), values.flatten(0, 1)
        # One statement each, so that no exception leaves K, or V, in two memories.
        self.padded_keys, self.keys, self.key_slots = padded_keys, keys, key_slots
        self.padded_values, self.values, self.value_slots = padded_values, values, value_slots

    def refusal(self, keys: torch.Tensor, values: torch.Tensor) -> str | None:
        """Why K/V ([batch, kv_heads, tokens, head_dim]) cannot be stored here, None if they can."""
        for name, stored, new in (("K", self.keys, keys), ("V", self.values, values)):
            _, _, heads, dim = stored.shape
            if new.shape[1] != heads or new.shape[3] != dim:
                return (
                    f"stores {name} of (kv_heads, head_dim) {(heads, dim)}, got "
                    f"{(new.shape[1], new.shape[3])}; use a pool made for this model's config."
                )
            if new.dtype != self.given_dtype:
                return (
                    f"has had {name} of {self.given_dtype}, got {new.dtype}; use one dtype for all "
                    "calls on a pool."
                )
            if new.device != stored.device:
                return (
                    f"stores {name} on {stored.device}, got a tensor on {new.device}; use one pool "
                    "for each placement of the model."
                )
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self.padded_keys.nbytes + self.padded_values.nbytes

    @property
    def num_bytes_unpadded(self) -> int:
        """Bytes that K and V would take without the zeros behind each head."""
        return (self.keys.numel() + self.values.numel()) * self.keys.itemsize

    @torch.inference_mode(False)  # what is made in inference mode could be written nowhere else
    def grow(self, num_blocks: int) -> None:
        before = min(len(self.keys), len(self.values))
        # One after the other, so that at most one tensor is held twice. If the second runs out of
        # memory, another try grows what is short.
        if self.padded_keys.shape[0] < num_blocks:
            self._set(_grown(self.padded_keys, num_blocks), self.padded_values)
        if self.padded_values.shape[0] < num_blocks:
            self._set(self.padded_keys, _grown(self.padded_values, num_blocks))
        if is_debugging():
            self.poison(np.arange(before, num_blocks))

    def poison(self, blocks: np.ndarray) -> None:
        """Fill `blocks` with NaN, so that it shows if anybody reads what nobody has written."""
        for stored in (self.keys, self.values):
            nan = torch.full((), torch.nan, dtype=torch.float32, device=stored.device)
            nan = nan.to(stored.dtype)
            index = torch.from_numpy(blocks.copy()).to(stored.device)
            bits(stored)[index] = bits(nan)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks `source` to `target` (int64 [blocks], on the storage's device)."""
        for memory in (bits(self.padded_keys), bits(self.padded_values)):
            memory[target] = memory[source]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write [tokens, kv_heads, head_dim] K and V to `slots` (int64 [tokens], same device)."""
        for stored, new in ((self.key_slots, keys), (self.value_slots, values)):
            if new.dtype != stored.dtype:
                new = _converted(new, stored.dtype)
            bits(stored).index_copy_(0, slots, bits(new))


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


class Change:
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


class BlockPool:
    """Blocks of K/V for a model, shared by any number of caches.

    Args:
        config: the model's config (a composite model's is resolved to its decoder's), or the model
            itself: then known prefixes are also told apart by its weights and active adapters, so
            that a pool that several checkpoints use, or whose model is trained, stays right. Later
            changes of the config are followed, except other windows, which are refused.
        block_size: token slots in a block.
        num_blocks: blocks of each layer group. With neither this nor `max_memory` the pool grows.
        max_memory: bytes over all layers, as an int or as text such as "4GiB".
        dtype: dtype that the model's K/V must have; None takes that of the first K/V seen.
        device: device that the model's K/V must be on; None takes each layer's own.
        kv_dtype: dtype to store K/V in, if another than the model's.

    Raises:
        ValueError: naming the argument that is wrong or the two that contradict each other, or
            saying why the model has nothing to page.
    """

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_memory: int | str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        kv_dtype: torch.dtype | None = None,
    ):
        check_count("block_size", block_size)
        if num_blocks is not None:
            check_count("num_blocks", num_blocks)
            if max_memory is not None:
                raise ValueError("num_blocks and max_memory both bound the pool; pass one of them.")
        for name, kind in (("dtype", dtype), ("kv_dtype", kv_dtype)):
            if kind is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
                raise ValueError(
                    f"{name} must be a floating-point torch.dtype such as torch.bfloat16, not "
                    f"{kind!r}."
                )
        model = config if isinstance(config, torch.nn.Module) else None
        config = config if model is None else getattr(model, "config", model)
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(
                "config must be a model's PreTrainedConfig or the model, not "
                f"{type(config).__name__}."
            )
        self._model, self.whole_config = model, config
        self.media_tokens = media_tokens(config)
        self.config, self.attending = decoder_config(config), attending_config(config)
        check_cacheable(self.config)
        self._config_facts = copy.deepcopy(config_facts(config))
        self._config_fingerprint = config_fingerprint(config)
        self._watched = Watched([], [])  # of the model, as `identity` last found it
        self.block_size = block_size
        self.max_memory = None if max_memory is None else parse_memory(max_memory)
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.device = None if device is None else torch.device(device)
        self.lock = threading.RLock()
        self.copies = self.peak_used = self.evictions = 0
        self.hits = self.misses = self.matched_tokens = 0
        self.change = Change(self._recount)
        # The arrays of each cache's tables, which outlive it: the collector may run in the middle
        # of any other call, so it only queues the reference, and the next call returns the blocks.
        self._tables: dict[weakref.ref[BlockTables], list[np.ndarray]] = {}
        self._dropped: deque[weakref.ref[BlockTables]] = deque()
        if self.max_memory is not None:
            computed = dtype or getattr(model, "dtype", None)
            num_blocks = self._blocks_in_memory(bytes_per_token(self.config, kv_dtype or computed))
        by_window: dict[int | None, list[int]] = {}
        for layer, window in paged_windows(self.config).items():
            by_window.setdefault(window, []).append(layer)
        # Full attention first: it is the group that `PagedCache.block_tables` shows.
        self.groups = [
            BlockGroup(window, by_window[window], block_size, num_blocks)
            for window in sorted(by_window, key=lambda window: window or 0)
        ]
        self.group_of_layer = {i: n for n, g in enumerate(self.groups) for i in g.layers}
        self.stateful_layers = stateful_layers(self.config)
        self.plain_layers = dynamic_layers(self.config)  # empty; what a cache's layers are made of
        self.index = PrefixIndex(self.groups, block_size)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A BlockPool, which holds the K/V of all its caches, is neither pickled nor copied: "
            "pickle or fork() a PagedCache, keep known prefixes by save_prefixes(path), or make a "
            "new BlockPool."
        )

    @property
    def home(self) -> torch.device | None:
        """Where K/V that are loaded go: the pool's device, or its model's."""
        if self.device is None and self._model is not None:
            return next(self._model.parameters()).device
        return self.device

    @cached_property
    def longest_prefix(self) -> int | None:
        """The longest prompt whose beginning can be reused, None for any.

        Raises:
            ValueError: the model's prefixes cannot be reused exactly.
        """
        return longest_prefix(self.whole_config)

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
    def num_evictable(self) -> int:
        """Blocks of known prefixes that no cache uses: free as soon as they are needed."""
        with self.lock:
            self.collect()
            return sum(self.index.evictable())

    @property
    def num_used(self) -> int:
        """Blocks that are neither free nor evictable, over all layer groups."""
        with self.lock:
            return self.num_blocks - self.num_free - self.num_evictable

    def stats(self) -> dict[str, int]:
        """Counters since the pool was made.

        hits, misses: prompts of which a beginning was known, and others. matched_tokens: tokens
        that did not have to be computed. evictions: blocks of prefixes that were evicted. copies:
        blocks copied on write. peak_used: the most blocks that were not free.
        """
        return {
            "hits": self.hits,
            "misses": self.misses,
            "matched_tokens": self.matched_tokens,
            "evictions": self.evictions,
            "copies": self.copies,
            "peak_used": self.peak_used,
        }

    def match_prefix(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        extra_key: ExtraKey = None,
        num_return_sequences: int = 1,
    ) -> PagedCache:
        """A cache that already holds the longest known beginning of every prompt.

            cache = pool.match_prefix(**inputs)
            sequences = model.generate(**inputs, past_key_values=cache)
            pool.insert_prefix(cache, sequences)

        They are the K/V that the model as it is now computes from tokens and their positions alone,
        without forward hooks, not in training, and under the autocast that this is called under. So
        call it where generate is called; what hooks are to change or see must be computed anew.

        All rows continue at the same column, so what is reused of a batch is what all rows know,
        counted in columns, and at least the last token of each prompt is left to compute. An
        assistant or prompt lookup takes no cache that already holds tokens.

        Args:
            input_ids: whole numbers [rows, tokens], the prompts, padded on the left; a tensor, an
                array or lists.
            attention_mask: [rows, tokens], 0 where a column is padding.
            extra_key: what else the K/V depend on or must not be shared across (a tenant, the hash
                of an image, what `insert_prefix` cannot see): text, an int, bytes, or a tuple of
                these.
            num_return_sequences: how many rows of the cache each prompt gets.

        Raises:
            ValueError: arguments of another kind, padding on the right, images or sounds without an
                extra_key, or a model whose prefixes cannot be reused exactly (recurrent layers,
                rotary embeddings that depend on the whole length or on the last prompt).
        """
        from .reuse import match_prefix

        check_count("num_return_sequences", num_return_sequences)
        ids = token_ids("input_ids", input_ids)
        key = self._key(ids, extra_key, autocast_dtype())
        return match_prefix(self, key, ids, attention_mask, num_return_sequences)

    def insert_prefix(
        self,
        cache: PagedCache,
        sequences: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        extra_key: ExtraKey = None,
    ) -> int:
        """Index the tokens that a cache holds; what was known before is then stored once.

        The K/V must be those of a prompt on its own. Of each row are left out the first token that
        cannot be so, and all behind it:

        - under a mask that is more than causal (image blocks, packed sequences);
        - at another position than generate and `PagedCache.prefill` give it, which leave out the
          padding in front of it, or of `inputs_embeds` in place of tokens, if the forward was given
          these by name;
        - under another autocast than the first token, or after config, weights or active adapters
          have changed, if only in between;
        - where the pool was made from the model: in training, or under a forward hook that returns
          something or calls what writes to a tensor (`add_`). Hooks that only look on do not count,
          and `adapter_names` of PEFT are such hooks as do.

        Not seen, so to be named by `extra_key`, or to be kept in a pool of its own: other inputs of
        the forward (`token_type_ids`, `encoder_hidden_states`), hooks that write by an index
        (`output[0][:] = ...`), attributes and methods of modules that are replaced for the time of
        the forward, weights written through `weight.data`; and all that changes the model, where
        the pool was made from a config.

        After beam search the rows of a cache are not the sequences that it returned: their prompts
        are indexed, and no more.

        Args:
            cache: a cache of this pool.
            sequences: whole numbers [rows, tokens], as generate returned them, or that itself.
            attention_mask: that of the prompts, which the cache knows too: it is only checked.
            extra_key: as for `match_prefix`.

        Returns:
            How many tokens are indexed that were not before.

        Raises:
            ValueError: the sequences, the mask and the cache do not belong together, the model's
                config, weights or adapters are others than when the cache was begun, there is
                padding behind a token, or the model's prefixes cannot be reused exactly.
        """
        from .reuse import insert_prefix

        # What generate returns with return_dict_in_generate has them inside.
        ids = token_ids("sequences", getattr(sequences, "sequences", sequences))
        key = self._key(ids, extra_key, getattr(cache, "autocast", None))
        return insert_prefix(self, key, cache, ids, attention_mask)

    def batches(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int,
        *,
        num_return_sequences: int = 1,
        max_prompts: int | None = None,
        pad_token_id: int = 0,
    ) -> Iterator[PromptBatch]:
        """Batches of a long list of prompts, so small that generate never finds the pool full.

            for batch in pool.batches(prompts, max_new_tokens=64):
                cache = pool.match_prefix(**batch.inputs)
                sequences = model.generate(
                    **batch.inputs, past_key_values=cache, max_new_tokens=64
                )
                pool.insert_prefix(cache, sequences)

        Prompts that begin alike are put together. What caches hold when this is called is left out
        of the reckoning; a batch's own cache must be gone, or freed, before the next one's generate
        (binding its name again is enough). With windows, an assistant or prompt lookup holds more
        than is reckoned here.

        Args:
            prompts: the token ids of each prompt.
            max_new_tokens: as generate gets it.
            num_return_sequences: rows that generate makes of a prompt (or num_beams).
            max_prompts: the most prompts of a batch; None leaves it to the pool's size.
            pad_token_id: what the input_ids hold where they are padded.

        Raises:
            ValueError: a prompt that can never fit, with its index; said before the first batch.
            RuntimeError: one for which caches have left no room, when its turn comes.
        """
        from .admission import batches

        if isinstance(prompts, Mapping):
            raise ValueError(
                f"prompts must be a list of token ids, not a {type(prompts).__name__}; pass its "
                "input_ids, without padding."
            )
        token_ids("pad_token_id", [pad_token_id], ndim=1)
        check_count("max_new_tokens", max_new_tokens)
        check_count("num_return_sequences", num_return_sequences)
        if max_prompts is not None:
            check_count("max_prompts", max_prompts)
        return batches(
            self, prompts, max_new_tokens, num_return_sequences, max_prompts, pad_token_id
        )

    def evict(self, n: int) -> int:
        """Free blocks of the least recently used prefixes that no cache uses, `n` or all there are.

        Returns:
            How many blocks were freed, which may be a few more than n.
        """
        check_count("n", n)
        with self.lock, self.change:
            self.collect()
            most = min(n, sum(self.index.evictable()))
            return self._evict(lambda freed: sum(freed) >= most)

    def clear_prefixes(self) -> None:
        """Forget all prefixes; what no cache uses is free."""
        with self.lock, self.change:
            self.index.clear()

    def check(self) -> None:
        """Raise AssertionError where an invariant of the pool is broken."""
        with self.lock:
            self.collect()
            for index, group in enumerate(self.groups):
                group.check(self._holders(index))
            for reference in list(self._tables):
                tables = reference()
                if tables is not None:
                    tables.check()
            self.index.check()

    def collect(self) -> None:
        """Return the blocks of caches that were garbage collected."""
        with self.lock, self.change:
            while self._dropped:
                tables = self._tables.pop(self._dropped.popleft(), None)
                for group, table in zip(self.groups, tables or [], strict=False):
                    group.release(table[table >= 0])

    def register(self, tables: BlockTables) -> None:
        """Count the blocks in the list `tables.tables` as held, for as long as `tables` lives."""
        self._tables[weakref.ref(tables, self._dropped.append)] = tables.tables

    def _recount(self) -> None:
        """Count the holders of every block, whatever a change that was cut short has done."""
        for reference in list(self._tables):
            tables = reference()
            if tables is None:
                self._tables.pop(reference, None)
            else:
                tables.drop_unfinished()
        self.index.mend()
        for index, group in enumerate(self.groups):
            group.recount(self._holders(index))

    def _holders(self, group: int) -> list[np.ndarray]:
        held = [tables[group] for tables in list(self._tables.values())]
        return [*(table[table >= 0] for table in held), self.index.held(group)]

    def take(self, counts: Sequence[int]) -> list[np.ndarray]:
        """Take `counts[g]` blocks of each group g, all of them or none, in a change.

        Raises:
            PoolExhausted: a bounded group has too few, also without the prefixes that nobody uses;
                no block was taken, no prefix evicted.
        """
        self.collect()
        short = [
            0 if group.max_blocks is None else max(count - group.num_free, 0)
            for group, count in zip(self.groups, counts, strict=True)
        ]
        if any(short) and not self._evict(
            lambda freed: all(f >= s for f, s in zip(freed, short, strict=True))
        ):
            evictable = self.index.evictable()
            at = next(index for index, count in enumerate(short) if count > evictable[index])
            group = self.groups[at]
            raise PoolExhausted(
                counts[at], group.num_free, evictable[at], group.capacity, str(group)
            )
        for group, count in zip(self.groups, counts, strict=True):
            group.ensure_free(count)
        taken = [group.take(count) for group, count in zip(self.groups, counts, strict=True)]
        self.peak_used = max(self.peak_used, sum(group.num_used for group in self.groups))
        return taken

    def _evict(self, enough: Callable[[list[int]], bool]) -> int:
        freed = self.index.evict(enough)
        self.evictions += freed
        return freed

    def save_prefixes(self, path: str | os.PathLike[str]) -> None:
        """Write all known prefixes of the model as it is now to a safetensors file.

        It can be loaded where config and weights are the same; by a pool that was made from a
        config where this one was, which is trusted to belong to one checkpoint.

        Raises:
            OSError: the file cannot be written; what was there before is as it was.
        """
        from .reuse import save_prefixes

        save_prefixes(self, path)

    def load_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Add the prefixes of a file that `save_prefixes` wrote, in this process or another.

        Returns:
            How many tokens became reusable that were not before.

        Raises:
            ValueError: the file is damaged, or of another config (the error names the fields),
                other weights or adapters, block_size or layout, or only one of the two pools was
                made from a model, so that the weights may be others; nothing was loaded.
            PoolExhausted: the pool has too few blocks; nothing was loaded.
        """
        from .reuse import load_prefixes

        return load_prefixes(self, path)

    def _key(self, ids: torch.Tensor, extra_key: ExtraKey, autocast: str | None) -> Key:
        """What prompts of these ids are indexed under, if computed under that `autocast_dtype`.

        Raises:
            ValueError: K/V depend on images or sounds that nothing names.
        """
        if extra_key is None and self.media_tokens:
            media = torch.tensor(self.media_tokens, dtype=torch.long, device=ids.device)
            if torch.isin(ids, media).any():
                raise ValueError(
                    "The prompts hold images or sounds, on which K/V depend; name these by "
                    "extra_key (a hash of their data)."
                )
        return self.identity(), encode_extra_key(extra_key, autocast)

    def identity(self) -> str:
        """What K/V depend on besides tokens and extra keys: config, and weights where known.

        Raises:
            ValueError: layers look back on other numbers of tokens than when the pool was made, or
                the weights cannot be read.
        """
        if config_facts(self.whole_config) != self._config_facts:
            self._read_config()
        weights, adapters = None, None
        if self._model is not None:
            weights, adapters, self._watched = read_model(self._model)
        return json.dumps(
            {"config": self._config_fingerprint, "weights": weights, "adapters": adapters}
        )

    def _read_config(self) -> None:
        """Follow what was written into the config since it was last read."""
        config = decoder_config(self.whole_config)
        if paged_windows(config) != {i: g.window for g in self.groups for i in g.layers}:
            raise ValueError(
                "The layers in the model's config, or their windows, are no longer those that the "
                "pool was made for; make a new pool."
            )
        self.config = config
        self._config_fingerprint = config_fingerprint(self.whole_config)
        self._config_facts = copy.deepcopy(config_facts(self.whole_config))
        vars(self).pop("longest_prefix", None)

    def is_altered(self) -> bool:
        """Whether the model, where it is known, may compute other K/V than its weights say now."""
        return may_change_states(self._watched)

    def layer_storage(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        stored_dims: StoredDims = lambda keys, values: (keys.shape[3], values.shape[3]),
    ) -> LayerStorage:
        """The storage of `layer`, made at its first K/V ([batch, kv_heads, tokens, head_dim]).

        Args:
            stored_dims: the width of a head of these K and V in memory; zeros fill what it is wider
                than head_dim.

        Raises:
            ValueError: K/V of another shape, dtype or device than those that the layer stores, or
                than what the pool was made for.
        """
        storages = self.groups[self.group_of_layer[layer]].storage
        storage = storages.get(layer)
        if storage is not None and storage.refusal(keys, values) is None:
            return storage
        if storage is not None:
            self._drop_unused_storage()
        storage = storages.get(layer) or self._make_storage(
            layer, keys, values, stored_dims(keys, values)
        )
        refusal = storage.refusal(keys, values)
        if refusal is not None:
            raise ValueError(f"Layer {layer} {refusal}")
        return storage

    def _drop_unused_storage(self) -> None:
        """Where no block is held, let the next K/V say anew of what kind all are."""
        with self.lock:
            self.collect()
            if not any(group.num_used for group in self.groups):
                for group in self.groups:
                    group.storage.clear()

    @torch.inference_mode(False)
    def _make_storage(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, stored_dims: tuple[int, int]
    ) -> LayerStorage:
        with self.lock:
            self._size_by(layer, keys, stored_dims)
            group = self.groups[self.group_of_layer[layer]]
            if layer not in group.storage:
                self._check_declared(layer, keys, values)
                memory = [
                    self._empty_blocks(group, states, dim)
                    for states, dim in zip((keys, values), stored_dims, strict=True)
                ]
                dims = keys.shape[3], values.shape[3]
                storage = LayerStorage(memory[0], memory[1], dims, keys.dtype)
                if is_debugging():
                    storage.poison(np.arange(group.capacity))
                self._check_budget(layer, storage)
                group.storage[layer] = storage
            return group.storage[layer]

    def _size_by(self, layer: int, keys: torch.Tensor, stored_dims: tuple[int, int]) -> None:
        """Before the first block is taken, correct what the config said by the first real K/V."""
        if self.max_memory is None or any(group.storage for group in self.groups):
            return
        dtype = self.kv_dtype or keys.dtype
        actual = keys.shape[1] * sum(stored_dims)
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

    def _check_budget(self, layer: int, new: LayerStorage) -> None:
        held = sum(s.num_bytes for group in self.groups for s in group.storage.values())
        if self.max_memory is not None and held + new.num_bytes > self.max_memory:
            raise ValueError(
                f"Layer {layer} stores more than its config says, so max_memory cannot be kept; "
                "bound the pool by num_blocks."
            )

    def _empty_blocks(self, group: BlockGroup, new: torch.Tensor, dim: int) -> torch.Tensor:
        shape = (group.capacity, self.block_size, new.shape[1], dim)
        make = torch.empty if dim == new.shape[3] else torch.zeros
        return make(shape, dtype=self.kv_dtype or new.dtype, device=new.device)


def is_debugging() -> bool:
    """Whether each step is checked, and blocks that nobody holds are filled with NaN."""
    return os.environ.get(ENV_DEBUG) == "1"


def _grown(memory: torch.Tensor, num_blocks: int) -> torch.Tensor:
    grown = memory.new_zeros((num_blocks, *memory.shape[1:]))
    bits(grown)[: memory.shape[0]] = bits(memory)
    return grown


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; 8-bit floats as integers, as few operations know them."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


def _converted(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`states` in `dtype`; in 8 bits what is out of range becomes the largest number there is."""
    if dtype in FLOAT8:
        largest = torch.finfo(dtype).max
        states = states.clamp(-largest, largest)
    return states.to(dtype)
