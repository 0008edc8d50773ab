"""Attention over blocks: one module a backend, and the choice among them."""

from __future__ import annotations

import os

import torch

from .base import AttentionCall, Backend
from .cpu import CPUBackend

__all__ = ["BACKENDS", "AttentionCall", "Backend", "backend_for", "check_backend"]

ENV_BACKEND = "HF_PAGED_BACKEND"
BACKENDS = ("auto", "cpu", "dense")
_CPU = CPUBackend()


def check_backend(name: str) -> str:
    """`name`, or what the environment forces; ValueError if there is no such backend."""
    name = os.environ.get(ENV_BACKEND) or name
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}.")
    return name


def backend_for(name: str, device: torch.device) -> Backend | None:
    """The backend to use for K/V on `device`; None is the dense one, on gathered K/V."""
    return _CPU if device.type == "cpu" and name != "dense" else None
