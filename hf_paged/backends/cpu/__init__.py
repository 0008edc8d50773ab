"""Attention on the CPU: a compiled kernel for decoding, torch's for prompts."""

from .prompt import CPUBackend

__all__ = ["CPUBackend"]
