"""What callers pass for counts, tokens, masks and rows: near enough is taken, the rest refused."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a whole number of at least 1."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}.")


def token_ids(name: str, ids: Any, ndim: int = 2) -> torch.Tensor:
    """int64 [rows, tokens], or with an `ndim` of 1 [tokens], at least one.

    Args:
        name: of the argument.
        ids: a tensor, which stays where it is, an array, or lists.

    Raises:
        ValueError: they are not that.
    """
    what = "whole numbers [rows, tokens]" if ndim == 2 else "whole numbers [tokens], at least one"
    tensor = _tensor(name, ids, what)
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if not is_whole or len(shape) != ndim or shape == (0,):
        raise ValueError(f"{name} must be {what}, not {dtype} of shape {shape}.")
    return tensor.long()


def padding_mask(mask: Any, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """bool [rows, tokens], False where a column is padding.

    Args:
        mask: a tensor, which stays where it is, an array, or lists.
        shape: what it must be, if there is one.

    Raises:
        ValueError: it is not that.
    """
    tensor = _tensor("attention_mask", mask, "0 and 1 [rows, tokens]")
    if tensor.ndim != 2 or shape not in (None, tuple(tensor.shape)):
        raise ValueError(
            f"The attention_mask must have the shape {shape or '[rows, tokens]'} of the token ids, "
            f"not {tuple(tensor.shape)}."
        )
    return tensor.to(torch.bool)


def row_numbers(indices: Any, rows: int) -> np.ndarray:
    """int64, those of `rows` rows that `indices` are: numbers, a slice, or a bool for each row.

    Raises:
        IndexError: they are none of these, or there are no such rows.
    """
    if isinstance(indices, torch.Tensor):
        indices = indices.cpu().numpy()
    elif isinstance(indices, tuple):  # of which numpy would make an axis each
        indices = list(indices)
    try:
        numbers = np.arange(rows)[indices]
    except IndexError:
        numbers = None
    if numbers is None or numbers.ndim > 1:
        raise IndexError(
            f"Rows are chosen by numbers below {rows} or by a bool for each of the {rows}, not by "
            f"{indices!r}."
        )
    return numbers.reshape(-1)


def _tensor(name: str, value: Any, what: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):  # a tokenizer's BatchEncoding
        raise ValueError(
            f"{name} must be {what}, not a {type(value).__name__}; pass what is in it, as **inputs."
        )
    try:
        array = np.array(value)
        return torch.from_numpy(array if array.size else array.astype(np.int64))
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be {what}: a tensor, an array or lists of one length, not "
            f"{reprlib.repr(value)}."
        ) from None
