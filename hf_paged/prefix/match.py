"""Prompts reused across calls: what is known of a batch of token ids, what a cache adds to it."""

from __future__ import annotations

import os

import numpy as np
import torch

from ..arguments import padding_mask
from ..core.block_table import blocks_for, first_block
from ..core.forward import CacheState
from ..core.kv_storage import KVStorage
from ..core.model_spec import POSITIONS_WITH_PADDING, ModelSpec
from ..core.provenance import Model
from ..core.row_layout import RowLayout
from ..core.rows import settled_tables
from ..serialization import Snapshot
from .identity import check_identity
from .radix import Key, PrefixIndex, longest_readable


def match(
    index: PrefixIndex,
    spec: ModelSpec,
    key: Key,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> tuple[RowLayout, list[np.ndarray]]:
    """What is known of prompts: the tokens of each row, and for each group the table of the blocks
    that hold them. Whoever calls this holds the allocator's lock until it holds the blocks too.

    Raises:
        ValueError: see `BlockPool.match_prefix`.
    """
    prompts, padding = _prompts(input_ids, attention_mask)
    _check_positions(spec, np.arange(input_ids.shape[1]) >= padding[:, None])
    _check_length(spec, input_ids.shape[1])
    found = [index.match(key, prompt) for prompt in prompts]
    ends = padding + [length for length, _ in found]
    columns = min(int(ends.min()), input_ids.shape[1] - 1)
    is_media = np.isin(input_ids.cpu().numpy(), spec.media_tokens)
    blocks_of_rows = [blocks for _, blocks in found]
    columns = _readable_columns(index, columns, padding, is_media, blocks_of_rows)
    tokens = RowLayout(columns, np.maximum(columns - padding, 0))
    index.note_use(tokens.lengths)
    tables = [
        _table(
            tokens, first_block(group, tokens), [b[at] for b in blocks_of_rows], group.block_size
        )
        for at, group in enumerate(index.groups)
    ]
    return tokens, tables


def insert(
    index: PrefixIndex,
    key: Key,
    state: CacheState,
    ids: np.ndarray,
    attention_mask: torch.Tensor | None,
) -> int:
    """Index the tokens that a cache holds; returns how many are known that were not.

    Raises:
        ValueError: see `BlockPool.insert_prefix`.
    """
    spec, provenance = state.model.spec, state.provenance
    if provenance.identity not in (None, key[0]):
        raise ValueError(
            "The model's config, weights or active adapters are not those that this cache was "
            "begun with, so its K/V are not what this model would compute; make a new cache."
        )
    if attention_mask is not None:
        attention_mask = padding_mask(attention_mask)
    tables, provenance = settled_tables(state), state.provenance
    tokens, known_columns = tables.tokens, provenance.known_columns
    columns = tokens.columns if known_columns is None else known_columns
    rows = _rows_of_sequences(len(tokens), ids, columns, known_columns is not None)
    provenance.check_ids(ids, rows, tokens)
    mask = tokens.mask()[rows, :columns]
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError(
            "The cache has padding behind a token, so its positions are not those of the tokens "
            "alone; pad on the left."
        )
    _check_length(spec, tokens.columns)
    _check_positions(spec, mask)
    stops = np.minimum(provenance.own_columns(tokens)[rows], columns)
    is_padded = attention_mask is None or not bool(attention_mask.all())
    if provenance.may_hold_padding and is_padded:
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
    fresh, size = 0, index.block_size
    with state.allocator.lock, state.allocator.change:
        state.allocator.collect()
        for row, row_ids, is_token, stop in zip(rows, ids, mask, stops, strict=True):
            known = row_ids[:stop][is_token[:stop]].tolist()
            if stop < tokens.columns:  # a block with other tokens behind these stays the row's
                known = known[: len(known) // size * size]
            fresh += index.insert(key, known, [table[row] for table in tables.tables])
        return fresh


def save_prefixes(
    index: PrefixIndex, storage: KVStorage, identity: str, path: str | os.PathLike[str]
) -> None:
    """Write each path from a root to a leaf, of this identity, as a row."""
    with storage.allocator.lock:
        paths = [(key[1], nodes) for key, nodes in index.paths() if key[0] == identity]
        lengths = [sum(len(node.label) for node in nodes) for _, nodes in paths]
        width = max((len(nodes) for _, nodes in paths), default=1)
        tables = [np.full((len(paths), width), -1, np.int64) for _ in index.groups]
        for row, (_, nodes) in enumerate(paths):
            for group, table in enumerate(tables):
                table[row, : len(nodes)] = [node.blocks[group] for node in nodes]
        snapshot = Snapshot.take(storage, np.array(lengths, np.int64), tables)
    snapshot.facts["extra_keys"] = [extra for extra, _ in paths]
    tokens = [token for _, nodes in paths for node in nodes for token in node.label]
    snapshot.arrays["tokens"] = np.array(tokens, np.int64)
    snapshot.save(path, storage, "prefixes", identity)


def load_prefixes(
    index: PrefixIndex, storage: KVStorage, model: Model, path: str | os.PathLike[str]
) -> int:
    """Insert each row of a file, in the order in which they were last used."""
    identity = model.identity()

    def target(saved: str, **kwargs: object) -> KVStorage:
        check_identity(saved, identity)
        return storage

    snapshot = Snapshot.load(path, "prefixes", target)
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
    layout = RowLayout(int(lengths.max(initial=0)), lengths)
    with storage.allocator.lock, storage.allocator.change:
        tables = snapshot.place(storage, layout, storage.device or model.device)
        rows = np.split(tokens, lengths.cumsum()[:-1]) if len(lengths) else []
        fresh = sum(
            index.insert((identity, extra), row.tolist(), [t[at] for t in tables.tables])
            for at, (extra, row) in enumerate(zip(extra_keys, rows, strict=True))
        )
        tables.release()
    return fresh


def _check_positions(spec: ModelSpec, mask: np.ndarray) -> None:
    kinds = {spec.whole_config.model_type, spec.config.model_type} & POSITIONS_WITH_PADDING
    if kinds and not mask.all():
        raise ValueError(
            f"A {kinds.pop()} model counts padding as positions, so padded prompts have "
            "K/V of their own; use batches of prompts of one length."
        )


def _check_length(spec: ModelSpec, columns: int) -> None:
    longest = spec.longest_prefix
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
    index: PrefixIndex,
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
            readable = longest_readable(length, held, index.groups, index.block_size)
            if readable < length:
                ends.append(int(pad) + readable)
        if min(ends) == columns:
            return columns
        columns = min(ends)


def _table(
    tokens: RowLayout, firsts: np.ndarray, blocks: list[np.ndarray], size: int
) -> np.ndarray:
    """int32 [rows, width], of each row's `blocks` those that its tokens need."""
    stops = blocks_for(tokens.lengths, size)
    table = np.full((len(tokens), max(int(stops.max()), 1)), -1, np.int32)
    for row, (first, stop) in enumerate(zip(firsts, stops, strict=True)):
        table[row, first:stop] = blocks[row][first:stop]
    return table
