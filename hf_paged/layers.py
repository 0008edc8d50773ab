"""The cache layers that transformers calls, one a model layer."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from .core.caller import is_inside_model
from .core.forward import CacheState
from .core.metadata import shown_columns
from .core.model_spec import cross_layers, other_attention
from .core.rows import can_read, shown_slots, start_recording
from .core.storage import LayerStorage, gather
from .edit import assign, edit
from .view import COMPILED, TRACED, KVLength, Reader, ReadOnly, no_writes


# A compiled forward breaks its graph here, and gets ordinary numbers and tensors: it can neither
# trace what is decided on the host nor hold a view.
@torch.compiler.disable
def _columns(layer: PagedLayer) -> int:
    return layer.get_seq_length()


@torch.compiler.disable
def _mask_sizes(layer: PagedLayer, queries: int) -> tuple[int, int]:
    length, offset = layer.get_mask_sizes(queries)
    layer.reader.is_compiling = True
    return int(length), offset


@torch.compiler.disable
def _updated(
    layer: PagedLayer, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return layer._show(keys, values, COMPILED)


@torch.compiler.disable
def _read(state: CacheState, index: int, part: Literal["keys", "values"]) -> torch.Tensor | None:
    """A copy of a layer's K or V, [rows, kv_heads, columns, head_dim]; None if it has had none."""
    storage = state.storage.stored(index)
    if storage is None or not can_read(state, index):
        return None
    return gather(getattr(storage, part), shown_slots(state, index)).to(storage.given_dtype)


class PagedLayer(DynamicLayer):
    """Keys and values of one layer, in the blocks of the cache's pool.

    What moves rows or drops tokens does so in the block tables, for all layers at once: the cache's
    own methods do that, and those of a layer raise.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    number: torch.Tensor | None = None  # by which compiled forwards find the cache

    def __init__(self, state: CacheState, reader: Reader, index: int):
        self.state, self.reader, self.index = state, reader, index

    @property
    def is_initialized(self) -> bool:
        return can_read(self.state, self.index)

    @property
    def batch_size(self) -> int:
        return len(self.state.tokens) or -1

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """That of the layer's blocks; AttributeError before there are any, as in transformers."""
        return self._of_storage("device").keys.device

    @property
    def dtype(self) -> torch.dtype:
        """That of K/V as the model computes them; AttributeError before there are any."""
        return self._of_storage("dtype").given_dtype

    def _of_storage(self, name: str) -> LayerStorage:
        storage = self.state.storage.stored(self.index)
        if storage is None:
            raise AttributeError(f"Layer {self.index} has had no K/V, so no {name} is known.")
        return storage

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of the keys that DynamicCache would hold, padding zero; it cannot be written to.

        In a layer or a hook in the middle of a forward these include its tokens.
        """
        return self._copy("keys")

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        with edit(self.state, self.index) as (keys, _):
            assign(keys, states)

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of the values, as of the keys."""
        return self._copy("values")

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        with edit(self.state, self.index) as (_, values):
            assign(values, states)

    def _copy(self, part: Literal["keys", "values"]) -> torch.Tensor | None:
        states = _read(self.state, self.index, part)
        if states is None or torch.compiler.is_compiling():
            return states
        return ReadOnly(states, no_writes(self.index))

    def activate_past_recording(self) -> None:
        start_recording(self.state)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Blocks are taken by `update`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [batch, kv_heads, tokens, head_dim] K/V; returns all that are shown, as views where
        our attention function reads them."""
        if torch.compiler.is_compiling():
            if self.number is None or not self.reader.is_prepared or key_states.shape[2] != 1:
                return _updated(self, key_states, value_states)
            TRACED.states = key_states, value_states, self.number, self.index
            return key_states, value_states
        return self._show(key_states, value_states)

    def _show(
        self, keys: torch.Tensor, values: torch.Tensor, gathered: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self.state.lock:  # what is gathered is read before another thread can go on
            return self.reader.show(self.state.update(self.index, keys, values), gathered)

    def get_seq_length(self) -> Any:  # in a compiled step a tensor, as of a StaticCache
        if torch.compiler.is_compiling():
            return self.reader.columns if self.reader.is_prepared else _columns(self)
        return self.state.tokens_of(self.index).columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if torch.compiler.is_compiling():
            return _mask_sizes(self, query_length)
        state, config = self.state, self.reader.config
        window, tokens = state.storage.group(self.index).window, state.tokens_of(self.index)
        length, offset = shown_columns(window, tokens.columns, query_length)
        if tokens is not state.complete:
            return length, offset  # a layer asks that has the step's tokens: no mask of this step
        if other_attention(config) is not None:
            # Ours is not asked for a mask next, so the one that is there is of another forward; a
            # hook may ask in the middle of one.
            if not is_inside_model():
                state.masks.drop()
            if config._attn_implementation == "flex_attention":
                return length, offset  # it is compiled code, and anew for every int of ours
        return KVLength(length, state, self.reader), offset

    def crop(self, tokens_to_remove: int) -> None:
        raise self._not_alone("crop(...)")

    def reset(self) -> None:
        raise self._not_alone("reset()")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise self._not_alone("reorder_cache(...)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise self._not_alone("batch_repeat_interleave(...)")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise self._not_alone("batch_select_indices(...)")

    def offload(self) -> None:
        raise self._not_alone("offload()")

    def prefetch(self) -> None:
        raise self._not_alone("restore()")

    def _not_alone(self, call: str) -> NotImplementedError:
        return NotImplementedError(
            f"Layers of a PagedCache share their block tables, so that layer {self.index} cannot "
            f"do this alone; call cache.{call}."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """transformers' own layer with the same contents: blocks belong to whole caches."""
        layer: Any = copy.deepcopy(self.state.model.spec.plain_layers[self.index])
        copy_states(self, layer)
        if self.is_initialized:
            layer.update(self.keys, self.values)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = self.get_seq_length()
            layer.record_past = self.state.record_past
        return layer

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A layer is pickled as transformers' own, for the same reason."""
        return _itself, (copy.deepcopy(self),)


def _itself(one: Any) -> Any:
    return one


class PagedSlidingLayer(PagedLayer, DynamicSlidingWindowLayer):
    """That of a layer with a window, or with chunks."""

    is_sliding = True

    @property
    def sliding_window(self) -> int:  # type: ignore[override]
        """Tokens that a query may look back on, itself included."""
        window = self.state.storage.group(self.index).window
        assert window is not None
        return window

    @property
    def _sliding_window_tensor(self) -> torch.Tensor:  # type: ignore[override]
        return torch.tensor(self.sliding_window, dtype=torch.long, device="cpu")

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        return self.get_seq_length()

    @property
    def record_past(self) -> bool:
        """Whether tokens that leave the window are kept until the next `crop`."""
        return self.state.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.state.record_past = value

    def get_max_length(self) -> int:
        return self.sliding_window


class _FollowingLayer(PagedLayer):
    """One whose other states are moved by methods that would move its K/V too."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing here: `PagedCache.crop` has dropped the K/V of all layers."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Nothing here: `PagedCache.reorder_cache` has moved the rows of all layers."""


class PagedIndexedLayer(DynamicIndexedLayer, _FollowingLayer):  # type: ignore[misc]
    """K/V in blocks; the indexer's keys of sparse attention as transformers keeps them."""

    def reset(self) -> None:
        """Drop them; older versions of transformers zero them and go on behind the zeros."""
        self.indexer_keys, self.is_indexer_initialized = None, False
        self.indexer_position_ids = None


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc,override]
    """K/V in blocks; recurrent and convolution states as transformers keeps them."""

    is_compileable = False
    device: Any = None  # that of the states, which set it
    dtype: Any = None


class PagedHybridSlidingLayer(PagedHybridLayer, PagedSlidingLayer):  # type: ignore[misc,override]
    """The same with a window."""


# The layers that keep nothing outside of the blocks; and what stands for each of transformers'.
PLAIN = (PagedLayer, PagedSlidingLayer)
_KINDS: dict[Any, type[PagedLayer]] = {
    DynamicLayer: PagedLayer,
    DynamicSlidingWindowLayer: PagedSlidingLayer,
    DynamicIndexedLayer: PagedIndexedLayer,
    LinearAttentionAndFullAttentionLayer: PagedHybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: PagedHybridSlidingLayer,
}


class CrossLayer(DynamicLayer):
    """K/V of another input, such as an image: they are computed once, and no crop touches them."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: what is dropped are tokens."""


def states_of(layer: Any) -> dict[str, Any]:
    """All that a layer keeps outside of the blocks, by attribute."""
    shared = ("state", "reader", "index", "number")
    return {name: value for name, value in vars(layer).items() if name not in shared}


def copy_states(source: Any, target: Any) -> None:
    """Give `target` a copy of all that the layer `source` keeps outside of the blocks."""
    vars(target).update(copy.deepcopy(states_of(source)))


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


def make_layers(state: CacheState, reader: Reader) -> list[Any]:
    """A paged layer where K/V are cached, transformers' own where a layer keeps other states."""
    spec = state.model.spec
    crossing = cross_layers(spec.config)
    layers: list[Any] = []
    for index, own in enumerate(spec.plain_layers):
        if index in crossing:
            layers.append(CrossLayer())
        elif index in spec.windows:
            layers.append(_paged(state, reader, index, own))
        else:
            layers.append(copy.deepcopy(own))
    return layers


def _paged(state: CacheState, reader: Reader, index: int, own: Any) -> PagedLayer:
    kind = _KINDS[type(own)]
    layer: PagedLayer = kind.__new__(kind)
    if kind not in PLAIN:
        states = copy.deepcopy(vars(own))
        vars(layer).update(  # its K/V are in blocks, where properties find them
            (name, value)
            for name, value in states.items()
            if not isinstance(getattr(kind, name, None), property)
        )
    PagedLayer.__init__(layer, state, reader, index)
    return layer
