"""The cache layers that transformers calls, one a model layer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from .batch import Batch
from .geometry import cross_layers
from .view import LayerPages


# A compiled forward breaks its graph here, and gets ordinary numbers and tensors: it can neither
# trace what is decided on the host nor hold a view.
@torch.compiler.disable
def _columns(batch: Batch) -> int:
    return batch.columns


@torch.compiler.disable
def _mask_sizes(batch: Batch, queries: int, window: int | None) -> tuple[int, int]:
    length, offset = batch.mask_sizes(queries, window)
    return int(length), offset


@torch.compiler.disable
def _updated(
    batch: Batch,
    index: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    position_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    pages: LayerPages = batch.update(index, keys, values, position_ids)
    return pages.tensors()


class PagedLayer(DynamicLayer):
    """Keys and values of one layer, in the blocks of the cache's pool.

    What moves rows or drops tokens does so in the block tables, for all layers at once: the cache's
    own methods do that, and those of a layer have nothing left to do.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: Batch, index: int, window: int | None):
        self._batch, self._index, self._window = batch, index, window

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        return self._window is not None

    @property
    def is_initialized(self) -> bool:
        return self._batch.can_read(self._index)

    @property
    def batch_size(self) -> int:
        return self._batch.rows or -1

    @property
    def record_past(self) -> bool:
        """Whether tokens that leave the window are kept until the next `crop`."""
        return self._batch.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._batch.record_past = value

    def activate_past_recording(self) -> None:
        self.record_past = True

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """A copy of the keys that the next query can see, as DynamicCache would hold them."""
        return self._batch.read(self._index)[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """A copy of the values that the next query can see."""
        return self._batch.read(self._index)[1] if self.is_initialized else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Blocks are taken by `update`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [batch, kv_heads, tokens, head_dim] K/V; returns views of all that are shown."""
        # What the model hands down to its attention layers; versions before 5.24 do not pass it.
        position_ids = kwargs.get("kwargs", {}).get("position_ids")
        if torch.compiler.is_compiling():
            return _updated(self._batch, self._index, key_states, value_states, position_ids)
        pages: LayerPages = self._batch.update(self._index, key_states, value_states, position_ids)
        return pages.views()

    def get_seq_length(self) -> int:
        if torch.compiler.is_compiling():
            return _columns(self._batch)
        return self._batch.columns

    def get_max_length(self) -> int:
        return -1 if self._window is None else self._window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if torch.compiler.is_compiling():
            return _mask_sizes(self._batch, query_length, self._window)
        return self._batch.mask_sizes(query_length, self._window)

    def crop(self, tokens_to_remove: int) -> None:
        """The cache does it."""

    def reset(self) -> None:
        """The cache does it."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The cache does it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicLayer:
        """transformers' own layer with the same K/V: blocks belong to whole caches."""
        layer = (
            DynamicLayer()
            if self._window is None
            else DynamicSlidingWindowLayer(sliding_window=self._window)
        )
        if self.keys is not None and self.values is not None:
            layer.update(self.keys, self.values)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = self.record_past
        return layer


class PagedIndexedLayer(DynamicIndexedLayer, PagedLayer):  # type: ignore[misc]
    """K/V in blocks; the indexer's keys of sparse attention as transformers keeps them."""

    def reset(self) -> None:
        """Drop them; older versions of transformers zero them and go on behind the zeros."""
        self.indexer_keys, self.is_indexer_initialized = None, False
        self.indexer_position_ids = None


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc,override]
    """K/V in blocks; recurrent and convolution states as transformers keeps them."""

    is_compileable = False
    get_max_length = PagedLayer.get_max_length


class CrossLayer(DynamicLayer):
    """K/V of another input, such as an image: they are computed once, and no crop touches them."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: what is dropped are tokens."""


def copy_states(source: Any, target: Any) -> None:
    """Give `target` a copy of all that the layer `source` keeps outside of the blocks."""
    states = {name: value for name, value in vars(source).items() if name != "_batch"}
    vars(target).update(copy.deepcopy(states))


def check_crop(layer: Any, count: int) -> None:
    """Raise RuntimeError where the last `count` tokens cannot be taken out of a layer's states."""
    if not isinstance(layer, LinearAttentionLayer):
        return
    if not layer.record_past:
        raise RuntimeError(
            "This model has layers that keep recurrent or convolution states; call "
            "activate_past_recording() before the forward whose tokens will be cropped."
        )
    if count and any(layer.is_recurrent_states_initialized.values()):
        raise RuntimeError(
            f"Cannot crop {count} tokens: recurrent states cannot be rolled back; fork() the cache "
            "before such a forward, or reset() it and compute the prompt again."
        )


def make_layers(batch: Batch) -> list[Any]:
    """A paged layer where K/V are cached, transformers' own where a layer keeps other states."""
    pool = batch.pool
    crossing = cross_layers(pool.config)
    layers: list[Any] = []
    for index, own in enumerate(pool.plain_layers):
        if index in crossing:
            layers.append(CrossLayer())
        elif index in pool.group_of_layer:
            window = pool.groups[pool.group_of_layer[index]].window
            layers.append(_paged(batch, index, window, own))
        else:
            layers.append(copy.deepcopy(own))
    return layers


def _paged(batch: Batch, index: int, window: int | None, own: Any) -> PagedLayer:
    kind: type[PagedLayer] = PagedLayer
    if isinstance(own, DynamicIndexedLayer):
        kind = PagedIndexedLayer
    elif isinstance(own, LinearAttentionLayer):
        kind = PagedHybridLayer
    layer = kind.__new__(kind)
    if kind is not PagedLayer:
        # Its states; its K/V attributes are hidden by our properties.
        vars(layer).update(copy.deepcopy(vars(own)))
    PagedLayer.__init__(layer, batch, index, window)
    return layer
