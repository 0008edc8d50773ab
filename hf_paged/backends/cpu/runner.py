"""Runs the compiled decode kernel: whether it can run here, its plan, its threads."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.metadata import AttentionMetadata, Step
from ..base import AttentionCall

logger = logging.getLogger("hf_paged")

MAX_QUERIES = 8  # new tokens of a row; from there on torch's matrix products win
MIN_TASK = 256  # tokens of a row in one task, so that merging costs little
TASKS_A_THREAD = 4  # so that threads with short rows find more to do
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROCESS = os.getpid()
_failures: list[str] = []


class Plan:
    """Which tokens each task reads and where its results go: the arrays behind a `Call`.

    Args:
        metadata: the step's index arrays.
        begin: int64 [tokens], the first token of its row that each new token looks at.
        heads: query heads of a layer.
        value_dim: head_dim of its values.
        threads: how many threads share the tasks.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        begin: np.ndarray,
        heads: int,
        value_dim: int,
        threads: int,
    ):
        step = metadata.step
        starts, has_new = step.token_starts, step.counts > 0
        end = step.token_position + 1
        # The tokens of each row that any of its queries looks at; a row's first never decrease.
        run_row = np.flatnonzero(has_new)
        first, last = begin[starts[run_row]], end[starts[run_row + 1] - 1]
        if step.hidden_tokens is not None:
            run_row, first, last = _shown_runs(step, run_row, first, last)
        size = max(MIN_TASK, -(-int((last - first).sum()) // (threads * TASKS_A_THREAD)))
        tasks = -(-(last - first) // size)
        run = np.repeat(np.arange(len(run_row)), tasks)
        rank = np.arange(len(run)) - np.repeat(tasks.cumsum() - tasks, tasks)
        share = -(-(last - first) // np.maximum(tasks, 1))  # equal parts of a run
        row, start = run_row[run], first[run] + rank * share[run]
        task_starts = np.searchsorted(row, np.arange(len(step) + 1))
        offset = np.concatenate([[0], (step.counts[row] * heads).cumsum()])
        stop = np.minimum(start + share[run], last[run])
        results = int(offset[-1])
        self.threads = min(threads, len(row))
        self._counters = np.zeros(len(step) + 1, np.int64)
        arrays = {
            "table": np.ascontiguousarray(metadata.table),
            "spans": np.stack([begin, end], axis=1),
            "query_starts": starts,
            "tasks": np.stack([row, start, stop, offset[:-1]], axis=1),
            "task_starts": task_starts,
            "counters": self._counters,
            "outs": np.empty((results, value_dim), np.float32),
            "peaks": np.empty(results, np.float32),
            "totals": np.empty(results, np.float32),
        }
        self._arrays = arrays  # alive as long as their addresses are in use
        self.call = _kernel().Call(
            **{name: array.ctypes.data for name, array in arrays.items()},
            tokens=step.num_tokens,
            rows=len(step),
            heads=heads,
            value_dim=value_dim,
            table_width=metadata.table.shape[1],
            num_tasks=len(row),
            results=results,
            block_size=metadata.block_size,
        )

    def run(self, function: Any, call: AttentionCall) -> torch.Tensor:
        """float32 [tokens, heads, value_dim]."""
        query = call.query.float().contiguous()
        # Held here, as another thread may make the pool grow and put other memory in their place.
        keys, values = call.storage.key_slots, call.storage.value_slots
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        merged = query.new_empty((*query.shape[:2], self.call.value_dim))
        self._counters.fill(0)
        arguments = self.call
        arguments.query, arguments.merged = query.data_ptr(), merged.data_ptr()
        arguments.keys, arguments.values = keys.data_ptr(), values.data_ptr()
        arguments.slots, arguments.kv_heads, arguments.dim = keys.shape
        arguments.scaling, arguments.softcap = call.scaling, call.softcap or 0.0
        arguments.num_sinks = 0 if sinks is None else len(sinks)
        arguments.sinks = 0 if sinks is None else sinks.data_ptr()
        if self.threads > 1:
            team = _parallel()
            assert team is not None  # `unavailable` has looked
            team(function, ctypes.byref(arguments), self.threads, 0)
        else:
            function(ctypes.byref(arguments))
        return merged


def _shown_runs(
    step: Step, rows: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The runs of tokens between `first` and `last` of each row that its mask shows."""
    assert step.hidden_tokens is not None
    runs = []
    for row, start, stop in zip(rows, first, last, strict=True):
        shown = np.pad(~step.hidden_tokens[row, start:stop], 1).astype(np.int8)
        change = np.diff(shown)
        borders = zip(np.flatnonzero(change > 0), np.flatnonzero(change < 0), strict=True)
        runs += [(row, start + low, start + high) for low, high in borders]
    row, low, high = np.array(runs, np.int64).reshape(-1, 3).T
    return row, low, high


def refusal(call: AttentionCall) -> str | None:
    """Why the kernel does not compute `call`, or None if it does."""
    if call.softcap is None and call.metadata.step.most_new > MAX_QUERIES:
        return "many queries"
    if call.query.dtype not in DTYPES or call.storage.keys.dtype != call.query.dtype:
        return f"{call.query.dtype} queries on {call.storage.keys.dtype} K/V"
    if not (call.storage.key_slots.is_contiguous() and call.storage.value_slots.is_contiguous()):
        return "K/V stored by another backend, with padding"
    if not call.metadata.stores_all:
        return "new tokens that leave the window at once"
    return unavailable()


def unavailable() -> str | None:
    """Why the kernel cannot run in this process, or None if it can; said once in the log."""
    if not _has_numba():
        return _fail("Numba is not installed (pip install numba)")
    if _parallel() is None:
        return _fail("this torch has no OpenMP threads to share")
    return next(iter(_failures), None)


def attend(call: AttentionCall) -> torch.Tensor | None:
    """[tokens, heads, value_dim] in the query's dtype; None if the kernel turns out not to run."""
    try:
        return _attend(call)
    except Exception as error:  # a platform that Numba cannot compile for
        _fail(f"it does not run on this machine ({type(error).__name__}: {error})")
        return None


def _attend(call: AttentionCall) -> torch.Tensor:
    function = _function(call.storage.keys.dtype)
    begin, heads, value_dim = call.first_visible, call.query.shape[1], call.value_dim
    # OpenMP's threads do not survive a fork.
    threads = torch.get_num_threads() if os.getpid() == _PROCESS else 1
    # The layers share the array of first tokens itself, so it tells one pattern from another.
    plan = call.metadata.memo(
        ("cpu plan", id(begin), heads, value_dim, threads),
        lambda: Plan(call.metadata, begin, heads, value_dim, threads),
    )
    return plan.run(function, call).to(call.query.dtype)


@cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@cache
def _parallel() -> Callable[..., None] | None:
    """GOMP_parallel(function, its argument, threads, flags) of torch's own OpenMP library."""
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            function = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
        function.restype = None
        return function
    return None


@cache
def _kernel() -> Any:
    return importlib.import_module("hf_paged.backends.cpu.kernel")


@cache
def _function(dtype: torch.dtype) -> Any:
    """The kernel for K/V of `dtype`. Compiles on the first use, or takes what is on disk."""
    notice = threading.Timer(1.0, logger.warning, ["Compiling the CPU attention kernel ..."])
    notice.start()
    try:
        try:
            return _kernel().compiled(dtype, is_kept=True).ctypes
        except Exception as error:  # Numba's folder is missing, full, damaged or another user's
            function = _kernel().compiled(dtype, is_kept=False).ctypes
            logger.warning(
                "Each process compiles the CPU attention kernel, as it cannot be kept on disk (%s: "
                "%s); set NUMBA_CACHE_DIR to a folder that can be written.",
                type(error).__name__,
                error,
            )
            return function
    finally:
        notice.cancel()


def _fail(reason: str) -> str:
    if reason not in _failures:
        _failures.append(reason)
        logger.warning("The CPU attention kernel is off, torch's attention is used: %s.", reason)
    return reason
