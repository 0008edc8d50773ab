"""`BlockPool`: blocks, the memory behind them, and the prefixes that are known."""

from __future__ import annotations

import copy
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from .arguments import check_count, token_ids
from .core.allocator import BlockGroup, PoolExhausted, RecountGuard
from .core.model_spec import (
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
from .core.storage import LayerStorage, is_debugging
from .prefix.circumstances import Watched, autocast_dtype, may_change_states
from .prefix.identity import (
    ExtraKey,
    config_facts,
    config_fingerprint,
    encode_extra_key,
    read_model,
)
from .prefix.radix import Key, PrefixIndex

if TYPE_CHECKING:
    from .batching import PromptBatch
    from .cache import PagedCache
    from .core.block_table import BlockTables

# (keys, values) -> the width of a head of each in memory.
StoredDims = Callable[[torch.Tensor, torch.Tensor], tuple[int, int]]


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
        self.change = RecountGuard(self._recount)
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
        from .prefix.match import match_prefix

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
        from .prefix.match import insert_prefix

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
        from .batching import batches

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
                    group.decref(table[table >= 0])

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

    def allocate(self, counts: Sequence[int]) -> list[np.ndarray]:
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
        taken = [group.allocate(count) for group, count in zip(self.groups, counts, strict=True)]
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
        from .prefix.match import save_prefixes

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
        from .prefix.match import load_prefixes

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
