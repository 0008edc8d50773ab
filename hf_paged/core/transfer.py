"""Arrays between the host and a device, without making the host wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 16  # bytes


def pinned(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Host tensors of `arrays` that a CUDA `device` can copy from while the host goes on."""
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    return _views(_packed(arrays, pin_memory=True), arrays)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors of `arrays` on `device`: one asynchronous copy for all of them on CUDA."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = _packed(arrays, pin_memory=device.type == "cuda")
    return _views(packed.to(device, non_blocking=True), arrays)


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
    # Whatever torch.set_default_device says.
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pin_memory)


def _packed(arrays: Sequence[np.ndarray], pin_memory: bool) -> torch.Tensor:
    """The bytes of all arrays in one host tensor, each from an aligned offset."""
    offsets = _offsets(arrays)
    packed = _host_memory((offsets[-1],), torch.uint8, pin_memory)
    for array, start in zip(arrays, offsets[:-1], strict=True):
        packed[start : start + array.nbytes].numpy().view(array.dtype)[:] = array
    return packed


def _views(packed: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """The arrays in what `_packed` made of them."""
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
        for array, start in zip(arrays, _offsets(arrays)[:-1], strict=True)
    ]


def _offsets(arrays: Sequence[np.ndarray]) -> list[int]:
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
    return offsets
