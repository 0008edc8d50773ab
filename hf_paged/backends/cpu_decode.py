"""Runs the compiled decode kernel: whether it can run here, its plan, its threads."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ..pool import LayerStorage
from ..step import GroupStep
from .base import AttentionCall

logger = logging.getLogger("hf_paged")

MAX_QUERIES = 8  # new tokens of a row; from there on torch's matrix products win
MIN_TASK = 256  # tokens of a row in one task, so that merging costs little
TASKS_A_THREAD = 4  # so that threads with short rows find more to do
# How the kernel is told a dtype that NumPy or Numba lacks.
NUMPY_VIEWS = {torch.float32: None, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
NO_SINKS = np.zeros(0, np.float32)
# The kernel's threads are started once a process and may not be used by two callers at a time.
_lock = threading.Lock()
_failures: list[str] = []
_started_in: list[int] = []


class Plan(NamedTuple):
    """Which tokens each task reads and where its results go, as the kernel takes them."""

    spans: np.ndarray
    query_starts: np.ndarray
    tasks: np.ndarray
    task_starts: np.ndarray
    results: int


def refusal(call: AttentionCall) -> str | None:
    """Why the kernel does not compute `call`, or None if it does."""
    if call.softcap is None and call.group.step.most_new > MAX_QUERIES:
        return "many queries"
    if call.query.dtype not in NUMPY_VIEWS or call.storage.keys.dtype != call.query.dtype:
        return f"{call.query.dtype} queries on {call.storage.keys.dtype} K/V"
    if not call.group.stores_all:
        return "new tokens that leave the window at once"
    return unavailable()


def unavailable() -> str | None:
    """Why the kernel cannot run in this process, or None if it can; said once in the log."""
    if not _has_numba():
        return _fail("Numba is not installed (pip install numba)")
    if _started_in and _started_in[0] != os.getpid():
        return _fail("this process was forked from one that had started the kernel's threads")
    return next(iter(_failures), None)


def attend(call: AttentionCall) -> torch.Tensor | None:
    """[tokens, heads, value_dim] in the query's dtype; None if the kernel turns out not to run."""
    try:
        kernel, numba = _kernel()
        return _attend(call, kernel, numba)
    except Exception as error:  # a platform that Numba cannot compile for, or threads that fail
        _fail(f"it does not run on this machine ({type(error).__name__}: {error})")
        return None


def _attend(call: AttentionCall, kernel: Any, numba: Any) -> torch.Tensor:
    query, begin, group = call.query, call.first_visible, call.group
    heads, threads = query.shape[1], min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    # The layers share the array of first tokens itself, so it tells one pattern from another.
    plan = group.memo(
        ("cpu plan", id(begin), heads, threads), lambda: _plan(group, begin, heads, threads)
    )
    merged = np.empty((*query.shape[:2], call.storage.values.shape[3]), np.float32)
    with _lock:
        numba.set_num_threads(threads)
        kernel.attend(
            (query if query.dtype == torch.float32 else query.float()).contiguous().numpy(),
            np.float32(call.scaling),
            np.float32(call.softcap or 0.0),
            NO_SINKS if call.sinks is None else call.sinks.float().numpy(),
            *_arrays(call.storage),
            group.table,
            group.block_size,
            plan.spans,
            plan.query_starts,
            plan.tasks,
            plan.task_starts,
            plan.results,
            merged,
        )
    out = torch.from_numpy(merged)
    return out if query.dtype == torch.float32 else out.to(query.dtype)


@cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@cache
def _kernel() -> tuple[Any, Any]:
    """The compiled kernel and numba. Compiles on the first use, or takes what is on disk."""
    notice = threading.Timer(
        1.0, logger.warning, ["Compiling the CPU attention kernel; it is kept on disk ..."]
    )
    notice.start()
    try:
        numba = importlib.import_module("numba")
        kernel = importlib.import_module("hf_paged.backends.cpu_kernel")
        kernel.warm_up()
    finally:
        notice.cancel()
    _started_in.append(os.getpid())
    return kernel, numba


def _plan(group: GroupStep, begin: np.ndarray, heads: int, threads: int) -> Plan:
    step = group.step
    starts, has_new = step.token_starts, step.counts > 0
    end = step.token_position + 1
    # The tokens of each row that any of its queries looks at. First tokens never decrease in a row.
    first, last = np.zeros(len(step), np.int64), np.zeros(len(step), np.int64)
    first[has_new], last[has_new] = begin[starts[:-1][has_new]], end[starts[1:][has_new] - 1]
    size = max(MIN_TASK, -(-int((last - first).sum()) // (threads * TASKS_A_THREAD)))
    tasks = -(-(last - first) // size)
    row = np.repeat(np.arange(len(step)), tasks)
    task_starts = np.concatenate([[0], tasks.cumsum()])
    rank = np.arange(len(row)) - task_starts[row]
    share = -(-(last - first) // np.maximum(tasks, 1))  # equal parts of a row
    start = first[row] + rank * share[row]
    offset = np.concatenate([[0], (step.counts[row] * heads).cumsum()])
    stop = np.minimum(start + share[row], last[row])
    return Plan(
        spans=np.stack([begin, end], axis=1),
        query_starts=starts,
        tasks=np.stack([row, start, stop, offset[:-1]], axis=1),
        task_starts=task_starts,
        results=int(offset[-1]),
    )


def _arrays(storage: LayerStorage) -> tuple[np.ndarray, np.ndarray]:
    """K and V as the kernel takes them, [slots, kv_heads, dim]."""
    if "cpu" not in storage.memo:
        slots = (storage.key_slots, storage.value_slots)
        view = NUMPY_VIEWS[storage.keys.dtype]
        storage.memo["cpu"] = [(t if view is None else t.view(view)).numpy() for t in slots]
    return storage.memo["cpu"]


def _fail(reason: str) -> str:
    if reason not in _failures:
        _failures.append(reason)
        logger.warning("The CPU attention kernel is off, torch's attention is used: %s.", reason)
    return reason
