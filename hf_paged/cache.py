"""`PagedCache`: what a user passes to `generate`."""

from __future__ import annotations

import copy
import os
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from .arguments import check_count, row_numbers
from .backends import Backend, check_backend, stored_dims
from .base_cache import BaseCache, select_states
from .compiled import make_compileable
from .core.block_table import BlockTables
from .core.forward import CacheState
from .core.kv_storage import KVStorage
from .core.provenance import Provenance
from .core.rows import fork, free, free_rows, freed_rows
from .edit import edit
from .layers import copy_states, states_of
from .pool import BlockPool
from .prefill import prefill
from .prefix.identity import check_identity
from .report import CacheReport, block_map, report
from .serialization import (
    Snapshot,
    offload,
    pack,
    place_rows,
    restore,
    save_rows,
    unpack,
)

DEFAULT_BLOCK_SIZE = 16


class PagedCache(BaseCache):
    """A `transformers.Cache` that keeps K/V in fixed-size blocks.

        model.generate(**inputs, past_key_values=PagedCache(config=model.config))

    It is a `DynamicCache` to whoever asks, as `EncoderDecoderCache` does: it can do all of that.

    Args:
        config: the model's config, or the model; the cache makes a pool of its own for it.
        pool: a pool to share with other caches, instead of a config.
        block_size: token slots in a block.
        num_blocks: blocks of each layer group. With neither this nor `max_memory` the pool grows.
        max_memory: bytes over all layers, as an int or as text such as "4GiB".
        backend: "auto", or the name of an attention backend; the environment variable
            HF_PAGED_BACKEND goes before it.
        share_prompts: store what the prompts of a batch have in common at their beginning once.
        compile: let generate run decode steps as one compiled graph, where transformers would do so
            for a StaticCache.

    Raises:
        ValueError: naming the argument that is wrong, or the two that contradict each other.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        pool: BlockPool | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        num_blocks: int | None = None,
        max_memory: int | str | None = None,
        backend: str | Backend = "auto",
        share_prompts: bool = True,
        compile: bool = False,
    ):
        if (config is None) == (pool is None):
            raise ValueError("Pass either config (for a pool of its own) or pool, one of them.")
        backend = check_backend(backend)
        if pool is None:
            assert config is not None
            pool = BlockPool(
                config, block_size=block_size, num_blocks=num_blocks, max_memory=max_memory
            )
        else:
            if not isinstance(pool, BlockPool):
                raise ValueError(f"pool must be a BlockPool, not {type(pool).__name__}.")
            if num_blocks is not None or max_memory is not None:
                raise ValueError("The pool sets num_blocks and max_memory; pass them to BlockPool.")
            if block_size not in (DEFAULT_BLOCK_SIZE, pool.block_size):
                raise ValueError(
                    f"block_size={block_size} contradicts the pool's, which is {pool.block_size}."
                )
        self._begin(pool, backend, share_prompts, compile)

    def _begin(
        self, pool: BlockPool, backend: str | Backend, share_prompts: bool, may_compile: bool
    ) -> None:
        self.pool = pool
        state = CacheState(pool.storage, pool.model, partial(stored_dims, backend), share_prompts)
        self._set_state(state, backend, may_compile)

    def _set_state(self, state: CacheState, backend: str | Backend, may_compile: bool) -> None:
        super()._set_state(state, backend, may_compile)
        if may_compile:
            make_compileable(self.layers)

    @classmethod
    def holding(
        cls, pool: BlockPool, tables: BlockTables, provenance: Provenance, **kwargs: Any
    ) -> PagedCache:
        """A cache of a pool whose rows are those of `tables`."""
        cache = cls(pool=pool, **kwargs)
        cache.state.tables, cache.state.provenance = tables, provenance
        return cache

    @property
    def freed_rows(self) -> np.ndarray:
        """bool [rows], whose blocks `free_rows` has given back."""
        return freed_rows(self.state)

    def fork(self, n: int = 1) -> PagedCache:
        """A new cache that shares every block; its rows are these rows, each n times in a row."""
        check_count("n", n)
        numbers = np.arange(len(self.state.tokens)).repeat(n)
        forked = copy.copy(self)  # a subclass may have more attributes
        forked._set_state(fork(self.state, numbers), self._reader.backend, self._reader.may_compile)
        added = self.layers[len(forked.layers) :]  # some models make more layers of their own
        forked.layers += copy.deepcopy(added)
        copies = zip(self.stateful_layers(), forked.stateful_layers(), strict=True)
        for source, target in copies:
            copy_states(source, target)
            select_states(target, numbers)
        return forked

    def __copy__(self) -> PagedCache:
        alias = type(self).__new__(type(self))
        vars(alias).update(vars(self))
        return alias

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self.fork()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the rows and copies of their blocks, without the pool and its model."""
        others = vars(self).keys() - {"state", "_reader", "layers", "pool"}
        spec, storage = self.state.model.spec, self.state.storage
        count = len(spec.plain_layers)  # some models make more layers of their own
        return {
            "config": spec.whole_config,
            "pool": {"block_size": self.pool.block_size, "kv_dtype": storage.kv_dtype},
            "cache": (self._reader.backend, self.state.share_prompts, self._reader.may_compile),
            "rows": pack(self.state),
            "states": [states_of(layer) for layer in self.layers[:count]],
            "added": self.layers[count:],
            "others": {name: vars(self)[name] for name in others},
        }

    def __setstate__(self, parts: dict[str, Any]) -> None:
        """A cache in a pool of its own, that grows; K/V are on the devices that they were on."""
        self._begin(BlockPool(parts["config"], **parts["pool"]), *parts["cache"])
        unpack(self.state, parts["rows"])
        for layer, states in zip(self.layers, parts["states"], strict=True):
            vars(layer).update(states)
        self.layers += parts["added"]
        vars(self).update(parts["others"])

    def edit(self, layer: int) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        """Change what a layer holds: K/V go out as ordinary tensors and come back at the end.

            with cache.edit(3) as (keys, values):
                values[:, :, :5] *= 0.5

        The tensors are what `layers[layer].keys` and `.values` show, [rows, kv_heads, columns,
        head_dim] in the model's dtype, of a window its last columns. Change them in place, as names
        that are bound to others come to nothing. Blocks that other rows, forks or known prefixes
        hold too are copied first, so these stay as they are. What is written to columns of padding
        is passed over: they are not stored. `insert_prefix` leaves out edited tokens and what is
        behind them. If the body raises, nothing is written.

        Args:
            layer: the number of the layer.

        Raises:
            ValueError: the layer keeps no K/V in blocks, or the tensors have got another shape,
                dtype or device.
            RuntimeError: there are no K/V yet, the cache was freed or moved out, its tokens have
                changed meanwhile, or this is called in the middle of a forward.
            PoolExhausted: too few blocks are free for the copies; nothing was written.
        """
        return edit(self.state, layer)

    def prefill(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> PagedCache:
        """Compute all but the last token of the prompts, so that generate computes that one only.

            cache.prefill(model, **inputs)
            model.generate(**inputs, past_key_values=cache, num_beams=8)

        A cache of one row then serves all beams or return sequences of its prompt.

        Args:
            model: the model, which is run without its head.
            input_ids: whole numbers [rows, tokens], whole prompts, in a tensor, an array or lists;
                what the cache holds is passed over.
            attention_mask: [rows, tokens], 0 where a column is padding.
            chunk_size: tokens in one forward; None takes all at once.
            kwargs: what else the model's forward takes; `..._ids` of each token go in chunks too.

        Returns:
            This cache.

        Raises:
            ValueError: an argument is of another kind, the prompts are shorter than what the cache
                holds or other ones, or the model counts the positions of images in whole prompts
                and is to get chunks.
        """
        prefill(self, model, input_ids, attention_mask, chunk_size, **kwargs)
        return self

    def offload(  # type: ignore[override]  # transformers' own is for its offloaded layers
        self, device: torch.device | str = "cpu"
    ) -> None:
        """Move K/V to `device` and give all blocks back, until `restore`.

        Blocks that other caches share stay where they are, and are copied.

        Raises:
            ValueError: the device holds no data.
        """
        if torch.device(device).type == "meta":
            raise ValueError("K/V cannot be moved to the meta device, which holds no data.")
        offload(self.state, device)

    def restore(self) -> None:
        """Move K/V that were offloaded back into blocks of the pool.

        Raises:
            PoolExhausted: too few blocks are free; K/V stay offloaded.
        """
        restore(self.state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows and their K/V to a safetensors file.

        Raises:
            ValueError: the model has layers that keep other states than K/V.
            OSError: the file cannot be written; what was there before is as it was.
        """
        if self.has_other_states:
            raise ValueError(
                "A cache with layers that keep other states than K/V (recurrent ones) cannot be "
                "saved; save its prompt instead."
            )
        save_rows(self.state, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: PreTrainedConfig | torch.nn.Module
    ) -> PagedCache:
        """The cache that `save` wrote, in a pool of its own.

        Args:
            path: the file.
            config: the model if the cache's pool was made from a model, else its config: which
                weights computed K/V must be known on both sides, or on none. Fields of the config
                that change no K/V may be others.

        Raises:
            ValueError: the file is damaged, or of another config (the error names the fields),
                other weights or adapters, or only one side knows weights.
        """
        BlockPool(config)  # what is wrong with the config is not the file's fault
        pools = []

        def target(identity: str, **kwargs: Any) -> KVStorage:
            pools.append(BlockPool(config, **kwargs))
            check_identity(identity, pools[0].identity())
            return pools[0].storage

        snapshot = Snapshot.load(path, "cache", target)
        tables, provenance, freed = place_rows(snapshot, pools[0].storage, pools[0].device, path)
        cache = cls.holding(pools[0], tables, provenance)
        if freed.any():
            cache.free_rows(freed)
        return cache

    def free_rows(self, rows: torch.Tensor | np.ndarray) -> None:
        """Give the blocks of rows that have ended back; what they are given later is not stored.

        The rows stay in the batch, and attention gives zeros for them.

        Args:
            rows: their numbers, or a bool for each row.

        Raises:
            IndexError: there is no such row.
        """
        free_rows(self.state, row_numbers(rows, len(self.state.tokens)))

    def free(self) -> None:
        """Give all blocks back now; the cache cannot be used any more."""
        free(self.state)

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.free()

    def report(self) -> CacheReport:
        """What the cache holds, what a DynamicCache would, and which way attention went."""
        return report(self.state, self._reader)

    def _repr_html_(self) -> str:
        """What a notebook shows: the block map, and its meaning."""
        tokens = self.state.tokens
        return block_map(self.pool.groups, self.state.complete_tables.tables, tokens.lengths)


BlockPool.cache_type = PagedCache


def encoder_decoder_cache(config: PreTrainedConfig, **kwargs: Any) -> EncoderDecoderCache:
    """The cache of an encoder-decoder model: self-attention in blocks, cross-attention as it is.

        model.generate(**inputs, past_key_values=encoder_decoder_cache(model.config))

    Cross-attention K/V are computed once and never grow, so there is nothing to page in them.

    Args:
        config: the model's config.
        kwargs: what else `PagedCache` takes.
    """
    own = PagedCache(config=config, **kwargs)
    return EncoderDecoderCache(own, DynamicCache(config=getattr(config, "config", config)))
