"""Which K/V each request of a step reads, as pages: index arrays for kernels that take them so.

A *request* is some queries of a row that follow each other and see the same first token, or slide a
window along; so a request is a row of a decode step, a prompt, or a chunk of one. Pages are our
blocks; single slots, where what is seen does not begin with a block; or the step's own states,
where a window has left them before they were stored.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..core.metadata import AttentionMetadata, Step
from ..core.transfer import upload
from .base import AttentionCall


class Requests(NamedTuple):
    """Queries that follow each other, and the K/V that they see.

    Attributes:
        row: int64 [requests].
        query_starts: int64 [requests + 1], among the step's new tokens (indptr).
        first, stop: int64 [requests], tokens of the row: the first that the first query sees, and
            the one behind the last query. Each query sees up to itself.
        window: how many tokens each query sees at most; None is all.
    """

    row: np.ndarray
    query_starts: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    window: int | None

    @property
    def is_decode(self) -> bool:
        return bool((np.diff(self.query_starts) == 1).all())


def requests_of(call: AttentionCall) -> Requests:
    step, begin = call.metadata.step, call.first_visible
    end = step.token_position + 1
    window = call.pattern.size if call.pattern.kind == "sliding" else call.metadata.window
    is_window = (
        window is not None
        and call.metadata.step.hidden is None
        and call.pattern.kind != "chunked"
        and bool((begin == np.maximum(end - window, 0)).all())
    )
    is_border = step.token_row[1:] != step.token_row[:-1]
    if not is_window:
        is_border = is_border | (begin[1:] != begin[:-1])
    starts = np.concatenate([[0], np.flatnonzero(is_border) + 1])
    stops = np.append(starts[1:], step.num_tokens)
    return Requests(
        row=step.token_row[starts],
        query_starts=np.append(starts, step.num_tokens),
        first=begin[starts],
        stop=end[stops - 1],
        window=window if is_window else None,
    )


class Pages(NamedTuple):
    """Which pages of K/V each request reads, as the kernels take it (CSR), on the host.

    Attributes:
        size: tokens in a page.
        indptr: int32 [requests + 1], where each request's pages start.
        indices: int32 [pages].
        last_page_len: int32 [requests], tokens in the last page.
    """

    size: int
    indptr: np.ndarray
    indices: np.ndarray
    last_page_len: np.ndarray


def _ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The whole numbers from each start to its stop: (indptr, whose range, number)."""
    count = stop - start
    indptr = np.concatenate([[0], count.cumsum()])
    owner = np.repeat(np.arange(len(count)), count)
    return indptr, owner, np.arange(indptr[-1]) + np.repeat(start - indptr[:-1], count)


def _shown_tokens(
    step: Step, row: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`_ranges` of tokens of the rows `row`, without those that the mask hides."""
    indptr, owner, token = _ranges(start, stop)
    if step.hidden_tokens is None:
        return indptr, owner, token
    shown = ~step.hidden_tokens[row[owner], token]
    owner, token = owner[shown], token[shown]
    return np.searchsorted(owner, np.arange(len(row) + 1)), owner, token


def block_pages(
    metadata: AttentionMetadata, row: np.ndarray, first: np.ndarray, stop: np.ndarray
) -> Pages:
    """Whole blocks from the one that holds token `first`."""
    size = metadata.block_size
    indptr, owner, block = _ranges(first // size, -(-stop // size))
    indices = metadata.table[row[owner], block]
    return _csr(size, indptr, indices, (stop - 1) % size + 1)


def slot_pages(metadata: AttentionMetadata, requests: Requests) -> Pages:
    """Single slots, as pages of one token."""
    indptr, owner, token = _shown_tokens(metadata.step, requests.row, requests.first, requests.stop)
    indices = metadata.token_slots(requests.row[owner], token)
    return _csr(1, indptr, indices, np.ones(len(requests.row)))


def _csr(size: int, indptr: np.ndarray, indices: np.ndarray, last: np.ndarray) -> Pages:
    return Pages(size, *(array.astype(np.int32) for array in (indptr, indices, last)))


class Unstored:
    """K/V that a window has left before they were stored: past slots, then the step's own states.

    The past is what the blocks still hold of what the queries see.
    """

    def __init__(self, metadata: AttentionMetadata, requests: Requests, device: torch.device):
        before = metadata.step.before.lengths
        first = before.copy()
        np.minimum.at(first, requests.row, requests.first)
        indptr, row, token = _ranges(first, before)
        self._past = len(token)
        self._slots = upload([metadata.token_slots(row, token)], device)[0]
        page_indptr, owner, token = _shown_tokens(
            metadata.step, requests.row, requests.first, requests.stop
        )
        row = requests.row[owner]
        indices = np.where(
            token < before[row],
            indptr[row] + token - first[row],
            self._past + metadata.step.token_starts[row] + token - before[row],
        )
        self.pages = _csr(1, page_indptr, indices, np.ones(len(requests.row)))

    def states(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """[tokens, 1, kv_heads, dim] from `stored` ([slots, ...]) and `new` ([new tokens, ...])."""
        if self._past:
            new = torch.cat([stored[self._slots].to(new.dtype), new])
        return new.contiguous()[:, None]
