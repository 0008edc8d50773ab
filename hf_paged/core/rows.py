"""What moves, drops, copies or changes the rows of a cache, between two forwards.

All of it happens in the block tables: K/V stay where they are, but for `overwrite`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .block_table import BlockTables, slots_in
from .forward import CacheState
from .metadata import shown_columns
from .row_layout import RowLayout, freed_among
from .transfer import upload


def settled_tables(state: CacheState) -> BlockTables:
    """The block tables, for whoever reads or keeps them; the last step is over."""
    with state.lock:
        return _settled(state)


def _settled(state: CacheState) -> BlockTables:
    state.settle()
    state.end_step()
    state.provenance.note_pause()
    return state.tables


@contextmanager
def _tearing(state: CacheState) -> Iterator[None]:
    """K/V become others than those that other states belong to, unless it is refused."""
    before, state.is_torn = state.is_torn, bool(state.model.spec.stateful_layers)
    try:
        yield
    except Exception:
        state.is_torn = before
        raise


def note_move(state: CacheState) -> None:
    """From here on rows may no longer be the sequences that a caller takes them for."""
    with state.lock:
        state.settle()
        if state.provenance.known_columns is None and state.tokens.columns:
            state.provenance.known_columns = state.tokens.columns


def select(state: CacheState, rows: np.ndarray) -> None:
    """Make the rows `rows` of the present ones; an index may repeat or be left out."""
    with state.lock:
        state.settle()
        if len(state.tokens):
            with _tearing(state):
                state.replace_rows(rows)
            state.end_step()


def fork(state: CacheState, rows: np.ndarray) -> CacheState:
    """A new state of the rows `rows` that shares every block."""
    with state.lock:
        state.settle()
        new = CacheState(state.storage, state.model, state.stored_dims, state.share_prompts)
        new.tables, new.provenance = state.tables.select(rows), state.provenance.select(rows)
        new.freed = freed_among(state.freed, rows)
        take_habits(new, habits(state))
        return new


def habits(state: CacheState) -> dict[str, Any]:
    """What is known of the model that uses a cache, for a copy of it."""
    return {name: copy.copy(getattr(state, name)) for name in ("record_past", "idle", "is_proven")}


def take_habits(state: CacheState, known: dict[str, Any]) -> None:
    """Know what `habits` returned."""
    vars(state).update(known)


def start_recording(state: CacheState) -> None:
    """Keep what leaves a window until the next crop, as assisted decoding asks for first."""
    state.record_past, state.may_repeat = True, state.complete.columns > 0


def crop(state: CacheState, columns: int) -> None:
    """Drop the last `columns` columns and what no window reaches any more.

    Raises:
        ValueError: there are not that many.
        RuntimeError: a window's older tokens are gone.
    """
    with state.lock:
        state.settle()
        held = state.tokens.columns
        if not 0 <= columns <= held:
            raise ValueError(f"Cannot crop {columns} tokens of a cache that holds {held}.")
        if columns:
            provenance = state.provenance.crop(held - columns)
            with _tearing(state):
                state.tables.truncate(held - columns)
            state.provenance = provenance
        state.tables.drop_outside_windows()
        state.end_step()


def freed_rows(state: CacheState) -> np.ndarray:
    """bool [rows], whose blocks `free_rows` has given back."""
    return np.zeros(len(state.tokens), bool) if state.freed is None else state.freed


def free_rows(state: CacheState, rows: np.ndarray) -> None:
    """Give the blocks of `rows` back; whatever they are given from here on is not stored."""
    with state.lock:
        tables = _settled(state)
        freed = freed_rows(state).copy()
        freed[rows] = True
        tokens = tables.tokens.without(rows)
        with state.allocator.lock, state.allocator.change:
            state.freed, tables.tokens = freed, tokens
            tables.drop_behind_ends()


def reset(state: CacheState) -> None:
    """Give all blocks back; the cache is as new."""
    with state.lock:
        state.check_turn()
        if state.is_freed:
            state.check_usable()
        state.check_between_forwards()
        with _tearing(state):
            state.clear(for_good=False)


def free(state: CacheState) -> None:
    """Give all blocks back for good, whatever thread is in the middle of a step."""
    with state.lock:
        if not state.is_freed:
            state.clear(for_good=True)


def move_out(state: CacheState, outside: Any) -> None:
    """Give all blocks back, and keep `outside` in their place."""
    with state.lock:
        tables = _settled(state)
        state.outside = outside
        tables.release()


def can_read(state: CacheState, layer: int) -> bool:
    """Whether the layer has had K/V since the cache was new."""
    has_rows = len(state.tokens_of(layer)) > 0 and layer not in state.idle
    return has_rows and state.storage.stored(layer) is not None


def shown_slots(state: CacheState, layer: int) -> np.ndarray:
    """int64 [rows, columns], the slots of what a `DynamicCache` would hold in this layer: of a
    window only the columns that it has not dropped; -1 where a column is padding."""
    tokens, window = state.tokens_of(layer), state.storage.group(layer).window
    tables = state.tables if tokens is state.tables.tokens else state.complete_tables
    columns, _ = shown_columns(window, tokens.columns, 0)
    return tables.column_slots(state.storage.group_of_layer[layer], tokens, columns)


def overwrite(
    state: CacheState,
    layer: int,
    tokens: RowLayout,
    where: np.ndarray,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Write other K/V ([rows, kv_heads, columns, head_dim]) over those of tokens.

    Args:
        layer: whose K/V.
        tokens: those that the cache must still hold.
        where: bool [rows, columns], of the last columns those that are written. Padding among them
            is passed over.

    Raises:
        RuntimeError: the cache holds other tokens by now; nothing is written.
        PoolExhausted: too few blocks are free to copy shared ones; nothing is written.
    """
    with state.lock:
        tables = _settled(state)
        if tables.tokens is not tokens:
            raise RuntimeError(
                "The cache has got, dropped or moved tokens since edit() began, so nothing was "
                "written; run forwards and move rows before or behind an edit."
            )
        start = tokens.columns - where.shape[1]
        rows, columns = np.nonzero(where & tokens.mask()[:, start:])
        if not len(rows):
            return
        position = tokens.count_before(start + np.arange(where.shape[1])[None])[rows, columns]
        index, size = state.storage.group_of_layer[layer], state.allocator.block_size
        shared = [np.zeros(table.shape, bool) for table in tables.tables]
        shared[index][rows, position // size] = True
        tables.unshare(shared)
        state.provenance.note_mixed(start + int(columns.min()))
        storage = state.storage.stored(layer)
        assert storage is not None
        slots = slots_in(tables.tables[index], size, rows, position)
        at, row, column = upload([slots, rows, columns], keys.device)
        new = at, keys[row, :, column], values[row, :, column]
        with state.allocator.lock:
            try:
                storage.write(*new)
            except BaseException:
                storage.write(*new)  # not K without V
                raise
