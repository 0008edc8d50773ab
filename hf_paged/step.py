"""One forward: its tokens, and the index arrays that all layers of a group share.

Everything here is derived from the block tables once a step and group, on the host, and moved to
a device at its first use there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from .table import BlockTables, Tokens, first_block, slots_in
from .transfer import Download, upload

if TYPE_CHECKING:
    from .sharing import Sharing

T = TypeVar("T")


class Pattern(NamedTuple):
    """What a query may look at: all in front of it, a window of `size`, or its chunk of `size`."""

    kind: Literal["causal", "sliding", "chunked"] = "causal"
    size: int = 0


class Step:
    """The columns that one forward appends to every row.

    Args:
        before, after: the tokens in front of the step and with it.
        new: bool [rows, columns], which of the step's columns are tokens; None if all are.
    """

    def __init__(self, before: Tokens, after: Tokens, new: np.ndarray | None):
        self.before, self.after = before, after
        self.columns = self.after.columns - before.columns
        self.counts = self.after.lengths - before.lengths
        if new is None or new.all():
            self._real = None
            self.token_row = np.repeat(np.arange(len(before)), self.columns)
            rank = np.tile(np.arange(self.columns), len(before))
        else:
            self._real = np.flatnonzero(new)
            self.token_row = self._real // self.columns
            rank = new.cumsum(1).reshape(-1)[self._real] - 1
        self.token_position = before.lengths[self.token_row] + rank
        self.is_current = True
        self.stays: np.ndarray | None = None  # bool [rows, columns], if not all tokens did
        self._positions: Download | None = None
        self._real_on: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        """Rows of the batch."""
        return len(self.before)

    def note_positions(self, position_ids: torch.Tensor | None) -> None:
        """Remember the positions [..., rows or 1, columns] that the model gives the columns."""
        if position_ids is not None and self._positions is None:
            self._positions = Download(position_ids)

    def positions_have_arrived(self) -> bool:
        return self._positions is None or self._positions.has_arrived()

    def moved_rows(self) -> np.ndarray:
        """bool [rows], in which the model gave a token another position than it has in its row, as
        far as it has said so; waits for the device."""
        rows, columns = len(self), self.columns
        if self._positions is None:
            return np.zeros(rows, bool)
        given = self._positions.array()
        if given.shape[-1] != columns or given.shape[-2:-1] not in ((), (1,), (rows,)):
            return np.ones(rows, bool)
        given = np.broadcast_to(given, (*given.shape[:-2], rows, columns))
        given = given.reshape(-1, rows * columns)
        real = slice(None) if self._real is None else self._real
        moved = np.zeros((rows, columns), bool)
        moved.reshape(-1)[real] = (given[:, real] != self.token_position).any(0)
        if self.stays is not None:
            moved &= self.stays
        return np.any(moved, axis=1)

    @property
    def num_tokens(self) -> int:
        return len(self.token_row)

    @cached_property
    def most_new(self) -> int:
        """The most new tokens that a row has."""
        return int(self.counts.max(initial=0))

    @cached_property
    def token_starts(self) -> np.ndarray:
        """int64 [rows + 1], where each row's new tokens start among all new tokens (indptr)."""
        return np.concatenate([[0], self.counts.cumsum()])

    def _real_index(self, device: torch.device) -> torch.Tensor | None:
        if self._real is None:
            return None
        if device not in self._real_on:
            self._real_on[device] = upload([self._real], device)[0]
        return self._real_on[device]

    def unpad(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, heads, columns, dim] -> [tokens, heads, dim], without the padding."""
        index = self._real_index(states.device)
        if index is None and self.columns == 1:
            return states.squeeze(2)
        flat = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
        return flat if index is None else flat.index_select(0, index)

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] -> [rows, columns, heads, dim], zeros where a column is padding."""
        index = self._real_index(states.device)
        if index is None and self.columns == 1:
            return states.unsqueeze(1)
        shape = (len(self), self.columns, *states.shape[1:])
        if index is not None:
            flat = states.new_zeros((shape[0] * shape[1], *shape[2:]))
            states = flat.index_copy_(0, index, states)
        return states.view(shape)


class GroupStep:
    """A step as the layers of one group see it.

    Args:
        step: the step.
        tables: the block tables, with the step's columns appended.
        index: the group's index in the pool.
        keep_past: whether blocks are held beyond the windows.
        sharing: rows whose leading tokens their leader writes.

    Attributes:
        table: int32 [rows, width], physical block of each logical block, -1 where none is held.
        window: the group's window, None for full attention.
        block_size: slots in a block.
        stores_all: whether every new token is in the blocks, not only what a later query can see.
    """

    def __init__(
        self,
        step: Step,
        tables: BlockTables,
        index: int,
        keep_past: bool,
        sharing: Sharing | None = None,
    ):
        group = tables.pool.groups[index]
        self.step = step
        self._tables = tables  # whoever reads this step keeps its blocks held
        self._index = index
        self.table = tables.tables[index]
        self.window, self.block_size = group.window, group.block_size
        row, position = step.token_row, step.token_position
        slots = self.token_slots(row, position)
        # Whatever block is held is written, so that a crop into it finds its tokens.
        written = slots >= 0
        self.stores_all = bool(written.all())
        if sharing is not None:
            shared = np.zeros(len(step), np.int64)
            followers = sharing.followers(first_block(group, step.after, keep_past))
            shared[followers] = sharing.tokens[followers]
            written &= position >= shared[row]
        self._written = None if written.all() else np.flatnonzero(written)
        self._slots = slots if self._written is None else slots[self._written]
        self._on_device: dict[torch.device, list[torch.Tensor]] = {}
        self._memo: dict[Hashable, Any] = {}

    def slots(self, device: torch.device) -> torch.Tensor:
        """int64 [written tokens] on `device`, the slot that each of them is written to."""
        return self._indices(device)[0]

    def keep_written(self, states: torch.Tensor) -> torch.Tensor:
        """Of [tokens, heads, dim] the states that are written: not those that no later query can
        see, nor those that another row writes."""
        if self._written is None:
            return states
        return states.index_select(0, self._indices(states.device)[1])

    def _indices(self, device: torch.device) -> list[torch.Tensor]:
        """The slots and, where not all tokens are written, which ones are; uploaded once."""
        if device not in self._on_device:
            arrays = [self._slots] if self._written is None else [self._slots, self._written]
            self._on_device[device] = upload(arrays, device)
        return self._on_device[device]

    def token_slots(self, row: np.ndarray | int, position: np.ndarray) -> np.ndarray:
        """int64, the slot of token `position` of `row` (two arrays that broadcast)."""
        return slots_in(self.table, self.block_size, row, position)

    def row_slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """int64 [stop - start], the slots of tokens `start` to `stop` of `row`."""
        return torch.from_numpy(self.token_slots(row, np.arange(start, stop)))

    def past_slots(self, columns: int) -> np.ndarray:
        """int64 [rows, columns], slots of the last past columns, -1 where a column is padding."""
        return self._tables.column_slots(self._index, self.step.before, columns)

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned for `key` in this step: a backend's plan serves all its layers."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def first_visible(self, pattern: Pattern, kv_offset: int) -> np.ndarray:
        """int64 [tokens], the first token of its row that each new token may look at.

        Args:
            pattern: what the mask allows, in columns.
            kv_offset: the first column that the layer still shows.
        """
        return self.memo((pattern, kv_offset), lambda: self._first_visible(pattern, kv_offset))

    def _first_visible(self, pattern: Pattern, kv_offset: int) -> np.ndarray:
        step, after = self.step, self.step.after
        column = np.arange(step.before.columns, after.columns)[None].repeat(len(step), 0)
        if pattern.kind == "sliding":
            lowest = column - pattern.size + 1
        elif pattern.kind == "chunked":  # chunks count from the row's first token
            mask = after.mask()
            padding = np.where(mask.any(1), mask.argmax(1), after.columns)[:, None]
            lowest = padding + (column - padding) // pattern.size * pattern.size
        else:
            lowest = np.zeros_like(column)
        begin = after.count_before(np.maximum(lowest, kv_offset)).reshape(-1)
        return begin if step._real is None else begin[step._real]
