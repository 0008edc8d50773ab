"""Rows and their blocks outside of a pool: in memory for a cache that is moved out, or in a file.

Files are safetensors, so that reading one never runs code. They are written beside their place and
moved there, so that a process that dies leaves the old file or the new one. A checksum tells that a
file is as it was written; it cannot tell who wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .core.block_table import BlockTables, blocks_for, is_behind_end, tokens_in_blocks
from .core.forward import CacheState
from .core.kv_storage import KVStorage
from .core.model_spec import dtype_name
from .core.provenance import Provenance
from .core.row_layout import RowLayout
from .core.rows import freed_rows, habits, move_out, settled_tables, take_habits
from .core.storage import FLOAT8, bits

FORMAT = "hf_paged/2"
States = dict[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Snapshot:
    """Rows of tokens and copies of the blocks that hold them.

    Attributes:
        lengths: int64 [rows], tokens of each row.
        tables: for each layer group int64 [rows, blocks of the longest row], numbers of the copied
            blocks, -1 for none.
        states: K and V of each layer, [blocks of its group, block_size, kv_heads, head_dim]. Slots
            without a token are zero.
        given_dtypes: dtype of each layer's K/V as the model computes them.
        facts: what else is to be known, as JSON has it.
        arrays: further arrays, by name.
    """

    lengths: np.ndarray
    tables: list[np.ndarray]
    states: dict[int, tuple[torch.Tensor, torch.Tensor]]
    given_dtypes: dict[int, torch.dtype]
    facts: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def take(
        cls,
        storage: KVStorage,
        lengths: np.ndarray,
        tables: list[np.ndarray],
        device: torch.device | str | None = "cpu",
    ) -> Snapshot:
        """Copy what `tables` (physical blocks, [rows, width] for each group) hold to `device`, or
        each layer's to where it is."""
        numbers, states, given = [], {}, {}
        allocator, size = storage.allocator, storage.allocator.block_size
        width = _width(blocks_for(lengths, size))
        with allocator.lock:
            for group, whole in zip(allocator.groups, tables, strict=True):
                table = whole[:, :width]
                blocks, number = np.unique(table[table >= 0], return_inverse=True)
                numbered = np.full(table.shape, -1, np.int64)
                numbered[table >= 0] = number
                numbers.append(numbered)
                filled = tokens_in_blocks(lengths, numbered, len(blocks), size)
                empty = torch.from_numpy(np.arange(size) >= filled[:, None])
                index = torch.from_numpy(blocks.astype(np.int64))
                for layer, memory in group.storage.items():
                    copies = [
                        stored[index.to(stored.device)].to(device or stored.device, copy=True)
                        for stored in (memory.keys, memory.values)
                    ]
                    for copy in copies:
                        bits(copy)[empty.to(copy.device)] = 0
                    states[layer] = (copies[0], copies[1])
                    given[layer] = memory.given_dtype
        return cls(lengths, numbers, states, given)

    def place(
        self, storage: KVStorage, tokens: RowLayout, device: torch.device | None
    ) -> BlockTables:
        """Put the blocks into a pool's storage, as those of rows of `tokens`.

        Args:
            device: where K/V of a layer go that has none yet; None is where they are.

        Raises:
            PoolExhausted: it has too few free blocks; nothing has changed.
            ValueError: its layers are of another shape or dtype.
        """
        counts = [int(table.max(initial=-1)) + 1 for table in self.tables]
        allocator = storage.allocator
        with allocator.lock, allocator.change:
            layers = {}
            for layer, (keys, values) in sorted(self.states.items()):
                if not len(keys):
                    continue
                stored = storage.stored(layer)
                home = device or keys.device if stored is None else stored.keys.device
                like = [
                    states[:1].transpose(1, 2).to(home, self.given_dtypes[layer])
                    for states in (keys, values)
                ]
                layers[layer] = storage.of_layer(layer, like[0], like[1])
                if layers[layer].keys.dtype != keys.dtype:
                    raise ValueError(
                        f"Layer {layer} was saved as {keys.dtype}, the pool stores it as "
                        f"{layers[layer].keys.dtype}; use a pool of the same kv_dtype."
                    )
            taken = allocator.allocate(counts)
            for layer, stored in layers.items():
                index = torch.from_numpy(taken[storage.group_of_layer[layer]])
                for memory, states in zip(
                    (stored.keys, stored.values), self.states[layer], strict=True
                ):
                    memory[index.to(memory.device)] = states.to(memory.device)
            tables = [
                np.append(blocks, -1)[table].astype(np.int32)
                for table, blocks in zip(self.tables, taken, strict=True)
            ]
            held = BlockTables.holding(allocator, tokens, tables)
            for group, blocks in zip(allocator.groups, taken, strict=True):
                group.decref(blocks)
        return held

    def save(
        self, path: str | os.PathLike[str], storage: KVStorage, kind: str, identity: str
    ) -> None:
        """Write a file; what was at `path` is replaced when the new one is complete.

        Args:
            path: where.
            storage: where the blocks were.
            kind: what it holds.
            identity: `BlockPool.identity` of the model that computed the K/V.

        Raises:
            OSError: it cannot be written; what was at `path` is as it was.
        """
        path = Path(os.fsdecode(path))
        facts = {
            "kind": kind,
            "identity": identity,
            "block_size": storage.allocator.block_size,
            "windows": [group.window for group in storage.allocator.groups],
            "kv_dtype": None if storage.kv_dtype is None else dtype_name(storage.kv_dtype),
            "given_dtypes": {str(i): dtype_name(dtype) for i, dtype in self.given_dtypes.items()},
            **self.facts,
        }
        arrays = {"lengths": self.lengths, **self.arrays}
        arrays |= {f"table.{index}": table for index, table in enumerate(self.tables)}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
        for layer, (keys, values) in self.states.items():
            tensors |= {f"layer.{layer}.keys": keys, f"layer.{layer}.values": values}
        text = json.dumps(facts)
        metadata = {"format": FORMAT, "facts": text, "checksum": checksum(text, tensors)}
        name = path.with_name(f".hf_paged.{uuid.uuid4().hex}")
        try:
            save_file(tensors, name, metadata)
            with open(name, "rb") as written:
                os.fsync(written.fileno())
            os.replace(name, path)
        except BaseException as error:
            name.unlink(missing_ok=True)
            if isinstance(error, SafetensorError):
                raise OSError(f"{path} cannot be written: {error}.") from error
            raise

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], kind: str, target: Callable[..., KVStorage]
    ) -> Snapshot:
        """Read a file and check that it is whole, of this `kind`, and of the target's layers.

        Args:
            target: returns the storage that it is for, given the file's identity, block_size and
                kv_dtype; or raises Unfit.

        Raises:
            ValueError: it is not; the storage is as before.
        """
        path = os.fsdecode(path)
        if os.path.isdir(path):
            raise IsADirectoryError(f"{path} is a folder, not a file of hf_paged.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise Unfit(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata["checksum"] != checksum(metadata["facts"], tensors):
                raise Unfit("its contents are not what was written")
            snapshot = _parse(tensors, json.loads(metadata["facts"]))
            if snapshot.facts.get("kind") != kind:
                raise Unfit(f"it holds {snapshot.facts.get('kind')!r}, not {kind!r}")
            kv_dtype = snapshot.facts["kv_dtype"]
            storage = target(
                snapshot.facts["identity"],
                block_size=snapshot.facts["block_size"],
                kv_dtype=None if kv_dtype is None else _dtype(kv_dtype),
            )
            _check(snapshot, storage)
        except _MALFORMED as error:
            raise ValueError(f"{path} is damaged or no file of hf_paged: {error}.") from error
        except Unfit as error:
            raise ValueError(f"{path} cannot be loaded: {error}.") from None
        return snapshot


def pack(state: CacheState) -> dict[str, Any]:
    """All that the rows of a cache are, as what any process can unpickle: no pool and no model."""
    tables = settled_tables(state)
    parts = vars(Snapshot.take(state.storage, tables.tokens.lengths, tables.tables, device=None))
    provenance = state.provenance.select(np.arange(len(tables.tokens)))
    return {
        "is_token": tables.tokens.mask(),
        "snapshot": parts | {"states": _viewed(parts["states"], bits)},
        "rows": {"provenance": provenance, "freed": state.freed},
        "habits": habits(state),
    }


def unpack(state: CacheState, parts: dict[str, Any]) -> None:
    """Put what `pack` returned into a state that is new, with K/V on the devices they were on."""
    snapshot, dtype = Snapshot(**parts["snapshot"]), state.storage.kv_dtype
    if dtype in FLOAT8:
        snapshot.states = _viewed(snapshot.states, lambda stored: stored.view(dtype))
    state.tables = snapshot.place(state.storage, RowLayout.of(parts["is_token"]), None)
    vars(state).update(parts["rows"])
    take_habits(state, parts["habits"])


def save_rows(state: CacheState, path: str | os.PathLike[str]) -> None:
    """Write the rows of a cache to a file."""
    tables, provenance = settled_tables(state), state.provenance
    tokens, known = tables.tokens, state.provenance.known_columns
    snapshot = Snapshot.take(state.storage, tokens.lengths, tables.tables)
    own = int(provenance.own_columns(tokens).min(initial=tokens.columns))
    if own < tokens.columns:
        known = own if known is None else min(known, own)
    snapshot.facts |= {"known": known, "may_hold_padding": provenance.may_hold_padding}
    snapshot.facts["autocast"] = provenance.autocast
    snapshot.arrays |= {"is_token": tokens.mask(), "freed_rows": freed_rows(state)}
    identity = provenance.identity or state.model.identity()
    snapshot.save(path, state.storage, "cache", identity)


def place_rows(
    snapshot: Snapshot,
    storage: KVStorage,
    device: torch.device | None,
    path: str | os.PathLike[str],
) -> tuple[BlockTables, Provenance, np.ndarray]:
    """The rows of a file that `save_rows` wrote, in blocks; and bool [rows], which were freed.

    Raises:
        ValueError: they are not those of a cache.
    """
    facts, arrays, lengths = snapshot.facts, snapshot.arrays, snapshot.lengths
    mask, freed, known = arrays.get("is_token"), arrays.get("freed_rows"), facts.get("known", -1)
    if (
        mask is None
        or freed is None
        or (mask.dtype, mask.ndim, len(mask)) != (bool, 2, len(lengths))
        or (mask.sum(1) != lengths).any()
        or (mask.shape[1] and not len(mask))
        or not (known is None or (isinstance(known, int) and 0 <= known <= mask.shape[1]))
        or (freed.dtype, freed.shape) != (bool, lengths.shape)
        or lengths[freed].any()
    ):
        raise ValueError(f"{path} cannot be loaded: its rows are not those of a cache.")
    tables = snapshot.place(storage, RowLayout.of(mask), device)
    if tables.missing():
        raise ValueError(f"{path} cannot be loaded: a row lacks blocks that it needs.")
    provenance = Provenance(facts["identity"], facts.get("autocast"), known)
    provenance.may_hold_padding = bool(facts.get("may_hold_padding", True))
    return tables, provenance, freed


def offload(state: CacheState, device: torch.device | str) -> None:
    """Copy all blocks to `device` and give them back."""
    tables = settled_tables(state)
    snapshot = Snapshot.take(state.storage, tables.tokens.lengths, tables.tables, device)
    move_out(state, (snapshot, tables.tokens))


def restore(state: CacheState) -> None:
    """Take blocks again for what was moved out.

    Raises:
        PoolExhausted: too few are free; it stays outside.
    """
    with state.lock:
        state.check_turn()
        if state.is_freed:
            state.check_usable()
        if state.outside is not None:
            snapshot, tokens = state.outside
            device = state.storage.device or state.model.device
            tables = snapshot.place(state.storage, tokens, device)
            state.tables, state.outside = tables, None


def _viewed(states: States, view: Callable[[torch.Tensor], torch.Tensor]) -> States:
    """`states` in another dtype: pickle knows no tensors of 8-bit floats."""
    return {layer: (view(keys), view(values)) for layer, (keys, values) in states.items()}


def checksum(facts: str, tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all that a file holds, in hexadecimal digits."""
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, dtype_name(tensor.dtype), tensor.shape]).encode())
        if tensor.numel():
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _width(blocks: np.ndarray) -> int:
    """Of the table of rows of so many blocks; never 0, for padding is looked up too."""
    return int(blocks.max(initial=1))


class Unfit(Exception):
    """Why a file cannot be loaded."""


# What comes of reading a file whose parts are not there or not what they should be.
_MALFORMED = (
    SafetensorError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    ValueError,
    RecursionError,
)


def _parse(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> Snapshot:
    states = {}
    for name in [name for name in tensors if name.startswith("layer.")]:
        layer, part = name.split(".")[1:]
        if part == "keys":
            states[int(layer)] = (tensors[name], tensors[f"layer.{layer}.values"])
    arrays = {n: t.numpy() for n, t in tensors.items() if not n.startswith("layer.")}
    lengths = arrays.pop("lengths")
    tables = [arrays.pop(f"table.{index}") for index in range(len(facts["windows"]))]
    given = {layer: _dtype(facts["given_dtypes"][str(layer)]) for layer in states}
    return Snapshot(lengths, tables, states, given, facts, arrays)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


def _check(snapshot: Snapshot, storage: KVStorage) -> None:
    """Raise Unfit where loading would go wrong, or would give K/V that are not the model's."""
    facts, groups = snapshot.facts, storage.allocator.groups
    size = storage.allocator.block_size
    if facts["block_size"] != size:
        raise Unfit(f"its block_size is {facts['block_size']}, the pool's is {size}")
    if facts["windows"] != [group.window for group in groups]:
        raise Unfit(f"its layer groups have windows {facts['windows']}, the pool's have not")
    if facts["kv_dtype"] != (None if storage.kv_dtype is None else dtype_name(storage.kv_dtype)):
        raise Unfit(f"its kv_dtype is {facts['kv_dtype']}, the pool's is {storage.kv_dtype}")
    lengths = snapshot.lengths
    if lengths.ndim != 1 or lengths.dtype != np.int64 or (lengths < 0).any():
        raise Unfit("its row lengths are not counts")
    for layer, (keys, values) in snapshot.states.items():
        if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise Unfit(f"K and V of layer {layer} do not fit each other")
    known = {layer for group in groups for layer in group.storage if len(lengths)}
    if not known <= set(snapshot.states) <= set(storage.group_of_layer):
        raise Unfit(f"it has layers {sorted(snapshot.states)}, which are not the model's")
    for index, (group, table) in enumerate(zip(groups, snapshot.tables, strict=True)):
        shapes = [
            states.shape
            for layer, pair in snapshot.states.items()
            if storage.group_of_layer[layer] == index
            for states in pair
        ]
        if any(len(shape) != 4 or shape[1] != size for shape in shapes):
            raise Unfit(f"K/V of the {group} are not [blocks, block_size, kv_heads, head_dim]")
        stops = blocks_for(lengths, size)
        if table.dtype != np.int64 or table.shape != (len(lengths), _width(stops)):
            raise Unfit(f"the block table of the {group} does not fit its rows")
        blocks = int(table.max(initial=-1)) + 1
        if any(shape[0] != blocks for shape in shapes) or (table < -1).any():
            raise Unfit(f"the block table of the {group} is not that of its blocks")
        if (table[is_behind_end(table, lengths, size)] >= 0).any():
            raise Unfit(f"the block table of the {group} does not end with its rows")
        if group.window is None and ((table >= 0).sum(1) != stops).any():
            raise Unfit(f"the block table of the {group} has holes")
