"""The memory behind all blocks: made at a layer's first K/V, within the bytes that it may take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedConfig

from .allocator import BlockAllocator, BlockGroup
from .model_spec import bytes_per_token, elements_per_token, layer_config
from .storage import LayerStorage, is_debugging

# (keys, values) -> the width of a head of each in memory.
StoredDims = Callable[[torch.Tensor, torch.Tensor], tuple[int, int]]


def head_dims(keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int]:
    """The width of a head of K and V as they are: without padding."""
    return keys.shape[3], values.shape[3]


class KVStorage:
    """K and V of all layers, in the blocks of an allocator.

    Args:
        config: the decoder's config.
        allocator: the blocks.
        max_memory: bytes over all layers, None for no limit.
        dtype, device: what K/V must be of and on, None for any.
        kv_dtype: dtype to store K/V in, None for that of the first K/V seen.
        computed_dtype: what the model is expected to compute K/V in, None if nobody knows.

    Raises:
        ValueError: max_memory is less than one block.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        allocator: BlockAllocator,
        *,
        max_memory: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        kv_dtype: torch.dtype | None = None,
        computed_dtype: torch.dtype | None = None,
    ):
        self.config, self.allocator = config, allocator
        self.max_memory, self.kv_dtype = max_memory, kv_dtype
        self.dtype, self.device = dtype, device
        self.group_of_layer = {i: n for n, g in enumerate(allocator.groups) for i in g.layers}
        if max_memory is not None:
            self._resize(bytes_per_token(config, kv_dtype or computed_dtype))

    def group(self, layer: int) -> BlockGroup:
        """The group whose blocks hold the K/V of `layer`."""
        return self.allocator.groups[self.group_of_layer[layer]]

    def stored(self, layer: int) -> LayerStorage | None:
        """The memory of `layer`; None before its first K/V, when no shape is known."""
        return self.group(layer).storage.get(layer)

    def of_layer(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        stored_dims: StoredDims = head_dims,
    ) -> LayerStorage:
        """The memory for K/V ([batch, kv_heads, tokens, head_dim]) of `layer`, made if need be.

        Args:
            stored_dims: the width of a head of these K and V in memory; zeros fill what it is wider
                than head_dim.

        Raises:
            ValueError: K/V of another shape, dtype or device than those that the layer stores, or
                than what the pool was made for.
        """
        storages = self.group(layer).storage
        storage = storages.get(layer)
        if storage is not None and storage.refusal(keys, values) is None:
            return storage
        if storage is not None:
            self._drop_unused()
        storage = storages.get(layer) or self._make(layer, keys, values, stored_dims(keys, values))
        refusal = storage.refusal(keys, values)
        if refusal is not None:
            raise ValueError(f"Layer {layer} {refusal}")
        return storage

    def _drop_unused(self) -> None:
        """Where no block is held, let the next K/V say anew of what kind all are."""
        groups = self.allocator.groups
        with self.allocator.lock:
            self.allocator.collect()
            if not any(group.num_used for group in groups):
                for group in groups:
                    group.storage.clear()

    @torch.inference_mode(False)
    def _make(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, stored_dims: tuple[int, int]
    ) -> LayerStorage:
        with self.allocator.lock:
            self._size_by(layer, keys, stored_dims)
            group = self.group(layer)
            if layer not in group.storage:
                self._check_declared(layer, keys, values)
                memory = [
                    self._empty_blocks(group, states, dim)
                    for states, dim in zip((keys, values), stored_dims, strict=True)
                ]
                storage = LayerStorage(memory[0], memory[1], head_dims(keys, values), keys.dtype)
                if is_debugging():
                    storage.poison(np.arange(group.capacity))
                self._check_budget(layer, storage)
                group.storage[layer] = storage
            return group.storage[layer]

    def _size_by(self, layer: int, keys: torch.Tensor, stored_dims: tuple[int, int]) -> None:
        """Before the first block is taken, correct what the config said by the first real K/V."""
        if self.max_memory is None or any(group.storage for group in self.allocator.groups):
            return
        dtype = self.kv_dtype or keys.dtype
        actual = keys.shape[1] * sum(stored_dims)
        declared = elements_per_token(layer_config(self.config, layer))
        self._resize(bytes_per_token(self.config, dtype) * actual // declared)

    def _resize(self, bytes_per_token: int) -> None:
        """Give each group as many blocks as the memory holds, as far as none is used."""
        assert self.max_memory is not None
        block = bytes_per_token * self.allocator.block_size
        if self.max_memory < block:
            raise ValueError(
                f"max_memory of {self.max_memory} bytes is less than one block over all layers "
                f"({block} bytes); raise it or lower block_size."
            )
        num_blocks = self.max_memory // block
        for group in self.allocator.groups:
            if group.max_blocks != num_blocks and not group.num_used:
                group.resize(num_blocks)

    def _check_declared(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for new in (keys, values):
            if self.dtype is not None and new.dtype != self.dtype:
                raise ValueError(
                    f"The pool was made for {self.dtype}, layer {layer} is {new.dtype}."
                )
            if self.device is not None and new.device.type != self.device.type:
                raise ValueError(
                    f"The pool was made for {self.device}, layer {layer} is on {new.device}."
                )

    def _check_budget(self, layer: int, new: LayerStorage) -> None:
        groups = self.allocator.groups
        held = sum(s.num_bytes for group in groups for s in group.storage.values())
        if self.max_memory is not None and held + new.num_bytes > self.max_memory:
            raise ValueError(
                f"Layer {layer} stores more than its config says, so max_memory cannot be kept; "
                "bound the pool by num_blocks."
            )

    def _empty_blocks(self, group: BlockGroup, new: torch.Tensor, dim: int) -> torch.Tensor:
        shape = (group.capacity, self.allocator.block_size, new.shape[1], dim)
        make = torch.empty if dim == new.shape[3] else torch.zeros
        return make(shape, dtype=self.kv_dtype or new.dtype, device=new.device)
