"""`BlockPool`: blocks, the memory behind them, and the prefixes that are known."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedConfig

from .arguments import check_count, token_ids
from .batching import PromptBatch, batches
from .core.allocator import BlockAllocator, BlockGroup
from .core.block_table import BlockTables
from .core.caller import autocast_dtype
from .core.forward import CacheState
from .core.kv_storage import KVStorage
from .core.model_spec import parse_memory
from .core.provenance import Provenance
from .prefix.identity import ExtraKey, ModelIdentity, encode_extra_key
from .prefix.match import insert, load_prefixes, match, save_prefixes
from .prefix.radix import Key, PrefixIndex


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

    cache_type: ClassVar[Any]  # PagedCache, which is built on this and says so itself

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
        self.model = ModelIdentity(config, model)
        by_window: dict[int | None, list[int]] = {}
        for layer, window in self.model.spec.windows.items():
            by_window.setdefault(window, []).append(layer)
        # Full attention first: it is the group that `PagedCache.block_tables` shows.
        groups = [
            BlockGroup(window, by_window[window], block_size, num_blocks)
            for window in sorted(by_window, key=lambda window: window or 0)
        ]
        self.index = PrefixIndex(groups, block_size)
        self.allocator = BlockAllocator(groups, self.index)
        self.storage = KVStorage(
            self.model.spec.config,
            self.allocator,
            max_memory=None if max_memory is None else parse_memory(max_memory),
            dtype=dtype,
            device=None if device is None else torch.device(device),
            kv_dtype=kv_dtype,
            computed_dtype=dtype or self.model.dtype,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A BlockPool, which holds the K/V of all its caches, is neither pickled nor copied: "
            "pickle or fork() a PagedCache, keep known prefixes by save_prefixes(path), or make a "
            "new BlockPool."
        )

    @property
    def groups(self) -> Sequence[BlockGroup]:
        """The blocks of the layers that keep the same tokens, those with full attention first."""
        return self.allocator.groups

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self.allocator.block_size

    @property
    def device(self) -> torch.device | None:
        """Where K/V that are loaded go: the pool's device, or its model's."""
        return self.storage.device or self.model.device

    @property
    def num_blocks(self) -> int:
        """Blocks that exist now, over all layer groups."""
        return sum(group.capacity for group in self.groups)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, over all layer groups."""
        self.allocator.collect()
        return sum(group.num_free for group in self.groups)

    @property
    def num_evictable(self) -> int:
        """Blocks of known prefixes that no cache uses: free as soon as they are needed."""
        with self.allocator.lock:
            self.allocator.collect()
            return sum(self.index.evictable())

    @property
    def num_used(self) -> int:
        """Blocks that are neither free nor evictable, over all layer groups."""
        with self.allocator.lock:
            return self.num_blocks - self.num_free - self.num_evictable

    def stats(self) -> dict[str, int]:
        """Counters since the pool was made.

        hits, misses: prompts of which a beginning was known, and others. matched_tokens: tokens
        that did not have to be computed. evictions: blocks of prefixes that were evicted. copies:
        blocks copied on write. peak_used: the most blocks that were not free.
        """
        return {
            "hits": self.index.hits,
            "misses": self.index.misses,
            "matched_tokens": self.index.matched_tokens,
            "evictions": self.allocator.evictions,
            "copies": self.allocator.copies,
            "peak_used": self.allocator.peak_used,
        }

    def match_prefix(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        extra_key: ExtraKey = None,
        num_return_sequences: int = 1,
        compile: bool = False,
    ) -> Any:
        """A `PagedCache` that already holds the longest known beginning of every prompt.

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
            compile: as for `PagedCache`.

        Raises:
            ValueError: arguments of another kind, padding on the right, images or sounds without an
                extra_key, or a model whose prefixes cannot be reused exactly (recurrent layers,
                rotary embeddings that depend on the whole length or on the last prompt).
        """
        check_count("num_return_sequences", num_return_sequences)
        ids = token_ids("input_ids", input_ids)
        autocast = autocast_dtype()
        key = self._key(ids, extra_key, autocast)
        with self.allocator.lock, self.allocator.change:
            self.allocator.collect()
            tokens, tables = match(self.index, self.model.spec, key, ids, attention_mask)
            if not tokens.columns:
                return self.cache_type(pool=self, compile=compile)
            rows = np.arange(len(ids)).repeat(num_return_sequences)
            held = [table[rows] for table in tables]
            held_tables = BlockTables.holding(self.allocator, tokens.select(rows), held)
        provenance = Provenance(key[0], autocast)
        provenance.note_ids(ids.cpu().numpy()[rows], tokens.columns)
        return self.cache_type.holding(self, held_tables, provenance, compile=compile)

    def insert_prefix(
        self,
        cache: Any,
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
        # What generate returns with return_dict_in_generate has them inside.
        ids = token_ids("sequences", getattr(sequences, "sequences", sequences))
        state = getattr(cache, "state", None)
        if not isinstance(state, CacheState):
            raise ValueError(
                "cache must be the PagedCache that computed the sequences, not "
                f"{type(cache).__name__}."
            )
        key = self._key(ids, extra_key, state.provenance.autocast)
        if state.allocator is not self.allocator:
            raise ValueError("The cache is of another pool; insert it into cache.pool.")
        if cache.has_other_states:
            raise ValueError(
                "Prefixes of this model cannot be reused: it keeps states in layers that are not "
                "in blocks; use plain caches."
            )
        return insert(self.index, key, state, ids.cpu().numpy(), attention_mask)

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
            self.allocator, prompts, max_new_tokens, num_return_sequences, max_prompts, pad_token_id
        )

    def evict(self, n: int) -> int:
        """Free blocks of the least recently used prefixes that no cache uses, `n` or all there are.

        Returns:
            How many blocks were freed, which may be a few more than n.
        """
        check_count("n", n)
        with self.allocator.lock, self.allocator.change:
            self.allocator.collect()
            most = min(n, sum(self.index.evictable()))
            return self.allocator.evict(lambda freed: sum(freed) >= most)

    def clear_prefixes(self) -> None:
        """Forget all prefixes; what no cache uses is free."""
        with self.allocator.lock, self.allocator.change:
            self.index.clear()

    def check(self) -> None:
        """Raise AssertionError where an invariant of the pool is broken."""
        self.allocator.check()

    def save_prefixes(self, path: str | os.PathLike[str]) -> None:
        """Write all known prefixes of the model as it is now to a safetensors file.

        It can be loaded where config and weights are the same; by a pool that was made from a
        config where this one was, which is trusted to belong to one checkpoint.

        Raises:
            OSError: the file cannot be written; what was there before is as it was.
        """
        save_prefixes(self.index, self.storage, self.identity(), path)

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
        return load_prefixes(self.index, self.storage, self.model, path)

    def _key(self, ids: torch.Tensor, extra_key: ExtraKey, autocast: str | None) -> Key:
        """What prompts of these ids are indexed under, if computed under that `autocast_dtype`.

        Raises:
            ValueError: K/V depend on images or sounds that nothing names.
        """
        media_tokens = self.model.spec.media_tokens
        if extra_key is None and media_tokens:
            media = torch.tensor(media_tokens, dtype=torch.long, device=ids.device)
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
        return self.model.identity()
