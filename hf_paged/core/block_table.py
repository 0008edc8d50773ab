"""Block tables: the blocks that hold the tokens of each row of a cache.

Token t of a row is in slot `t % block_size` of the physical block `table[row, t // block_size]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .allocator import BlockAllocator, BlockGroup
from .row_layout import RowLayout


@dataclass
class Sharing:
    """Which rows of a batch's first step have their leading tokens in another row's blocks.

    Attributes:
        leader: int64 [rows], the row whose blocks a row shares; its own number if it shares none.
        tokens: int64 [rows], how many leading tokens it shares: whole blocks of them, or all that
            both rows have.
    """

    leader: np.ndarray
    tokens: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """The rows that share."""
        return np.flatnonzero(self.tokens)

    def followers(self, firsts: np.ndarray) -> np.ndarray:
        """The sharing rows that keep the same blocks as their leader, by each row's first one."""
        return np.flatnonzero((self.tokens > 0) & (firsts == firsts[self.leader]))

    def drop(self, rows: np.ndarray) -> None:
        self.tokens[rows], self.leader[rows] = 0, rows


class BlockTables:
    """Block tables of all rows of a cache, one array a layer group.

    Exceptions come at any time, so whoever changes them puts a block into a table before the tokens
    that it will hold, and drops tokens before their blocks.

    Attributes:
        tokens: which columns are tokens.
        tables: for each group int32 [rows, width], the physical block of each logical block, -1
            where the row holds none (behind its end, or out of the group's window).
    """

    def __init__(self, allocator: BlockAllocator, rows: int = 0):
        self.allocator = allocator
        self.tokens = RowLayout.none(rows)
        self.tables = [np.full((rows, 8), -1, np.int32) for _ in allocator.groups]
        allocator.register(self)

    @classmethod
    def holding(
        cls, allocator: BlockAllocator, tokens: RowLayout, tables: list[np.ndarray]
    ) -> BlockTables:
        """New tables that share the blocks in `tables`, whose present holders keep them."""
        new = cls(allocator)
        with allocator.lock, allocator.change:
            new.tables[:], new.tokens = tables, tokens
            for index, group in enumerate(allocator.groups):
                group.incref(new.held(index))
        return new

    def held(self, group: int) -> np.ndarray:
        """The blocks of `group` that the rows hold, each as often as it is held."""
        table = self.tables[group]
        return table[table >= 0]

    def column_slots(self, group: int, tokens: RowLayout, columns: int) -> np.ndarray:
        """int64 [rows, columns], slots of the last columns of `tokens`, -1 for padding."""
        index = np.arange(tokens.columns - columns, tokens.columns)[None]
        rows, position = np.arange(len(tokens))[:, None], tokens.count_before(index)
        slots = slots_in(self.tables[group], self.allocator.block_size, rows, position)
        slots[~tokens.mask()[:, tokens.columns - columns :]] = -1
        return slots

    def filled_slots(self, group: int) -> int:
        """Slots of the held blocks that hold a token; a shared slot counts once."""
        table, size = self.tables[group], self.allocator.block_size
        capacity = self.allocator.groups[group].capacity
        return int(tokens_in_blocks(self.tokens.lengths, table, capacity, size).sum())

    def select(self, rows: np.ndarray) -> BlockTables:
        """New tables whose rows are `rows` of these; every block is shared, none is copied."""
        with self.allocator.lock:
            tables = [table[rows] for table in self.tables]
            return self.holding(self.allocator, self.tokens.select(rows), tables)

    def release(self) -> None:
        """Give all blocks back; what remains is a cache of no rows."""
        tokens, tables = RowLayout.none(0), [table[:0] for table in self.tables]
        with self.allocator.lock, self.allocator.change:
            for index, group in enumerate(self.allocator.groups):
                group.decref(self.held(index))
            self.tables[:], self.tokens = tables, tokens

    def drop_unfinished(self) -> None:
        """Forget the blocks behind each row's end, which an append that was cut short has left."""
        for table in self.tables:
            table[self._is_behind(table)] = -1

    def _is_behind(self, table: np.ndarray) -> np.ndarray:
        return is_behind_end(table, self.tokens.lengths, self.allocator.block_size)

    def append(self, tokens: RowLayout, keep_past: bool, sharing: Sharing | None = None) -> None:
        """Hold blocks for new columns, copying a shared block that they will write to.

        Args:
            tokens: the present tokens and the new columns.
            keep_past: hold the blocks of every new token, also those that no window reaches.
            sharing: rows that get their leader's blocks, in a first step.

        Raises:
            PoolExhausted: a group has too few free blocks; nothing has changed.
        """
        with self.allocator.lock, self.allocator.change:
            needs = [
                AllocationPlan(self, index, tokens, keep_past, sharing)
                for index in range(len(self.allocator.groups))
            ]
            if not all(need.is_met for need in needs):
                taken = self.allocator.allocate([need.count for need in needs])
                for need, blocks in zip(needs, taken, strict=True):
                    self.allocator.copies += need.fill(blocks)
            self.tokens = tokens

    def unshare(self, where: Sequence[np.ndarray]) -> None:
        """Put copies in the place of blocks that others hold too.

        Args:
            where: for each group bool [rows, width], the entries that need a block of their own.

        Raises:
            PoolExhausted: a group has too few free blocks; nothing has changed.
        """
        with self.allocator.lock, self.allocator.change:
            at = []
            for group, table, asked in zip(self.allocator.groups, self.tables, where, strict=True):
                rows, logical = np.nonzero(asked & (table >= 0))
                copies = _must_copy(group, table[rows, logical])
                at.append((rows[copies], logical[copies]))
            taken = self.allocator.allocate([len(rows) for rows, _ in at])
            for group, table, entries, copies in zip(
                self.allocator.groups, self.tables, at, taken, strict=True
            ):
                originals = table[entries].astype(np.int64)
                group.copy_blocks(originals, copies)
                table[entries] = copies
                group.decref(originals)
                self.allocator.copies += len(copies)

    def truncate(self, columns: int) -> None:
        """Drop all but the first `columns` columns.

        Raises:
            RuntimeError: a window's older blocks, which would be needed again, are gone.
        """
        tokens = self.tokens.truncate(columns)
        for group, table in zip(self.allocator.groups, self.tables, strict=True):
            if _missing(group, table, tokens):
                raise RuntimeError(
                    f"Cannot crop {self.tokens.columns - columns} tokens: the tokens that the "
                    f"window of {group.window} would need again are gone; call "
                    "activate_past_recording() before the forward whose tokens will be cropped."
                )
        self.end_rows(tokens)

    def end_rows(self, tokens: RowLayout) -> None:
        """Make `tokens` the present ones, where some rows end before they did."""
        with self.allocator.lock, self.allocator.change:
            self.tokens = tokens
            self.drop_behind_ends()

    def drop_behind_ends(self) -> None:
        """Give back the blocks behind each row's last token."""
        with self.allocator.lock, self.allocator.change:
            for group, table in zip(self.allocator.groups, self.tables, strict=True):
                _drop(group, table, self._is_behind(table))

    def drop_outside_windows(self) -> None:
        """Give back the blocks that no window reaches any more."""
        with self.allocator.lock, self.allocator.change:
            for group, table in zip(self.allocator.groups, self.tables, strict=True):
                if group.window is not None:
                    firsts = first_block(group, self.tokens)
                    _drop(group, table, np.arange(table.shape[1]) < firsts[:, None])

    def check(self) -> None:
        """Raise AssertionError unless each row holds exactly the blocks that it needs."""
        assert not self.missing(), "a row lacks a block that it needs"
        for table in self.tables:
            assert (table[self._is_behind(table)] < 0).all(), "a row holds a block past its end"

    def missing(self) -> int:
        """Entries without a block where a row needs one."""
        return sum(
            _missing(group, table, self.tokens)
            for group, table in zip(self.allocator.groups, self.tables, strict=True)
        )


def slots_in(
    table: np.ndarray, block_size: int, row: np.ndarray | int, position: np.ndarray
) -> np.ndarray:
    """int64, the slot of token `position` of `row` (two arrays that broadcast) in a block table."""
    # Padding at a row's end has the position behind its last token: behind the table, maybe.
    block = table[row, np.minimum(position // block_size, table.shape[1] - 1)]
    return block.astype(np.int64) * block_size + position % block_size


def blocks_for(tokens: np.ndarray, block_size: int) -> np.ndarray:
    """The blocks that so many tokens take."""
    return -(-tokens // block_size)


def is_behind_end(table: np.ndarray, lengths: np.ndarray, block_size: int) -> np.ndarray:
    """bool [rows, width], True for the entries of `table` behind each row's last token."""
    return np.arange(table.shape[1]) >= blocks_for(lengths, block_size)[:, None]


def tokens_in_blocks(
    lengths: np.ndarray, table: np.ndarray, num_blocks: int, block_size: int
) -> np.ndarray:
    """int64 [num_blocks], how many slots of each block hold a token of some row.

    Args:
        lengths: int64 [rows], tokens of each row.
        table: [rows, width], the block of each logical block, -1 for none.
    """
    count = np.clip(lengths[:, None] - np.arange(table.shape[1]) * block_size, 0, block_size)
    filled = np.zeros(num_blocks, np.int64)
    np.maximum.at(filled, table[table >= 0], count[table >= 0])
    return filled


def first_block(group: BlockGroup, tokens: RowLayout, keep_past: bool = False) -> np.ndarray:
    """The first logical block of each row that a query behind `tokens` may look back on.

    With `keep_past` that is the row's first block, as no window drops any.
    """
    if group.window is None or keep_past:
        return np.zeros(len(tokens), np.int64)
    return (tokens.lengths - tokens.count_last(group.window - 1)) // group.block_size


def _missing(group: BlockGroup, table: np.ndarray, tokens: RowLayout) -> int:
    """Entries of `table` without a block where rows of `tokens` need one."""
    is_reached = np.arange(table.shape[1]) >= first_block(group, tokens)[:, None]
    needed = is_reached & ~is_behind_end(table, tokens.lengths, group.block_size)
    return int((needed & (table < 0)).sum())


def _must_copy(group: BlockGroup, blocks: np.ndarray) -> np.ndarray:
    """bool, which of the entries `blocks` of a table must be copies before they are written to.

    Where only these entries hold a block, the first of them may keep the original.
    """
    counts = group.ref_counts[blocks]
    copies = counts > 1
    if copies.any():
        _, first, writers = np.unique(blocks, return_index=True, return_counts=True)
        copies[first[writers == counts[first]]] = False
    return copies


class AllocationPlan:
    """The blocks of one group that an append needs: fresh ones and copies of shared ones."""

    def __init__(
        self,
        tables: BlockTables,
        index: int,
        tokens: RowLayout,
        keep_past: bool,
        sharing: Sharing | None,
    ):
        self.tables, self.index = tables, index
        self.group = tables.allocator.groups[index]
        size = self.group.block_size
        before, after = tables.tokens.lengths, tokens.lengths
        firsts = first_block(self.group, tokens, keep_past)
        self.starts = np.maximum(blocks_for(before, size), firsts)
        self.followers: list[tuple[int, int, slice]] = []
        if sharing is not None:
            for row in sharing.followers(firsts):
                leader, stop = sharing.leader[row], -(-sharing.tokens[row] // size)
                if firsts[row] < stop:
                    self.followers.append((row, leader, slice(firsts[row], stop)))
                    self.starts[row] = stop
        self.fresh = np.maximum(blocks_for(after, size) - self.starts, 0)
        # Rows that will write behind the tokens of a partly filled last block.
        last = before // size
        self.rows = np.flatnonzero((before % size > 0) & (after > before))
        self.rows = self.rows[tables.tables[index][self.rows, last[self.rows]] >= 0]
        copies = _must_copy(self.group, tables.tables[index][self.rows, last[self.rows]])
        self.rows = self.rows[copies]
        self.last = last[self.rows]
        self.count = int(self.fresh.sum()) + len(self.rows)
        self.width = int((self.starts + self.fresh).max(initial=0))

    @property
    def is_met(self) -> bool:
        """Whether the table is as it must be already."""
        is_wide = self.width <= self.tables.tables[self.index].shape[1]
        return is_wide and not self.count and not self.followers

    def fill(self, taken: np.ndarray) -> int:
        """Put the blocks `taken` into the table; returns how many were copies."""
        table = self._widened(self.width)
        copies, fresh = np.split(taken, [len(self.rows)])
        if len(copies):
            shared = table[self.rows, self.last].astype(np.int64)
            self.group.copy_blocks(shared, copies)
            self.group.decref(shared)
            table[self.rows, self.last] = copies
        rows = np.repeat(np.arange(len(self.fresh)), self.fresh)
        rank = np.arange(len(rows)) - np.repeat(self.fresh.cumsum() - self.fresh, self.fresh)
        table[rows, self.starts[rows] + rank] = fresh
        for row, leader, shared in self.followers:
            table[row, shared] = table[leader, shared]
            self.group.incref(table[leader, shared])
        return len(copies)

    def _widened(self, width: int) -> np.ndarray:
        table = self.tables.tables[self.index]
        if width > table.shape[1]:
            missing = max(width, 2 * table.shape[1]) - table.shape[1]
            table = np.pad(table, ((0, 0), (0, missing)), constant_values=-1)
            self.tables.tables[self.index] = table
        return table


def _drop(group: BlockGroup, table: np.ndarray, where: np.ndarray) -> None:
    dropped = where & (table >= 0)
    if dropped.any():
        group.decref(table[dropped])
        table[dropped] = -1
