"""What the K/V of a cache are of: which columns follow from the rows' tokens alone.

`BlockPool.insert_prefix` may give K/V to other prompts only where they are what the model computes
for the tokens in front of them and nothing else. So each step is looked at as it begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from .caller import autocast_dtype, given_to_model
from .metadata import Step
from .model_spec import ModelSpec
from .row_layout import RowLayout

ENDLESS = int(np.iinfo(np.int64).max)


class Model(Protocol):
    """The model whose K/V a cache holds, as far as it is known."""

    spec: ModelSpec

    @property
    def device(self) -> torch.device | None:
        """Where it is, None if it is not known."""
        ...

    def identity(self) -> str:
        """Text that no model has that computes other K/V."""
        ...

    def is_altered(self) -> bool:
        """Whether it may compute others at the moment, in training or under a hook."""
        ...


@dataclass
class Provenance:
    """Where the K/V of a cache come from.

    Attributes:
        identity, autocast: the model's identity and `autocast_dtype` at the first token.
        known_columns: the columns in which each row is the sequence that its caller takes it for:
            not after beam search has moved rows, nor under a mask that is more than a pattern.
            None for all.
        own: int64 [rows], the columns whose K/V follow from the tokens and the identity, None for
            all.
        moved: the same by other positions than those of a prompt alone; still on its device.
        may_hold_padding: whether a step came without our mask function, so that padding is stored
            if there was any.
        ids: the token ids [rows, columns] that the cache begins with, None if nobody has said.
    """

    identity: str | None = None
    autocast: str | None = None
    known_columns: int | None = None
    own: np.ndarray | None = None
    moved: torch.Tensor | None = None
    may_hold_padding: bool = False
    ids: np.ndarray | None = None
    _may_differ: bool = True  # whether the next step may be of another model or config

    def of_first_step(self, model: Model) -> Provenance:
        """That of a cache whose first tokens this model computes now."""
        fresh = Provenance(model.identity(), autocast_dtype(), ids=self.ids)
        fresh._may_differ = False
        return fresh

    def note_step(self, step: Step, model: Model) -> None:
        """Look at what a step runs under, when its first layer comes."""
        given = given_to_model()
        if step.before.columns and (step.columns > 1 or self._may_differ):
            # Other steps follow one that was looked at.
            self._may_differ = model.identity() != self.identity
        if (
            self._may_differ
            or autocast_dtype() != self.autocast
            or model.is_altered()
            or given.embeddings is not None
        ):
            self.note_foreign(step)
        if given.position_ids is not None:
            step.note_positions(given.position_ids)
        if step.is_more_than_a_pattern:
            self.note_mixed(step.before.columns)
        if step.ended_at is not None:
            self.note_mixed(step.ended_at)
        self.may_hold_padding |= step.mask is None

    def note_complete(self, step: Step) -> None:
        """Keep where a step has moved tokens, on the device, which is not waited for."""
        if step.moved is not None:
            columns = torch.where(step.moved, step.before.columns, ENDLESS)
            self.moved = columns if self.moved is None else self.moved.minimum(columns)

    def note_foreign(self, step: Step) -> None:
        """From this step on K/V may not follow from the tokens and the identity."""
        self._limit(np.full(len(step), step.before.columns))

    def note_mixed(self, column: int) -> None:
        """From this column on a row's K/V may be of more or less than its own past alone."""
        known = self.known_columns
        self.known_columns = column if known is None else min(known, column)

    def note_pause(self) -> None:
        """Before the next step the model may be changed."""
        self._may_differ = True

    def note_ids(self, ids: np.ndarray, columns: int) -> None:
        """Remember the token ids ([rows, columns]) that the first columns have."""
        self.ids = ids[:, :columns] if columns else None

    def check_ids(self, ids: np.ndarray, rows: np.ndarray, tokens: RowLayout) -> None:
        """Raise ValueError where the cache is known to hold other tokens.

        Args:
            ids: [n, columns], token ids, beginning with those of the cache.
            rows: int64 [n], the row of the cache for each.
            tokens: those of the cache.
        """
        if self.ids is None:
            return
        known = self._ids_of(rows)
        width = min(known.shape[1], ids.shape[1])
        is_token = tokens.mask()[rows, :width]
        differs = ((known[:, :width] != ids[:, :width]) & is_token).any(1)
        if differs.any():
            raise ValueError(
                "The cache was begun with other tokens than those of rows "
                f"{np.flatnonzero(differs)[:10].tolist()}; use it for its own prompts, or reset it."
            )

    def _ids_of(self, rows: np.ndarray) -> np.ndarray:
        assert self.ids is not None
        return self.ids[rows if len(self.ids) > 1 else rows * 0]  # one row may have become many

    def own_columns(self, tokens: RowLayout) -> np.ndarray:
        """int64 [rows], the columns of each row whose K/V are those of its tokens in a prompt
        alone, as the model of the cache's identity computes them."""
        self._read_moved()
        every = np.full(len(tokens), tokens.columns)
        return every if self.own is None else np.minimum(every, self.own)

    def select(self, rows: np.ndarray) -> Provenance:
        """That of the rows `rows` of these."""
        self._read_moved()
        ids = None if self.ids is None else self._ids_of(rows)
        return replace(self, own=None if self.own is None else self.own[rows], ids=ids)

    def crop(self, columns: int) -> Provenance:
        """That of the first columns."""
        self._read_moved()
        known, own, ids = self.known_columns, self.own, self.ids
        return replace(
            self,
            known_columns=None if known is None else min(known, columns),
            own=None if own is None else np.where(own < columns, own, ENDLESS),
            ids=None if ids is None or not columns else ids[:, :columns],
        )

    def _limit(self, columns: np.ndarray) -> None:
        """Behind so many columns of each row K/V do not follow from the tokens and the identity."""
        own = columns if self.own is None else np.minimum(self.own, columns)
        self.own = own if (own < ENDLESS).any() else None

    def _read_moved(self) -> None:
        if self.moved is not None:
            self._limit(self.moved.cpu().numpy())
            self.moved = None
