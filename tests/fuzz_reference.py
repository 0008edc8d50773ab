"""What a cache must hold after any operation, for the fuzzer: rows of tokens, and their K/V.

K/V of a token depend on it and on all in front of it, so a token behind its past is a node of a
tree. A cache's rows are lists of nodes, one a column, moved about as plain lists are. Of the K/V of
a node two things are known:

- *bit for bit* a cache reads what the model once handed to `update` for this very node, in this
  call or in another one: never another token's, another past's, or what was never written;
- *up to rounding* those, and the hidden states that attention to them led to, are those of a plain
  forward of the same weights over the whole sequence with a `DynamicCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged import PagedCache

PAD = -1  # what a column of padding is among token ids
ROOT = 0  # the node of what is in front of a row's first token: nothing, or padding
TOLERANCE = 2e-3


class Failed(Exception):
    """What a layer raises when a step is to fail."""


class Tree:
    """Tokens behind their past. Padding behind a token (a *hole*) is a node as well: it moves what
    a window shows."""

    def __init__(self) -> None:
        self._parents, self._items = [ROOT], [PAD]
        self._children: dict[tuple[int, int], int] = {}

    def grow(self, node: int, items: Sequence[int]) -> list[int]:
        """The nodes of `items`, which follow `node`."""
        nodes = []
        for item in items:
            if node != ROOT or item != PAD:
                node = self._child(node, item)
            nodes.append(node)
        return nodes

    def _child(self, node: int, item: int) -> int:
        child = self._children.setdefault((node, item), len(self._items))
        if child == len(self._items):
            self._parents.append(node)
            self._items.append(item)
        return child

    def item(self, node: int) -> int:
        return self._items[node]

    def parent(self, node: int) -> int:
        return self._parents[node]

    def path(self, node: int) -> list[int]:
        """The nodes from a row's first token to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self._parents[node]
        return path[::-1]


class Reference:
    """The K/V of each node, and what a plain model says of them.

    Args:
        plain: the model, with another attention than that of hf_paged.
    """

    def __init__(self, plain: PreTrainedModel):
        self.tree = Tree()
        self._plain = plain
        self._expected: dict[int, np.ndarray] = {}
        self._known: list[dict[int, set[bytes]]] = [
            {} for _ in range(plain.config.num_hidden_layers)
        ]

    def note(self, layer: int, node: int, states: bytes) -> None:
        """The model has handed over these K/V of a node."""
        self._known[layer].setdefault(node, set()).add(states)

    def check(self, layer: int, nodes: Sequence[int], states: Sequence[bytes]) -> None:
        """Raise AssertionError unless `states` are K/V that were handed over for these nodes."""
        known = self._known[layer]
        for column, (node, read) in enumerate(zip(nodes, states, strict=True)):
            if self.tree.item(node) == PAD:
                assert not any(read), f"layer {layer}, column {column}: padding has K/V"
            else:
                assert read in known[node], f"layer {layer}, column {column}: not its K/V"

    def expected(self, nodes: Sequence[int]) -> np.ndarray:
        """[nodes, numbers], K/V of all layers and the last hidden states by the plain model."""
        missing = [node for node in nodes if node not in self._expected]
        if missing:
            self._compute(missing)
        return np.stack([self._expected[node] for node in nodes])

    @torch.no_grad()
    def _compute(self, nodes: list[int]) -> None:
        paths: list[list[int]] = []
        covered: set[int] = set()
        for node in sorted(nodes, reverse=True):  # a node comes behind its past
            if node not in covered:
                paths.append(self.tree.path(node))
                covered.update(paths[-1])
        items = [[self.tree.item(node) for node in path] for path in paths]
        width = max(map(len, items))
        inputs = as_inputs([row + [PAD] * (width - len(row)) for row in items])
        cache = DynamicCache()  # of no config, so that it keeps what is behind a window too
        out = self._plain.model(
            **inputs,
            position_ids=positions(inputs["attention_mask"]),
            past_key_values=cache,
        )
        states = [by_column(layer.keys, layer.values) for layer in cache.layers]
        states.append(out.last_hidden_state.numpy())
        for path, row in zip(paths, np.concatenate(states, -1), strict=True):
            self._expected.update(zip(path, row, strict=False))


def as_inputs(items: list[list[int]]) -> dict[str, torch.Tensor]:
    """What a model is given for rows of token ids and PAD, left-padded to one width."""
    width = max(map(len, items))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in items])
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids != PAD).long()}


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def by_column(keys: torch.Tensor, values: torch.Tensor) -> np.ndarray:
    """[rows, heads, columns, dim] K and V -> [rows, columns, numbers]."""
    return torch.cat([keys, values], -1).transpose(1, 2).flatten(2).numpy()


def as_bytes(states: np.ndarray) -> list[list[bytes]]:
    """[rows, columns, numbers] -> the bits of each row's columns."""
    states = np.ascontiguousarray(states)
    return states.view(f"V{states.shape[2] * states.itemsize}")[..., 0].tolist()


@dataclass
class Tracked:
    """A cache, and what it must hold.

    Attributes:
        rows: of each row the node of each column.
        freed: the rows that were given back, and store nothing.
        known: how many columns have the tokens that the caller takes them to have; None for all.
        safe: the columns that a crop can always go back to.
        is_outside: whether it is offloaded.
        has_completed: whether a forward was ever complete.
        is_torn: whether the first forward failed, so that only it or a reset may follow.
    """

    cache: PagedCache
    rows: list[list[int]] = field(default_factory=list)
    freed: list[bool] = field(default_factory=list)
    known: int | None = None
    safe: int = 0
    is_outside: bool = False
    has_completed: bool = False
    is_torn: bool = False

    @property
    def columns(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    @property
    def known_columns(self) -> int:
        return self.columns if self.known is None else min(self.known, self.columns)

    def extend(self, nodes: list[list[int]]) -> None:
        """A forward has appended columns."""
        if not self.columns:
            self.rows, self.freed = [[] for _ in nodes], [False] * len(nodes)
            self.known = None
        elif len(self.rows) != len(nodes):  # one row serves as the prompt of many
            self._select([0] * len(nodes))
        self.rows = [row + new for row, new in zip(self.rows, nodes, strict=True)]
        if not self.cache.state.record_past:
            self.safe = self.columns
        self.has_completed = True

    def reorder_cache(self, rows: torch.Tensor) -> None:
        PagedCache.reorder_cache(self.cache, rows)
        if self.columns:
            self.known = self.known_columns
        self._select(rows.tolist())

    def batch_select_indices(self, rows: torch.Tensor) -> None:
        PagedCache.batch_select_indices(self.cache, rows)
        self._select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        PagedCache.batch_repeat_interleave(self.cache, repeats)
        self._select([row for row in range(len(self.rows)) for _ in range(repeats)])

    def _select(self, rows: list[int]) -> None:
        if self.rows:
            self.rows = [list(self.rows[row]) for row in rows]
            self.freed = [self.freed[row] for row in rows]

    def crop(self, tokens_to_remove: int) -> None:
        PagedCache.crop(self.cache, tokens_to_remove)
        columns = self.columns + int(tokens_to_remove)
        self.rows = [row[:columns] for row in self.rows]
        if self.known is not None:
            self.known = min(self.known, columns)
        self.safe = columns

    def free_rows(self, rows: torch.Tensor) -> None:
        PagedCache.free_rows(self.cache, rows)
        for row in rows.tolist():
            self.freed[row], self.rows[row] = True, [ROOT] * self.columns

    def reset(self) -> None:
        PagedCache.reset(self.cache)
        vars(self).update(vars(Tracked(self.cache)))

    def like(self, cache: PagedCache, repeats: int = 1) -> Tracked:
        """Another cache of these rows, each `repeats` times."""
        new = Tracked(**{**vars(self), "cache": cache})
        new._select([row for row in range(len(self.rows)) for _ in range(repeats)])
        return new

    @contextmanager
    def moves(self) -> Iterator[None]:
        """Within it the moves are followed that generate makes by itself."""
        names = ["reorder_cache", "crop", "free_rows"]
        vars(self.cache).update({name: getattr(self, name) for name in names})
        try:
            yield
        finally:
            for name in names:
                del vars(self.cache)[name]


class Watch:
    """Follows what a model's forwards hand to a cache.

    Args:
        model: its body's forward is replaced until `close`.
        reference: learns of all K/V.

    Attributes:
        tracked: the cache that the next forwards are given.
        fails: the forward from now on, and the layer of it, that raises `Failed` behind its update.
    """

    def __init__(self, model: PreTrainedModel, reference: Reference):
        self.tracked: Tracked | None = None
        self.fails: tuple[int, int] | None = None
        self._reference, self._body = reference, model.model
        self._layers = model.config.num_hidden_layers
        self._forward = self._body.forward
        self._body.forward = self._watched(self._forward)
        self._nodes: list[int] = []  # whose K/V are yet to be compared with the plain model's
        self._states: list[np.ndarray] = []

    def close(self) -> None:
        del self._body.forward

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            tracked = self.tracked
            assert tracked is not None
            assert any(value is tracked.cache for value in kwargs.values())
            nodes = self._new_nodes(tracked, kwargs["input_ids"], kwargs.get("attention_mask"))
            states: dict[int, np.ndarray] = {}
            tracked.cache.update = self._noting(tracked.cache, states)  # type: ignore[method-assign]
            hidden, failed = None, False
            try:
                out = forward(*args, **kwargs)
                hidden = out.last_hidden_state.numpy()
            except Failed:
                failed = True
                raise
            finally:
                del tracked.cache.update
                if len(states) == self._layers:
                    tracked.extend(nodes)
                    self._note(nodes, states, hidden)
                elif failed and states:
                    tracked.is_torn = not tracked.has_completed
                if self.fails is not None:
                    self.fails = None if failed else (self.fails[0] - 1, self.fails[1])
            return out

        return watched

    def _new_nodes(
        self, tracked: Tracked, ids: torch.Tensor, mask: torch.Tensor | None
    ) -> list[list[int]]:
        items = ids if mask is None else ids.where(mask[:, -ids.shape[1] :] > 0, PAD)
        rows, freed = tracked.rows, tracked.freed
        if not tracked.columns:
            rows, freed = [[ROOT]] * len(items), [False] * len(items)
        elif len(rows) == 1:
            rows, freed = rows * len(items), freed * len(items)
        nodes = []
        for row, is_freed, new in zip(rows, freed, items.tolist(), strict=True):
            if is_freed:
                new = [PAD] * len(new)
            nodes.append(self._reference.tree.grow(row[-1], new))
        return nodes

    def _noting(self, cache: PagedCache, states: dict[int, np.ndarray]) -> Callable[..., Any]:
        def update(keys: torch.Tensor, values: torch.Tensor, layer: int, **kwargs: Any) -> Any:
            views = PagedCache.update(cache, keys, values, layer, **kwargs)
            states[layer] = by_column(keys.detach(), values.detach())
            if self.fails == (0, layer):
                raise Failed
            return views

        return update

    def _note(
        self, nodes: list[list[int]], states: dict[int, np.ndarray], hidden: np.ndarray | None
    ) -> None:
        tree = self._reference.tree
        is_token = [[tree.item(node) != PAD for node in row] for row in nodes]
        flat = [node for row in nodes for node in row if tree.item(node) != PAD]
        for layer, columns in states.items():
            kept = as_bytes(columns[is_token][None])[0] if flat else []
            for node, column in zip(flat, kept, strict=True):
                self._reference.note(layer, node, column)
        if hidden is not None and flat:
            parts = [states[layer][is_token] for layer in range(self._layers)]
            self._states.append(np.concatenate([*parts, hidden[is_token]], -1))
            self._nodes += flat

    def verify(self) -> None:
        """Compare all since the last time with the plain model."""
        if self._nodes:
            expected = self._reference.expected(self._nodes)
            found = np.concatenate(self._states)
            self._nodes, self._states = [], []
            worst = np.abs(found - expected).max()
            assert worst < TOLERANCE, f"K/V or hidden states are off by {worst}"


def check_cache(tracked: Tracked, reference: Reference) -> None:
    """Raise AssertionError unless a cache holds what it must, bit for bit."""
    cache, columns = tracked.cache, tracked.columns
    assert cache.get_seq_length() == columns
    item = reference.tree.item
    if not columns:
        assert not any(cache.row_lengths)
        return
    lengths = [sum(item(node) != PAD for node in row) for row in tracked.rows]
    assert cache.row_lengths == lengths
    for index, layer in enumerate(cache.layers):
        if layer.keys is None:  # loaded from a file without blocks, so that no shape is known
            assert not any(lengths)
            continue
        keys, values, window = layer.keys, layer.values, layer.get_max_length()
        shown = columns if window < 0 else min(columns, window - 1)
        assert keys.shape[2] == shown
        for row, states in zip(tracked.rows, as_bytes(by_column(keys, values)), strict=True):
            reference.check(index, row[columns - shown :], states)
