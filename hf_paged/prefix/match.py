"""Prompts reused across calls: from a batch of token ids to a cache that holds what is known."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..arguments import padding_mask
from ..cache import PagedCache
from ..core.block_table import BlockTables, RowLayout, blocks_for, first_block
from ..core.model_spec import POSITIONS_WITH_PADDING
from ..serialization import Snapshot
from .circumstances import autocast_dtype
from .radix import Key, longest_readable

if TYPE_CHECKING:
    from ..pool import BlockPool


def match_prefix(
    pool: BlockPool,
    key: Key,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    num_return_sequences: int,
) -> PagedCache:
    """A cache that holds what the index knows of the prompts; see `BlockPool.match_prefix`."""
    prompts, padding = _prompts(input_ids, attention_mask)
    _check_positions(pool, np.arange(input_ids.shape[1]) >= padding[:, None])
    _check_length(pool, input_ids.shape[1])
    with pool.lock, pool.change:
        pool.collect()
        found = [pool.index.match(key, prompt) for prompt in prompts]
        ends = padding + [length for length, _ in found]
        columns = min(int(ends.min()), input_ids.shape[1] - 1)
        is_media = np.isin(input_ids.cpu().numpy(), pool.media_tokens)
        blocks_of_rows = [blocks for _, blocks in found]
        columns = _readable_columns(pool, columns, padding, is_media, blocks_of_rows)
        tokens = RowLayout(columns, np.maximum(columns - padding, 0))
        pool.matched_tokens += int(tokens.lengths.sum())
        pool.hits += int(np.count_nonzero(tokens.lengths))
        pool.misses += int(np.count_nonzero(tokens.lengths == 0))
        if not columns:
            return PagedCache(pool=pool)
        tables = [
            _table(
                tokens, first_block(group, tokens), [held[index] for held in blocks_of_rows], pool
            )
            for index, group in enumerate(pool.groups)
        ]
        rows = np.arange(len(prompts)).repeat(num_return_sequences)
        held = BlockTables.holding(pool, tokens.select(rows), [table[rows] for table in tables])
    cache = PagedCache.holding(held, key[0], autocast_dtype())
    cache.note_ids(input_ids.cpu().numpy()[rows])
    return cache


def insert_prefix(
    pool: BlockPool,
    key: Key,
    cache: PagedCache,
    sequences: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> int:
    """Index the tokens that a cache holds; see `BlockPool.insert_prefix`."""
    if not isinstance(cache, PagedCache):
        raise ValueError(
            f"cache must be the PagedCache that computed the sequences, not {type(cache).__name__}."
        )
    if cache.pool is not pool:
        raise ValueError("The cache is of another pool; insert it into cache.pool.")
    if cache.has_other_states:
        raise ValueError(
            "Prefixes of this model cannot be reused: it keeps states in layers that are not in "
            "blocks; use plain caches."
        )
    if cache.identity not in (None, key[0]):
        raise ValueError(
            "The model's config, weights or active adapters are not those that this cache was "
            "begun with, so its K/V are not what this model would compute; make a new cache."
        )
    ids = sequences.cpu().numpy()
    if attention_mask is not None:
        attention_mask = padding_mask(attention_mask)
    tables, known_columns = cache.known_tables()
    tokens = tables.tokens
    columns = tokens.columns if known_columns is None else known_columns
    rows = _rows_of_sequences(len(tokens), ids, columns, known_columns is not None)
    cache.check_ids(ids, rows)
    mask = tokens.mask()[rows, :columns]
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError(
            "The cache has padding behind a token, so its positions are not those of the tokens "
            "alone; pad on the left."
        )
    _check_length(pool, tokens.columns)
    _check_positions(pool, mask)
    stops = np.minimum(cache.own_columns[rows], columns)
    if cache.may_hold_padding and (attention_mask is None or not bool(attention_mask.all())):
        raise ValueError(
            "The model did not ask the cache for its mask (it has another attn_implementation than "
            '"hf_paged", or was given a 4-D mask or a dict of them), so padding may be stored like '
            'tokens; give it 2-D masks under "hf_paged", or pass the attention_mask of prompts '
            "without padding."
        )
    if attention_mask is not None:
        given = attention_mask.cpu().numpy()[:, :columns]
        kept = mask.any(1)  # of rows that were freed nothing is known
        if given.shape[0] != len(rows) or (given != mask[:, : given.shape[1]])[kept].any():
            raise ValueError(
                "The attention_mask is not the one that the cache was computed with; pass that of "
                "the prompts, or none."
            )
    with pool.lock, pool.change:
        pool.collect()
        fresh = 0
        for row, row_ids, is_token, stop in zip(rows, ids, mask, stops, strict=True):
            known = row_ids[:stop][is_token[:stop]].tolist()
            if stop < tokens.columns:  # a block with other tokens behind these stays the row's
                known = known[: len(known) // pool.block_size * pool.block_size]
            fresh += pool.index.insert(key, known, [table[row] for table in tables.tables])
        return fresh


def save_prefixes(pool: BlockPool, path: str | os.PathLike[str]) -> None:
    """Write each path from a root to a leaf as a row."""
    with pool.lock:
        identity = pool.identity()
        paths = [(key[1], nodes) for key, nodes in pool.index.paths() if key[0] == identity]
        lengths = [sum(len(node.label) for node in nodes) for _, nodes in paths]
        width = max((len(nodes) for _, nodes in paths), default=1)
        tables = [np.full((len(paths), width), -1, np.int64) for _ in pool.groups]
        for row, (_, nodes) in enumerate(paths):
            for group, table in enumerate(tables):
                table[row, : len(nodes)] = [node.blocks[group] for node in nodes]
        snapshot = Snapshot.take(pool, np.array(lengths, np.int64), tables)
    snapshot.facts["extra_keys"] = [extra for extra, _ in paths]
    tokens = [token for _, nodes in paths for node in nodes for token in node.label]
    snapshot.arrays["tokens"] = np.array(tokens, np.int64)
    snapshot.save(path, pool, "prefixes", identity)


def load_prefixes(pool: BlockPool, path: str | os.PathLike[str]) -> int:
    """Insert each row of a file, in the order in which they were last used."""
    snapshot, _ = Snapshot.load(path, "prefixes", lambda **kwargs: pool)
    extra_keys, tokens = snapshot.facts.get("extra_keys"), snapshot.arrays.get("tokens")
    lengths = snapshot.lengths
    if (
        not isinstance(extra_keys, list)
        or len(extra_keys) != len(lengths)
        or not all(isinstance(key, str) for key in extra_keys)
        or tokens is None
        or tokens.dtype != np.int64
        or tokens.shape != (lengths.sum(),)
    ):
        raise ValueError(f"{path} cannot be loaded: its tokens do not fit its rows.")
    identity = pool.identity()
    with pool.lock, pool.change:
        tables = snapshot.place(pool, RowLayout(int(lengths.max(initial=0)), lengths))
        rows = np.split(tokens, lengths.cumsum()[:-1]) if len(lengths) else []
        fresh = sum(
            pool.index.insert((identity, extra), row.tolist(), [t[index] for t in tables.tables])
            for index, (extra, row) in enumerate(zip(extra_keys, rows, strict=True))
        )
        tables.release()
    return fresh


def _check_positions(pool: BlockPool, mask: np.ndarray) -> None:
    kinds = {pool.whole_config.model_type, pool.config.model_type} & POSITIONS_WITH_PADDING
    if kinds and not mask.all():
        raise ValueError(
            f"A {kinds.pop()} model counts padding as positions, so padded prompts have "
            "K/V of their own; use batches of prompts of one length."
        )


def _check_length(pool: BlockPool, columns: int) -> None:
    longest = pool.longest_prefix
    if longest is not None and columns > longest:
        raise ValueError(
            f"Prefixes of more than {longest} tokens cannot be reused, since this model's rotary "
            f"embedding depends on the prompt's whole length from there on; got {columns}."
        )


def _prompts(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[list[list[int]], np.ndarray]:
    """The tokens of each row, and how many columns of padding are in front of them."""
    ids = input_ids.cpu().numpy()
    if not ids.size:
        raise ValueError(f"input_ids hold no tokens: their shape is {tuple(input_ids.shape)}.")
    if attention_mask is None:
        return ids.tolist(), np.zeros(len(ids), np.int64)
    mask = padding_mask(attention_mask, ids.shape).cpu().numpy()
    padding = (~mask).sum(1)
    if (mask != (np.arange(ids.shape[1]) >= padding[:, None])).any():
        raise ValueError("Prompts must be padded on the left to be matched with known ones.")
    return [row[start:].tolist() for row, start in zip(ids, padding, strict=True)], padding


def _rows_of_sequences(
    rows: int, sequences: np.ndarray, known: int, have_moved: bool
) -> np.ndarray:
    """The row of the cache for each of the sequences.

    Args:
        rows: of the cache.
        known: columns of them that are the sequences'.
        have_moved: whether the rows are beams.
    """
    count = len(sequences)
    if sequences.shape[1] < known:
        raise ValueError(
            f"The sequences have {sequences.shape[1]} tokens a row, the cache holds {known} of "
            "them; pass the whole sequences that generate returned, prompts included."
        )
    if count == rows:
        return np.arange(rows)
    if not have_moved or not 0 < count < rows:
        raise ValueError(
            f"There are {count} sequences for a cache of {rows} rows; pass one for each row."
        )
    return np.arange(count) * rows // count  # beams: any of a prompt's rows holds the prompt


def _readable_columns(
    pool: BlockPool,
    columns: int,
    padding: np.ndarray,
    is_media: np.ndarray,
    blocks: list[list[np.ndarray]],
) -> int:
    """The most of the first `columns` columns at which every row has all that its windows reach.

    They end in no row between two tokens of an image, for a model takes images as a whole.
    """
    while True:
        ends = [columns]
        for row in is_media[is_media[:, max(columns - 1, 0) : columns + 1].all(1)]:
            others = np.flatnonzero(~row[:columns])
            ends.append(int(others[-1]) + 1 if len(others) else 0)
        for pad, held in zip(padding, blocks, strict=True):
            length = max(columns - int(pad), 0)
            readable = longest_readable(length, held, pool.groups, pool.block_size)
            if readable < length:
                ends.append(int(pad) + readable)
        if min(ends) == columns:
            return columns
        columns = min(ends)


def _table(
    tokens: RowLayout, firsts: np.ndarray, blocks: list[np.ndarray], pool: BlockPool
) -> np.ndarray:
    """int32 [rows, width], of each row's `blocks` those that its tokens need."""
    stops = blocks_for(tokens.lengths, pool.block_size)
    table = np.full((len(tokens), max(int(stops.max()), 1)), -1, np.int32)
    for row, (first, stop) in enumerate(zip(firsts, stops, strict=True)):
        table[row, first:stop] = blocks[row][first:stop]
    return table
