"""Decode attention that walks the block table, compiled by Numba.

One task is a range of a row's tokens: it reads each K and V once for all heads of a KV head, with a
running softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The
tasks of a row are merged by their log-sum-exp, as in FlashDecoding. What is read next is prefetched
through the table a few tokens at a time, so that memory and arithmetic are busy together: these
tokens' V while their logits are computed, the next ones' K while V is summed up.

All arithmetic is float32. bfloat16 comes in as uint16 and float16 as int16, since NumPy lacks the
one and Numba the other. The two inner products are written as LLVM vectors (`_score_tile`,
`_weigh_tile`): Numba's own loops check for overlapping arrays at each entry and keep sums in
memory, which made them less than half as fast.

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
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

CHUNK = 32  # tokens that are computed together
TILE = 4  # tokens of one `_score_tile`
LANES = 16  # floats in a vector; LLVM splits it where registers are narrower
LINE = 64  # bytes in a cache line
# Sums may be reordered and multiplications fused, but infinities and NaN keep their meaning.
FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
SMALLEST = np.float32(-87.0)  # exp of less would be subnormal
LOWEST = np.float32(-np.inf)

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


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


@intrinsic
def _void_pointer(typing_context, address):
    """The pointer whose value is an int64."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@njit(inline="always")
def _array(address, shape, dtype):
    return carray(_void_pointer(address), shape, dtype)


@intrinsic
def _fetch_and_increment(typing_context, counters, i):
    """counters[i]++, as one atomic operation that also orders the threads' other memory access."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1:])
        return builder.atomic_rmw("add", pointer, pointer.type.pointee(1), "acq_rel")

    return types.int64(counters, types.intp), codegen


@intrinsic
def _bits_to_float(typing_context, bits):
    """The float32 whose bits are an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), codegen


@intrinsic
def _prefetch(typing_context, array, i, j, k):
    """Ask for the cache line of array[i, j, k]."""

    def codegen(context, builder, signature, args):
        address = _pointer(context, builder, signature.args[0], args[0], args[1:])
        address = builder.bitcast(address, ir.IntType(8).as_pointer())
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [address.type, _INT, _INT, _INT]),
            "llvm.prefetch.p0",
        )
        # read, into the first cache level, data
        builder.call(function, [address, _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp), codegen


def _pointer(context, builder, array_type, array, indices):
    struct = make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, struct, indices)


def _splat(builder, value, vector):
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INT(0))
    zeros = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _multiply_add(builder, a, b, c):
    fused = ("contract",)
    return builder.fadd(builder.fmul(a, b, flags=fused), c, flags=fused)


def _load(builder, pointer, dtype, mask=None):
    """LANES elements of `dtype` as floats; zeros where a `mask` is false."""
    element = {types.uint16: ir.IntType(16), types.int16: ir.HalfType()}.get(dtype, _FLOAT)
    vector = ir.VectorType(element, LANES)
    pointer = builder.bitcast(pointer, vector.as_pointer())
    align = dtype.bitwidth // 8
    if mask is None:
        loaded = builder.load(pointer, align=align)
    else:
        name = {types.uint16: "i16", types.int16: "f16"}.get(dtype, "f32")
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [pointer.type, _INT, _MASK, vector]),
            f"llvm.masked.load.v{LANES}{name}.p0",
        )
        zeros = ir.Constant(vector, None)
        loaded = builder.call(function, [pointer, _INT(align), mask, zeros])
    if dtype == types.uint16:
        wide = builder.zext(loaded, ir.VectorType(_INT, LANES))
        shift = ir.Constant(ir.VectorType(_INT, LANES), [16] * LANES)
        return builder.bitcast(builder.shl(wide, shift), _VECTOR)
    return builder.fpext(loaded, _VECTOR) if dtype == types.int16 else loaded


def _store(builder, value, pointer, mask):
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTOR.as_pointer(), _INT, _MASK]),
        f"llvm.masked.store.v{LANES}f32.p0",
    )
    builder.call(function, [value, builder.bitcast(pointer, _VECTOR.as_pointer()), _INT(4), mask])


def _each_vector(builder, length, body):
    """body(offset, mask) for each LANES of `length` elements; a mask only where they end."""
    integer = length.type
    lanes = integer(LANES)
    whole = builder.sdiv(length, lanes)
    with cgutils.for_range(builder, whole) as loop:
        body(builder.mul(loop.index, lanes), None)
    start = builder.mul(whole, lanes)
    rest = builder.sub(length, start)
    with cgutils.if_unlikely(builder, builder.icmp_signed(">", rest, integer(0))):
        counted = ir.Constant(ir.VectorType(integer, LANES), list(range(LANES)))
        limit = _splat(builder, rest, counted.type)
        body(start, builder.icmp_signed("<", counted, limit))


def _sum_of_four(builder, sums):
    """<4 x float>: the sum over the lanes of each of four vectors."""

    def halves(a, b, size):
        """Add the halves of each `size` lanes of a and b, those of a in front."""
        groups = [range(g, g + size) for g in range(0, 2 * LANES, size)]
        low, high = (
            [i for g in groups for i in (g[: size // 2] if part == 0 else g[size // 2 :])]
            for part in (0, 1)
        )
        indices = (ir.Constant(ir.VectorType(_INT, LANES), part) for part in (low, high))
        return builder.fadd(*(builder.shuffle_vector(a, b, part) for part in indices))

    pairs = halves(sums[0], sums[1], LANES), halves(sums[2], sums[3], LANES)
    four = halves(*pairs, LANES // 2)
    each = LANES // 4  # partial sums of each that are left
    for distance in [d for d in (4, 2, 1) if d < each]:
        four = builder.fadd(four, _turned(builder, four, distance))
    firsts = ir.Constant(ir.VectorType(_INT, 4), [0, each, 2 * each, 3 * each])
    return builder.shuffle_vector(four, ir.Constant(_VECTOR, ir.Undefined), firsts)


@intrinsic
def _peak(typing_context, scores, result, peak):
    """The highest of a chunk's logits and `peak`; NaN if one of them is."""

    def codegen(context, builder, signature, args):
        scores, result, peak = args

        def higher(a, b):
            is_higher = builder.fcmp_ordered(">", b, a)
            is_nan = builder.fcmp_unordered("uno", b, b)
            return builder.select(builder.or_(is_higher, is_nan), b, a)

        highest = _splat(builder, peak, _VECTOR)
        for start in range(0, CHUNK, LANES):
            at = (result, result.type(start))
            pointer = _pointer(context, builder, signature.args[0], scores, at)
            highest = higher(highest, _load(builder, pointer, types.float32))
        for distance in (8, 4, 2, 1):
            highest = higher(highest, _turned(builder, highest, distance))
        return builder.extract_element(highest, _INT(0))

    return types.float32(scores, types.intp, types.float32), codegen


def _turned(builder, vector, distance):
    """Each lane's value in the lane at `distance` from it, in pairs."""
    lanes = ir.Constant(ir.VectorType(_INT, LANES), [i ^ distance for i in range(LANES)])
    return builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), lanes)


def _make_score_tile(heads):
    @intrinsic
    def score_tile(typing_context, query, q, head, keys, kv_head, slots, i, scores, result):
        """scores[result + h, i + t] = query[q, head + h] . keys[slots[i + t], kv_head]."""

        def codegen(context, builder, signature, args):
            query, q, head, keys, kv_head, slots, i, scores, result = args
            query_type, _, _, keys_type, _, slots_type, _, scores_type, _ = signature.args
            zero, integer = q.type(0), q.type
            queries = [
                _pointer(
                    context, builder, query_type, query, (q, builder.add(head, integer(h)), zero)
                )
                for h in range(heads)
            ]
            tokens = []
            for t in range(TILE):
                at = _pointer(context, builder, slots_type, slots, (builder.add(i, integer(t)),))
                slot = builder.load(at)
                tokens.append(_pointer(context, builder, keys_type, keys, (slot, kv_head, zero)))
            sums = [
                [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None)) for _ in tokens]
                for _ in queries
            ]

            def multiply(offset, mask):
                states = [
                    _load(builder, builder.gep(token, [offset]), keys_type.dtype, mask)
                    for token in tokens
                ]
                for pointer, row in zip(queries, sums, strict=True):
                    states_of_query = _load(
                        builder, builder.gep(pointer, [offset]), types.float32, mask
                    )
                    for state, total in zip(states, row, strict=True):
                        product = _multiply_add(
                            builder, states_of_query, state, builder.load(total)
                        )
                        builder.store(product, total)

            dim = builder.extract_value(make_array(keys_type)(context, builder, keys).shape, 2)
            _each_vector(builder, dim, multiply)
            for h, row in enumerate(sums):
                four = _sum_of_four(builder, [builder.load(total) for total in row])
                at = _pointer(
                    context, builder, scores_type, scores, (builder.add(result, integer(h)), i)
                )
                builder.store(four, builder.bitcast(at, four.type.as_pointer()), align=4)
            return context.get_dummy_value()

        n = types.intp
        return types.void(query, n, n, keys, n, slots, n, scores, n), codegen

    return score_tile


def _make_weigh_tile(heads):
    @intrinsic
    def weigh_tile(typing_context, scores, result, low, high, values, kv_head, slots, outs, at):
        """outs[at + h] += sum over i in [low, high) of scores[result + h, i] * values[slots[i]]."""

        def codegen(context, builder, signature, args):
            scores, result, low, high, values, kv_head, slots, outs, at = args
            scores_type, _, _, _, values_type, _, slots_type, outs_type, _ = signature.args
            integer = at.type

            def weigh(offset, mask):
                targets = [
                    _pointer(
                        context, builder, outs_type, outs, (builder.add(at, integer(h)), offset)
                    )
                    for h in range(heads)
                ]
                sums = [cgutils.alloca_once(builder, _VECTOR) for _ in targets]
                for target, total in zip(targets, sums, strict=True):
                    builder.store(_load(builder, target, types.float32, mask), total)
                with cgutils.for_range_slice(builder, low, high, integer(1)) as (i, _):
                    slot = builder.load(_pointer(context, builder, slots_type, slots, (i,)))
                    pointer = _pointer(
                        context, builder, values_type, values, (slot, kv_head, offset)
                    )
                    state = _load(builder, pointer, values_type.dtype, mask)
                    for h, total in enumerate(sums):
                        weight = builder.load(
                            _pointer(
                                context,
                                builder,
                                scores_type,
                                scores,
                                (builder.add(result, integer(h)), i),
                            )
                        )
                        weight = _splat(builder, weight, _VECTOR)
                        builder.store(
                            _multiply_add(builder, weight, state, builder.load(total)), total
                        )
                for target, total in zip(targets, sums, strict=True):
                    if mask is None:
                        pointer = builder.bitcast(target, _VECTOR.as_pointer())
                        builder.store(builder.load(total), pointer, align=4)
                    else:
                        _store(builder, builder.load(total), target, mask)

            dim = builder.extract_value(make_array(values_type)(context, builder, values).shape, 2)
            _each_vector(builder, dim, weigh)
            return context.get_dummy_value()

        n = types.intp
        return types.void(scores, n, n, n, values, n, slots, outs, n), codegen

    return weigh_tile


_score_4, _score_3, _score_2, _score_1 = (_make_score_tile(heads) for heads in (4, 3, 2, 1))
_weigh_4, _weigh_3, _weigh_2, _weigh_1 = (_make_weigh_tile(heads) for heads in (4, 3, 2, 1))


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
    return p * _bits_to_float((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(fastmath=FASTMATH)
def _prefetch_tokens(blocks, kv_head, slots, first, last):
    """Ask for one head of the K or V of `slots[first:last]`."""
    step = LINE // blocks.itemsize
    for i in range(first, last):
        for d in range(0, blocks.shape[2], step):
            _prefetch(blocks, slots[i], kv_head, d)


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
    peak = _peak(scores, result, peaks[at])
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
    query = _array(call.query, (call.tokens, call.heads, call.dim), np.float32)
    keys = _array(call.keys, (call.slots, call.kv_heads, call.dim), element)
    values = _array(call.values, (call.slots, call.kv_heads, call.value_dim), element)
    sinks = _array(call.sinks, (call.num_sinks,), np.float32)
    merged = _array(call.merged, (call.tokens, call.heads, call.value_dim), np.float32)
    table = _array(call.table, (call.rows, call.table_width), np.int32)
    spans = _array(call.spans, (call.tokens, 2), np.int64)
    query_starts = _array(call.query_starts, (call.rows + 1,), np.int64)
    tasks = _array(call.tasks, (call.num_tasks, 4), np.int64)
    task_starts = _array(call.task_starts, (call.rows + 1,), np.int64)
    counters = _array(call.counters, (call.rows + 1,), np.int64)
    outs = _array(call.outs, (call.results, call.value_dim), np.float32)
    peaks = _array(call.peaks, (call.results,), np.float32)
    totals = _array(call.totals, (call.results,), np.float32)
    while True:
        task = _fetch_and_increment(counters, call.rows)
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
        if _fetch_and_increment(counters, row) == last_task - first_task - 1:
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
