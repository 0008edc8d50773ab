"""`PagedCache`: what a user passes to `generate`."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from .arguments import check_count, padding_mask, row_numbers, token_ids
from .backends import backend_for, check_backend
from .core.block_table import BlockTables, RowLayout
from .core.forward import CacheState
from .edit import edit
from .layers import PLAIN, check_crop, copy_states, make_layers, states_of
from .pool import BlockPool
from .report import CacheReport, block_map
from .serialization import Snapshot

DEFAULT_BLOCK_SIZE = 16


class PagedCache(DynamicCache):
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

    Raises:
        ValueError: naming the argument that is wrong, or the two that contradict each other.
    """

    _ids: np.ndarray | None = None  # what `note_ids` has been told

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        pool: BlockPool | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        num_blocks: int | None = None,
        max_memory: int | str | None = None,
        backend: str = "auto",
        share_prompts: bool = True,
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
        self._set_state(CacheState(pool, backend, share_prompts))

    @classmethod
    def holding(
        cls, tables: BlockTables, identity: str, autocast: str | None, known: int | None = None
    ) -> PagedCache:
        """A cache whose rows are those of `tables`, computed by the model of that identity.

        Their first `known` columns (None: all) have the tokens that a caller takes them to have.
        """
        cache = cls(pool=tables.pool)
        cache._state.adopt(tables, identity, autocast, known)
        return cache

    def note_ids(self, ids: np.ndarray) -> None:
        """Remember the token ids ([rows, columns]) that the cache begins with."""
        columns = self.get_seq_length()
        self._ids = ids[:, :columns] if columns else None

    def check_ids(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Raise ValueError where the cache is known to hold other tokens.

        Args:
            ids: [n, columns], token ids, beginning with those of the cache.
            rows: int64 [n], the row of the cache for each.
        """
        known = self._ids_of(rows)
        if known is None:
            return
        width = min(known.shape[1], ids.shape[1])
        is_token = self._state.tokens.mask()[rows, :width]
        differs = ((known[:, :width] != ids[:, :width]) & is_token).any(1)
        if differs.any():
            raise ValueError(
                "The cache was begun with other tokens than those of rows "
                f"{np.flatnonzero(differs)[:10].tolist()}; use it for its own prompts, or reset it."
            )

    def _ids_of(self, rows: np.ndarray) -> np.ndarray | None:
        """What is known of the token ids of `rows`; one row may have become many."""
        return None if self._ids is None else self._ids[rows if len(self._ids) > 1 else rows * 0]

    @property
    def identity(self) -> str | None:
        """`BlockPool.identity` when the first token was stored; None if there was none yet."""
        return self._state.identity

    @property
    def autocast(self) -> str | None:
        """`autocast_dtype` when the first token was stored."""
        return self._state.autocast

    @property
    def own_columns(self) -> np.ndarray:
        """int64 [rows], the columns of each row whose K/V follow from its tokens and the identity:
        none from the first that had another position, a hook, or a changed model."""
        return self._state.own_columns

    def known_tables(self) -> tuple[BlockTables, int | None]:
        """The block tables, and the columns whose K/V are those of the caller's sequences.

        After `reorder_cache`, which beam search calls, and after a mask that is more than causal,
        those are the columns in front of it; else None, for all.
        """
        return self._state.known_tables()

    @property
    def may_hold_padding(self) -> bool:
        """Whether padding may be stored, as a model without our mask function has it stored."""
        return self._state.may_hold_padding

    @property
    def freed_rows(self) -> np.ndarray:
        """bool [rows], whose blocks `free_rows` has given back."""
        return self._state.freed_rows

    @property
    def num_steps(self) -> int:
        """Forwards that have begun on this cache."""
        return self._state.num_steps

    @property
    def has_other_states(self) -> bool:
        """Whether a layer keeps something outside of the blocks, as the model's own ones do."""
        return bool(self._stateful_layers())

    def _set_state(self, batch: CacheState) -> None:
        self._state = batch
        self._ids = None
        Cache.__init__(self, layers=make_layers(batch))

    @property
    def pool(self) -> BlockPool:
        """The blocks of this cache, and of all that it shares with."""
        return self._state.pool

    @property
    def block_tables(self) -> list[list[int]]:
        """For each row the physical block of each logical block (full-attention group)."""
        return [row[row >= 0].tolist() for row in self._state.block_table(0)]

    @property
    def row_lengths(self) -> list[int]:
        """For each row the tokens that it holds, padding not counted."""
        return self._state.tokens.lengths.tolist()

    @property
    def batch_size(self) -> int:
        """Rows of the cache, -1 before the first forward."""
        return self._state.rows or -1

    @property
    def is_compileable(self) -> bool:
        """False: what a step needs is decided on the host."""
        return False

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, ...]]:
        """(keys, values, window) of each layer, as DynamicCache yields them."""
        for layer in self.layers:  # of which recurrent ones have none of these
            names = ("keys", "values", "_sliding_window_tensor")
            yield tuple(getattr(layer, name, None) for name in names)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens (columns) of every row, and what no window reaches any more.

        Args:
            tokens_to_remove: minus the number of tokens, as transformers passes it.

        Raises:
            ValueError: it is positive or no whole number, or there are not that many tokens.
            RuntimeError: a window has moved past the tokens that would be needed again, or a layer
                keeps states that cannot be rolled back (recurrent ones never can).
        """
        try:
            count = -operator.index(tokens_to_remove)  # some versions of generate pass a tensor
        except TypeError:
            count = -1
        if count < 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, not {tokens_to_remove!r}."
            )
        for layer in self._stateful_layers():
            check_crop(layer, count)
        ids, self._ids = self._ids, None  # an exception may come behind any call
        self._state.crop(count)
        if ids is not None:
            self.note_ids(ids)
        for layer in self._stateful_layers():
            layer.crop(-count)
        self._state.rejoin()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` is now; moves table entries, never K/V.

        Raises:
            IndexError: there is no such row.
        """
        rows = self._row_numbers(beam_idx)
        self._state.note_move()
        self._select(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order; an index may repeat.

        Raises:
            IndexError: there is no such row.
        """
        self._select(self._row_numbers(indices))

    def _row_numbers(self, indices: Any) -> np.ndarray:
        """Those that `indices` are; an empty cache has none, whatever is chosen of it."""
        rows = self._state.rows
        return row_numbers(indices, rows) if rows else np.arange(0)

    def _select(self, rows: np.ndarray) -> None:
        ids, self._ids = self._ids_of(rows), None
        self._state.select(rows)
        self._ids = ids
        for layer in self._stateful_layers():
            _select_states(layer, rows)
        self._state.rejoin()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make each row `repeats` rows, one after the other, that share every block."""
        check_count("repeats", repeats)
        self._select(np.arange(self._state.rows).repeat(repeats))

    def reset(self) -> None:
        """Give all blocks back; the cache is as new."""
        self._ids = None
        self._state.reset()
        for layer in self._stateful_layers():
            layer.reset()
        self._state.rejoin()

    def fork(self, n: int = 1) -> PagedCache:
        """A new cache that shares every block; its rows are these rows, each n times in a row."""
        check_count("n", n)
        rows = np.arange(self._state.rows).repeat(n)
        forked = copy.copy(self)  # a subclass may have more attributes
        forked._set_state(self._state.forked(rows))
        forked._ids = self._ids_of(rows)
        added = self.layers[len(forked.layers) :]  # some models make more layers of their own
        forked.layers += copy.deepcopy(added)
        copies = zip(self._stateful_layers(), forked._stateful_layers(), strict=True)
        for source, target in copies:
            copy_states(source, target)
            _select_states(target, rows)
        return forked

    def __copy__(self) -> PagedCache:
        alias = type(self).__new__(type(self))
        vars(alias).update(vars(self))
        return alias

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self.fork()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the rows and copies of their blocks, without the pool and its model."""
        others = vars(self).keys() - {"_state", "layers"}
        count = len(self.pool.plain_layers)  # some models make more layers of their own
        return {
            "batch": self._state.packed(),
            "states": [states_of(layer) for layer in self.layers[:count]],
            "added": self.layers[count:],
            "others": {name: vars(self)[name] for name in others},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A cache in a pool of its own, that grows; K/V are on the devices that they were on."""
        self._set_state(CacheState.unpacked(state["batch"]))
        for layer, states in zip(self.layers, state["states"], strict=True):
            vars(layer).update(states)
        self.layers += state["added"]
        vars(self).update(state["others"])

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
        return edit(self._state, layer)

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
        if chunk_size is not None:
            check_count("chunk_size", chunk_size)
        body = getattr(unwrapped(model), "base_model", None)
        if body is None:
            raise ValueError(f"model must be a transformers model, not {type(model).__name__}.")
        ids = token_ids("input_ids", input_ids)
        input_ids = ids if isinstance(input_ids, torch.Tensor) else ids.to(body.device)
        if attention_mask is not None:
            mask = padding_mask(attention_mask, tuple(ids.shape))
            attention_mask = mask.to(input_ids.device, torch.long)
        start, last = self.get_seq_length(), input_ids.shape[1] - 1
        if start > input_ids.shape[1]:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens, the cache holds {start}; pass whole "
                "prompts, in front what the cache holds."
            )
        numbers = ids.cpu().numpy()
        if self._state.rows in (1, len(numbers)):
            self.check_ids(numbers, np.arange(len(numbers)) % self._state.rows)
        # With M-RoPE an image takes positions of its own, which the model finds.
        finds_positions = bool(kwargs) and hasattr(body, "get_rope_index")
        if finds_positions and chunk_size is not None:
            raise ValueError(
                f"{type(body).__name__} counts the positions of images in whole prompts; leave out "
                "chunk_size."
            )
        if (
            attention_mask is not None
            and "position_ids" in argument_names(body)
            and not finds_positions
        ):
            kwargs.setdefault("position_ids", (attention_mask.cumsum(-1) - 1).clamp(min=0))
        of_tokens = [name for name in kwargs if name.endswith("_ids")]
        for name in of_tokens:
            kwargs[name] = torch.as_tensor(kwargs[name], dtype=torch.long, device=input_ids.device)
        while start < last:
            stop = last if chunk_size is None else min(start + chunk_size, last)
            inputs = {**kwargs, **cache_argument(body, self)}
            if attention_mask is not None:
                inputs["attention_mask"] = attention_mask[:, :stop]
            inputs |= {name: kwargs[name][..., start:stop] for name in of_tokens}
            with torch.no_grad():
                body(input_ids=input_ids[:, start:stop], **inputs)
            start = stop
        if self._state.rows == len(numbers):
            self.note_ids(numbers)
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
        self._state.move_out(device)

    def restore(self) -> None:
        """Move K/V that were offloaded back into blocks of the pool.

        Raises:
            PoolExhausted: too few blocks are free; K/V stay offloaded.
        """
        self._state.move_in()

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
        tables, known = self.known_tables()
        tokens = tables.tokens
        snapshot = Snapshot.take(self.pool, tokens.lengths, tables.tables)
        own = int(self.own_columns.min(initial=tokens.columns))
        if own < tokens.columns:
            known = own if known is None else min(known, own)
        snapshot.facts |= {"known": known, "may_hold_padding": self.may_hold_padding}
        snapshot.facts["autocast"] = self.autocast
        snapshot.arrays |= {"is_token": tokens.mask(), "freed_rows": self.freed_rows}
        snapshot.save(path, self.pool, "cache", self.identity or self.pool.identity())

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
        snapshot, pool = Snapshot.load(path, "cache", partial(BlockPool, config))
        mask, known = snapshot.arrays.get("is_token"), snapshot.facts.get("known", -1)
        lengths = snapshot.lengths
        freed = snapshot.arrays.get("freed_rows", lengths < 0)  # older files have none
        if (
            mask is None
            or (mask.dtype, mask.ndim, len(mask)) != (bool, 2, len(lengths))
            or (mask.sum(1) != lengths).any()
            or (mask.shape[1] and not len(mask))
            or not (known is None or (isinstance(known, int) and 0 <= known <= mask.shape[1]))
            or (freed.dtype, freed.shape) != (bool, lengths.shape)
            or lengths[freed].any()
        ):
            raise ValueError(f"{path} cannot be loaded: its rows are not those of a cache.")
        tokens = RowLayout.of(mask)
        tables = snapshot.place(pool, tokens)
        if tables.missing():
            raise ValueError(f"{path} cannot be loaded: a row lacks blocks that it needs.")
        facts = snapshot.facts
        cache = cls.holding(tables, facts["identity"], facts.get("autocast"), known)
        cache._state.may_hold_padding = bool(snapshot.facts.get("may_hold_padding", True))
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
        self._state.free_rows(row_numbers(rows, self._state.rows))

    def free(self) -> None:
        """Give all blocks back now; the cache cannot be used any more."""
        self._state.free()

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
        tokens, batch = self._state.tokens, self._state
        blocks = shared = slots = stored = num_bytes = dense_bytes = 0
        for index, group in enumerate(batch.pool.groups):
            held = np.unique(batch.tables.held(index))
            blocks += len(held)
            shared += int((group.ref_counts[held] > 1).sum())
            slots += len(held) * group.block_size
            stored += batch.tables.filled_slots(index)
            kept = tokens.columns
            if group.window is not None:
                kept = min(kept, group.window - 1)
            for storage in group.storage.values():
                stored_blocks = max(len(storage.keys), 1)
                num_bytes += len(held) * storage.num_bytes // stored_blocks
                per_block = storage.num_bytes_unpadded // stored_blocks
                dense_bytes += len(tokens) * kept * per_block // group.block_size
        device = self._device()
        backend = "dense" if device is None else backend_for(batch.backend, device)
        return CacheReport(
            rows=len(tokens),
            tokens=int(tokens.lengths.sum()),
            blocks=blocks,
            block_size=batch.pool.block_size,
            slots=slots,
            wasted_slots=slots - stored,
            shared_blocks=shared,
            bytes=num_bytes,
            dense_bytes=dense_bytes,
            backend="dense" if isinstance(backend, str) else backend.name,
            paged_calls=batch.calls.paged,
            dense_calls=dict(batch.calls.dense),
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the block map, and its meaning."""
        groups, tokens = self.pool.groups, self._state.tokens
        tables = [self._state.block_table(index) for index in range(len(groups))]
        return block_map(groups, tables, tokens.lengths)

    def _device(self) -> torch.device | None:
        for group in self.pool.groups:
            for storage in group.storage.values():
                return storage.keys.device
        return None

    def _stateful_layers(self) -> list[Any]:
        """The layers that keep something outside of the blocks."""
        return [layer for layer in self.layers if type(layer) not in PLAIN]


def unwrapped(model: torch.nn.Module) -> Any:
    """The model of transformers in which PEFT has put its layers, or the model itself."""
    get_base_model: Any = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def argument_names(model: torch.nn.Module) -> Iterable[str]:
    """What the forward of a model takes, below PEFT."""
    return signature(unwrapped(model).forward).parameters


def cache_argument(model: torch.nn.Module, cache: PagedCache) -> dict[str, PagedCache]:
    """`cache` under the name that the model's forward has for it: transformers has renamed it."""
    return {"cache" if "cache" in argument_names(model) else "past_key_values": cache}


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


def _select_states(layer: Any, rows: np.ndarray) -> None:
    # Of transformers' layers all can reorder, and an index_select repeats and selects as well.
    layer.reorder_cache(torch.from_numpy(rows))
