"""The rows of one cache as its layers see them: which step each layer is in, and what it reads.

transformers updates the layers one by one and never says where a forward begins or ends. A layer
that has seen as many columns as the batch begins a step; one that is behind belongs to the step
that is under way. If a step begins while layers are behind, the forward before it failed, and what
it had appended is rolled back.

An exception may come after any call (Ctrl-C), so state that belongs together is assigned together,
by assignments alone, and a roll-back may be cut short and begun again.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch

from ..backends import backend_for
from ..pool import BlockPool
from ..prefix.circumstances import autocast_dtype
from ..serialization import Snapshot
from ..view import Calls, LayerPages, LazyMask
from .block_table import BlockTables, RowLayout, slots_in
from .caller import given_to_model, is_inside_model
from .metadata import AttentionMetadata, Step
from .model_spec import advise, other_attention
from .sharing import Sharing, find_sharing
from .storage import FLOAT8, LayerStorage, bits, is_debugging
from .transfer import upload

ENDLESS = int(np.iinfo(np.int64).max)
States = dict[int, tuple[torch.Tensor, torch.Tensor]]
Method = TypeVar("Method", bound=Callable[..., Any])


class KVLength(int):
    """`kv_length` as `Cache.get_mask_sizes` returns it: an int that knows whose length it is.

    transformers hands it to the mask function unchanged, which so learns of the cache.
    """

    batch: CacheState

    def __new__(cls, length: int, batch: CacheState) -> KVLength:
        self = super().__new__(cls, length)
        self.batch = batch
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _exclusive(method: Method) -> Method:
    """`method` for one thread at a time, and not in the middle of another thread's step."""

    @wraps(method)
    def exclusive(self: CacheState, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._check_thread()
            return method(self, *args, **kwargs)

    return exclusive  # type: ignore[return-value]


# What a batch knows besides its tokens and blocks, and a copy of it has to know.
_KNOWN = (
    *("record_past", "_known", "_own", "_freed_rows", "may_hold_padding", "identity"),
    *("autocast", "_idle", "_has_completed"),
)


class CacheState:
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
        self._metadata: list[AttentionMetadata] = []
        self._sharing: Sharing | None = None
        self.record_past = False  # whether tokens outside of windows are kept until `crop`
        # Whether the next step may be what is there once more, as assisted decoding begins.
        self.may_repeat = False
        # The columns whose K/V are those of the caller's sequences, each behind its own past alone:
        # not after beam search has moved rows, nor under a mask that is more than a pattern.
        self._known: int | None = None
        # Whether a step came without our mask function, so that padding is stored if there was any.
        self.may_hold_padding = False
        # `BlockPool.identity` when the first token was stored: what the K/V are of.
        self.identity: str | None = None
        self.autocast: str | None = None  # `autocast_dtype` at that time
        self._may_differ = True  # whether the next step may be of another model or config
        # int64 [rows], the columns whose K/V follow from the tokens and the identity; None for all.
        self._own: np.ndarray | None = None
        self._moved: torch.Tensor | None = None  # the same of other positions, not read yet
        self._outside: tuple[Snapshot, RowLayout] | None = None
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
        # The mask of each thread's next step, until that is complete. The next one takes its place,
        # and a forward that makes none of ours drops it: one that fails leaves its mask behind, and
        # a traceback that somebody keeps holds it for as long as it lives.
        self._masks: dict[int, weakref.ref[LazyMask]] = {}
        # The last mask (bool [rows, columns]) that showed all that was stored, and these tokens.
        self._shown: tuple[RowLayout, torch.Tensor] | None = None
        # What the rows held before this step ended some of them at what its mask shows.
        self._whole: BlockTables | None = None
        # Why what reads K/V in the step under way cannot be given views, None if it can.
        self._gathered: str | None = None
        # Whether compiled code has made that step's mask, and whether it makes the next one's.
        self._is_compiled = self._will_be_compiled = False
        self._lock = threading.RLock()
        self._thread = threading.current_thread()  # whose step is under way
        self._was_left = False  # whether others have asked since that its forward has gone on

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def freed_rows(self) -> np.ndarray:
        """bool [rows], whose blocks `free_rows` has given back."""
        return np.zeros(self.rows, bool) if self._freed_rows is None else self._freed_rows

    @property
    def tokens(self) -> RowLayout:
        """The tokens of all complete steps."""
        self._check_usable()
        return self._complete

    @property
    def _complete(self) -> RowLayout:
        return self._before if self._behind else self.tables.tokens

    @property
    def _complete_tables(self) -> BlockTables:
        return self._whole if self._behind and self._whole is not None else self.tables

    @property
    def columns(self) -> int:
        """Columns of all complete steps."""
        return self.tokens.columns

    def block_table(self, group: int) -> np.ndarray:
        """int32 [rows, width], the blocks of a layer group; -1 where a row holds none."""
        self._check_usable()
        return self._complete_tables.tables[group]

    def tokens_of(self, layer: int) -> RowLayout:
        """The tokens that a layer has: in the middle of a step the new ones too, if it has them.

        Before the next step the tokens of one whose forward has failed are not counted.
        """
        complete = self.tokens
        if not self._behind or layer in self._behind | self._idle or not self._is_under_way():
            return complete
        return self.tables.tokens

    def _is_under_way(self) -> bool:
        """Whether the caller is in the forward whose step some layers are behind in."""
        if self._has_failed or self._thread is not threading.current_thread():
            return False
        # Once a model asks what to go on from, the forward before has failed, whoever asks next.
        self._was_left = self._was_left or not is_inside_model()
        return not self._was_left

    def mask_sizes(self, layer: int, queries: int) -> tuple[int, int]:
        """(kv_length, kv_offset) for `queries` new columns, as `DynamicCache` would show them."""
        window = self.pool.groups[self.pool.group_of_layer[layer]].window
        tokens = self.tokens_of(layer)
        visible = tokens.columns if window is None else min(tokens.columns, window - 1)
        length, offset = visible + queries, tokens.columns - visible
        if tokens is not self._complete:
            return length, offset  # a layer asks that has the step's tokens: no mask of this step
        # Where ours is not asked for a mask next, the one that is there is of another forward; a
        # hook may ask in the middle of one.
        if other_attention(self.pool.attending) is not None and not is_inside_model():
            self._masks.pop(threading.get_ident(), None)
        # That of flex_attention is compiled code, and compiled anew for every int of ours.
        if self.pool.attending._attn_implementation != "flex_attention":
            length = KVLength(length, self)
        return length, offset

    def note_mask(self, mask: LazyMask) -> None:
        """Keep the mask of the step that comes; it says which new columns are tokens."""
        self._masks[threading.get_ident()] = weakref.ref(mask)

    def note_compiled(self) -> None:
        """Remember that compiled code makes the mask of the forward under way."""
        self._will_be_compiled = True

    @_exclusive
    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, gathered: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new K/V ([rows, kv_heads, columns, head_dim]) and show all of them.

        Args:
            gathered: why they cannot be shown as views, if not for what the config says.

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
            self._undo_unfinished()
            self._end_step()
        self._has_failed = True  # until it is done: what handles an exception may be cut short too
        self._was_left = False
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
            group = self._metadata[self.pool.group_of_layer[layer]]
            with self.pool.lock:  # another thread may be moving this memory to make it grow
                storage.write(
                    group.slots(keys.device),
                    group.keep_written(new_keys),
                    group.keep_written(new_values),
                )
            is_complete = self._behind <= {layer}
            if is_complete:
                self._masks.pop(threading.get_ident(), None)
            self._behind, self._has_failed = self._behind - {layer}, False
            if is_complete:
                self._drop_whole()
        except BaseException:
            if self._behind and self.step is not None:
                self._roll_back(self.step)
            raise
        if gathered is None and self._gathered is not None:
            gathered = self._gathered
            advise(gathered)
        past = step.before.columns
        visible = past if group.window is None else min(past, group.window - 1)
        pages = LayerPages(
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
            self._is_compiled,
        )
        return pages.views() if gathered is None else pages.tensors(gathered)

    def _stored_dims(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int]:
        """The widths of a head in memory that the attention backend asks for."""
        backend = backend_for(self.backend, keys.device)
        dims = keys.shape[3], values.shape[3]
        return dims if isinstance(backend, str) else backend.stored_dims(keys.dtype, *dims)

    def storage(self, layer: int) -> LayerStorage | None:
        """The blocks of a layer; None while there is none, so that no shape is known."""
        return self.pool.groups[self.pool.group_of_layer[layer]].storage.get(layer)

    def can_read(self, layer: int) -> bool:
        """Whether the layer has had K/V since the cache was new."""
        has_rows = len(self.tokens_of(layer)) > 0 and layer not in self._idle
        return has_rows and self.storage(layer) is not None

    def shown_slots(self, layer: int) -> np.ndarray:
        """int64 [rows, columns], the slots of what a `DynamicCache` would hold in this layer: of a
        window only the columns that it has not dropped; -1 where a column is padding."""
        index, tokens = self.pool.group_of_layer[layer], self.tokens_of(layer)
        tables = self.tables if tokens is self.tables.tokens else self._complete_tables
        window, columns = self.pool.groups[index].window, tokens.columns
        if window is not None:
            columns = min(columns, window - 1)
        return tables.column_slots(index, tokens, columns)

    @_exclusive
    def overwrite(
        self,
        layer: int,
        tokens: RowLayout,
        where: np.ndarray,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write other K/V ([rows, kv_heads, columns, head_dim]) over those of tokens.

        Args:
            layer: whose K/V.
            tokens: those that the cache must still hold.
            where: bool [rows, columns], of the last columns those that are written. Padding among
                them is passed over.

        Raises:
            RuntimeError: the cache holds other tokens by now; nothing is written.
            PoolExhausted: too few blocks are free to copy shared ones; nothing is written.
        """
        tables, _ = self.known_tables()
        if tables.tokens is not tokens:
            raise RuntimeError(
                "The cache has got, dropped or moved tokens since edit() began, so nothing was "
                "written; run forwards and move rows before or behind an edit."
            )
        start = tokens.columns - where.shape[1]
        rows, columns = np.nonzero(where & tokens.mask()[:, start:])
        if not len(rows):
            return
        position = tokens.count_before(start + np.arange(where.shape[1])[None])[rows, columns]
        index, size = self.pool.group_of_layer[layer], self.pool.block_size
        shared = [np.zeros(table.shape, bool) for table in tables.tables]
        shared[index][rows, position // size] = True
        tables.unshare(shared)
        first = start + int(columns.min())
        self._known = first if self._known is None else min(self._known, first)
        storage, device = self.pool.groups[index].storage[layer], keys.device
        slots = slots_in(tables.tables[index], size, rows, position)
        at, row, column = upload([slots, rows, columns], device)
        new = at, keys[row, :, column], values[row, :, column]
        with self.pool.lock:
            try:
                storage.write(*new)
            except BaseException:
                storage.write(*new)  # not K without V
                raise

    @_exclusive
    def known_tables(self) -> tuple[BlockTables, int | None]:
        """The tables, and how many columns of each row have the tokens that its caller thinks; None
        for all, in the rows that its caller thinks."""
        self._settle()
        self._end_step()
        self._read_moved()
        self._may_differ = True
        return self.tables, self._known

    @property
    def own_columns(self) -> np.ndarray:
        """int64 [rows], behind `known_tables` the columns whose K/V are those of the row's tokens
        in a prompt alone, as the model of the cache's identity computes them."""
        every = np.full(self.rows, self.columns)
        return every if self._own is None else np.minimum(every, self._own)

    def adopt(
        self, tables: BlockTables, identity: str, autocast: str | None, known: int | None
    ) -> None:
        """Begin with the rows of `tables`, whose first `known` columns are (None: all) known."""
        self.identity, self.autocast = identity, autocast
        self.tables, self._known = tables, known

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
    def forked(self, rows: np.ndarray) -> CacheState:
        """A new batch of rows `rows` that shares every block."""
        self._settle()
        batch = CacheState(self.pool, self.backend, self.share_prompts)
        batch.tables = self.tables.select(rows)
        vars(batch).update({name: copy.copy(getattr(self, name)) for name in _KNOWN})
        batch._freed_rows, batch._own = self._freed_among(rows), self._own_of(rows)
        return batch

    def packed(self) -> dict[str, Any]:
        """All of it as what any process can unpickle: no lock, no pool and no model."""
        tables, _ = self.known_tables()
        pool, tokens = self.pool, tables.tokens
        parts = vars(Snapshot.take(pool, tokens.lengths, tables.tables, device=None))
        return {
            "config": pool.whole_config,
            "pool": {"block_size": pool.block_size, "kv_dtype": pool.kv_dtype},
            "batch": {"backend": self.backend, "share_prompts": self.share_prompts},
            "known": {name: getattr(self, name) for name in _KNOWN},
            "is_token": tokens.mask(),
            "snapshot": parts | {"states": _viewed(parts["states"], bits)},
        }

    @classmethod
    def unpacked(cls, parts: dict[str, Any]) -> CacheState:
        """What was `packed`, in a pool of its own."""
        batch = cls(BlockPool(parts["config"], **parts["pool"]), **parts["batch"])
        snapshot, dtype = Snapshot(**parts["snapshot"]), batch.pool.kv_dtype
        if dtype in FLOAT8:
            snapshot.states = _viewed(snapshot.states, lambda stored: stored.view(dtype))
        batch.tables = snapshot.place(batch.pool, RowLayout.of(parts["is_token"]))
        vars(batch).update(parts["known"])
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
            self._read_moved()
            if self._own is not None:
                self._own = np.where(self._own < remaining, self._own, ENDLESS)
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
        self._check_between_forwards()
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
        self._known = self._own = self._moved = self._freed_rows = self._blamed = None
        self.may_hold_padding = False

    def _begin_step(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Step:
        rows, columns = keys.shape[0], keys.shape[2]
        before = self.tables.tokens
        is_first = not before.columns
        if is_first:
            before = RowLayout.none(rows)
            self._known = self._own = self._moved = self._freed_rows = None
            self.may_hold_padding, self.identity = False, self.pool.identity()
            self.autocast, self._may_differ = autocast_dtype(), False
        elif columns > 1 or self._may_differ:  # other steps follow one that was looked at
            self._may_differ = self.pool.identity() != self.identity
        given = given_to_model()
        differs = (
            self._may_differ
            or autocast_dtype() != self.autocast
            or self.pool.is_altered()
            or given.embeddings is not None
        )
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
        mask = self._noted_mask()
        new, hidden = self._read(mask, before, rows, columns)
        ended = None if hidden is None or self.record_past else _ended(before, hidden, new)
        if ended is not None:
            assert hidden is not None
            self._note_mixed(int(ended.any(0).argmax()))
            before, hidden = before.hide(ended), hidden & ~ended
        step = Step(before, before.extend(columns, new), new, hidden, mask)
        if given.position_ids is not None:
            step.note_positions(given.position_ids)
        sharing = None
        if self.share_prompts and is_first and rows > 1:
            states = step.unpad(keys.detach()), step.unpad(values.detach())
            sharing = find_sharing(step, *states, self.pool.block_size)
        behind = set(self.pool.group_of_layer) - self._idle
        thread = threading.current_thread()
        self.num_steps += 1
        # From here on the step is under way, and rolled back if it fails.
        self.step, self._sharing, self._thread = step, sharing, thread
        self._shown = None
        if mask is not None and mask.padding is not None and len(mask.padding) == rows:
            is_exact = step.hidden is None and self._freed_rows is None
            self._shown = (step.after, mask.padding) if is_exact else None
        self._behind, self._before = behind, self.tables.tokens
        if is_first:
            self.tables = BlockTables(self.pool, rows)
        elif is_fork:
            self._replace_tables(np.zeros(rows, np.int64))
        if ended is not None:
            self._whole = self.tables.select(np.arange(rows))
            self.tables.end_rows(before)
        if differs:
            self._limit_own(np.full(rows, step.before.columns))
        self.tables.append(step.after, self.record_past, sharing)
        self._make_metadata()
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

    def _note_mixed(self, column: int) -> None:
        """From this column on a row's K/V may be of more or less than its own past alone."""
        self._known = column if self._known is None else min(self._known, column)

    def _limit_own(self, columns: np.ndarray) -> None:
        """Behind so many columns of each row K/V do not follow from the tokens and the identity."""
        own = columns if self._own is None else np.minimum(self._own, columns)
        self._own = own if (own < ENDLESS).any() else None

    def _note_moved(self, step: Step) -> None:
        """Keep where a complete step has moved tokens, on the device, which is not waited for."""
        if step.moved is not None:
            columns = torch.where(step.moved, step.before.columns, ENDLESS)
            self._moved = columns if self._moved is None else self._moved.minimum(columns)

    def _read_moved(self) -> None:
        """Note which rows have got other positions than in a prompt alone."""
        if self._moved is not None:
            self._limit_own(self._moved.cpu().numpy())
            self._moved = None

    def _own_of(self, rows: np.ndarray) -> np.ndarray | None:
        self._read_moved()
        return None if self._own is None else self._own[rows]

    def _make_metadata(self) -> None:
        assert self.step is not None
        self._metadata = [
            AttentionMetadata(self.step, self.tables, index, self.record_past, self._sharing)
            for index in range(len(self.pool.groups))
        ]

    def _part(self, rows: np.ndarray) -> None:
        """Give rows that turn out to differ from their leader blocks of their own."""
        if len(rows):
            assert self._sharing is not None
            parting = np.zeros((len(self.tables.tokens), 1), bool)
            parting[rows] = True
            self.tables.unshare([parting] * len(self.pool.groups))
            self._sharing.drop(rows)
            self._make_metadata()

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
        self._check_between_forwards()
        self._undo_unfinished()

    def _check_between_forwards(self) -> None:
        """Raise RuntimeError in the middle of a forward that has not failed."""
        if self._behind and self._is_under_way():
            raise RuntimeError(
                "A layer or a hook has called this in the middle of a forward of this PagedCache, "
                "when its layers hold different tokens; do it before or behind the forward."
            )

    def _undo_unfinished(self) -> None:
        self._check_usable()
        if self.step is not None and self.step.is_custom:
            self._note_mixed(self.step.before.columns)
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
            self._note_moved(self.step)

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
            group = self._metadata[self.pool.group_of_layer[layer]]
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
        if self._whole is not None:
            ended, self.tables, self._whole = self.tables, self._whole, None
            ended.release()
        self.tables.truncate(columns)
        if len(self.tables.tokens) != rows and columns:
            self._replace_tables(np.zeros(rows, np.int64))
        elif len(self.tables.tokens) != rows:
            self.tables = BlockTables(self.pool, rows)
        if not columns:
            self._own = None
        self._end_step()

    def _end_step(self) -> None:
        behind: set[int] = set()
        if self.step is not None:
            self.step.is_current = False
        self.step, self._behind, self._has_failed = None, behind, False
        self._sharing, self._metadata = None, []
        self._drop_whole()

    def _drop_whole(self) -> None:
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.release()

    def _replace_tables(self, rows: np.ndarray) -> None:
        old, tables = self.tables, self.tables.select(rows)
        freed, own = self._freed_among(rows), self._own_of(rows)
        self.tables, self._freed_rows, self._own = tables, freed, own
        old.release()

    def _freed_among(self, rows: np.ndarray) -> np.ndarray | None:
        """bool [rows], which of `rows` were freed, if any were."""
        freed = None if self._freed_rows is None else self._freed_rows[rows]
        return None if freed is None or not freed.any() else freed

    def _noted_mask(self) -> LazyMask | None:
        """The mask of the step that begins, None where our mask function made none."""
        reference = self._masks.get(threading.get_ident())
        mask = None if reference is None else reference()
        if mask is not None and mask.kv_offset + mask.kv_length - mask.shape[2] != self.columns:
            raise RuntimeError(
                "The cache is not as long as when the mask of this forward was made; if several "
                "threads use it, give each a fork() of its own."
            )
        return mask

    def _read(
        self, mask: LazyMask | None, before: RowLayout, rows: int, columns: int
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What the mask of a step says.

        Returns:
            bool [rows, columns], which new columns are stored, None if all are; and bool [rows,
            past columns], which stored tokens it hides, None if none.

        Raises:
            ValueError: it shows a column that is not stored.
        """
        self.may_hold_padding |= mask is None
        self._gathered = other_attention(self.pool.attending) if mask is None else None
        self._is_compiled, self._will_be_compiled = self._will_be_compiled, False
        padding = None if mask is None else mask.padding
        new = hidden = None
        if padding is not None and before.columns and len(padding) != rows:
            raise self._wrong_rows(len(padding))
        if padding is not None and len(padding) == rows:
            past, new = self._download(padding, columns)
            hidden = None if past is None else self._hidden(before, past)
        if hidden is not None or (mask is not None and mask.among_tokens is None):
            self._note_mixed(before.columns)
        return self._stored(new, rows, columns), hidden

    def _download(
        self, padding: torch.Tensor, columns: int
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """A 2-D mask on the host: its past, None if it shows what is stored, and its new columns.

        The past is compared where it is, so that a decode step brings a few bytes to the host.
        """
        past, new = padding.split([padding.shape[1] - columns, columns], dim=1)
        tokens, shown = self._shown or (None, past)
        if tokens is self.tables.tokens and (shown.shape, shown.device) == (
            past.shape,
            past.device,
        ):
            flat = torch.cat([(past != shown).any()[None], new.reshape(-1)]).cpu().numpy()
            if not flat[0]:
                return None, flat[1:].reshape(new.shape)
        whole = padding.cpu().numpy()
        return whole[:, : past.shape[1]], whole[:, past.shape[1] :]

    def _hidden(self, before: RowLayout, past: np.ndarray) -> np.ndarray | None:
        """bool [rows, columns], the stored tokens that a mask's `past` hides; None if none."""
        stored = before.mask()
        if self._freed_rows is not None:
            past = past & ~self._freed_rows[:, None]
        if (past & ~stored).any():
            raise ValueError(
                "The attention_mask shows columns that were padding when they were computed, or "
                "that an earlier mask hid at a row's end, which a PagedCache does not keep; pass "
                "the same mask for them again, or fork() the cache before it hides them."
            )
        hidden = stored & ~past
        return hidden if hidden.any() else None

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


def _ended(before: RowLayout, hidden: np.ndarray, new: np.ndarray | None) -> np.ndarray | None:
    """Of the `hidden` stored tokens those at the ends of rows that now go on; None if none.

    They are what generate fed to rows that had ended: no text goes on behind tokens that it hides.
    """
    shown = before.mask() & ~hidden
    is_behind = ~np.flip(np.logical_or.accumulate(np.flip(shown, 1), 1), 1)
    goes_on = True if new is None else new.any(1, keepdims=True)
    ended = hidden & is_behind & goes_on
    return ended if ended.any() else None


def _viewed(states: States, view: Callable[[torch.Tensor], torch.Tensor]) -> States:
    """`states` in another dtype: pickle knows no tensors of 8-bit floats."""
    return {layer: (view(keys), view(values)) for layer, (keys, values) in states.items()}


def _check_states(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"Layer {layer} got K of shape {tuple(keys.shape)} and V of {tuple(values.shape)}; "
            "both must be [batch, kv_heads, tokens, head_dim]."
        )
