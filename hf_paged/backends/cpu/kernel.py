"""Decode attention that walks the block table, compiled by Numba.

One task is a range of a row's tokens: it reads each K and V once for all heads of a KV head, with a
running softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The
tasks of a row are merged by their log-sum-exp, as in FlashDecoding. What is read next is prefetched
through the table a few tokens at a time, so that memory and arithmetic are busy together: these
tokens' V while their logits are computed, the next ones' K while V is summed up.

All arithmetic is float32. bfloat16 comes in as uint16 and float16 as int16, since NumPy lacks the
one and Numba the other. The two inner products are written as LLVM vectors (codegen.py).

What is compiled is a C function for the threads of torch's own OpenMP team. Numba's threads are a
second team: on every core a thread of each waits in a loop for work and takes the core's time from
the other, which cost more than the attention over a short context.

The kernels are at module level because Numba's disk cache never hits on closures.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, from_dtype, njit, types

from .codegen import (
    CHUNK,
    TILE,
    array_at,
    bits_to_float,
    fetch_and_increment,
    find_peak,
    make_score_tile,
    make_weigh_tile,
    prefetch,
)

LINE = 64  # bytes in a cache line
# Sums may be reordered and multiplications fused, but infinities and NaN keep their meaning.
FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
SMALLEST = np.float32(-87.0)  # exp of less would be subnormal
LOWEST = np.float32(-np.inf)


class Call(ctypes.Structure):
    """The arguments of the kernel: addresses of C-contiguous arrays, their sizes, and numbers.

    Attributes:
        query: float32 [tokens, heads, dim].
        keys, values: [slots, kv_heads, dim] and [slots, kv_heads, value_dim].
        sinks: float32 [num_sinks], one logit a head, or none at all.
        merged: float32 [tokens, heads, value_dim], where the output is put.
        table: int32 [rows, table_width], the physical block of each logical block.
        spans: int64 [tokens, 2], the first token that each new token sees, and the last plus one.
        query_starts: int64 [rows + 1], where each row's new tokens start.
        tasks: int64 [num_tasks, 4]: row, first token, last plus one, where its results start.
        task_starts: int64 [rows + 1], where each row's tasks start.
        counters: int64 [rows + 1], zeros: tasks that are done of each row, tasks that are taken.
        outs, peaks, totals: float32 [results, value_dim] and [results], a result for each query
            and head of each task.
        scaling, softcap: factor on the logits, and their cap after it (0 for none).
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("query", "keys", "values", "sinks", "merged")),
        *((name, ctypes.c_int64) for name in ("table", "spans", "query_starts", "tasks")),
        *((name, ctypes.c_int64) for name in ("task_starts", "counters", "outs", "peaks")),
        *((name, ctypes.c_int64) for name in ("totals", "tokens", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("value_dim", "slots", "num_sinks", "rows")),
        *((name, ctypes.c_int64) for name in ("table_width", "num_tasks", "results")),
        ("block_size", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


_score_4, _score_3, _score_2, _score_1 = (make_score_tile(heads) for heads in (4, 3, 2, 1))
_weigh_4, _weigh_3, _weigh_2, _weigh_1 = (make_weigh_tile(heads) for heads in (4, 3, 2, 1))


@njit(inline="always")
def _tile_heads(rest):
    """How many of the `rest` heads that are left go into the next tile."""
    return 3 if rest == 5 else min(rest, 4)


@njit(fastmath=FASTMATH, inline="always")
def _exp(x):
    """exp(x) for x <= 0, to about an ulp; unlike math.exp it vectorises (Cephes' expf)."""
    x = SMALLEST if x < SMALLEST else x  # max() would not keep a NaN
    n = np.floor(x * LOG2_E + np.float32(0.5))
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * bits_to_float((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(fastmath=FASTMATH)
def _prefetch_tokens(blocks, kv_head, slots, first, last):
    """Ask for one head of the K or V of `slots[first:last]`."""
    step = LINE // blocks.itemsize
    for i in range(first, last):
        for d in range(0, blocks.shape[2], step):
            prefetch(blocks, slots[i], kv_head, d)


@njit(fastmath=FASTMATH)
def _find_slots(table, row, block_size, start, count, slots):
    logical, offset = start // block_size, start % block_size
    for i in range(count):
        slots[i] = table[row, logical] * block_size + offset
        offset += 1
        if offset == block_size:
            logical, offset = logical + 1, 0


@njit(fastmath=FASTMATH)
def _score(query, q, keys, values, kv_head, slots, count, scores, result):
    """Logits of the heads of one KV head over the first `count` tokens of a chunk."""
    group = query.shape[1] // keys.shape[1]
    head, result, last = kv_head * group, result + kv_head * group, (kv_head + 1) * group
    first = head
    while head < last:
        size = _tile_heads(last - head)
        for i in range(0, count, TILE):
            if head == first:
                _prefetch_tokens(values, kv_head, slots, i, min(i + TILE, count))
            if size == 4:
                _score_4(query, q, head, keys, kv_head, slots, i, scores, result)
            elif size == 3:
                _score_3(query, q, head, keys, kv_head, slots, i, scores, result)
            elif size == 2:
                _score_2(query, q, head, keys, kv_head, slots, i, scores, result)
            else:
                _score_1(query, q, head, keys, kv_head, slots, i, scores, result)
        head += size
        result += size


@njit(fastmath=FASTMATH)
def _weigh(scores, result, low, high, values, kv_head, group, slots, outs, at):
    """Add the weighted values of tokens `low` to `high` of a chunk to `outs`."""
    head, last = kv_head * group, (kv_head + 1) * group
    while head < last:
        r, a, size = result + head, at + head, _tile_heads(last - head)
        if size == 4:
            _weigh_4(scores, r, low, high, values, kv_head, slots, outs, a)
        elif size == 3:
            _weigh_3(scores, r, low, high, values, kv_head, slots, outs, a)
        elif size == 2:
            _weigh_2(scores, r, low, high, values, kv_head, slots, outs, a)
        else:
            _weigh_1(scores, r, low, high, values, kv_head, slots, outs, a)
        head += size


@njit(fastmath=FASTMATH)
def _weights(scores, result, peak):
    """Turn a chunk's logits into weights against `peak`; their sum."""
    total = np.float32(0.0)
    for i in range(CHUNK):
        weight = _exp(scores[result, i] - peak)
        scores[result, i] = weight
        total += weight
    return total


@njit(fastmath=FASTMATH)
def _softmax(scores, result, low, high, outs, peaks, totals, at):
    """Turn a chunk's logits `low` to `high` into weights, and what is summed up so far to match."""
    for i in range(low):
        scores[result, i] = LOWEST
    for i in range(high, CHUNK):
        scores[result, i] = LOWEST
    peak = find_peak(scores, result, peaks[at])
    if peak == LOWEST:  # all logits are -inf so far: nothing to weigh
        for i in range(CHUNK):
            scores[result, i] = np.float32(0.0)
        return
    if not peak <= peaks[at]:  # higher, or NaN
        scale = _exp(peaks[at] - peak)
        totals[at] *= scale
        for d in range(outs.shape[1]):
            outs[at, d] *= scale
        peaks[at] = peak
    totals[at] += _weights(scores, result, peak)


@njit(fastmath=FASTMATH)
def _scaled(query, first, last, scaling):
    """Query tokens `first` to `last`, times `scaling`."""
    scaled = np.empty((last - first, query.shape[1], query.shape[2]), np.float32)
    for q in range(first, last):
        for head in range(query.shape[1]):
            for d in range(query.shape[2]):
                scaled[q - first, head, d] = query[q, head, d] * scaling
    return scaled


@njit(fastmath=FASTMATH)
def _attend_task(
    query, keys, values, table, block_size, spans, first, last, task, softcap, outs, peaks, totals
):
    """Attention of tokens `first` to `last`, of one row, over the task's range of its tokens.

    `query` is that of these tokens alone, scaled.
    """
    row, begin, stop, offset = task
    heads, kv_heads = query.shape[1], keys.shape[1]
    group = heads // kv_heads
    results = (last - first) * heads
    for result in range(offset, offset + results):
        peaks[result], totals[result] = LOWEST, np.float32(0.0)
        for d in range(outs.shape[1]):
            outs[result, d] = np.float32(0.0)
    scores = np.empty((results, CHUNK), np.float32)
    slots, ahead = np.empty(CHUNK, np.intp), np.empty(CHUNK, np.intp)
    _find_slots(table, row, block_size, begin, min(CHUNK, stop - begin), ahead)
    for start in range(begin, stop, CHUNK):
        count = min(CHUNK, stop - start)
        for i in range(CHUNK):  # a tile that reaches past the end reads the last token again
            slots[i] = ahead[min(i, count - 1)]
        coming = min(CHUNK, stop - start - count)
        _find_slots(table, row, block_size, start + count, coming, ahead)
        for kv_head in range(kv_heads):
            for q in range(last - first):
                _score(query, q, keys, values, kv_head, slots, count, scores, q * heads)
        if softcap > 0:
            for result in range(results):
                for i in range(count):
                    scores[result, i] = softcap * np.tanh(scores[result, i] / softcap)
        for q in range(last - first):
            low = max(spans[first + q, 0] - start, 0)
            high = min(spans[first + q, 1] - start, count)
            for result in range(q * heads, (q + 1) * heads):
                if low < high:
                    at = offset + result
                    _softmax(scores, result, low, high, outs, peaks, totals, at)
        for kv_head in range(kv_heads):
            _prefetch_tokens(keys, kv_head, ahead, 0, coming)
            for q in range(last - first):
                low = max(spans[first + q, 0] - start, 0)
                high = min(spans[first + q, 1] - start, count)
                result = q * heads
                at = offset + result
                _weigh(scores, result, low, high, values, kv_head, group, slots, outs, at)


@njit(fastmath=FASTMATH)
def _merge(outs, peaks, totals, first, last, tasks, first_task, last_task, sinks, merged):
    """Merge the tasks of a row, whose tokens are `first` to `last`, by their log-sum-exp."""
    for q in range(first, last):
        for head in range(merged.shape[1]):
            local = (q - first) * merged.shape[1] + head
            peak = sinks[head] if len(sinks) else LOWEST
            for task in range(first_task, last_task):
                peak = max(peak, peaks[tasks[task, 3] + local])
            total = np.float32(0.0)
            if len(sinks) and peak != LOWEST:
                total = _exp(sinks[head] - peak)
            for d in range(merged.shape[2]):
                merged[q, head, d] = np.float32(0.0)
            for task in range(first_task, last_task):
                at = tasks[task, 3] + local
                if peaks[at] != LOWEST:
                    weight = _exp(peaks[at] - peak)
                    total += weight * totals[at]
                    for d in range(merged.shape[2]):
                        merged[q, head, d] += weight * outs[at, d]
            if total != 0:  # a NaN stays one
                for d in range(merged.shape[2]):
                    merged[q, head, d] /= total


@njit(fastmath=FASTMATH)
def _attend(call, element):
    """Take tasks until none is left; whoever ends the last one of a row merges the row."""
    query = array_at(call.query, (call.tokens, call.heads, call.dim), np.float32)
    keys = array_at(call.keys, (call.slots, call.kv_heads, call.dim), element)
    values = array_at(call.values, (call.slots, call.kv_heads, call.value_dim), element)
    sinks = array_at(call.sinks, (call.num_sinks,), np.float32)
    merged = array_at(call.merged, (call.tokens, call.heads, call.value_dim), np.float32)
    table = array_at(call.table, (call.rows, call.table_width), np.int32)
    spans = array_at(call.spans, (call.tokens, 2), np.int64)
    query_starts = array_at(call.query_starts, (call.rows + 1,), np.int64)
    tasks = array_at(call.tasks, (call.num_tasks, 4), np.int64)
    task_starts = array_at(call.task_starts, (call.rows + 1,), np.int64)
    counters = array_at(call.counters, (call.rows + 1,), np.int64)
    outs = array_at(call.outs, (call.results, call.value_dim), np.float32)
    peaks = array_at(call.peaks, (call.results,), np.float32)
    totals = array_at(call.totals, (call.results,), np.float32)
    while True:
        task = fetch_and_increment(counters, call.rows)
        if task >= call.num_tasks:
            return
        row = tasks[task, 0]
        first, last = query_starts[row], query_starts[row + 1]
        _attend_task(
            _scaled(query, first, last, call.scaling),
            keys,
            values,
            table,
            call.block_size,
            spans,
            first,
            last,
            (row, tasks[task, 1], tasks[task, 2], tasks[task, 3]),
            call.softcap,
            outs,
            peaks,
            totals,
        )
        first_task, last_task = task_starts[row], task_starts[row + 1]
        if fetch_and_increment(counters, row) == last_task - first_task - 1:
            _merge(outs, peaks, totals, first, last, tasks, first_task, last_task, sinks, merged)


def _attend_float32(call):
    _attend(carray(call, 1)[0], np.float32)


def _attend_bfloat16(call):
    _attend(carray(call, 1)[0], np.uint16)


def _attend_float16(call):
    _attend(carray(call, 1)[0], np.int16)


_FUNCTIONS = {
    torch.float32: _attend_float32,
    torch.bfloat16: _attend_bfloat16,
    torch.float16: _attend_float16,
}


def compiled(dtype: torch.dtype, is_kept: bool) -> Any:
    """The C function `void attend(Call *)` for K/V of `dtype`.

    All threads of a team call it with the same `Call`.

    Args:
        is_kept: take it from Numba's folder on disk if it is there, and put it there if not.
    """
    pointer = types.CPointer(from_dtype(np.dtype(Call)))
    return cfunc(types.void(pointer), cache=is_kept)(_FUNCTIONS[dtype])
