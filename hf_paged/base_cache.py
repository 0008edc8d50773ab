"""The part of a `PagedCache` that transformers calls: rows that are moved, cropped and copied."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache

from .arguments import check_count, row_numbers
from .backends import Backend
from .core import rows
from .core.forward import CacheState
from .layers import PLAIN, check_crop, make_layers
from .view import Reader


class BaseCache(DynamicCache):
    """A `DynamicCache` whose layers keep K/V in blocks.

    Attributes:
        state: what the layers share.
    """

    state: CacheState
    _reader: Reader

    def _set_state(self, state: CacheState, backend: str | Backend, may_compile: bool) -> None:
        self.state, self._reader = state, Reader(state.model.spec, backend, may_compile)
        Cache.__init__(self, layers=make_layers(state, self._reader))

    @property
    def block_tables(self) -> list[list[int]]:
        """For each row the physical block of each logical block (full-attention group)."""
        self.state.check_usable()
        return [row[row >= 0].tolist() for row in self.state.complete_tables.tables[0]]

    @property
    def row_lengths(self) -> list[int]:
        """For each row the tokens that it holds, padding not counted."""
        return self.state.tokens.lengths.tolist()

    @property
    def batch_size(self) -> int:
        """Rows of the cache, -1 before the first forward."""
        return len(self.state.tokens) or -1

    @property
    def is_compileable(self) -> bool:
        """Whether generate may compile decode steps."""
        return self._reader.eager_reason is None

    @property
    def has_other_states(self) -> bool:
        """Whether a layer keeps something outside of the blocks, as the model's own ones do."""
        return bool(self.stateful_layers())

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
        for layer in self.stateful_layers():
            check_crop(layer, count)
        rows.crop(self.state, count)
        for layer in self.stateful_layers():
            layer.crop(-count)
        self.state.is_torn = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` is now; moves table entries, never K/V.

        Raises:
            IndexError: there is no such row.
        """
        numbers = self._row_numbers(beam_idx)
        rows.note_move(self.state)
        self._select(numbers)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order; an index may repeat.

        Raises:
            IndexError: there is no such row.
        """
        self._select(self._row_numbers(indices))

    def _row_numbers(self, indices: Any) -> np.ndarray:
        """Those that `indices` are; an empty cache has none, whatever is chosen of it."""
        count = len(self.state.tokens)
        return row_numbers(indices, count) if count else np.arange(0)

    def _select(self, numbers: np.ndarray) -> None:
        rows.select(self.state, numbers)
        for layer in self.stateful_layers():
            select_states(layer, numbers)
        self.state.is_torn = False

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make each row `repeats` rows, one after the other, that share every block."""
        check_count("repeats", repeats)
        self._select(np.arange(len(self.state.tokens)).repeat(repeats))

    def reset(self) -> None:
        """Give all blocks back; the cache is as new."""
        rows.reset(self.state)
        for layer in self.stateful_layers():
            layer.reset()
        self.state.is_torn = False

    def stateful_layers(self) -> list[Any]:
        """The layers that keep something outside of the blocks."""
        return [layer for layer in self.layers if type(layer) not in PLAIN]


def select_states(layer: Any, rows: np.ndarray) -> None:
    """Make the rows `rows` of the present ones in what a layer keeps outside of the blocks."""
    # Of transformers' layers all can reorder, and an index_select repeats and selects as well.
    layer.reorder_cache(torch.from_numpy(rows))
