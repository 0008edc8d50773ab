"""The cache layers that transformers calls, one a model layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .batch import Batch, KVLength
from .geometry import dynamic_layers, paged_windows
from .view import LayerPages


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer, in the blocks of the cache's pool."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: Batch, index: int, window: int | None):
        self._batch, self._index, self._window = batch, index, window

    @property
    def is_sliding(self) -> bool:
        return self._window is not None

    @property
    def is_initialized(self) -> bool:
        return self._batch.columns > 0

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
        pages: LayerPages = self._batch.update(self._index, key_states, value_states)
        return pages.views()

    def get_seq_length(self) -> int:
        return self._batch.columns

    def get_max_length(self) -> int:
        return -1 if self._window is None else self._window

    def get_mask_sizes(self, query_length: int) -> tuple[KVLength, int]:
        return self._batch.mask_sizes(query_length, self._window)


def make_layers(batch: Batch) -> list[Any]:
    """A paged layer where K/V are cached, transformers' own where a layer keeps other states."""
    windows = paged_windows(batch.pool.config)
    return [
        PagedLayer(batch, index, windows[index]) if index in windows else layer
        for index, layer in enumerate(dynamic_layers(batch.pool.config))
    ]
