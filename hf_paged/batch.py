"""The rows of one cache as its layers see them: which step each layer is in, and what it reads.

transformers updates the layers one by one and never says where a forward begins or ends. A layer
that has seen as many columns as the batch begins a step; one that is behind belongs to the step
that is under way. If a step begins while layers are behind, the forward before it failed, and what
it had appended is rolled back.

An exception may come after any call (Ctrl-C), so state that belongs together is assigned together,
by assignments alone, and a roll-back may be cut short and begun again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch

from .backends import backend_for
from .padding import Padding
from .pool import BlockPool, PoolExhausted, is_debugging
from .sharing import Sharing, find_sharing
from .snapshot import Snapshot
from .step import GroupStep, Step
from .table import BlockTables, Tokens
from .transfer import upload
from .view import Calls, LayerPages, LazyMask, gather

Method = TypeVar("Method", bound=Callable[..., Any])


class KVLength(int):
    """`kv_length` as `Cache.get_mask_sizes` returns it: an int that knows whose length it is.

    transformers hands it to the mask function unchanged, which so learns of the cache.
    """

    batch: Batch

    def __new__(cls, length: int, batch: Batch) -> KVLength:
        self = super().__new__(cls, length)
        self.batch = batch
        return self


def _exclusive(method: Method) -> Method:
    """`method` for one thread at a time, and not in the middle of another thread's step."""

    @wraps(method)
    def exclusive(self: Batch, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._check_thread()
            return method(self, *args, **kwargs)

    return exclusive  # type: ignore[return-value]


class Batch:
    """The state that the layers of a cache share.

    Args:
        pool: where the blocks are.
        backend: name of the attention backend.
        share_prompts: store what rows have in common at their beginning once.
    """

    def __init__(self, pool: BlockPool, backend: str, share_prompts: bool):
        self.pool, self.backend, self.share_prompts = pool, backend, share_prompts
        self.tables = BlockTables(pool)
        self.step: Step | None = None
        self._group_steps: list[GroupStep] = []
        self._sharing: Sharing | None = None
        self.record_past = False
        # Whether the next step may be what is there once more, as assisted decoding begins.
        self.may_repeat = False
        # The columns whose K/V are those of the caller's sequences, each behind its own past alone:
        # not after beam search has moved rows, nor under a mask that is more than a pattern.
        self._known: int | None = None
        # Whether a step came without our mask function, so that padding is stored if there was any.
        self.may_hold_padding = False
        # `BlockPool.identity` when the first token was stored: what the K/V are of.
        self.identity: str | None = None
        self._outside: tuple[Snapshot, Tokens] | None = None
        self._freed_rows: np.ndarray | None = None  # bool [rows], if there are any
        self.calls = Calls()
        self.num_steps = 0  # that have begun
        self.is_freed = False
        self._is_torn = False  # whether other states than K/V are not those of the K/V
        self._behind: set[int] = set()  # layers that the step under way has not updated yet
        self._before = self.tables.tokens  # what was there before the step under way
        self._has_failed = False  # whether that can only be rolled back any more
        self._idle: set[int] = set()  # layers that the model passes over
        self._has_completed = False
        self._blamed: set[int] | None = None  # layers behind at the last roll-back
        # The mask of each thread's forward under way. It is alive exactly while that runs, so a
        # failed one leaves nothing behind.
        self._masks: dict[int, weakref.ref[LazyMask]] = {}
        # Masks that the step under way goes on without, the noted one first; None if it may not.
        self._unread: list[Padding] | None = None
        self._only_grows = False  # whether the last mask showed all that is stored, and a new token
        self._longer: BlockTables | None = None  # what rows held that have ended in this step
        self._lock = threading.RLock()
        self._thread = threading.current_thread()  # whose step is under way

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def freed_rows(self) -> np.ndarray:
        """bool [rows], whose blocks `free_rows` has given back."""
        return np.zeros(self.rows, bool) if self._freed_rows is None else self._freed_rows

    @property
    def tokens(self) -> Tokens:
        """The tokens of all complete steps."""
        self._check_usable()
        return self._complete

    @property
    def _complete(self) -> Tokens:
        return self._before if self._behind else self.tables.tokens

    @property
    def columns(self) -> int:
        """Columns of all complete steps."""
        return self.tokens.columns

    def block_table(self, group: int) -> np.ndarray:
        """int32 [rows, width], the blocks of a layer group; -1 where a row holds none."""
        self._check_usable()
        return self.tables.tables[group]

    def mask_sizes(self, queries: int, window: int | None) -> tuple[KVLength, int]:
        """(kv_length, kv_offset) for `queries` new columns, as `DynamicCache` would show them."""
        past = self.columns
        visible = past if window is None else min(past, window - 1)
        return KVLength(visible + queries, self), past - visible

    def hides_tokens(self, mask: np.ndarray) -> bool:
        """Whether a 2-D mask (bool [rows, all columns]) masks a token that is stored.

        Raises:
            ValueError: it shows a column that was padding and is not stored.
        """
        tokens = self.tokens
        if not tokens.columns:
            return False
        stored, past = tokens.mask(), mask[:, : tokens.columns]
        if len(stored) not in (1, len(past)):
            raise self._wrong_rows(len(past))
        if self._freed_rows is not None:
            past = past & ~self._freed_rows[:, None]
        if (past & ~stored).any():
            raise ValueError(
                "The attention_mask shows columns that were padding when they were computed; a "
                "PagedCache does not store padding, so pass the same mask for them again."
            )
        return bool((past != stored).any())

    def may_go_on(self, padding: Padding) -> bool:
        """Whether the step under way may go on without `padding`, and read it before it is over."""
        if self._unread is None:
            return False
        if padding not in self._unread:
            self._unread.append(padding)
        return True

    def note_mask(self, mask: LazyMask) -> None:
        """Remember the mask of the forward under way; it says which new columns are tokens."""
        self._masks[threading.get_ident()] = weakref.ref(mask)

    @_exclusive
    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerPages:
        """Write a layer's new K/V ([rows, kv_heads, columns, head_dim]) and show all of them.

        Raises:
            PoolExhausted: too few blocks are free; nothing is written.
            ValueError: K/V of another batch, shape, dtype or device than the layer's.
        """
        self._check_usable()
        _check_states(layer, keys, values)
        if keys.dtype != values.dtype:  # under autocast rotary embeddings leave K in float32
            wider = torch.promote_types(keys.dtype, values.dtype)
            keys, values = keys.to(wider), values.to(wider)
        # First the storage, so that K/V of a wrong kind take no block.
        storage = self.pool.layer_storage(layer, keys, values, self._stored_dims)
        is_due = layer in self._behind or layer in self._idle
        begins = self._has_failed or not is_due
        if begins:
            self._check_retry(layer, keys)
            self._settle()
            self._end_step()
        self._has_failed = True  # until it is done: what handles an exception may be cut short too
        try:
            if begins:
                step = self._begin_step(layer, keys, values)
                # Until now, when it holds blocks, others could have made the storage anew.
                storage = self.pool.layer_storage(layer, keys, values, self._stored_dims)
            else:
                step = self._continue_step(layer, keys)
            new_keys, new_values = step.unpad(keys.detach()), step.unpad(values.detach())
            if self._sharing is not None and not begins:  # the first layer's is how it was found
                self._part(self._sharing.differing(step, new_keys, new_values))
            group = self._group_steps[self.pool.group_of_layer[layer]]
            with self.pool.lock:  # another thread may be moving this memory to make it grow
                storage.write(
                    group.slots(keys.device),
                    group.keep_written(new_keys),
                    group.keep_written(new_values),
                )
            if self._behind == {layer}:
                new = self._read_masks(step)
                if new is not None:
                    self._longer = self.tables.take_back(step.before.extend(step.columns, new))
                self._masks.pop(threading.get_ident(), None)
            self._behind, self._has_failed = self._behind - {layer}, False
        except BaseException:
            if self._behind and self.step is not None:
                self._roll_back(self.step)
            raise
        past = step.before.columns
        visible = past if group.window is None else min(past, group.window - 1)
        return LayerPages(
            group,
            storage,
            keys,
            values,
            new_keys,
            new_values,
            visible + step.columns,
            past - visible,
            self.calls,
            self.backend,
        )

    def _stored_dims(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int]:
        """The widths of a head in memory that the attention backend asks for."""
        backend = backend_for(self.backend, keys.device)
        dims = keys.shape[3], values.shape[3]
        return dims if isinstance(backend, str) else backend.stored_dims(keys.dtype, *dims)

    def can_read(self, layer: int) -> bool:
        """Whether there is a column, and the shape of the layer's K/V is known."""
        group = self.pool.groups[self.pool.group_of_layer[layer]]
        return self.columns > 0 and layer in group.storage

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's K and V that the next query can see, [rows, kv_heads, columns, head_dim]."""
        index, tokens = self.pool.group_of_layer[layer], self.tokens
        group = self.pool.groups[index]
        window = tokens.columns if group.window is None else group.window - 1
        slots = self.tables.column_slots(index, tokens, min(tokens.columns, window))
        storage = group.storage[layer]
        return gather(storage.keys, slots), gather(storage.values, slots)

    @_exclusive
    def known_tables(self) -> tuple[BlockTables, int | None]:
        """The tables, and how many columns of each row have the tokens that its caller thinks; None
        for all, in the rows that its caller thinks."""
        self._settle()
        self._end_step()
        return self.tables, self._known

    def adopt(self, tables: BlockTables, identity: str, known: int | None) -> None:
        """Begin with the rows of `tables`, whose first `known` columns are (None: all) known."""
        self.tables, self.identity, self._known = tables, identity, known

    def start_recording(self) -> None:
        """Keep what leaves a window until the next crop, as assisted decoding asks for first."""
        self.record_past, self.may_repeat = True, self._complete.columns > 0

    @_exclusive
    def note_move(self) -> None:
        """From here on rows may no longer be the sequences that a caller takes them for."""
        self._settle()
        if self._known is None and self.columns:
            self._known = self.columns

    @_exclusive
    def select(self, rows: np.ndarray) -> None:
        """Make the rows `rows` of the present ones; an index may repeat or be left out."""
        self._settle()
        if not self.rows:
            return
        with self._tearing():
            self._replace_tables(rows)
        self._end_step()

    @_exclusive
    def forked(self, rows: np.ndarray) -> Batch:
        """A new batch of rows `rows` that shares every block."""
        self._settle()
        batch = Batch(self.pool, self.backend, self.share_prompts)
        batch.tables = self.tables.select(rows)
        batch._freed_rows = self._freed_among(rows)
        batch.record_past, batch._known = self.record_past, self._known
        batch._only_grows = self._only_grows
        batch.may_hold_padding, batch.identity = self.may_hold_padding, self.identity
        batch._idle, batch._has_completed = set(self._idle), self._has_completed
        return batch

    @_exclusive
    def crop(self, columns: int) -> None:
        """Drop the last `columns` columns and what no window reaches any more.

        Raises:
            ValueError: there are not that many.
            RuntimeError: a window's older tokens are gone.
        """
        self._settle()
        if not 0 <= columns <= self.columns:
            raise ValueError(f"Cannot crop {columns} tokens of a cache that holds {self.columns}.")
        if columns:
            remaining = self.columns - columns
            with self._tearing():
                self.tables.truncate(remaining)
            if self._known is not None:
                self._known = min(self._known, remaining)
        self.tables.drop_outside_windows()
        self._end_step()

    @_exclusive
    def move_out(self, device: torch.device | str) -> None:
        """Copy all blocks to `device` and give them back."""
        tables, _ = self.known_tables()
        snapshot = Snapshot.take(self.pool, tables.tokens.lengths, tables.tables, device)
        self._outside = snapshot, tables.tokens
        tables.release()

    @_exclusive
    def move_in(self) -> None:
        """Take blocks again for what was moved out.

        Raises:
            PoolExhausted: too few are free; it stays outside.
        """
        if self.is_freed:
            self._check_usable()
        if self._outside is not None:
            snapshot, tokens = self._outside
            tables = snapshot.place(self.pool, tokens)
            self.tables, self._outside = tables, None

    @_exclusive
    def free_rows(self, rows: np.ndarray) -> None:
        """Give the blocks of `rows` back; whatever they are given from here on is not stored."""
        self.known_tables()
        freed = self.freed_rows.copy()
        freed[rows] = True
        tokens = self.tables.tokens.without(rows)
        with self.pool.lock, self.pool.change:
            self._freed_rows, self.tables.tokens = freed, tokens
            self.tables.drop_behind_ends()

    @_exclusive
    def reset(self) -> None:
        """Give all blocks back; the batch is as new."""
        if self.is_freed:
            self._check_usable()
        with self._tearing():
            self._clear(for_good=False)

    def free(self) -> None:
        """Give all blocks back for good."""
        with self._lock:
            if not self.is_freed:
                self._clear(for_good=True)

    def _clear(self, for_good: bool) -> None:
        if self._behind and self.step is not None:
            self._roll_back(self.step)
        self._end_step()
        old, tables = self.tables, BlockTables(self.pool)
        self.tables, self.is_freed, self._outside = tables, for_good, None
        old.release()
        self._known = self._freed_rows = self._blamed = None
        self.may_hold_padding = False

    def _begin_step(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Step:
        rows, columns = keys.shape[0], keys.shape[2]
        before = self.tables.tokens
        is_first = not before.columns
        if is_first:
            before = Tokens.none(rows)
            self._known = self._freed_rows = None
            self.may_hold_padding, self.identity = False, self.pool.identity()
        if self._freed_rows is not None and columns > 1:
            raise RuntimeError(
                "Rows of this cache have been freed, so it cannot go on with more than the token "
                "that generate gives an ended row; keep the others by batch_select_indices."
            )
        if len(before) not in (1, rows):
            raise self._wrong_rows(rows)
        if not self.record_past:
            self.tables.drop_outside_windows()
        may_repeat, self.may_repeat = self.may_repeat, False
        if may_repeat and columns > 1 and self._is_repeated(layer, keys):
            raise ValueError(
                f"The forward begins anew with the first of the {self.columns} tokens that are in "
                "the cache; assisted decoding and prompt lookup compute all of input_ids, so pass "
                "a fresh cache, or only the new input_ids with the attention_mask of all."
            )
        is_fork = len(before) != rows  # one row serves as the prompt of many
        if is_fork and self.pool.stateful_layers:
            raise ValueError(
                f"Layers {self.pool.stateful_layers} keep other states than K/V, so one row cannot "
                f"serve {rows}; call batch_repeat_interleave({rows}) first."
            )
        if is_fork:
            before = before.select(np.zeros(rows, np.int64))
        # A step that begins without its mask may have to be undone, or done with fewer rows.
        may_begin = self._only_grows and not is_first and not self.pool.stateful_layers
        new = self._new_tokens(rows, columns, may_begin and columns == 1)
        step = Step(before, before.extend(columns, new), new)
        sharing = None
        if self.share_prompts and is_first and rows > 1:
            states = step.unpad(keys.detach()), step.unpad(values.detach())
            sharing = find_sharing(step, *states, self.pool.block_size)
        behind = set(self.pool.group_of_layer) - self._idle
        thread = threading.current_thread()
        self.num_steps += 1
        # From here on the step is under way, and rolled back if it fails.
        self.step, self._sharing, self._thread = step, sharing, thread
        self._behind, self._before = behind, self.tables.tokens
        if is_first:
            self.tables = BlockTables(self.pool, rows)
        elif is_fork:
            self._replace_tables(np.zeros(rows, np.int64))
        try:
            self.tables.append(step.after, self.record_past, sharing)
        except PoolExhausted:
            new = self._read_masks(step)  # a row that does not grow after all needs no block
            if new is None:
                raise
            self.step = step = Step(before, before.extend(columns, new), new)
            self.tables.append(step.after, self.record_past)
        self._make_group_steps()
        self._pass_over(layer)
        if is_debugging():
            self.pool.check()
        return step

    def _is_repeated(self, layer: int, keys: torch.Tensor) -> bool:
        """Whether most of a forward's keys are, up to rounding, those that the batch begins with:
        of the same tokens in the same positions."""
        if len(keys) != self.rows:
            return False
        index = self.pool.group_of_layer[layer]
        slots = self.tables.column_slots(index, self.tokens, self.columns)[:, : keys.shape[2]]
        where = np.nonzero(slots >= 0)
        slot, row, column = upload([slots[where], *where], keys.device)
        stored = self.pool.groups[index].storage[layer].key_slots
        held, again = stored[slot].float(), keys.detach()[row, :, column].float()
        near = max(1 / 32, torch.finfo(stored.dtype).eps)
        is_near = (again - held).abs() <= near * held.abs()
        return 2 * int((is_near.flatten(1).float().mean(1) > 0.9).sum()) > len(slot)

    def _read_masks(self, step: Step) -> np.ndarray | None:
        """Read the masks that the step has begun without.

        Returns:
            bool [rows, columns], which new columns are tokens, if the step took more for tokens.

        Raises:
            RuntimeError: one hides tokens, which a layer has seen.
            ValueError: one shows a column that was padding and is not stored.
        """
        if self._unread is None:
            return None
        unread, self._unread = self._unread, None
        self._only_grows = False
        facts = [padding.read() for padding in unread]
        hides_tokens = any(fact.hides_tokens for fact in facts)
        if hides_tokens and any(padding.was_guessed for padding in unread):
            raise RuntimeError(
                "The attention_mask hides tokens that it did not hide before, and the step began "
                "before the device had passed it on; the step is undone, so run it once more: then "
                "the mask is read first."
            )
        if hides_tokens:
            self._note_mixed()
        new = self._stored(facts[0].new_tokens, len(step), step.columns)
        all_grow = self._all_grow(new)
        self._only_grows = all_grow and not hides_tokens
        return None if all_grow else new

    def _note_mixed(self) -> None:
        """From here on a row's K/V may be of more or less than its own past alone."""
        if self._known is None:
            self._known = self.columns

    def _make_group_steps(self) -> None:
        assert self.step is not None
        self._group_steps = [
            GroupStep(self.step, self.tables, index, self.record_past, self._sharing)
            for index in range(len(self.pool.groups))
        ]

    def _part(self, rows: np.ndarray) -> None:
        """Give rows that turn out to differ from their leader blocks of their own."""
        if len(rows):
            assert self._sharing is not None
            self.tables.unshare(rows)
            self._sharing.drop(rows)
            self._make_group_steps()

    def _continue_step(self, layer: int, keys: torch.Tensor) -> Step:
        step = self.step
        assert step is not None
        if (keys.shape[0], keys.shape[2]) != (len(step), step.columns):
            raise ValueError(
                f"Layer {layer} got K/V of {keys.shape[0]} rows and {keys.shape[2]} tokens in a "
                f"step of {len(step)} rows and {step.columns} tokens."
            )
        self._idle.discard(layer)
        self._pass_over(layer)
        return step

    def _pass_over(self, layer: int) -> None:
        """Layers run in order: those in front of the one that the first step is at hold no K/V."""
        if not self._has_completed:
            self._idle.update(other for other in self._behind if other < layer)
            self._behind -= self._idle

    def _settle(self) -> None:
        """Roll back the step that a failed forward has left unfinished."""
        self._check_usable()
        if self._behind and self.step is not None:
            behind, is_unexplained = self._behind, not self._has_failed and not self._has_completed
            if is_unexplained and behind == self._blamed:
                raise RuntimeError(
                    f"The model has twice left layers {sorted(behind)} without K/V, so no step of "
                    "this cache is ever complete; if the forwards failed, reset() the cache."
                )
            self._roll_back(self.step)
            if is_unexplained:
                self._blamed = behind
            self._check_usable()
        elif self.step is not None:
            self._has_completed = True

    def _check_retry(self, layer: int, keys: torch.Tensor) -> None:
        """Refuse what follows an unfinished first step, unless it is that step once more.

        Raises:
            RuntimeError: a forward failed, or some layers of the model never get K/V; which of the
                two cannot be told, and the next step would be wrong after the one or the other.
        """
        step = self.step
        if step is None or not self._behind or self._has_completed or self._has_failed:
            return
        if (keys.shape[0], keys.shape[2]) == (len(step), step.columns):
            group = self._group_steps[self.pool.group_of_layer[layer]]
            blocks = self.pool.groups[self.pool.group_of_layer[layer]].storage[layer].key_slots
            stored = blocks[group.slots(blocks.device)]
            again = group.keep_written(step.unpad(keys.detach())).to(stored.dtype)
            if bool((again.float() == stored.float()).flatten(1).all(1).any()):
                return
        behind = sorted(self._behind)
        self._roll_back(step)
        raise RuntimeError(
            f"The forward before this one left layers {behind} without K/V. If it failed, reset() "
            "the cache; if the model does not have these layers, set the config's number of layers "
            "to what it has; and an encoder-decoder model needs EncoderDecoderCache(PagedCache, "
            "DynamicCache)."
        )

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        """K/V become others than those that other states belong to, unless it is refused."""
        before, self._is_torn = self._is_torn, bool(self.pool.stateful_layers)
        try:
            yield
        except Exception:
            self._is_torn = before
            raise

    def rejoin(self) -> None:
        """Note that all other states have followed what `select`, `crop` or `reset` did."""
        self._is_torn = False

    def _roll_back(self, step: Step) -> None:
        self._is_torn = bool(self.pool.stateful_layers)
        rows, columns = len(self._before), step.before.columns
        self.tables.truncate(columns)
        if len(self.tables.tokens) != rows and columns:
            self._replace_tables(np.zeros(rows, np.int64))
        elif len(self.tables.tokens) != rows:
            self.tables = BlockTables(self.pool, rows)
        self._end_step()

    def _end_step(self) -> None:
        behind: set[int] = set()
        if self.step is not None:
            self.step.is_current = False
        self.step, self._behind, self._has_failed = None, behind, False
        self._sharing, self._unread, self._group_steps = None, None, []
        longer, self._longer = self._longer, None
        if longer is not None:
            longer.release()

    def _replace_tables(self, rows: np.ndarray) -> None:
        old, tables = self.tables, self.tables.select(rows)
        freed = self._freed_among(rows)
        self.tables, self._freed_rows = tables, freed
        old.release()

    def _freed_among(self, rows: np.ndarray) -> np.ndarray | None:
        """bool [rows], which of `rows` were freed, if any were."""
        freed = None if self._freed_rows is None else self._freed_rows[rows]
        return None if freed is None or not freed.any() else freed

    def _new_tokens(self, rows: int, columns: int, may_begin: bool) -> np.ndarray | None:
        """bool [rows, columns], which columns are stored, None if all; or will be, if the step
        `may_begin` without its mask."""
        reference = self._masks.get(threading.get_ident())
        mask = None if reference is None else reference()
        if mask is not None and mask.kv_offset + mask.kv_length - mask.shape[2] != self.columns:
            raise RuntimeError(
                "The cache is not as long as when the mask of this forward was made; if several "
                "threads use it, give each a fork() of its own."
            )
        self.may_hold_padding |= mask is None
        padding = None if mask is None else mask.padding
        if padding is not None and may_begin and not padding.has_arrived():
            self._unread = [padding]
            return self._stored(None, rows, columns)
        facts = None if padding is None else padding.read()
        hides_tokens = facts is not None and facts.hides_tokens
        if hides_tokens or (mask is not None and mask.among_tokens is None):
            self._note_mixed()
        new = self._stored(None if facts is None else facts.new_tokens, rows, columns)
        self._only_grows = not hides_tokens and self._all_grow(new)
        return new

    def _all_grow(self, new: np.ndarray | None) -> bool:
        """Whether the last new column is a token in every row that has not been freed."""
        if new is None:
            return True
        grow = new[:, -1] if self._freed_rows is None else new[:, -1] | self._freed_rows
        return bool(grow.all())

    def _stored(self, new: np.ndarray | None, rows: int, columns: int) -> np.ndarray | None:
        """bool [rows, columns], which of the `new` tokens are stored; None if all columns are."""
        if new is not None and new.shape != (rows, columns):
            new = None
        if self._freed_rows is not None:
            kept = np.broadcast_to(~self._freed_rows[:, None], (rows, columns))
            new = kept if new is None else new & kept
        return new

    def _wrong_rows(self, rows: int) -> ValueError:
        repeats, rest = divmod(rows, self.rows)
        if rest or not repeats:
            what = "a cache of one row serves any number, any other must get the rows that it holds"
        else:
            what = f"call batch_repeat_interleave({repeats}) first, for beams or return sequences"
        return ValueError(f"The cache holds {self.rows} rows, the input has {rows}; {what}.")

    def _check_thread(self) -> None:
        thread = self._thread
        if self._behind and thread is not threading.current_thread() and thread.is_alive():
            raise RuntimeError(
                f"{thread.name} is in the middle of a step of this PagedCache, or its forward has "
                "failed there; give each thread a fork(), and free() a cache whose forward failed "
                "in another thread."
            )

    def _check_usable(self) -> None:
        if self.is_freed:
            raise RuntimeError("This PagedCache was freed; make a new one.")
        if self._outside is not None:
            raise RuntimeError("This PagedCache was moved out of its pool; restore() it first.")
        if self._is_torn:
            raise RuntimeError(
                f"A forward or a move was cut short, and layers {self.pool.stateful_layers} keep "
                "states that cannot be rolled back as K/V can; reset() the cache."
            )


def _check_states(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"Layer {layer} got K of shape {tuple(keys.shape)} and V of {tuple(values.shape)}; "
            "both must be [batch, kv_heads, tokens, head_dim]."
        )
