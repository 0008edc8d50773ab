"""One forward: its tokens, and the index arrays that all layers of a group share.

Everything here is derived from the block tables once a step and group, on the host, and moved to
a device at its first use there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from .block_table import BlockTables, Sharing, first_block, slots_in
from .row_layout import RowLayout
from .storage import LayerStorage
from .transfer import upload

T = TypeVar("T")


class Pattern(NamedTuple):
    """What a query may look at: all in front of it, a window of `size`, or its chunk of `size`."""

    kind: Literal["causal", "sliding", "chunked"] = "causal"
    size: int = 0


@dataclass(slots=True, eq=False)
class MaskFacts:
    """What our mask function knows of a mask that it has not built.

    Attributes:
        rows, queries: of the batch and of the step that it is for.
        kv_length, kv_offset: the columns that it is for, as in `Cache.get_mask_sizes`.
        pattern: what it allows apart from padding, None if it is more than a pattern.
        padding: the 2-D mask (bool [rows, all columns]), None if there is none.
        is_read: whether anybody has had it built.
    """

    rows: int
    queries: int
    kv_length: int
    kv_offset: int
    pattern: Pattern | None = None
    padding: torch.Tensor | None = None
    is_read: bool = False

    @property
    def past(self) -> int:
        """The columns in front of the step."""
        return self.kv_offset + self.kv_length - self.queries


class Step:
    """The columns that one forward appends to every row.

    Args:
        before, after: the tokens in front of the step and with it.
        new: bool [rows, columns], which of the step's columns are tokens; None if all are.
        hidden: bool [rows, past columns], which stored tokens its mask hides; None if none.
        mask: the mask from which that is known, None if our mask function made none.
    """

    def __init__(
        self,
        before: RowLayout,
        after: RowLayout,
        new: np.ndarray | None,
        hidden: np.ndarray | None = None,
        mask: MaskFacts | None = None,
    ):
        self.before, self.after, self.mask = before, after, mask
        self.hidden = None if hidden is None or not hidden.any() else hidden
        self.columns = self.after.columns - before.columns
        self.counts = self.after.lengths - before.lengths
        self._real = None if new is None or new.all() else np.flatnonzero(new)
        if new is not None and self._real is not None:
            self.token_row = self._real // self.columns
            rank = new.cumsum(1).reshape(-1)[self._real] - 1
        elif self.columns == 1:
            self.token_row, rank = np.arange(len(before)), np.zeros(len(before), np.int64)
        else:
            self.token_row = np.repeat(np.arange(len(before)), self.columns)
            rank = np.tile(np.arange(self.columns), len(before))
        self.token_position = before.lengths[self.token_row] + rank
        self.is_current = True
        self.ended_at: int | None = None  # the first column that its mask has ended a row at
        # bool [rows], in which a token got another position than its own; None if nobody said.
        self.moved: torch.Tensor | None = None
        self.is_unseen = False  # whether it runs in a compiled forward, whose inputs nobody sees
        self.is_custom = False  # whether attention was under a mask that nobody knows
        self._differ = False  # whether this step has masks of different padding
        self._checked: list[torch.Tensor] = []  # masks that `once` was asked about
        self._real_on: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        """Rows of the batch."""
        return len(self.before)

    def note_positions(self, position_ids: torch.Tensor) -> None:
        """Compare the positions [..., rows or 1, columns] that the model gives with the tokens'."""
        rows, columns = len(self), self.columns
        given_rows, given_columns = (1, *position_ids.shape)[-2:]
        if given_columns != columns or given_rows not in (1, rows):
            self.moved = torch.ones(rows, dtype=torch.bool, device=position_ids.device)
            return
        own = np.full(rows * columns, -1)
        own[slice(None) if self._real is None else self._real] = self.token_position
        (at,) = upload([own], position_ids.device)
        at = at.view(rows, columns)
        moves = (position_ids != at) & (at >= 0)
        self.moved = moves.any(-1).view(-1, rows).any(0)

    @property
    def is_one_column(self) -> bool:
        """Whether each row has one new token and no padding, as in most decode steps."""
        return self.columns == 1 and self._real is None

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

    @cached_property
    def hidden_tokens(self) -> np.ndarray | None:
        """bool [rows, tokens of the longest row], the tokens that the mask hides; None if none."""
        if self.hidden is None:
            return None
        position = self.before.mask().cumsum(1) - 1
        row, column = self.hidden.nonzero()
        hidden = np.zeros((len(self), int(self.after.lengths.max())), bool)
        hidden[row, position[row, column]] = True
        return hidden

    @property
    def is_more_than_a_pattern(self) -> bool:
        """Whether tokens do not see all in front of them but for a pattern."""
        return self.hidden is not None or (self.mask is not None and self.mask.pattern is None)

    def has_padding_of(self, mask: MaskFacts) -> bool:
        """Whether a mask of this step has the 2-D mask by which it was begun."""
        own, other = None if self.mask is None else self.mask.padding, mask.padding
        if own is other or (other is None and self.hidden is None):
            return True
        if own is None or other is None or own.shape != other.shape:
            return False
        if self.once(other):
            self._differ |= not torch.equal(own, other.to(own.device))
        return not self._differ

    def once(self, mask: torch.Tensor) -> bool:
        """Whether this is asked for the first time in this step; all layers get the same masks."""
        if any(mask is other for other in self._checked):
            return False
        self._checked.append(mask)
        return True

    def visible(self, row: int, start: int, stop: int) -> np.ndarray:
        """int64, of the tokens `start` to `stop` of `row` those that the mask shows."""
        if self.hidden_tokens is None:
            return np.arange(start, stop)
        return start + np.flatnonzero(~self.hidden_tokens[row, start:stop])

    def _real_index(self, device: torch.device) -> torch.Tensor | None:
        if self._real is None:
            return None
        if device not in self._real_on:
            self._real_on[device] = upload([self._real], device)[0]
        return self._real_on[device]

    def unpad(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, heads, columns, dim] -> [tokens, heads, dim], without the padding."""
        if self.is_one_column:
            return states.squeeze(2)
        index = self._real_index(states.device)
        flat = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
        return flat if index is None else flat.index_select(0, index)

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] -> [rows, columns, heads, dim], zeros where a column is padding."""
        if self.is_one_column:
            return states.unsqueeze(1)
        index = self._real_index(states.device)
        shape = (len(self), self.columns, *states.shape[1:])
        if index is not None:
            flat = states.new_zeros((shape[0] * shape[1], *shape[2:]))
            states = flat.index_copy_(0, index, states)
        return states.view(shape)


class AttentionMetadata:
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
        kv_length, kv_offset: the columns that the layers show, as in `Cache.get_mask_sizes`.
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
        group = tables.allocator.groups[index]
        self.step = step
        self.kv_length, self.kv_offset = shown_columns(
            group.window, step.before.columns, step.columns
        )
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

    def write(self, states: LayerStates) -> None:
        """Write a layer's new K/V to their slots: not those that no later query can see, nor those
        that another row writes."""
        slots, *written = self.indices(states.keys.device)
        if written:
            keys, values = states.token_keys, states.token_values
            keys, values = (new.index_select(0, written[0]) for new in (keys, values))
        elif self.step.is_one_column:
            keys, values = without_graph(states.keys), without_graph(states.values)
        else:
            keys, values = states.token_keys, states.token_values
        states.storage.write(slots, keys, values)

    def holds(self, storage: LayerStorage, keys: torch.Tensor) -> bool:
        """Whether a token of the step has these keys ([tokens, kv_heads, dim]) in its slot."""
        slots, *written = self.indices(keys.device)
        again = keys.index_select(0, written[0]) if written else keys
        stored = storage.key_slots[slots]
        return bool((again.to(stored.dtype).float() == stored.float()).flatten(1).all(1).any())

    def indices(self, device: torch.device) -> list[torch.Tensor]:
        """The slots and, where not all tokens are written, which ones are; uploaded once."""
        if device not in self._on_device:
            arrays = [self._slots] if self._written is None else [self._slots, self._written]
            self._on_device[device] = upload(arrays, device)
        return self._on_device[device]

    def token_slots(self, row: np.ndarray | int, position: np.ndarray) -> np.ndarray:
        """int64, the slot of token `position` of `row` (two arrays that broadcast)."""
        return slots_in(self.table, self.block_size, row, position)

    def row_slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """int64, the slots of tokens `start` to `stop` of `row` that the mask shows."""
        return torch.from_numpy(self.token_slots(row, self.step.visible(row, start, stop)))

    def past_slots(self, columns: int) -> np.ndarray:
        """int64 [rows, columns], slots of the last past columns, -1 where a column is padding."""
        return self._tables.column_slots(self._index, self.step.before, columns)

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned for `key` in this step: a backend's plan serves all its layers."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def first_visible(self, pattern: Pattern) -> np.ndarray:
        """int64 [tokens], the first token of its row that each new token may look at.

        Args:
            pattern: what the mask allows, in columns.
        """
        return self.memo(pattern, lambda: self._first_visible(pattern))

    def _first_visible(self, pattern: Pattern) -> np.ndarray:
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
        begin = after.count_before(np.maximum(lowest, self.kv_offset)).reshape(-1)
        return begin if step._real is None else begin[step._real]


class LayerStates:
    """A layer's K/V in one step: where the past is, and the step's new states.

    Attributes:
        metadata: the step's index arrays.
        storage: the layer's blocks, in which the new states are too.
        keys, values: the new states as the model computed them, [rows, kv_heads, columns, dim].
    """

    __slots__ = ("_tokens", "keys", "metadata", "storage", "values")

    def __init__(
        self,
        metadata: AttentionMetadata,
        storage: LayerStorage,
        keys: torch.Tensor,
        values: torch.Tensor,
    ):
        self.metadata, self.storage, self.keys, self.values = metadata, storage, keys, values
        self._tokens: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def token_keys(self) -> torch.Tensor:
        """Those of the new keys that are tokens, [tokens, kv_heads, dim]."""
        return self._unpadded()[0]

    @property
    def token_values(self) -> torch.Tensor:
        """Those of the new values that are tokens, [tokens, kv_heads, dim]."""
        return self._unpadded()[1]

    def _unpadded(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._tokens is None:
            unpad = self.metadata.step.unpad
            self._tokens = unpad(without_graph(self.keys)), unpad(without_graph(self.values))
        return self._tokens


def without_graph(states: torch.Tensor) -> torch.Tensor:
    """`states`, of whose gradients nothing is known."""
    return states.detach() if states.requires_grad else states


def shown_columns(window: int | None, past: int, queries: int) -> tuple[int, int]:
    """(kv_length, kv_offset) of a layer for `queries` new columns, as `DynamicCache` shows them."""
    visible = past if window is None else min(past, window - 1)
    return visible + queries, past - visible
