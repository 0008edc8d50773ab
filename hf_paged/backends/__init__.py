"""Attention over blocks: one module a backend, and the choice among them."""

from __future__ import annotations

import os

import torch

from .base import AttentionCall, Backend
from .cpu.prompt import CPUBackend
from .flashinfer import FlashInferBackend

__all__ = ["BACKENDS", "AttentionCall", "Backend", "backend_for", "check_backend", "stored_dims"]

ENV_BACKEND = "HF_PAGED_BACKEND"
BACKENDS = ("auto", "flashinfer", "cpu", "dense")
_CPU, _FLASHINFER = CPUBackend(), FlashInferBackend()


def check_backend(name: str | Backend) -> str | Backend:
    """`name`, or what the environment forces; ValueError if there is no such backend here."""
    name = os.environ.get(ENV_BACKEND) or name
    if isinstance(name, Backend):
        return name
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}.")
    if name == _FLASHINFER.name and not _FLASHINFER.is_installed():
        raise ValueError(
            "backend='flashinfer' needs the package flashinfer-python; install it or choose 'auto'."
        )
    return name


def stored_dims(name: str | Backend, keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int]:
    """The widths of a head of K and V in memory that the backend for them asks for."""
    backend, dims = backend_for(name, keys.device), (keys.shape[3], values.shape[3])
    return dims if isinstance(backend, str) else backend.stored_dims(keys.dtype, *dims)


def backend_for(name: str | Backend, device: torch.device) -> Backend | str:
    """The backend to use for K/V on `device`, or why they are gathered for the dense one.

    Raises:
        RuntimeError: FlashInfer is asked for by name and does not run on `device`.
    """
    if not isinstance(name, str):
        return name
    if name == "dense":
        return "the dense backend was asked for"
    if name == _FLASHINFER.name:
        reason = _FLASHINFER.unavailable(device)
        if reason is not None:
            raise RuntimeError(f"backend='flashinfer' cannot be used: {reason}; choose 'auto'.")
        return _FLASHINFER
    if device.type == "cpu":
        return _CPU
    if name == _CPU.name:
        return f"the cpu backend on {device.type}"
    return _FLASHINFER.unavailable(device) or _FLASHINFER
