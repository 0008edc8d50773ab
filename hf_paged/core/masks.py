"""The masks of a cache's steps: which new columns are tokens, and which stored tokens they hide."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import torch

from .metadata import MaskFacts
from .row_layout import RowLayout


class StepMasks:
    """The mask of each thread's next step, and what 2-D masks say.

    A mask serves until its step is complete: a forward that failed may be run again with it. The
    next one takes its place, and a forward that makes none of ours drops it, since a traceback that
    somebody keeps holds it for as long as it lives.

    A 2-D mask that goes on as the last one did is compared with it where both are: one flag and the
    new columns come to the host, a few bytes in a decode step.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[Any], MaskFacts]] = {}
        # The last mask (bool [rows, columns]) that showed all that was stored, and these tokens.
        self._shown: tuple[RowLayout, torch.Tensor] | None = None

    def note(self, mask: MaskFacts, holder: object) -> None:
        """Keep a mask for as long as `holder` lives."""
        self._noted[threading.get_ident()] = weakref.ref(holder), mask

    def drop(self) -> None:
        """Forget the mask of this thread's next step."""
        self._noted.pop(threading.get_ident(), None)

    def noted(self, columns: int) -> MaskFacts | None:
        """The mask of this thread's next step, None if our mask function made none.

        Raises:
            RuntimeError: it was made for a cache that did not hold so many columns.
        """
        holder, mask = self._noted.get(threading.get_ident(), (None, None))
        if holder is None or mask is None or holder() is None:
            return None
        if mask.past != columns:
            raise RuntimeError(
                "The cache is not as long as when the mask of this forward was made; if several "
                "threads use it, give each a fork() of its own."
            )
        return mask

    def note_shown(self, tokens: RowLayout, mask: MaskFacts | None) -> None:
        """Remember that the 2-D mask of a step shows exactly these tokens, None that none does."""
        is_exact = mask is not None and mask.padding is not None
        self._shown = (tokens, mask.padding) if is_exact else None  # type: ignore[union-attr,assignment]

    def read(
        self, mask: MaskFacts | None, stored: RowLayout, before: RowLayout, freed: np.ndarray | None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What the mask of a step says.

        Args:
            stored: the tokens that the cache holds.
            before: the same in the rows of the step, of which there may be more.
            freed: bool [rows], which rows were given up; None if none.

        Returns:
            bool [rows, columns], which new columns are tokens, None if all are; and bool [rows,
            past columns], which stored tokens it hides, None if none.

        Raises:
            ValueError: it shows a column that is not stored.
        """
        if mask is None or mask.padding is None or len(mask.padding) != len(before):
            return None, None
        past, new = self._download(mask.padding, stored, mask.queries)
        if past is not None and freed is not None:
            past = past & ~freed[:, None]
        return new, None if past is None else _hidden(before, past)

    def _download(
        self, padding: torch.Tensor, stored: RowLayout, columns: int
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Its past, None if it shows what is `stored`, and its new columns."""
        past, new = padding.split([padding.shape[1] - columns, columns], dim=1)
        tokens, shown = self._shown or (None, past)
        if tokens is stored and (shown.shape, shown.device) == (past.shape, past.device):
            flat = torch.cat([(past != shown).any()[None], new.reshape(-1)]).cpu().numpy()
            if not flat[0]:
                return None, flat[1:].reshape(new.shape)
        whole = padding.cpu().numpy()
        return whole[:, : past.shape[1]], whole[:, past.shape[1] :]


def _hidden(before: RowLayout, past: np.ndarray) -> np.ndarray | None:
    """bool [rows, columns], the stored tokens that a mask's `past` hides; None if none."""
    stored = before.mask()
    if (past & ~stored).any():
        raise ValueError(
            "The attention_mask shows columns that were padding when they were computed, or that "
            "an earlier mask hid at a row's end, which a PagedCache does not keep; pass the same "
            "mask for them again, or fork() the cache before it hides them."
        )
    hidden = stored & ~past
    return hidden if hidden.any() else None


def ended_tokens(
    before: RowLayout, hidden: np.ndarray, new: np.ndarray | None
) -> np.ndarray | None:
    """Of the `hidden` stored tokens those at the ends of rows that now go on; None if none.

    They are what generate fed to rows that had ended: no text goes on behind tokens that it hides.
    """
    shown = before.mask() & ~hidden
    is_behind = ~np.flip(np.logical_or.accumulate(np.flip(shown, 1), 1), 1)
    goes_on = True if new is None else new.any(1, keepdims=True)
    ended = hidden & is_behind & goes_on
    return ended if ended.any() else None
