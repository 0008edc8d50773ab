"""Which columns of a padded batch are tokens.

A *column* is a position in the padded batch as transformers sees it; a *token* is a column that is
not padding. Only tokens are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class RowLayout:
    """Which columns of each row are tokens.

    Attributes:
        columns: columns so far.
        lengths: int64 [rows], tokens of each row.
        is_token: bool [rows, columns] if some row has padding behind a token (a *hole*), else None:
            then a row's tokens are its last `length` columns.
    """

    columns: int
    lengths: np.ndarray
    is_token: np.ndarray | None = None

    @classmethod
    def none(cls, rows: int) -> RowLayout:
        return cls(0, np.zeros(rows, np.int64))

    @classmethod
    def of(cls, mask: np.ndarray) -> RowLayout:
        """Those of a mask, bool [rows, columns]."""
        return cls.none(len(mask)).extend(mask.shape[1], mask)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_unpadded(self) -> bool:
        return bool((self.lengths == self.columns).all())

    def mask(self) -> np.ndarray:
        """bool [rows, columns], True where a column is a token."""
        if self.is_token is not None:
            return self.is_token
        return np.arange(self.columns) >= (self.columns - self.lengths)[:, None]

    def extend(self, columns: int, new: np.ndarray | None) -> RowLayout:
        """Append columns; `new` (bool [rows, columns]) says which are tokens, None that all are."""
        if new is None or new.all():
            is_token = self.is_token
            if is_token is not None:
                is_token = np.pad(is_token, ((0, 0), (0, columns)), constant_values=True)
            return RowLayout(self.columns + columns, self.lengths + columns, is_token)
        has_holes = (
            self.is_token is not None
            or bool((new[:, :-1] & ~new[:, 1:]).any())
            or not bool(new[self.lengths > 0].all())
        )
        return RowLayout(
            self.columns + columns,
            self.lengths + new.sum(1),
            np.concatenate([self.mask(), new], axis=1) if has_holes else None,
        )

    def truncate(self, columns: int) -> RowLayout:
        """Keep the first `columns` columns."""
        if self.is_token is not None:
            return RowLayout.of(self.is_token[:, :columns])
        padding = self.columns - self.lengths
        return RowLayout(columns, np.maximum(columns - padding, 0))

    def without(self, rows: np.ndarray) -> RowLayout:
        """All columns of `rows` become padding."""
        kept = np.ones(len(self), bool)
        kept[rows] = False
        if self.is_token is not None:
            return RowLayout.of(self.is_token & kept[:, None])
        return replace(self, lengths=self.lengths * kept)

    def hide(self, columns: np.ndarray) -> RowLayout:
        """The tokens in `columns` (bool [rows, columns]) become padding."""
        return RowLayout.of(self.mask() & ~columns)

    def select(self, rows: np.ndarray) -> RowLayout:
        if self.is_token is not None:
            return RowLayout.of(self.is_token[rows])
        return replace(self, lengths=self.lengths[rows])

    def count_before(self, columns: np.ndarray) -> np.ndarray:
        """Tokens of each row in front of its `columns` ([rows, n] or broadcastable to it)."""
        columns = np.clip(columns, 0, self.columns)
        if self.is_token is None:
            return np.maximum(columns - (self.columns - self.lengths)[:, None], 0)
        counts = np.pad(self.is_token.cumsum(1), ((0, 0), (1, 0)))
        return np.take_along_axis(
            counts, np.broadcast_to(columns, (len(self), columns.shape[1])), 1
        )

    def count_last(self, columns: int) -> np.ndarray:
        """Tokens of each row in the last `columns` columns."""
        if self.is_token is None:
            return np.minimum(self.lengths, columns)
        return self.is_token[:, max(self.columns - columns, 0) :].sum(1)


def freed_among(freed: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    """bool [rows], which of `rows` were freed, None if none; `freed` says it of all."""
    freed = None if freed is None else freed[rows]
    return None if freed is None or not freed.any() else freed
