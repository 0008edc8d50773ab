"""Which columns are padding, as the 2-D mask of a forward says, read without holding up the host.

The mask is on the device, and the host learns what is in it when the device has got that far. Where
it is behind, a decode step does not wait: it goes on as if the mask showed what is stored and one
token more in each row, as it nearly always does, and the cache compares before the step is over.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from .transfer import Download

if TYPE_CHECKING:
    from .batch import Batch


class _Facts(NamedTuple):
    new_tokens: np.ndarray | None
    hides_tokens: bool


class Padding:
    """What a 2-D mask (bool [rows, all columns]) says of the columns of a step.

    Args:
        batch: the rows that the mask is for.
        mask: the mask; the last `queries` columns are new.
    """

    def __init__(self, batch: Batch, mask: torch.Tensor, queries: int):
        self._batch: Batch = weakref.proxy(batch)  # which keeps this until it is read
        self._queries = queries
        self._mask = Download(mask.to(torch.bool))
        self._facts: _Facts | None = None

    @property
    def new_tokens(self) -> np.ndarray | None:
        """bool [rows, queries], which of the step's columns are tokens; None if all are."""
        return self._settled().new_tokens

    @property
    def hides_tokens(self) -> bool:
        """Whether it masks a stored token, so that more is stored than may be seen."""
        return self._settled().hides_tokens

    def _settled(self) -> _Facts:
        if self._facts is None:
            if not self._mask.has_arrived() and self._batch.may_go_on(self):
                self._facts = _Facts(None, False)
            else:
                self._facts = self.read()
        return self._facts

    def read(self) -> _Facts:
        """What the mask says, once it is on the host.

        Raises:
            ValueError: it shows a column that was padding and is not stored.
        """
        mask = self._mask.array()
        return _Facts(mask[:, -self._queries :], self._batch.hides_tokens(mask))
