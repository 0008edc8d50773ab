"""What Numba has no words for, written as LLVM code: vectors, atomics, prefetches.

Numba's own loops check for overlapping arrays at each entry and keep sums in memory, which made the
two inner products less than half as fast. So these are functions that emit vector instructions:
`make_score_tile` (logits of a few tokens) and `make_weigh_tile` (their weighted values).

Numba's disk cache looks at kernel.py alone: touch that after a change here.
"""

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

CHUNK = 32  # tokens that are computed together
TILE = 4  # tokens of one score tile
LANES = 16  # floats in a vector; LLVM splits it where registers are narrower

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


@intrinsic
def _void_pointer(typing_context, address):
    """The pointer whose value is an int64."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@njit(inline="always")
def array_at(address, shape, dtype):
    return carray(_void_pointer(address), shape, dtype)


@intrinsic
def fetch_and_increment(typing_context, counters, i):
    """counters[i]++, as one atomic operation that also orders the threads' other memory access."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1:])
        return builder.atomic_rmw("add", pointer, pointer.type.pointee(1), "acq_rel")

    return types.int64(counters, types.intp), codegen


@intrinsic
def bits_to_float(typing_context, bits):
    """The float32 whose bits are an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), codegen


@intrinsic
def prefetch(typing_context, array, i, j, k):
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
def find_peak(typing_context, scores, result, peak):
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


def make_score_tile(heads):
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


def make_weigh_tile(heads):
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
