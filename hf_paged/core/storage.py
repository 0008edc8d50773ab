"""The memory behind blocks: K and V of one layer, in blocks of token slots."""

from __future__ import annotations

import os

import numpy as np
import torch

ENV_DEBUG = "HF_PAGED_DEBUG"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class LayerStorage:
    """K and V of one layer.

    Args:
        keys, values: [num_blocks, block_size, kv_heads, stored_dim], the memory; where it is wider
            than head_dim, zeros follow each head.
        dims: head_dim of K and of V.
        given_dtype: dtype of the K/V as the model computes them.

    Attributes:
        kind: what a kernel needs to know of the memory; equal for layers that are alike.
        keys, values: [num_blocks, block_size, kv_heads, head_dim].
        padded_keys, padded_values: the same memory with the zeros behind each head.
        key_slots, value_slots: the same memory as `keys` as [slots, kv_heads, head_dim].
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        dims: tuple[int, int],
        given_dtype: torch.dtype,
    ):
        self._dims, self.given_dtype = dims, given_dtype
        self._set(keys, values)
        shapes = self.padded_keys.shape[2:], self.padded_values.shape[2:]
        self.kind = (*shapes, dims, keys.dtype, given_dtype, keys.device)
        heads = self.keys.shape[2], self.values.shape[2]
        self._expected = (*heads, *dims, given_dtype, given_dtype, keys.device, keys.device)

    def _set(self, padded_keys: torch.Tensor, padded_values: torch.Tensor) -> None:
        keys, values = padded_keys[..., : self._dims[0]], padded_values[..., : self._dims[1]]
        key_slots, value_slots = keys.flatten(0, 1), values.flatten(0, 1)
        # Where states of 3 and of 4 dimensions are written to.
        to_keys, to_values = (
            {3: slots, 4: slots.unsqueeze(2)} for slots in (bits(key_slots), bits(value_slots))
        )
        # One statement each, so that no exception leaves K, or V, in two memories.
        own = padded_keys, keys, key_slots, to_keys
        self.padded_keys, self.keys, self.key_slots, self._to_keys = own
        own = padded_values, values, value_slots, to_values
        self.padded_values, self.values, self.value_slots, self._to_values = own

    def takes(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these are K/V ([batch, kv_heads, tokens, head_dim]) that can be stored here."""
        k, v = keys.shape, values.shape
        if len(k) != 4 or len(v) != 4 or k[0] != v[0] or k[2] != v[2]:
            return False
        given = (k[1], v[1], k[3], v[3], keys.dtype, values.dtype, keys.device, values.device)
        return given == self._expected

    def refusal(self, keys: torch.Tensor, values: torch.Tensor) -> str | None:
        """Why K/V ([batch, kv_heads, tokens, head_dim]) cannot be stored here, None if they can."""
        for name, stored, new in (("K", self.keys, keys), ("V", self.values, values)):
            _, _, heads, dim = stored.shape
            if new.shape[1] != heads or new.shape[3] != dim:
                return (
                    f"stores {name} of (kv_heads, head_dim) {(heads, dim)}, got "
                    f"{(new.shape[1], new.shape[3])}; use a pool made for this model's config."
                )
            if new.dtype != self.given_dtype:
                return (
                    f"has had {name} of {self.given_dtype}, got {new.dtype}; use one dtype for all "
                    "calls on a pool."
                )
            if new.device != stored.device:
                return (
                    f"stores {name} on {stored.device}, got a tensor on {new.device}; use one pool "
                    "for each placement of the model."
                )
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self.padded_keys.nbytes + self.padded_values.nbytes

    @property
    def num_bytes_unpadded(self) -> int:
        """Bytes that K and V would take without the zeros behind each head."""
        return (self.keys.numel() + self.values.numel()) * self.keys.itemsize

    @torch.inference_mode(False)  # what is made in inference mode could be written nowhere else
    def grow(self, num_blocks: int) -> None:
        before = min(len(self.keys), len(self.values))
        # One after the other, so that at most one tensor is held twice. If the second runs out of
        # memory, another try grows what is short.
        if self.padded_keys.shape[0] < num_blocks:
            self._set(_grown(self.padded_keys, num_blocks), self.padded_values)
        if self.padded_values.shape[0] < num_blocks:
            self._set(self.padded_keys, _grown(self.padded_values, num_blocks))
        if is_debugging():
            self.poison(np.arange(before, num_blocks))

    def poison(self, blocks: np.ndarray) -> None:
        """Fill `blocks` with NaN, so that it shows if anybody reads what nobody has written."""
        for stored in (self.keys, self.values):
            nan = torch.full((), torch.nan, dtype=torch.float32, device=stored.device)
            nan = nan.to(stored.dtype)
            index = torch.from_numpy(blocks.copy()).to(stored.device)
            bits(stored)[index] = bits(nan)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks `source` to `target` (int64 [blocks], on the storage's device)."""
        for memory in (bits(self.padded_keys), bits(self.padded_values)):
            memory[target] = memory[source]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V to `slots` (int64 [tokens], same device).

        Args:
            keys, values: [tokens, kv_heads, head_dim], or of one column [rows, kv_heads, 1,
                head_dim].
        """
        dtype = self.keys.dtype
        for target, new in ((self._to_keys, keys), (self._to_values, values)):
            if new.dtype != dtype:
                new = _converted(new, dtype)
            target[new.ndim].index_copy_(0, slots, bits(new))


def is_debugging() -> bool:
    """Whether each step is checked, and blocks that nobody holds are filled with NaN."""
    return os.environ.get(ENV_DEBUG) == "1"


def _grown(memory: torch.Tensor, num_blocks: int) -> torch.Tensor:
    grown = memory.new_zeros((num_blocks, *memory.shape[1:]))
    bits(grown)[: memory.shape[0]] = bits(memory)
    return grown


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; 8-bit floats as integers, as few operations know them."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


def _converted(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`states` in `dtype`; in 8 bits what is out of range becomes the largest number there is."""
    if dtype in FLOAT8:
        largest = torch.finfo(dtype).max
        states = states.clamp(-largest, largest)
    return states.to(dtype)


def gather(blocks: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    """[rows, kv_heads, columns, head_dim] from `blocks`, zeros where a slot is -1.

    Args:
        blocks: [num_blocks, block_size, kv_heads, head_dim].
        slots: int64 [rows, columns].
    """
    if slots.max(initial=-1) < 0:  # there may be no block at all
        (rows, columns), (_, _, heads, dim) = slots.shape, blocks.shape
        return blocks.new_zeros((rows, heads, columns, dim))
    index = torch.from_numpy(np.maximum(slots, 0)).to(blocks.device)
    states = blocks.view(-1, *blocks.shape[2:])[index]
    if slots.min(initial=0) < 0:
        bits(states)[torch.from_numpy(slots < 0).to(blocks.device)] = 0
    return states.transpose(1, 2)
