"""Attention over blocks: one module a backend, and the choice among them."""

from __future__ import annotations

import os

import torch

from .base import AttentionCall, Backend
from .cpu.prompt import CPUBackend
from .flashinfer import FlashInferBackend

__all__ = ["BACKENDS", "AttentionCall", "Backend", "backend_for", "check_backend"]

ENV_BACKEND = "HF_PAGED_BACKEND"
BACKENDS = ("auto", "flashinfer", "cpu", "dense")
_CPU, _FLASHINFER = CPUBackend(), FlashInferBackend()


def check_backend(name: str) -> str:
    """`name`, or what the environment forces; ValueError if there is no such backend here."""
    name = os.environ.get(ENV_BACKEND) or name
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}.")
    if name == _FLASHINFER.name and not _FLASHINFER.is_installed():
        raise ValueError(
            "backend='flashinfer' needs the package flashinfer-python; install it or choose 'auto'."
        )
    return name


def backend_for(name: str, device: torch.device) -> Backend | str:
    """The backend to use for K/V on `device`, or why they are gathered for the dense one.

    Raises:
        RuntimeError: FlashInfer is asked for by name and does not run on `device`.
    """
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
