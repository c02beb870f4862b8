"""Few rows times a matrix: a product that is bound by reading the matrix once, as in decoding.

The sums have the order of `gemm`: chains of fused multiply-adds over k within blocks, the blocks'
sums added ascending. What differs is where an element's turn comes. A job has WIDE rows of the
weight and reads them as they lie, a few cache lines of each at a time. These are transposed in
registers into a scratch of some kilobytes, in words: a float32, or two k of bfloat16. Then each
row of x goes on with its WIDE chains side by side. Meanwhile the next job's rows are asked for.
"""

# M rows of x, N rows of a weight, K summed.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numba.np.numpy_support import carray

from .. import tile
from ..buffers import empty
from ..lanes import fma, from_bits, iand, ishl, load, store
from ..launch import address, body, device, get_num_threads

FEW = 8  # rows of x: with more of them the packed product is faster
_ENOUGH = 1 << 14  # elements of a matrix: below, cutting it into jobs takes longest
WIDE = 48  # rows of a weight per job: three vectors, whose chains hide each other's latency
HUGE = 1 << 48
_LANES = 16
_DEEP = 32  # words of a row in the scratch
# Bytes asked for ahead with each tile that is transposed, and with each word of the chains: half
# of all at either time, since memory takes few requests at once.
_PER_TILE, _PER_WORD = 512, WIDE * 2
_ask_8, _ask_2 = tile.ask_for(8), tile.ask_for(2)
_UPPER = np.int32(-65536)
_i32, _i64, _float = ir.IntType(32), ir.IntType(64), ir.FloatType()

# A job: address and bytes per row of the weight, 1 if it is bfloat16, how many rows, address and
# row length of the result, addresses of bias and residual or 0, and the address of what is asked
# of the memory meanwhile: the weight of the next job of this thread.
_JOB = 9


def suits(a: Any, b: Any, transpose_a: bool, transpose_b: bool, residual: Any) -> bool:
    """Whether `few_rows` computes op(a) @ op(b)."""
    return (
        transpose_b
        and not transpose_a
        and a.ndim == b.ndim == 2
        and 0 < len(a) <= FEW
        and b.size >= _ENOUGH
        and a.dtype == np.float32
        and b.dtype in (np.float32, np.uint16)
        and all(x is None or x.flags.c_contiguous for x in (a, b, residual))
    )


def few_rows(x: Any, weight: Any, bias: Any, residual: Any, out: Any, block: int) -> None:
    """out = residual + (x weight^T + bias).

    x (M, K) float32, weight (N, K) float32 or bfloat16 bits, bias (N), residual and out (M, N),
    all contiguous; `block` is the length of a chain.
    """
    table = jobs(weight, bias, residual, out)
    job(len(table), *arguments(table, x, block))


def arguments(table: Any, x: Any, block: int) -> tuple:
    """What `job` is called with, after the number of jobs."""
    M, K = x.shape
    threads = get_num_threads()
    work, scratch = empty((threads, 2 * M * WIDE), np.float32), empty((threads, _DEEP * WIDE), "i4")
    return table, x, M, K, block, work, scratch


def jobs(weight: Any, bias: Any, residual: Any, out: Any) -> Any:
    """The table of jobs that make up one product; tables may be joined to one launch."""
    first, count = _cut(weight.shape[0])
    table = np.empty((len(first), _JOB), np.int64)
    table[:, 0] = address(weight) + first * weight.strides[0]
    table[:, 1], table[:, 2], table[:, 3] = weight.strides[0], weight.itemsize == 2, count
    table[:, 4], table[:, 5] = address(out) + 4 * first, out.shape[1]
    table[:, 6] = 0 if bias is None else address(bias) + 4 * first
    table[:, 7] = 0 if residual is None else address(residual) + 4 * first
    fetch_ahead([table])
    return table


def fetch_ahead(tables: list[Any]) -> None:
    """Let the jobs of launches that follow each other ask for the weights of later ones."""
    addresses = np.concatenate([table[:, 0] for table in tables])
    later = np.roll(addresses, -min(get_num_threads(), len(addresses)))
    for table, ahead in zip(
        tables, np.split(later, np.cumsum([len(t) for t in tables])), strict=False
    ):
        table[:, 8] = ahead


@functools.lru_cache(256)
def _cut(N: int) -> Any:
    first = np.arange(0, N, WIDE)
    return first, np.minimum(WIDE, N - first)


@body
def job(i, thread, table, x, M, K, block, work, scratch):
    w, w_row, short, count = table[i, 0], table[i, 1], table[i, 2] == 1, table[i, 3]
    ahead, own, words = table[i, 8], work[thread], scratch[thread]
    part, total = own[: M * WIDE], own[M * WIDE :]
    panels, itemsize = count // _LANES, np.int64(2 if short else 4)
    per_word = 4 // itemsize
    step = _LANES * per_word
    for k0 in range(0, K, block):
        stop = min(K, k0 + block)
        whole = k0 + (stop - k0) // step * step
        part[:] = 0
        for k1 in range(k0, whole, _DEEP * per_word):
            k2 = min(whole, k1 + _DEEP * per_word)
            for p in range(panels):
                for k in range(k1, k2, step):
                    _ask_8(ahead)
                    ahead += _PER_TILE
                    at = (k - k1) // per_word * WIDE + p * _LANES
                    tile_at = w + p * _LANES * w_row + k * itemsize
                    _turn(tile_at, w_row, words, at)  # pyright: ignore[reportCallIssue]
            if short:
                _go_on_in_pairs(x, k1, k2, words, part, M, ahead)
            else:
                _go_on(x, k1, k2, words, part, M, ahead)
            ahead += (k2 - k1) // per_word * _PER_WORD
        for n in range(panels * _LANES, count):  # they went along with whatever the scratch held
            for m in range(M):
                part[m * WIDE + n] = 0
        for n in range(count):
            start = k0 if n >= panels * _LANES else whole
            if start < stop:
                _one_by_one(w + n * w_row, short, x, M, K, start, stop, part, n)
        for n in range(M * WIDE):
            total[n] = part[n] if k0 == 0 else total[n] + part[n]
    _finish(table, i, M, count, total)


@device(forceinline=False)
def _go_on(x, start, stop, words, part, M, ahead):
    for m in range(M):
        at = m * WIDE
        s0, s1, s2 = load(part, at), load(part, at + 16), load(part, at + 32)
        for k in range(stop - start):
            if m == 0:
                _ask_2(ahead + k * _PER_WORD)
            left, o = x[m, start + k], k * WIDE
            s0 = fma(left, from_bits(load(words, o)), s0)
            s1 = fma(left, from_bits(load(words, o + 16)), s1)
            s2 = fma(left, from_bits(load(words, o + 32)), s2)
        store(part, at, s0)
        store(part, at + 16, s1)
        store(part, at + 32, s2)


@device(forceinline=False)
def _go_on_in_pairs(x, start, stop, words, part, M, ahead):
    # the lower half of a word is the even k; as the upper half of a float32 it is that number
    for m in range(M):
        at = m * WIDE
        s0, s1, s2 = load(part, at), load(part, at + 16), load(part, at + 32)
        for n in range((stop - start) // 2):
            if m == 0:
                _ask_2(ahead + n * _PER_WORD)
            even, odd, o = x[m, start + 2 * n], x[m, start + 2 * n + 1], n * WIDE
            w0, w1, w2 = load(words, o), load(words, o + 16), load(words, o + 32)
            s0 = fma(even, from_bits(ishl(w0, np.int32(16))), s0)
            s1 = fma(even, from_bits(ishl(w1, np.int32(16))), s1)
            s2 = fma(even, from_bits(ishl(w2, np.int32(16))), s2)
            s0 = fma(odd, from_bits(iand(w0, _UPPER)), s0)
            s1 = fma(odd, from_bits(iand(w1, _UPPER)), s1)
            s2 = fma(odd, from_bits(iand(w2, _UPPER)), s2)
        store(part, at, s0)
        store(part, at + 16, s1)
        store(part, at + 32, s2)


@device(forceinline=False)
def _one_by_one(w, short, x, M, K, start, stop, part, n):
    """The chains of one row of the weight, for what does not fill a tile."""
    for m in range(M):
        s = part[m * WIDE + n]
        if short:
            bits = carray(tile.pointer(w), HUGE, np.uint16)
            for k in range(start, stop):
                w_k = _widened(bits[k])  # pyright: ignore[reportCallIssue]
                s = fma(x[m, k], w_k, s)
        else:
            row = carray(tile.pointer(w), HUGE, np.float32)
            for k in range(start, stop):
                s = fma(x[m, k], row[k], s)
        part[m * WIDE + n] = s


@device(forceinline=False)
def _finish(table, i, M, count, total):
    out, n = carray(tile.pointer(table[i, 4]), HUGE, np.float32), table[i, 5]
    bias, residual = table[i, 6], table[i, 7]
    for j in range(count):
        extra = np.float32(0)
        if bias:
            extra = carray(tile.pointer(bias), HUGE, np.float32)[j]
        for m in range(M):
            s = total[m * WIDE + j]
            if bias:
                s += extra
            if residual:
                s = carray(tile.pointer(residual), HUGE, np.float32)[m * n + j] + s
            out[m * n + j] = s


@intrinsic
def _widened(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.bitcast(b.shl(b.zext(args[0], _i32), _i32(16)), _float)

    return types.float32(bits), codegen


@intrinsic
def _turn(typingctx: Any, w: Any, w_row: Any, out: Any, o: Any) -> Any:
    """out[o + WIDE j + i] = word j of row i of the weight, for 16 rows and words."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        w, w_row, _, o = args
        out = make_array(sig.args[2])(context, b, args[2]).data
        rows = [b.add(w, b.mul(w_row, _i64(i))) for i in range(_LANES)]
        columns = [c for q in range(4) for c in _columns(b, rows, q)]
        for j, column in enumerate(columns):
            tile.store(b, column, b.gep(out, [b.add(o, _i64(j * WIDE))]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, out, types.int64), codegen


def _columns(b: Any, rows: list[Any], q: int) -> list[Any]:
    """Words 4 q .. 4 q + 3 of each of 16 rows, a vector per word.

    Four words of every fourth row are loaded to a vector, which costs no shuffle. Then four of
    these interleave their elements, then pairs of elements.
    """
    four = ir.VectorType(_i32, 4)

    def quarters(r: int) -> Any:
        parts = []
        for row in rows[r::4]:
            parts.append(b.load(b.inttoptr(b.add(row, _i64(16 * q)), four.as_pointer())))
            parts[-1].align = 2
        low, high = (_shuffle(b, x, y, list(range(8))) for x, y in (parts[:2], parts[2:]))
        return _shuffle(b, low, high, list(range(_LANES)))

    def interleaved(x: Any, y: Any, size: int) -> tuple[Any, Any]:
        """Of each four elements of x and y the first two, and the last two, by turns of `size`."""
        low = [
            lane + n + side
            for lane in range(0, _LANES, 4)
            for n, side in ([(0, 0), (0, 16), (1, 0), (1, 16)], [(0, 0), (1, 0), (0, 16), (1, 16)])[
                size - 1
            ]
        ]
        return _shuffle(b, x, y, low), _shuffle(b, x, y, [n + 2 for n in low])

    a0, a1 = interleaved(quarters(0), quarters(1), 1)
    a2, a3 = interleaved(quarters(2), quarters(3), 1)
    return [*interleaved(a0, a2, 2), *interleaved(a1, a3, 2)]


def _shuffle(b: Any, x: Any, y: Any, places: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_i32, len(places)), places))
