"""The matrix product on a CPU: c = a b at the speed of the machine, in one order of sums.

Every element is a sum over k in blocks of KC. Within a block it is one chain of fused
multiply-adds from +0, k ascending; the first block's sum is stored, later ones are added to it.
That order is part of the engine's promise. All else here only decides when an element's turn is:

- the result is cut into rectangles, one job each;
- a job goes through k in blocks. A block of b (KC x wide) is packed in panels as wide as a
  register tile, so that the tile reads it in one stream; b^T is transposed in registers on the way;
- for a few rows of a at a time, a tile runs over all panels. It reads a where it lies, whatever
  the strides. (Packing a as well, and gathering sums in a scratch, cost a tenth of the time.)
- after the last block bias and residual are added to the finished sums.

The scheme is Goto and van de Geijn 2008, doi:10.1145/1356052.1356053.
"""

# M rows, N columns, K summed.

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..backend import array_module, kernel
from ..buffers import empty, scratch
from ..launch import address, body, device, get_num_threads
from ..precision import is_deterministic
from ..tile import (
    ADDED,
    FRESH,
    NARROW,
    PAIR_PRODUCTS,
    ROWS,
    VECTOR_WIDTH,
    VECTORS,
    array_at,
    lanes,
    move_panel,
    tile,
    transpose,
)
from . import few_rows

KC = 512  # part of the contract: k is summed in blocks of this length


@kernel(strides=("a", "b"))
def gemm(a, b, transpose_a, transpose_b, bias=None, residual=None, out=None):
    """op(a) @ op(b) over the last two axes, plus bias, plus residual.

    Operands may be bits of bfloat16 (uint16) or float16 (int16); the result is then float32. Two
    bfloat16 operands are multiplied in the order of AVX512-BF16: of each two k the odd one first.
    The result goes into `out` if given: a contiguous array, which may be the residual.
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


@kernel
def gemm_codes(a, codes, scales, table, shape, transpose_b, bias=None):
    """a @ op(b) for a matrix b of that shape held as 4-bit codes, unpacked as it is read.

    Two codes make a byte, the first in the upper half; read row by row, 64 share a scale:
    b = table[code] * scale.
    """
    xp, size = array_module(a), math.prod(shape)
    b = table[xp.stack([codes >> 4, codes & 15], axis=-1)].reshape(-1)[:size]
    b = (b * xp.repeat(scales, BLOCK)[:size]).reshape(shape)
    return gemm(a, b, False, transpose_b, bias)


def widen(x):
    """bfloat16 and float16 bits as float32; other arrays as they are."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    if x.dtype == np.int16:
        return x.view(np.float16).astype(np.float32)
    return x


BLOCK = 64  # 4-bit codes that share a scale

# --- CPU: which job does what --------------------------------------------------------------

# How the elements of an operand become those that a tile multiplies.
SAME = 0  # as they are
BFLOAT16 = 1  # float32 with these upper halves
FLOAT16 = 2
PAIRS = 3  # two bfloat16, of neighbouring k, make one uint32
SWAPPED = 4  # as PAIRS would be multiplied, one by one: neighbours change places, tiny ones are 0
CODES = 5  # 4-bit codes

TALL = 96  # rows of a that are packed at once, where they must be
A_ROW = KC + 16  # not a multiple of 4096 bytes, or all rows would want the same cache lines


class Operand(NamedTuple):
    """A matrix in memory: elements between rows, what they are, the length of k, and how many
    of them make one that a tile multiplies.
    """

    address: int
    row: int
    kind: int
    length: int
    unit: int = 1
    scales: int = 0
    table: int = 0


class Plan(NamedTuple):
    """What all jobs of a product know: its size, how it is cut, and addresses.

    K and `block`, the length of a chain, count what a tile multiplies; `depth` is the room for a
    block in a packed column, whole vectors.
    """

    M: int
    N: int
    K: int
    block: int
    depth: int
    tall: int
    wide: int
    panel: int
    transpose_a: int
    transpose_b: int
    bias: int
    residual: int
    out: int
    work: int
    work_bytes: int
    offsets: int


@gemm.cpu
def gemm_cpu(a, b, transpose_a, transpose_b, bias=None, residual: Any = None, out: Any = None):
    dtype = a.dtype if a.itemsize == 8 else b.dtype if b.itemsize == 8 else _FLOAT32
    a, b = _operand(a, dtype), _operand(b, dtype)
    bias = None if bias is None else _operand(bias, dtype)
    residual = None if residual is None else _operand(residual, dtype)
    lead = None
    if b.ndim == 2 and a.ndim > 2 and not transpose_a:
        lead = a.shape[:-1]  # leading axes are more rows
        a = a.reshape(math.prod(lead), a.shape[-1])
    if few_rows.suits(a, b, transpose_a, transpose_b, residual):
        out = empty((len(a), len(b)), dtype) if out is None else out
        few_rows.few_rows(a, b, bias, residual, out, KC)
        return out if lead is None else out.reshape(*lead, len(b))
    K, M = a.shape[-2:] if transpose_a else a.shape[:-3:-1]
    N = b.shape[-2] if transpose_b else b.shape[-1]
    turned = transpose_a and not transpose_b and N <= _SLIM < M and a.ndim == b.ndim == 2
    if turned and all(x is None for x in (bias, residual, out)):
        # A few columns of a at a time would waste most of every cache line they are read from. As
        # the other side a is read as it lies: a^T b = (b^T a)^T, each element by the same chain.
        out = empty((M, N), dtype)
        out[...] = gemm_cpu(b, a, True, False).T
        return out
    if a.dtype.char != "H" or b.dtype.char != "H":
        a_side, b_side = _side(a, K), _side(b, K)
    elif PAIR_PRODUCTS and not is_deterministic():
        a_side, b_side = _pairs(a, K, transpose_a), _pairs(b, K, not transpose_b)
    else:
        a_side, b_side = _side(a, K, SWAPPED), _side(b, K, SWAPPED)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) if a.ndim + b.ndim > 4 else ()
    if out is not None and out is residual:  # which is needed until the sums are finished
        return np.add(residual, gemm_cpu(a, b, transpose_a, transpose_b, bias), out=out)
    out = empty((*batch, M, N), dtype) if out is None else out
    offsets = _offsets(a, a_side, b, b_side, batch) if batch else None
    _launch(a_side, b_side, transpose_a, transpose_b, offsets, M, N, K, out, bias, residual)
    return out if lead is None else out.reshape(*lead, N)


@gemm_codes.cpu
def gemm_codes_cpu(a, codes, scales, table, shape, transpose_b, bias=None):
    N, K = shape if transpose_b else shape[::-1]
    out = empty((len(a), N), np.float32)
    side = Operand(address(codes), shape[1], CODES, K, 1, address(scales), address(table))
    _launch(_side(a, K), side, False, transpose_b, None, len(a), N, K, out, bias, None)
    return out


def _operand(x, dtype):
    if min(x.strides) < 0:  # bodies count forwards only
        x = np.ascontiguousarray(x)
    if x.dtype is dtype or x.dtype == dtype or (x.itemsize == 2 and dtype.itemsize == 4):
        return x
    return widen(x).astype(dtype)


_FLOAT32 = np.dtype(np.float32)
_KINDS = {"f": SAME, "d": SAME, "H": BFLOAT16, "h": FLOAT16}


def _side(x, K, kind=None):
    kind = _KINDS[x.dtype.char] if kind is None else kind
    return Operand(address(x), x.strides[-2] // x.itemsize, kind, K)


def _pairs(x, K, across):
    """The operand for bfloat16 numbers that are multiplied in pairs.

    Where k runs along the rows, a row of an even length already is a row of pairs.
    """
    start, row = address(x), x.strides[-2] // 2
    if across or x.shape[-1] % 2 or start % 4 or any(s % 4 for s in x.strides[:-1]):
        return Operand(start, row, PAIRS, K)
    return Operand(start, row // 2, SAME, K, 2)


def _offsets(a, a_side, b, b_side, batch):
    """For each product of a batch, where its a and b begin: a, b, a, b, ..."""
    offsets = np.empty((*batch, 2), np.int64)
    for n, (x, side) in enumerate(((a, a_side), (b, b_side))):
        at = np.zeros((), np.int64)
        lead = len(batch) - (x.ndim - 2)
        for axis, size in enumerate(batch):
            step = 0
            if axis >= lead and x.shape[axis - lead] > 1:
                step = x.strides[axis - lead] // x.itemsize // side.unit
            at = at[..., None] + np.arange(size) * step
        offsets[..., n] = at
    return offsets.reshape(-1, 2)


def _launch(a_side, b_side, transpose_a, transpose_b, offsets, M, N, K, out, bias, residual):
    if not out.size:
        return
    paired = PAIRS in (a_side.kind, b_side.kind) or a_side.unit == 2
    unit = 2 if paired else 1
    batch = 1 if offsets is None else len(offsets)
    threads = get_num_threads() if out.size * K >= _ENOUGH else 1
    block = max(-(-min(KC, K) // unit), 1)
    depth = -(-block // VECTOR_WIDTH) * VECTOR_WIDTH
    more = _MORE if K <= KC // _MORE else unit
    tall, wide, panel = _cut(batch, M, N, more, a_side.kind != SAME, threads, out.itemsize)
    jobs = batch * -(-M // tall) * -(-N // wide)
    own = (TALL * A_ROW + wide * depth + VECTOR_WIDTH * A_ROW + tall * panel) * out.itemsize
    plan = Plan(
        M, N, -(-K // unit), block, depth, tall, wide, panel, transpose_a, transpose_b,
        address(bias), address(residual), address(out),
        scratch(min(get_num_threads(), jobs) * own), own, address(offsets),
    )  # fmt: skip
    result = out.dtype.type(0)
    _gemm_job(jobs, plan, a_side, b_side, _PAIR if paired else result, result)


_SLIM = 16  # columns: what two panels of the narrow tile hold in float32
_MORE = 8  # how much larger rectangles may be where k is that much shorter than KC
_ENOUGH = 1 << 19  # products: fewer take as long as it takes to wake a thread
_PAIR = np.uint32(0)


@functools.lru_cache(4096)
def _cut(batch, M, N, more, packs_a, threads, itemsize):
    """Rows and columns of the rectangles that the result is cut into, and columns of a tile.

    The estimate per unit of k: a product per row and column, and the packing, which costs each row
    or column what 6 products do. What is packed of a rectangle of 768 x 384 stays in the cache; of
    one `more` times as tall and as wide too, where a block of k takes so much less room.
    """
    narrow = lanes(itemsize, NARROW)
    panel = narrow if 2 * narrow >= N else VECTORS * lanes(itemsize)
    best: Any = (math.inf,)
    least_columns, least_rows = -(-N // (384 * more)), -(-M // (768 * more))
    for columns in range(least_columns, least_columns + threads):
        wide = -(-N // (columns * panel)) * panel
        for rows in range(least_rows, least_rows + threads):
            tall = -(-M // (rows * ROWS)) * ROWS
            jobs = batch * -(-M // tall) * -(-N // wide)
            time = -(-jobs // threads) * (tall * wide + 6 * wide + (6 if packs_a else 1) * tall)
            if time < best[0]:
                best = time, tall, wide, panel
    return best[1:]


# Numba compiles a function anew for each literal number that it is called with; not for these.
_ZERO, _ONE, _A_ROW = np.int64(0), np.int64(1), np.int64(A_ROW)

# --- CPU: one job --------------------------------------------------------------------------


@body
def _gemm_job(i, thread, plan, a, b, factor, result):
    """`factor` and `result` are of the types that a tile multiplies, and that it sums up to."""
    M, N, K, block, panel = plan.M, plan.N, plan.K, plan.block, plan.panel
    ta, tb, out = plan.transpose_a, plan.transpose_b, array_at(plan.out, result)
    x, y = array_at(a.address, factor), array_at(b.address, factor)
    size, memory = x.itemsize, plan.work + thread * plan.work_bytes
    vector = VECTOR_WIDTH * 4 // size
    pa = array_at(memory, factor)
    memory += TALL * A_ROW * size
    pb = array_at(memory, factor)
    memory += plan.wide * plan.depth * size
    stage = array_at(memory, factor)
    edge = array_at(memory + VECTOR_WIDTH * A_ROW * size, result)
    down, across = -(-M // plan.tall), -(-N // plan.wide)
    n, i = i // (down * across), i % (down * across)
    m0, n0 = i // across * plan.tall, i % across * plan.wide
    tall, wide = min(plan.tall, M - m0), min(plan.wide, N - n0)
    a_at = b_at = 0
    if plan.offsets:
        offsets = array_at(plan.offsets, np.int64)
        a_at, b_at = offsets[2 * n], offsets[2 * n + 1]
    first = (n * M + m0) * N + n0

    # Rows a multiple of 4096 bytes apart would all want the same lines of the cache.
    loose_a = a.kind == SAME and a.row * size % 4096 != 0
    # For few rows packing b would cost more than it brings.
    full = wide // panel * panel
    loose = full if b.kind == SAME and not tb and tall <= 2 * ROWS else 0

    for k0 in range(0, max(K, 1), block):  # a sum of nothing is a block too: zeros
        kc = min(block, K - k0)
        kp = -(-kc // vector) * vector
        mode = FRESH if k0 == 0 else ADDED
        if loose < wide:
            _pack_b(b, b_at, tb, k0, kc, n0 + loose, wide - loose, panel, pb, stage)
        for m in range(0, tall, TALL):
            mc = min(TALL, tall - m)
            if loose_a:
                if ta:
                    xs, at, row, step = x, a_at + k0 * a.row + m0 + m, 1, a.row
                else:
                    xs, at, row, step = x, a_at + (m0 + m) * a.row + k0, a.row, 1
            else:
                _pack_a(a, a_at, ta, k0, kc, m0 + m, mc, pa, stage)
                xs, at, row, step = pa, 0, A_ROW, 1
            r = 0
            while r < mc:
                rows = ROWS if r + ROWS <= mc else ROWS // 3 if r + ROWS // 3 <= mc else 1
                xr, to = at + r * row, first + (m + r) * N
                if loose:
                    ys, y_at = y, b_at + k0 * b.row + n0
                    _strip(
                        rows, xs, xr, row, step, ys, y_at, panel, b.row, loose // panel, panel,
                        out, to, N, kc, mode,
                    )  # fmt: skip
                if loose < full:
                    _strip(
                        rows, xs, xr, row, step, pb, _ZERO, kp * panel, panel,
                        (full - loose) // panel, panel, out, to + loose, N, kc, mode,
                    )  # fmt: skip
                if full < wide:
                    _strip(
                        rows, xs, xr, row, step, pb, (full - loose) * kp, _ZERO, panel, _ONE, panel,
                        edge, (m + r) * panel, panel, kc, mode,
                    )  # fmt: skip
                r += rows

    for r in range(tall):
        for j in range(full, wide):
            out[first + r * N + j] = edge[r * panel + j - full]
        if plan.bias or plan.residual:
            _finish(out, first + r * N, wide, n0, plan.bias, plan.residual)


_tile, _tile_less, _tile_one = (tile(rows, VECTORS) for rows in (ROWS, ROWS // 3, 1))
_narrow, _narrow_less, _narrow_one = (tile(rows, 1, NARROW) for rows in (ROWS, ROWS // 3, 1))


@device(forceinline=False)
def _strip(rows, x, at, row, step, y, y_at, y_j, y_k, panels, panel, out, o, o_row, kc, mode):
    """The tiles of a few rows, over all panels."""
    if panel < VECTORS * (VECTOR_WIDTH * 4 // x.itemsize):
        for j in range(panels):
            yj, oj = y_at + j * y_j, o + j * panel
            if rows == ROWS:
                _narrow(x, at, row, step, y, yj, y_k, out, oj, o_row, kc, mode)
            elif rows == ROWS // 3:
                _narrow_less(x, at, row, step, y, yj, y_k, out, oj, o_row, kc, mode)
            else:
                _narrow_one(x, at, row, step, y, yj, y_k, out, oj, o_row, kc, mode)
    else:
        for j in range(panels):
            yj, oj = y_at + j * y_j, o + j * panel
            if rows == ROWS:
                _tile(x, at, row, step, y, yj, y_k, out, oj, o_row, kc, mode)
            elif rows == ROWS // 3:
                _tile_less(x, at, row, step, y, yj, y_k, out, oj, o_row, kc, mode)
            else:
                _tile_one(x, at, row, step, y, yj, y_k, out, oj, o_row, kc, mode)


@device(forceinline=False)
def _finish(out, o, wide, n0, bias, residual):
    """One row of finished sums becomes residual + (sum + bias)."""
    to = out[o : o + wide]
    if bias:
        extra = array_at(bias, out)[n0 : n0 + wide]
        for j in range(wide):
            to[j] += extra[j]
    if residual:
        old = array_at(residual, out)[o : o + wide]
        for j in range(wide):
            to[j] = old[j] + to[j]


# --- CPU: packing --------------------------------------------------------------------------


@device(forceinline=False)
def _pack_b(b, base, tb, k0, kc, n0, wide, panel, pb, stage):
    """Columns n0 ... of b in panels: pb[panel][k][column in the panel]."""
    vector = VECTOR_WIDTH * 4 // pb.itemsize
    kp = -(-kc // vector) * vector
    x = array_at(b.address, pb)
    if tb and panel < vector * VECTORS:
        for j in range(wide):
            _along(b, base + (n0 + j) * b.row, k0, kc, stage, _ZERO)
            o = j // panel * panel * kp + j % panel
            for k in range(kc):
                pb[o + k * panel] = stage[k]
    elif tb:
        for j in range(0, wide, vector):
            o = j // panel * panel * kp + j % panel
            whole = 0
            if b.kind == SAME and j + vector <= wide:
                whole = kc // vector * vector
                _turn(x, base + (n0 + j) * b.row + k0, b.row, whole, pb, o, panel)
            if whole < kc:
                for r in range(min(vector, wide - j)):
                    _along(
                        b,
                        base + (n0 + j + r) * b.row,
                        k0 + whole,
                        kc - whole,
                        stage,
                        r * A_ROW,
                    )
                _turn(stage, _ZERO, _A_ROW, kc - whole, pb, o + whole * panel, panel)
    else:
        whole = wide // panel * panel if panel == vector * VECTORS else 0
        for k in range(kc):
            at = base + (k0 + k) * b.row + n0
            if b.kind != SAME:
                _across(b, base, k0 + k, n0, wide, stage, _ZERO)
                x, at = stage, 0
            for j in range(0, whole, panel):
                move_panel(x, at + j, pb, j * kp + k * panel)
            for j in range(whole, wide):
                pb[j // panel * panel * kp + k * panel + j % panel] = x[at + j]


@device(forceinline=False)
def _pack_a(a, base, ta, k0, kc, m0, mc, pa, stage):
    """Rows m0 ... of a: pa[row][k]."""
    if not ta:
        for r in range(mc):
            _along(a, base + (m0 + r) * a.row, k0, kc, pa, r * A_ROW)
        return
    vector = VECTOR_WIDTH * 4 // pa.itemsize
    x = array_at(a.address, pa)
    for k in range(0, kc, vector):
        whole = 0
        if a.kind == SAME and k + vector <= kc:
            whole = mc // vector * vector
            _turn(x, base + (k0 + k) * a.row + m0, a.row, whole, pa, k, _A_ROW)
        if whole < mc:
            for r in range(min(vector, kc - k)):
                _across(a, base, k0 + k + r, m0 + whole, mc - whole, stage, r * A_ROW)
            _turn(stage, _ZERO, _A_ROW, mc - whole, pa, k + whole * A_ROW, _A_ROW)


@device(forceinline=False)
def _turn(x, at, x_row, columns, out, o, o_row):
    """out[o + c o_row + r] = x[at + r x_row + c], for a vector's length of rows.

    Columns are filled up to a multiple of that length, with anything.
    """
    vector = VECTOR_WIDTH * 4 // out.itemsize
    for c in range(0, columns, vector):
        transpose(x, at + c, x_row, out, o + c * o_row, o_row)


@device(forceinline=False)
def _along(x, base, k, n, out, o):
    """out[o : o + n] = elements k ... of the row that begins at `base`, where k runs along rows."""
    to = out[o : o + n]
    if x.kind == PAIRS:
        halves = array_at(x.address, np.uint16)[base : base + x.length]
        for i in range(n):
            low = 2 * (k + i)
            high = np.uint32(halves[low + 1]) if low + 1 < x.length else np.uint32(0)
            to[i] = np.uint32(halves[low]) | high << np.uint32(16)
    elif x.kind == SWAPPED:
        halves = array_at(x.address, np.uint16)[base : base + x.length]
        bits = to.view(np.uint32)
        for i in range(n):
            other = (k + i) ^ 1
            bits[i] = _flushed(halves[other if other < x.length else k + i])
    else:
        _elements(x, base + k, n, out, o)


@device(forceinline=False)
def _across(x, base, k, j, n, out, o):
    """out[o : o + n] = elements j ... of row k, where k counts the rows."""
    to = out[o : o + n]
    if x.kind == PAIRS:
        at = base + 2 * k * x.row + j
        low = array_at(x.address, np.uint16)[at : at + n]
        if 2 * k + 1 < x.length:
            high = array_at(x.address, np.uint16)[at + x.row : at + x.row + n]
            for i in range(n):
                to[i] = np.uint32(low[i]) | np.uint32(high[i]) << np.uint32(16)
        else:
            for i in range(n):
                to[i] = np.uint32(low[i])
    elif x.kind == SWAPPED:
        at = base + (k ^ 1 if k ^ 1 < x.length else k) * x.row + j
        halves = array_at(x.address, np.uint16)[at : at + n]
        bits = to.view(np.uint32)
        for i in range(n):
            bits[i] = _flushed(halves[i])
    else:
        _elements(x, base + k * x.row + j, n, out, o)


@device(forceinline=False)
def _elements(x, at, n, out, o):
    """out[o : o + n] = the elements from `at` on, made what a tile multiplies."""
    to = out[o : o + n]
    if x.kind == SAME:
        source = array_at(x.address, out)[at : at + n]
        for i in range(n):
            to[i] = source[i]
    elif x.kind == CODES:
        codes = array_at(x.address, np.uint8)
        scales = array_at(x.scales, np.float32)
        table = array_at(x.table, np.float32)
        for i in range(n):
            code = codes[(at + i) >> 1] >> (4 * (1 - (at + i & 1))) & 15
            to[i] = table[code] * scales[(at + i) // BLOCK]
    else:
        halves = array_at(x.address, np.uint16)[at : at + n]
        bits = to.view(np.uint32)
        if x.kind == BFLOAT16:
            for i in range(n):
                bits[i] = np.uint32(halves[i]) << np.uint32(16)
        else:  # a subnormal float16 is a multiple of 2**-24, and a normal float32
            for i in range(n):
                to[i] = np.float32(np.int32(halves[i]) & 0x7FFF) * _TINY
            for i in range(n):
                bits[i] = _float16_bits(np.uint32(halves[i]), bits[i])


@device
def _flushed(half):
    """A bfloat16 as float32 bits; a subnormal one counts as zero, as in AVX512-BF16."""
    wide = np.uint32(half) << np.uint32(16)
    return wide if half & np.uint16(0x7F80) else wide & np.uint32(0x80000000)


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
