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


class Facts(NamedTuple):
    """What a 2-D mask says of a step.

    Attributes:
        new_tokens: bool [rows, columns], which of the step's columns are tokens.
        hides_tokens: whether it masks a stored token, so that more is stored than may be seen.
    """

    new_tokens: np.ndarray
    hides_tokens: bool


class Padding:
    """A 2-D mask (bool [rows, all columns]) on its way to the host.

    Args:
        batch: the rows that the mask is for.
        mask: the mask; its last columns are new.
        columns: how many.

    Attributes:
        was_guessed: whether somebody has gone on without it, as if it hid nothing.
    """

    def __init__(self, batch: Batch, mask: torch.Tensor, columns: int):
        self._batch: Batch = weakref.proxy(batch)  # which keeps this until it is read
        self._columns = columns
        self._mask = Download(mask.to(torch.bool))
        self._facts: Facts | None = None
        self.was_guessed = False

    def has_arrived(self) -> bool:
        return self._facts is not None or self._mask.has_arrived()

    @property
    def hides_tokens(self) -> bool:
        """See `Facts`; False where the step under way may go on without knowing."""
        if not self.has_arrived() and self._batch.may_go_on(self):
            self.was_guessed = True
            return False
        return self.read().hides_tokens

    def read(self) -> Facts:
        """What the mask says, once it is on the host.

        Raises:
            ValueError: it shows a column that was padding and is not stored.
        """
        if self._facts is None:
            mask = self._mask.array()
            self._facts = Facts(mask[:, -self._columns :], self._batch.hides_tokens(mask))
        return self._facts
