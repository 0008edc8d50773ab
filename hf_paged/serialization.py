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

from .core.block_table import BlockTables, RowLayout, blocks_for, is_behind_end, tokens_in_blocks
from .core.model_spec import dtype_name
from .core.storage import bits
from .pool import BlockPool
from .prefix.identity import refusal

FORMAT = "hf_paged/2"


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
        pool: BlockPool,
        lengths: np.ndarray,
        tables: list[np.ndarray],
        device: torch.device | str | None = "cpu",
    ) -> Snapshot:
        """Copy what `tables` (physical blocks, [rows, width] for each group) hold to `device`, or
        each layer's to where it is."""
        numbers, states, given = [], {}, {}
        width = _width(blocks_for(lengths, pool.block_size))
        with pool.lock:
            for group, whole in zip(pool.groups, tables, strict=True):
                table = whole[:, :width]
                blocks, number = np.unique(table[table >= 0], return_inverse=True)
                numbered = np.full(table.shape, -1, np.int64)
                numbered[table >= 0] = number
                numbers.append(numbered)
                filled = tokens_in_blocks(lengths, numbered, len(blocks), pool.block_size)
                empty = torch.from_numpy(np.arange(pool.block_size) >= filled[:, None])
                index = torch.from_numpy(blocks.astype(np.int64))
                for layer, storage in group.storage.items():
                    copies = [
                        stored[index.to(stored.device)].to(device or stored.device, copy=True)
                        for stored in (storage.keys, storage.values)
                    ]
                    for copy in copies:
                        bits(copy)[empty.to(copy.device)] = 0
                    states[layer] = (copies[0], copies[1])
                    given[layer] = storage.given_dtype
        return cls(lengths, numbers, states, given)

    def place(self, pool: BlockPool, tokens: RowLayout) -> BlockTables:
        """Put the blocks into a pool, as those of rows of `tokens`.

        Raises:
            PoolExhausted: it has too few free blocks; nothing has changed.
            ValueError: its layers are of another shape or dtype.
        """
        counts = [int(table.max(initial=-1)) + 1 for table in self.tables]
        with pool.lock, pool.change:
            storages = {}
            for layer, (keys, values) in sorted(self.states.items()):
                if not len(keys):
                    continue
                stored = pool.groups[pool.group_of_layer[layer]].storage.get(layer)
                home = pool.home or keys.device if stored is None else stored.keys.device
                like = [
                    states[:1].transpose(1, 2).to(home, self.given_dtypes[layer])
                    for states in (keys, values)
                ]
                storages[layer] = pool.layer_storage(layer, like[0], like[1])
                if storages[layer].keys.dtype != keys.dtype:
                    raise ValueError(
                        f"Layer {layer} was saved as {keys.dtype}, the pool stores it as "
                        f"{storages[layer].keys.dtype}; use a pool of the same kv_dtype."
                    )
            taken = pool.allocate(counts)
            for layer, storage in storages.items():
                index = torch.from_numpy(taken[pool.group_of_layer[layer]])
                for memory, states in zip(
                    (storage.keys, storage.values), self.states[layer], strict=True
                ):
                    memory[index.to(memory.device)] = states.to(memory.device)
            tables = [
                np.append(blocks, -1)[table].astype(np.int32)
                for table, blocks in zip(self.tables, taken, strict=True)
            ]
            held = BlockTables.holding(pool, tokens, tables)
            for group, blocks in zip(pool.groups, taken, strict=True):
                group.decref(blocks)
        return held

    def save(self, path: str | os.PathLike[str], pool: BlockPool, kind: str, identity: str) -> None:
        """Write a file; what was at `path` is replaced when the new one is complete.

        Args:
            path: where.
            pool: where the blocks were.
            kind: what it holds.
            identity: `BlockPool.identity` of the model that computed the K/V.

        Raises:
            OSError: it cannot be written; what was at `path` is as it was.
        """
        path = Path(os.fsdecode(path))
        facts = {
            "kind": kind,
            "identity": identity,
            "block_size": pool.block_size,
            "windows": [group.window for group in pool.groups],
            "kv_dtype": None if pool.kv_dtype is None else dtype_name(pool.kv_dtype),
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
        cls, path: str | os.PathLike[str], kind: str, pool_for: Callable[..., BlockPool]
    ) -> tuple[Snapshot, BlockPool]:
        """Read a file and check that it is whole, of this `kind`, and of the pool's layers.

        Args:
            pool_for: returns the pool that it is for, given the file's block_size and kv_dtype.

        Raises:
            ValueError: it is not; the pool is as before.
        """
        path = os.fsdecode(path)
        if os.path.isdir(path):
            raise IsADirectoryError(f"{path} is a folder, not a file of hf_paged.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise _Wrong(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata["checksum"] != checksum(metadata["facts"], tensors):
                raise _Wrong("its contents are not what was written")
            snapshot = _parse(tensors, json.loads(metadata["facts"]))
            if snapshot.facts.get("kind") != kind:
                raise _Wrong(f"it holds {snapshot.facts.get('kind')!r}, not {kind!r}")
            kv_dtype = snapshot.facts["kv_dtype"]
            pool = pool_for(
                block_size=snapshot.facts["block_size"],
                kv_dtype=None if kv_dtype is None else _dtype(kv_dtype),
            )
            _check(snapshot, pool)
        except _MALFORMED as error:
            raise ValueError(f"{path} is damaged or no file of hf_paged: {error}.") from error
        except _Wrong as error:
            raise ValueError(f"{path} cannot be loaded: {error}.") from None
        return snapshot, pool


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


class _Wrong(Exception):
    """What is wrong with a file."""


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


def _check(snapshot: Snapshot, pool: BlockPool) -> None:
    """Raise _Wrong where loading would go wrong, or would give K/V that are not the model's."""
    facts, size = snapshot.facts, pool.block_size
    reason = refusal(facts["identity"], pool.identity())
    if reason is not None:
        raise _Wrong(reason)
    if facts["block_size"] != size:
        raise _Wrong(f"its block_size is {facts['block_size']}, the pool's is {size}")
    if facts["windows"] != [group.window for group in pool.groups]:
        raise _Wrong(f"its layer groups have windows {facts['windows']}, the pool's have not")
    if facts["kv_dtype"] != (None if pool.kv_dtype is None else dtype_name(pool.kv_dtype)):
        raise _Wrong(f"its kv_dtype is {facts['kv_dtype']}, the pool's is {pool.kv_dtype}")
    lengths = snapshot.lengths
    if lengths.ndim != 1 or lengths.dtype != np.int64 or (lengths < 0).any():
        raise _Wrong("its row lengths are not counts")
    for layer, (keys, values) in snapshot.states.items():
        if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise _Wrong(f"K and V of layer {layer} do not fit each other")
    known = {layer for group in pool.groups for layer in group.storage if len(lengths)}
    if not known <= set(snapshot.states) <= set(pool.group_of_layer):
        raise _Wrong(f"it has layers {sorted(snapshot.states)}, which are not the model's")
    for index, (group, table) in enumerate(zip(pool.groups, snapshot.tables, strict=True)):
        shapes = [
            states.shape
            for layer, pair in snapshot.states.items()
            if pool.group_of_layer[layer] == index
            for states in pair
        ]
        if any(len(shape) != 4 or shape[1] != size for shape in shapes):
            raise _Wrong(f"K/V of the {group} are not [blocks, block_size, kv_heads, head_dim]")
        stops = blocks_for(lengths, size)
        if table.dtype != np.int64 or table.shape != (len(lengths), _width(stops)):
            raise _Wrong(f"the block table of the {group} does not fit its rows")
        blocks = int(table.max(initial=-1)) + 1
        if any(shape[0] != blocks for shape in shapes) or (table < -1).any():
            raise _Wrong(f"the block table of the {group} is not that of its blocks")
        if (table[is_behind_end(table, lengths, size)] >= 0).any():
            raise _Wrong(f"the block table of the {group} does not end with its rows")
        if group.window is None and ((table >= 0).sum(1) != stops).any():
            raise _Wrong(f"the block table of the {group} has holes")
