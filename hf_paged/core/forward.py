"""The rows of one cache as its layers see them: which step each layer is in, and what it reads.

transformers asks a cache for sizes, makes the mask, and then updates the layers one by one; it
never says where a forward begins or ends. A step begins with its mask, or with its first layer if
our mask function made none. A layer that has seen as many columns as the batch begins the next
step; one that is behind belongs to the step that is under way. If a step begins while layers are
behind, the forward before it failed, and what it had appended is rolled back.

An exception may come after any call (Ctrl-C), so state that belongs together is assigned together,
by assignments alone, and a roll-back may be cut short and begun again.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from .block_table import BlockTables, Sharing
from .caller import ForwardWatch
from .kv_storage import KVStorage, StoredDims
from .masks import StepMasks, ended_tokens
from .metadata import AttentionMetadata, LayerStates, MaskFacts, Step
from .provenance import Model, Provenance
from .refusals import check_not_repeated, check_rows, checked_states, is_step_again
from .row_layout import RowLayout, freed_among
from .sharing import differing, find_sharing
from .storage import is_debugging


class CacheState:
    """The state that the layers of a cache share.

    Args:
        storage: the memory, and the allocator of its blocks.
        model: whose K/V they are.
        stored_dims: the widths of a head in memory that the attention backend asks for.
        share_prompts: store what rows have in common at their beginning once.

    Attributes:
        tables: the block tables; in the middle of a step with its columns.
        step: the step that began last, None after whatever else has changed the rows.
        provenance: what the K/V are of.
        record_past: whether tokens outside of windows are kept until the next crop.
        may_repeat: whether the next step may be what is there once more, as assisted decoding
            begins.
        freed: bool [rows], whose blocks were given back early; None if there are none.
        num_steps, masks: forwards that have begun, and the masks of those that come.
        idle: the layers that the model passes over.
        is_proven: whether a step has been complete, so that these are known.
        lock: held in each call, by one thread.
        outside: what is to be put back into blocks, while the cache is moved out; else None.
        is_freed: whether it was given up for good.
        is_torn: whether states besides K/V are not those of the K/V.
    """

    def __init__(
        self, storage: KVStorage, model: Model, stored_dims: StoredDims, share_prompts: bool
    ):
        self.storage, self.allocator, self.model = storage, storage.allocator, model
        self.stored_dims, self.share_prompts = stored_dims, share_prompts
        self.tables = BlockTables(self.allocator)
        self.provenance = Provenance()
        self.record_past = self.may_repeat = False
        self.is_proven = self.is_freed = self.is_torn = False
        self.freed: np.ndarray | None = None
        self.outside: Any = None
        self.num_steps = 0
        self.step: Step | None = None
        self._metadata: list[AttentionMetadata] = []
        self._sharing: Sharing | None = None
        self.masks = StepMasks()
        self.idle: set[int] = set()
        self._behind: set[int] = set()  # layers that the step under way has not updated yet
        self._before = self.tables.tokens  # what was there before the step under way
        # What the rows held before this step ended some of them at what its mask shows.
        self._whole: BlockTables | None = None
        self._is_fresh = False  # whether no layer has come to it yet, so that it counts for nothing
        self._has_failed = False  # whether it can only be rolled back any more
        self._blamed: set[int] | None = None  # layers behind at the last roll-back
        self.lock, self._forward = threading.RLock(), ForwardWatch()

    @property
    def tokens(self) -> RowLayout:
        """The tokens of all complete steps."""
        self.check_usable()
        return self.complete

    @property
    def complete(self) -> RowLayout:
        """The same of a cache that may be freed, or outside."""
        return self._before if self._behind else self.tables.tokens

    @property
    def complete_tables(self) -> BlockTables:
        """The tables that hold all complete steps."""
        return self._whole if self._behind and self._whole is not None else self.tables

    def tokens_of(self, layer: int) -> RowLayout:
        """The tokens that a layer has: in the middle of a step the new ones too, if it has them.

        Before the next step the tokens of one whose forward has failed are not counted.
        """
        complete = self.tokens
        if not self._behind or layer in self._behind | self.idle or not self._forward.is_here:
            return complete
        return self.tables.tokens

    def note_mask(self, mask: MaskFacts, holder: object) -> None:
        """Take the mask of the step that comes, for as long as `holder` lives, and begin the step.

        Raises:
            PoolExhausted: too few blocks are free.
            ValueError: the mask shows what is not stored, or is of other rows.
        """
        with self.lock:
            step = self._fresh_step(mask.rows, mask.queries)
            if step is not None and step.has_padding_of(mask):
                return  # the same forward's, for another kind of layers
            self.masks.note(mask, holder)
            is_in_use = self._behind and not self._is_fresh
            if (
                not (self.is_proven and self.complete.columns)
                or self.may_repeat
                or self.model.spec.stateful_layers
                or (is_in_use and (self._forward.elsewhere or self._forward.is_here))
            ):
                return  # the first layer begins the step: it has K/V to look at, or is refused
            self._undo_unfinished()
            self.end_step()
            self._has_failed = True  # until it is done
            self._begin(mask.rows, mask.queries, mask)
            self._is_fresh, self._has_failed = True, False

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerStates:
        """Write a layer's new K/V ([rows, kv_heads, columns, head_dim]).

        Raises:
            PoolExhausted: too few blocks are free; nothing is written.
            ValueError: K/V of another batch, shape, dtype or device than the layer's.
        """
        with self.lock:
            self.check_turn()
            self.check_usable()
            storage = self.storage.stored(layer)
            if storage is None or not storage.takes(keys, values):
                keys, values = checked_states(layer, keys, values)
                # First the storage, so that K/V of a wrong kind take no block.
                storage = self.storage.of_layer(layer, keys, values, self.stored_dims)
            begins = self._has_failed or not (layer in self._behind or layer in self.idle)
            if self._is_fresh and self._fresh_step(keys.shape[0], keys.shape[2]) is None:
                begins = True
            if begins:
                self._check_retry(layer, keys)
                self._undo_unfinished()
                self.end_step()
            self._has_failed = True  # until it is done: handling an exception may be cut short too
            self._forward.begin()
            try:
                if begins:
                    step = self._begin_at_layer(layer, keys, values)
                    # Until now, when it holds blocks, others could have made the storage anew.
                    storage = self.storage.of_layer(layer, keys, values, self.stored_dims)
                else:
                    step = self._continue_step(layer, keys)
                if begins or self._is_fresh:  # its first layer has come, from here on it counts
                    self._is_fresh, self.num_steps = False, self.num_steps + 1
                    self.provenance.note_step(step, self.model)
                metadata = self._metadata[self.storage.group_of_layer[layer]]
                states = LayerStates(metadata, storage, keys, values)
                if self._sharing is not None and not begins:  # it was found by the first layer's
                    states.metadata = self._part(states, layer)
                with self.allocator.lock:  # another thread may move this memory to make it grow
                    states.metadata.write(states)
                is_complete = self._behind <= {layer}
                if is_complete:
                    self.masks.drop()
                self._behind.discard(layer)
                self._has_failed = False
                if is_complete:
                    self._drop_whole()
            except BaseException:
                if self._behind and self.step is not None:
                    self._roll_back(self.step)
                raise
            return states

    def check_turn(self) -> None:
        """Raise RuntimeError in the middle of another thread's step."""
        if self._behind and not self._is_fresh:
            self._forward.check_thread()

    def settle(self) -> None:
        """Roll back the step that a failed forward has left unfinished.

        Raises:
            RuntimeError: this is the middle of a forward that has not failed, or of another
                thread's step.
        """
        self.check_turn()
        self.check_between_forwards()
        self.check_usable()
        self._undo_unfinished()

    def check_between_forwards(self) -> None:
        """Raise RuntimeError in the middle of a forward that has not failed."""
        if self._behind and not self._is_fresh and self._forward.is_here:
            raise RuntimeError(
                "A layer or a hook has called this in the middle of a forward of this PagedCache, "
                "when its layers hold different tokens; do it before or behind the forward."
            )

    def end_step(self) -> None:
        """Let go of the last step, whose views and masks nobody can read any more."""
        behind: set[int] = set()
        if self.step is not None:
            self.step.is_current = False
        self.step, self._behind, self._has_failed, self._is_fresh = None, behind, False, False
        self._sharing, self._metadata = None, []
        self._drop_whole()

    def replace_rows(self, rows: np.ndarray) -> None:
        """Make the rows `rows` of the present ones, in the same blocks."""
        old, tables = self.tables, self.tables.select(rows)
        freed, provenance = freed_among(self.freed, rows), self.provenance.select(rows)
        self.tables, self.freed, self.provenance = tables, freed, provenance
        old.release()

    def clear(self, for_good: bool) -> None:
        """Give all blocks back; the cache is as new, or freed."""
        if self._behind and self.step is not None:
            self._roll_back(self.step)
        self.end_step()
        old, tables = self.tables, BlockTables(self.allocator)
        self.tables, self.is_freed, self.outside = tables, for_good, None
        old.release()
        self.provenance, self.freed, self._blamed = Provenance(), None, None

    def check_usable(self) -> None:
        """Raise RuntimeError if nothing can be done with the cache as it is."""
        if self.is_freed:
            raise RuntimeError("This PagedCache was freed; make a new one.")
        if self.outside is not None:
            raise RuntimeError("This PagedCache was moved out of its pool; restore() it first.")
        if self.is_torn:
            raise RuntimeError(
                "A forward or a move was cut short, and layers "
                f"{self.model.spec.stateful_layers} keep states that cannot be rolled back as K/V "
                "can; reset() the cache."
            )

    def _fresh_step(self, rows: int, columns: int) -> Step | None:
        """The step that this thread's mask has begun, if it is of so many rows and columns."""
        step = self.step
        if not self._is_fresh or step is None or self._forward.elsewhere:
            return None
        is_alike = (len(step), step.columns) == (rows, columns)
        is_noted = is_alike and self.masks.noted(step.before.columns) is step.mask
        return step if is_noted else None

    def _begin(
        self, rows: int, columns: int, mask: MaskFacts | None, keys_values: Any = None
    ) -> Step:
        """Hold blocks for new columns: what a step needs is decided here, for all layers at once.

        Args:
            keys_values: the first layer's, in a first step, whose rows may share blocks.
        """
        before = self.tables.tokens if self.tables.tokens.columns else RowLayout.none(rows)
        is_first, is_fork = not before.columns, len(before) != rows
        if self.freed is not None and not is_first and columns > 1:
            raise RuntimeError(
                "Rows of this cache have been freed, so it cannot go on with more than the token "
                "that generate gives an ended row; keep the others by batch_select_indices."
            )
        check_rows(before, rows, mask, self.model.spec.stateful_layers)
        if not self.record_past:
            self.tables.drop_outside_windows()
        stored = self.tables.tokens
        if is_fork:  # one row serves as the prompt of many
            before = before.select(np.zeros(rows, np.int64))
        new, hidden = self.masks.read(mask, stored, before, self.freed)
        new = None if new is not None and new.shape != (rows, columns) else new
        if self.freed is not None:
            kept = np.broadcast_to(~self.freed[:, None], (rows, columns))
            new = kept if new is None else new & kept
        ended = None
        if hidden is not None and not self.record_past:
            ended = ended_tokens(before, hidden, new)
            if ended is not None:
                before, hidden = before.hide(ended), hidden & ~ended
        step = Step(before, before.extend(columns, new), new, hidden, mask)
        step.ended_at = None if ended is None else int(ended.any(0).argmax())
        sharing = None
        if keys_values is not None and self.share_prompts and is_first and rows > 1:
            keys, values = (step.unpad(states.detach()) for states in keys_values)
            sharing = find_sharing(step, keys, values, self.allocator.block_size)
        behind = set(self.storage.group_of_layer) - self.idle
        # From here on the step is under way, and rolled back if it fails.
        self.step, self._sharing = step, sharing
        self._forward.begin()
        is_exact = step.hidden is None and self.freed is None
        self.masks.note_shown(step.after, mask if is_exact else None)
        self._behind, self._before = behind, self.tables.tokens
        try:
            if is_first:
                self.tables = BlockTables(self.allocator, rows)
            elif is_fork:
                self.replace_rows(np.zeros(rows, np.int64))
            if ended is not None:
                self._whole = self.tables.select(np.arange(rows))
                self.tables.end_rows(before)
            self.tables.append(step.after, self.record_past, sharing)
            self._make_metadata(step)
        except BaseException:
            self._roll_back(step)
            raise
        if is_debugging():
            self.allocator.check()
        return step

    def _begin_at_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Step:
        """Begin a step that no mask has begun."""
        if not self.tables.tokens.columns:
            self.provenance, self.freed = self.provenance.of_first_step(self.model), None
        may_repeat, self.may_repeat = self.may_repeat, False
        rows, columns = keys.shape[0], keys.shape[2]
        storage = self.storage.stored(layer)
        if may_repeat and columns > 1 and storage is not None:
            check_not_repeated(self.tables, self.storage.group_of_layer[layer], storage, keys)
        mask = self.masks.noted(self.complete.columns)
        step = self._begin(rows, columns, mask, (keys, values))
        self._pass_over(layer)
        return step

    def _continue_step(self, layer: int, keys: torch.Tensor) -> Step:
        step = self.step
        assert step is not None
        if (keys.shape[0], keys.shape[2]) != (len(step), step.columns):
            raise ValueError(
                f"Layer {layer} got K/V of {keys.shape[0]} rows and {keys.shape[2]} tokens in a "
                f"step of {len(step)} rows and {step.columns} tokens."
            )
        self.idle.discard(layer)
        self._pass_over(layer)
        return step

    def _pass_over(self, layer: int) -> None:
        """Layers run in order: those in front of the one that the first step is at hold no K/V."""
        if not self.is_proven:
            self.idle.update(other for other in self._behind if other < layer)
            self._behind -= self.idle

    def _part(self, states: LayerStates, layer: int) -> AttentionMetadata:
        """Give rows that turn out to differ from their leader blocks of their own."""
        assert self._sharing is not None
        rows = differing(
            self._sharing, states.metadata.step, states.token_keys, states.token_values
        )
        if len(rows):
            parting = np.zeros((len(self.tables.tokens), 1), bool)
            parting[rows] = True
            self.tables.unshare([parting] * len(self.allocator.groups))
            self._sharing.drop(rows)
            self._make_metadata(states.metadata.step)
        return self._metadata[self.storage.group_of_layer[layer]]

    def _make_metadata(self, step: Step) -> None:
        self._metadata = [
            AttentionMetadata(step, self.tables, index, self.record_past, self._sharing)
            for index in range(len(self.allocator.groups))
        ]

    def _undo_unfinished(self) -> None:
        """Roll the last step back if layers are behind in it; else it is complete."""
        step = self.step
        if step is None:
            return
        if step.is_custom:
            self.provenance.note_mixed(step.before.columns)
        if not self._behind:
            self.is_proven = True
            self.provenance.note_complete(step)
            return
        behind, is_unexplained = self._behind, not self._has_failed and not self.is_proven
        if is_unexplained and behind == self._blamed:
            raise RuntimeError(
                f"The model has twice left layers {sorted(behind)} without K/V, so no step of this "
                "cache is ever complete; if the forwards failed, reset() the cache."
            )
        self._roll_back(step)
        if is_unexplained:
            self._blamed = behind
        self.check_usable()

    def _check_retry(self, layer: int, keys: torch.Tensor) -> None:
        """Refuse what follows an unfinished first step, unless it is that step once more.

        Raises:
            RuntimeError: a forward failed, or some layers of the model never get K/V; which of the
                two cannot be told, and the next step would be wrong after the one or the other.
        """
        step = self.step
        if step is None or not self._behind or self.is_proven or self._has_failed:
            return
        metadata = self._metadata[self.storage.group_of_layer[layer]]
        storage = self.storage.stored(layer)
        if storage is not None and is_step_again(metadata, storage, keys):
            return
        behind = sorted(self._behind)
        self._roll_back(step)
        raise RuntimeError(
            f"The forward before this one left layers {behind} without K/V. If it failed, reset() "
            "the cache; if the model does not have these layers, set the config's number of layers "
            "to what it has; and an encoder-decoder model needs EncoderDecoderCache(PagedCache, "
            "DynamicCache)."
        )

    def _roll_back(self, step: Step) -> None:
        self.is_torn = bool(self.model.spec.stateful_layers)
        rows, columns = len(self._before), step.before.columns
        if self._whole is not None:
            ended, self.tables, self._whole = self.tables, self._whole, None
            ended.release()
        self.tables.truncate(columns)
        if len(self.tables.tokens) != rows and columns:
            self.replace_rows(np.zeros(rows, np.int64))
        elif len(self.tables.tokens) != rows:
            self.tables = BlockTables(self.allocator, rows)
        if not columns:
            self.provenance.own = None
        self.end_step()

    def _drop_whole(self) -> None:
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.release()
