"""The matrix product on a CPU: c = a b at the speed of the machine, in one order of sums.

Every element is a sum over k in blocks of KC. Within a block it is one chain of fused
multiply-adds from +0, k ascending; the first block's sum is stored, later ones are added to it.
That order is part of the engine's promise. All else here only decides when an element's turn is:

- the result is cut into rectangles, one job each;
- a job goes through k in blocks. A block of b (KC x wide) is packed in panels as wide as a
  register tile, so that the tile reads it in one stream; b^T is transposed in registers on the way;
- for each TALL rows it packs a block of a, and lets a tile run over every pair of panels. Sums
  gather in a scratch copy of the rectangle, which stays in the cache;
- after the last block the finished sums are written out, together with bias and residual.

The scheme is Goto and van de Geijn 2008, doi:10.1145/1356052.1356053.
"""

# M rows, N columns, K summed.

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray

from ..backend import kernel
from ..buffers import empty
from ..launch import body, device, get_num_threads
from ..tile import (
    ADDED,
    FRESH,
    ROWS,
    VECTOR_WIDTH,
    VECTORS,
    lanes,
    move_panel,
    pointer,
    tile,
    transpose,
)

KC = 512  # part of the contract: k is summed in blocks of this length
TALL = 96  # rows of a that are packed at once: 96 x 512 float32 are a fifth of a 1 MB cache
A_ROW = KC + 16  # not a multiple of 4096 bytes, or all rows would want the same cache lines
HUGE = 1 << 48

# Kinds of elements.
SAME, BFLOAT16, FLOAT16 = 0, 1, 2


@kernel(strides=("a", "b"))
def gemm(a, b, transpose_a, transpose_b, bias=None, residual=None, out=None):
    """op(a) @ op(b) over the last two axes, plus bias, plus residual.

    Operands may be bits of bfloat16 (uint16) or float16 (int16); the result is then float32. It
    goes into `out` if given, a contiguous array that may be the residual.
    """
    a, b = widen(a), widen(b)
    a = a.swapaxes(-1, -2) if transpose_a else a
    b = b.swapaxes(-1, -2) if transpose_b else b
    result = a @ b
    result = result if bias is None else result + bias
    result = result if residual is None else residual + result
    if out is None:
        return result
    out[...] = result
    return out


def widen(x):
    """bfloat16 and float16 bits as float32; other arrays as they are."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    if x.dtype == np.int16:
        return x.view(np.float16).astype(np.float32)
    return x


# --- CPU -----------------------------------------------------------------------------------


@gemm.cpu
def gemm_cpu(a, b, transpose_a, transpose_b, bias=None, residual=None, out=None):
    dtype = np.result_type(*(x.dtype for x in (a, b) if x.itemsize > 2), np.float32)
    a, b, bias, residual = (_in_type(x, dtype) for x in (a, b, bias, residual))
    lead = None
    if b.ndim == 2 and a.ndim > 2 and not transpose_a:
        lead = a.shape[:-1]
        a = a.reshape(math.prod(lead), a.shape[-1])  # leading axes are more rows
    K, M = a.shape[-2:] if transpose_a else a.shape[:-3:-1]
    N = b.shape[-2] if transpose_b else b.shape[-1]
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) if a.ndim + b.ndim > 4 else ()
    out = empty((*batch, M, N), dtype) if out is None else out
    if out.size:
        offsets = _offsets(a, b, batch)
        threads = get_num_threads()
        tall, wide = _cut(len(offsets), M, N, threads, lanes(out.itemsize) * VECTORS)
        jobs = len(offsets) * -(-M // tall) * -(-N // wide)
        work = empty((min(threads, jobs), _work_size(tall, wide)), dtype)
        _gemm_job(
            jobs, *_place(a), transpose_a, *_place(b), transpose_b, offsets,
            out, _place(bias)[0], _place(residual)[0], M, N, K, tall, wide, work,
        )  # fmt: skip
    return out if lead is None else out.reshape(*lead, N)


def _in_type(x, dtype):
    if x is None:
        return None
    if min(x.strides) < 0:  # bodies count forwards only
        x = np.ascontiguousarray(x)
    return (
        x
        if x.dtype == dtype or (x.itemsize == 2 and dtype == np.float32)
        else widen(x).astype(dtype)
    )


_KINDS = {"f": SAME, "d": SAME, "H": BFLOAT16, "h": FLOAT16}


def _place(x):
    """Where an operand lies, its stride between rows, and its kind."""
    if x is None:
        return 0, 0, SAME
    row = x.strides[-2] // x.itemsize if x.ndim > 1 else 0
    return x.__array_interface__["data"][0], row, _KINDS[x.dtype.char]


_NO_OFFSETS = np.zeros((1, 2), np.int64)


def _offsets(a, b, batch):
    """For each product of a batch, where its a and b begin."""
    if not batch:
        return _NO_OFFSETS
    offsets = np.empty((*batch, 2), np.int64)
    for n, x in enumerate((a, b)):
        at = np.zeros((), np.int64)
        lead = len(batch) - (x.ndim - 2)
        for axis, size in enumerate(batch):
            step = 0
            if axis >= lead and x.shape[axis - lead] > 1:
                step = x.strides[axis - lead] // x.itemsize
            at = at[..., None] + np.arange(size) * step
        offsets[..., n] = at
    return offsets.reshape(-1, 2)


@functools.lru_cache(4096)
def _cut(batch, M, N, threads, panel):
    """Rows and columns of the rectangles that the result is cut into.

    The estimate per unit of k: a vector per row and lane, and the packing of a and b.
    """
    best = None
    for columns in range(-(-N // 384), -(-N // 384) + threads):
        wide = -(-N // (columns * panel)) * panel
        for rows in range(-(-M // 768), -(-M // 768) + threads):
            tall = -(-M // (rows * ROWS)) * ROWS
            jobs = batch * -(-M // tall) * -(-N // wide)
            time = -(-jobs // threads) * (tall * wide + 6 * wide + 3 * tall)
            if best is None or time < best[0]:
                best = time, tall, wide
    return best[1:]


def _work_size(tall, wide):
    return TALL * A_ROW + (wide + 64) * KC + tall * wide + VECTOR_WIDTH * A_ROW


_tile, _tile4, _tile1 = (tile(rows, VECTORS) for rows in (ROWS, ROWS // 3, 1))


@body
def _gemm_job(
    i, thread, a, a_row, a_kind, ta, b, b_row, b_kind, tb, offsets, out, bias, residual,
    M, N, K, tall, wide, work,
):  # fmt: skip
    work = work[thread]
    vector = VECTOR_WIDTH * 4 // work.itemsize
    panel = vector * VECTORS
    down, across = -(-M // tall), -(-N // wide)
    n, i = i // (down * across), i % (down * across)
    m0, n0 = i // across * tall, i % across * wide
    tall, wide = min(tall, M - m0), min(wide, N - n0)
    width = -(-wide // panel) * panel
    pa = work[: TALL * A_ROW]
    c = work[TALL * A_ROW : TALL * A_ROW + tall * width]
    pb = work[TALL * A_ROW + tall * width :]
    stage = pb[width * KC :]
    for k0 in range(0, max(K, 1), KC):  # a sum of nothing is a block too: zeros
        kc = min(KC, K - k0)
        kp = -(-kc // vector) * vector
        _pack_b(b, b_kind, offsets[n, 1], b_row, tb, k0, kc, n0, wide, pb, stage)
        for m in range(0, tall, TALL):
            mc = min(TALL, tall - m)
            _pack_a(a, a_kind, offsets[n, 0], a_row, ta, k0, kc, m0 + m, mc, pa, stage)
            mode = FRESH if k0 == 0 else ADDED
            for j in range(0, wide, panel):
                r = 0
                while r + ROWS <= mc:
                    _tile(
                        pa,
                        r * A_ROW,
                        A_ROW,
                        1,
                        pb,
                        j * kp,
                        panel,
                        c,
                        (m + r) * width + j,
                        width,
                        kc,
                        mode,
                    )
                    r += ROWS
                while r + ROWS // 3 <= mc:
                    _tile4(
                        pa,
                        r * A_ROW,
                        A_ROW,
                        1,
                        pb,
                        j * kp,
                        panel,
                        c,
                        (m + r) * width + j,
                        width,
                        kc,
                        mode,
                    )
                    r += ROWS // 3
                while r < mc:
                    _tile1(
                        pa,
                        r * A_ROW,
                        A_ROW,
                        1,
                        pb,
                        j * kp,
                        panel,
                        c,
                        (m + r) * width + j,
                        width,
                        kc,
                        mode,
                    )
                    r += 1
    for r in range(tall):
        _finish(c, r * width, wide, out, bias, residual, (n * M + m0 + r) * N, n0)


@device(forceinline=False)
def _finish(c, start, wide, out, bias, residual, row, n0):
    """Write one row of finished sums: residual + (sum + bias)."""
    c = c[start : start + wide]
    o = out.reshape(-1)[row + n0 : row + n0 + wide]
    if bias:
        extra = carray(pointer(bias), HUGE, out.dtype)[n0 : n0 + wide]
        for j in range(wide):
            c[j] += extra[j]
    if residual:
        old = carray(pointer(residual), HUGE, out.dtype)[row + n0 : row + n0 + wide]
        for j in range(wide):
            o[j] = old[j] + c[j]
    else:
        for j in range(wide):
            o[j] = c[j]


@device(forceinline=False)
def _pack_b(b, kind, offset, b_row, tb, k0, kc, n0, wide, pb, stage):
    vector = VECTOR_WIDTH * 4 // pb.itemsize
    panel = vector * VECTORS
    kp = -(-kc // vector) * vector
    if tb:
        for j in range(0, wide, vector):
            o = j // panel * panel * kp + j % panel
            at = offset + (n0 + j) * b_row + k0
            _transpose_rows(b, kind, at, b_row, min(vector, wide - j), kc, pb, o, panel, stage)
    else:
        x = carray(pointer(b), HUGE, pb.dtype)
        full = wide // panel * panel
        for k in range(kc):
            at = offset + (k0 + k) * b_row + n0
            if kind != SAME:
                _widen(b, kind, at, wide, stage, 0)
                x, at = stage, 0
            for j in range(0, full, panel):
                move_panel(x, at + j, pb, j * kp + k * panel)
            for j in range(full, wide):
                pb[full * kp + k * panel + j - full] = x[at + j]


@device(forceinline=False)
def _pack_a(a, kind, offset, a_row, ta, k0, kc, m0, mc, pa, stage):
    if ta:
        vector = VECTOR_WIDTH * 4 // pa.itemsize
        for k in range(0, kc, vector):
            at = offset + (k0 + k) * a_row + m0
            _transpose_rows(a, kind, at, a_row, min(vector, kc - k), mc, pa, k, A_ROW, stage)
    else:
        for r in range(mc):
            _widen(a, kind, offset + (m0 + r) * a_row + k0, kc, pa, r * A_ROW)


@device(forceinline=False)
def _transpose_rows(x, kind, offset, x_row, rows, columns, out, o, o_row, stage):
    """out[o + c o_row + r] = x[offset + r x_row + c], for at most a vector's length of rows.

    Rows and columns up to the next multiple of that length are written too, with anything.
    """
    vector = VECTOR_WIDTH * 4 // out.itemsize
    direct = columns // vector * vector if kind == SAME and rows == vector else 0
    source = carray(pointer(x), HUGE, out.dtype)
    for c in range(0, direct, vector):
        transpose(source, offset + c, x_row, out, o + c * o_row, o_row)
    if direct < columns:
        for r in range(rows):
            _widen(x, kind, offset + r * x_row + direct, columns - direct, stage, r * A_ROW)
        for c in range(direct, columns, vector):
            transpose(stage, c - direct, A_ROW, out, o + c * o_row, o_row)


@device(forceinline=False)
def _widen(address, kind, offset, n, out, o):
    """out[o : o + n] = the elements from `offset` on."""
    if kind == SAME:
        x = carray(pointer(address), HUGE, out.dtype)[offset : offset + n]
        out = out[o : o + n]
        for i in range(n):
            out[i] = x[i]
    else:
        bits = carray(pointer(address), HUGE, np.uint16)[offset : offset + n]
        to = out.view(np.uint32)[o : o + n]
        if kind == BFLOAT16:
            for i in range(n):
                to[i] = np.uint32(bits[i]) << np.uint32(16)
        else:  # a subnormal float16 is a multiple of 2**-24, and a normal float32
            for i in range(n):
                out[o + i] = np.float32(np.int32(bits[i]) & 0x7FFF) * _TINY
            for i in range(n):
                to[i] = _float16_bits(np.uint32(bits[i]), to[i])


@device
def _float16_bits(h, subnormal):
    """The bits of a float16 as those of the same number in float32."""
    rest = h & np.uint32(0x7FFF)
    # The exponents of normal numbers differ by 112, those of infinity and NaN by 224.
    lift = np.uint32(224 << 23) if rest >= np.uint32(0x7C00) else np.uint32(112 << 23)
    normal = (rest << np.uint32(13)) + lift
    return (h & np.uint32(0x8000)) << np.uint32(16) | (
        subnormal if rest < np.uint32(0x0400) else normal
    )


_TINY = np.float32(2.0**-24)
