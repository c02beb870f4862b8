"""The matrix product on a GPU: with the CPU's bits, or by cuBLAS.

With `set_deterministic(True)` it is a kernel of our own. A block of 256 threads makes a rectangle
of the result, each thread a small square of it, in registers; pieces of a and b go through shared
memory, the next one while one is multiplied. Every element is the CPU's sum: chains of fused
multiply-adds over KC of k, the blocks' sums added ascending. Where the result has too few
rectangles for the machine, the blocks of k are spread as well: their sums are stored and added
up, ascending, by a second kernel.

Without, cuBLAS multiplies: float32 without TF32, or 16 bits with sums in float32.
"""

# M rows, N columns, K summed.

from __future__ import annotations

import functools
import math

import numpy as np

from .. import backend, cuda
from ..precision import is_deterministic
from .elementwise import add_arrays
from .gemm import BFLOAT16, BLOCK, CODES, FLOAT16, KC, SAME, SWAPPED, gemm, gemm_codes

# --- which kernel does what ----------------------------------------------------------------

# Rectangles: rows, columns, k in shared memory at a time, rows and columns of a thread.
SHAPES = {
    "large": {"float": (128, 128, 16, 8, 8), "double": (128, 64, 8, 8, 4)},
    "small": {"float": (64, 64, 16, 4, 4), "double": (64, 64, 8, 4, 4)},
    "few": {"float": (8, 128, 32, 4, 1), "double": (8, 64, 32, 2, 1)},  # rows, as in decoding
    "narrow": {"float": (128, 8, 32, 1, 4), "double": (64, 8, 32, 1, 2)},  # columns, as in LoRA
}
# Rectangles that a processor works on at once, as registers permit; an H200 has 132 processors.
RESIDENT = {"large": 1, "small": 2, "few": 2, "narrow": 2}
PROCESSORS = 132
PARTS = 1 << 28  # bytes of sums of blocks of k that are stored at once
_KINDS = {"f": SAME, "d": SAME, "H": BFLOAT16, "h": FLOAT16}


@gemm.gpu
def gemm_gpu(a, b, transpose_a, transpose_b, bias=None, residual=None, out=None):
    dtype = a.dtype if a.itemsize == 8 else b.dtype if b.itemsize == 8 else np.dtype(np.float32)
    a, b = _operand(a, dtype), _operand(b, dtype)
    bias, residual = (None if x is None else _operand(x, dtype) for x in (bias, residual))
    lead = None
    if b.ndim == 2 and a.ndim > 2 and not transpose_a:
        lead = a.shape[:-1]  # leading axes are more rows
        a = a.reshape(math.prod(lead), a.shape[-1])
    K, M = a.shape[-2:] if transpose_a else a.shape[:-3:-1]
    N = b.shape[-2] if transpose_b else b.shape[-1]
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) if a.ndim + b.ndim > 4 else ()
    shape = (*batch, M, N) if lead is None else (*lead, N)
    out = cuda.empty(shape, dtype) if out is None else out
    if out.size:
        # cuBLAS takes sizes of 31 bits.
        large = max(M, N, K, a.strides[-2], b.strides[-2]) >= 1 << 31
        product = _product if is_deterministic() or large or not K else _cublas
        product(a, b, transpose_a, transpose_b, batch, M, N, K, bias, residual, out)
    return out


@gemm_codes.gpu
def gemm_codes_gpu(a, codes, scales, table, shape, transpose_b, bias=None):
    N, K = shape if transpose_b else shape[::-1]
    out = cuda.empty((len(a), N), np.float32)
    b_side = codes, shape[1], CODES, int(not transpose_b)
    if out.size:
        _launch(_side(a, False), b_side, scales, table, _ONE, len(a), N, K, bias, None, out)
    return out


def _operand(x, dtype):
    if x.ndim and min(x.strides) < 0:  # kernels count forwards only
        x = backend.cupy.ascontiguousarray(x)
    if x.dtype == dtype or (x.itemsize == 2 and dtype.itemsize == 4):
        return x
    return (_widened(x) if x.itemsize == 2 else x).astype(dtype)


def _widened(x):
    """16-bit storage as float32."""
    x = backend.cupy.ascontiguousarray(x)
    out = cuda.empty(x.shape, np.float32)
    _rest("widen", cuda.blocks(x.size), cuda.THREADS, x, _KINDS[x.dtype.char], out, x.size)
    return out


def _side(x, across, kind=None):
    """What a kernel is told of an operand: elements between rows, kind, whether rows count k."""
    kind = _KINDS[x.dtype.char] if kind is None else kind
    return x, x.strides[-2] // x.itemsize, kind, int(across)


# --- the CPU's bits ------------------------------------------------------------------------

_ONE = [(1, 0, 0)]


def _product(a, b, transpose_a, transpose_b, batch, M, N, K, bias, residual, out):
    if out is residual and K > KC:  # which is needed until the sums are finished
        product = cuda.empty(out.shape, out.dtype)
        _product(a, b, transpose_a, transpose_b, batch, M, N, K, bias, None, product)
        add_arrays(residual, product, out)
        return
    a, b, axes = _batch(a, b, batch, 3)
    kind = SWAPPED if a.dtype.char == b.dtype.char == "H" else None
    a_side, b_side = _side(a, transpose_a, kind), _side(b, not transpose_b, kind)
    _launch(a_side, b_side, 0, 0, axes, M, N, K, bias, residual, out)


def _batch(a, b, batch, most):
    """The leading axes as few ones: (size, elements of a from one to the next, of b); and a, b.

    Operands whose leading axes do not merge to `most` are copied.
    """
    axes: list[tuple[int, int, int]] = []
    for n in range(len(batch)):
        size, step_a, step_b = batch[n], _step(a, n - len(batch)), _step(b, n - len(batch))
        if size == 1:
            continue
        if axes and axes[-1][1:] == (size * step_a, size * step_b):
            axes[-1] = axes[-1][0] * size, step_a, step_b
        else:
            axes.append((size, step_a, step_b))
    if len(axes) > most:
        cupy = backend.cupy
        a, b = (cupy.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
        return _batch(cupy.ascontiguousarray(a), cupy.ascontiguousarray(b), batch, most)
    return a, b, axes or _ONE


def _step(x, axis):
    """Elements from one index of a leading axis to the next; `axis` counts back from these."""
    axis -= 2
    if -axis > x.ndim or x.shape[axis] == 1:
        return 0
    return x.strides[axis] // x.itemsize


def _launch(a_side, b_side, scales, table, axes, M, N, K, bias, residual, out):
    """Choose the rectangles, and launch."""
    real, count = out.dtype.char, -(-K // KC) or 1  # a sum of nothing is a block too: zeros
    batch = math.prod(size for size, _, _ in axes)
    name, rectangles = _choose(batch, M, N, count, cuda.REALS[real])
    steps = [(1, 0, 0)] * (3 - len(axes)) + axes
    steps = [n for step in steps for n in step][1:]
    ends = [x for x in (bias, residual, out) if x is not None]
    wide = int(N % 4 == 0 and all(x.data.ptr % 16 == 0 for x in ends))
    tile, slots = _tiles[name], PROCESSORS * RESIDENT[name]

    def run(blocks, first, number, spread, bias, residual, to):
        tile(
            "multiply", blocks, cuda.THREADS, *a_side, *b_side, scales, table, *steps, M, N, K,
            first, number, int(spread), wide, _pointer(bias), _pointer(residual), to,
            real=out.dtype,
        )  # fmt: skip

    if count == 1 or rectangles >= slots:
        run(rectangles, 0, count, False, bias, residual, out)
        return
    most = min(count, PARTS // out.nbytes)
    parts = cuda.empty((most, out.size), out.dtype)
    for first in range(0, count, most):
        number = min(most, count - first)
        run(rectangles * number, first, number, True, None, None, parts)
        if first + number < count:
            _add_up(parts, number, first == 0, N, None, None, out)
        else:
            _add_up(parts, number, first == 0, N, bias, residual, out)


def _add_up(parts, number, fresh, N, bias, residual, out):
    """out = residual + ((parts[0] + parts[1] + ...) + bias); where not fresh, out is added to."""
    _rest(
        "add_up", cuda.blocks(out.size), cuda.THREADS, parts, number, int(fresh), N, _pointer(bias),
        _pointer(residual), out, out.size, real=out.dtype,
    )  # fmt: skip


def _pointer(x):
    return 0 if x is None else x


@functools.lru_cache(4096)
def _choose(batch, M, N, blocks, real):
    """The kind of rectangle, and how many there are."""

    def rectangles(name):
        rows, columns = SHAPES[name][real][:2]
        return batch * -(-M // rows) * -(-N // columns)

    if min(M, N) <= 8:
        name = "few" if M <= N else "narrow"
        return name, rectangles(name)

    def time(name):  # a small rectangle reads twice as much for each product
        rows, columns = SHAPES[name][real][:2]
        jobs = rectangles(name) * blocks
        turns = -(-jobs // (PROCESSORS * RESIDENT[name]))
        return turns * RESIDENT[name] * rows * columns * (1.3 if name == "small" else 1)

    name = min(("large", "small"), key=time)
    return name, rectangles(name)


# How elements in memory become those that are multiplied.
_ELEMENTS = rf"""
enum {{ SAME = {SAME}, BFLOAT16 = {BFLOAT16}, SWAPPED = {SWAPPED}, CODES = {CODES} }};

// A 16-bit number, whose bits are held in a float; among SWAPPED ones a subnormal counts as 0.
__device__ inline float widened(float held, i64 kind) {{
    const u32 h = bits_of(held);
    if (kind == SWAPPED && !(h & 0x7f80)) return widened((u16)(h & 0x8000));
    return kind == BFLOAT16 || kind == SWAPPED ? widened((u16)h) : widened((short)h);
}}
"""

# A thread makes TM x TN elements of the result. Those that lie side by side are four at most, what
# one instruction loads; where a thread has eight rows or columns, the second four lie half a
# rectangle away. The 32 threads of a warp have 4 x 8 of these squares, and read as few words from
# shared memory as can be.
_TILE = r"""
enum { ROWS = @ROWS@, COLUMNS = @COLUMNS@, DEPTH = @DEPTH@, TM = @TM@, TN = @TN@ };
enum { KC = @KC@, BLOCK = @BLOCK@, ALL = 256, ACROSS = COLUMNS / TN };
enum { HIGH = TM < 4 ? TM : 4, DOWN = TM / HIGH, LONG = TN < 4 ? TN : 4, OVER = TN / LONG };

template <int n> struct alignas(sizeof(REAL) * n < 16 ? sizeof(REAL) * n : 16) Pack { REAL v[n]; };

struct Operand {
    const void *data;
    i64 row, kind, across;  // elements between rows; whether these count k, or k runs along them
    i64 size, K;            // M or N, and K
    const float *scales, *table;
};

// What a thread takes from an operand to shared memory: elements of one k or of one row, which
// `fetch` reads and `put` stores, so that there is time between the two.
template <int SIDE> struct Feed {
    enum { ROW = SIDE + 4, EACH = SIDE * DEPTH / ALL, K_APART = ALL / SIDE, APART = ALL / DEPTH };
    Operand x;
    REAL held[EACH];
    i64 at, step, swap;  // the first element, from one to the next, from a k to what it swaps with
    int k, rest, count, place, stride;

    __device__ inline void begin(const Operand &operand, i64 start, i64 first, i64 k0) {
        x = operand;
        const int t = threadIdx.x, side = x.across ? t % SIDE : t / DEPTH;
        k = x.across ? t / SIDE : t % DEPTH;
        const i64 by_k = x.across ? x.row : 1, by_side = x.across ? 1 : x.row;
        swap = x.kind == SWAPPED ? (k % 2 ? -by_k : by_k) : 0;
        at = start + (first + side) * by_side + (k0 + k) * by_k;
        step = x.across ? K_APART * x.row : APART * x.row;
        rest = (int)min(x.size - first, (i64)SIDE) - side;
        place = k * ROW + side;
        stride = x.across ? K_APART * ROW : APART;
#pragma unroll
        for (int e = 0; e < EACH; e++) held[e] = 0;
    }
    __device__ inline void fetch(i64 k0) {
        const int left = (int)min(x.K - k0, (i64)DEPTH) - k;
        count = left <= 0 || rest <= 0 ? 0
              : x.across ? (left + K_APART - 1) / K_APART : (rest + APART - 1) / APART;
        i64 from = at;
        if (x.kind == SAME) {
#pragma unroll
            for (int e = 0; e < EACH; e++, from += step)
                if (e < count) held[e] = ((const REAL *)x.data)[from];
        } else if (x.kind == CODES) {
#pragma unroll
            for (int e = 0; e < EACH; e++, from += step)
                if (e < count)
                    held[e] = ((const unsigned char *)x.data)[from >> 1] >> 4 * (~from & 1) & 15;
        } else {
#pragma unroll
            for (int e = 0; e < EACH; e++, from += step) {
                // The last k of an odd number has nothing to swap with.
                const int ke = x.across ? k + e * K_APART : k;
                const bool lone = k0 + ke + 1 == x.K && ke % 2 == 0;
                if (e < count)
                    held[e] = from_bits((int)((const u16 *)x.data)[lone ? from : from + swap]);
            }
        }
    }
    // What does not exist may become anything: no result that is kept depends on it.
    __device__ inline void put(REAL *shared) {
        if (x.kind == SAME) {
#pragma unroll
            for (int e = 0; e < EACH; e++) shared[place + e * stride] = held[e];
        } else if (x.kind == CODES) {
            i64 from = at;
#pragma unroll
            for (int e = 0; e < EACH; e++, from += step)
                if (e < count)
                    shared[place + e * stride] = x.table[(int)held[e]] * x.scales[from / BLOCK];
        } else {
#pragma unroll
            for (int e = 0; e < EACH; e++)
                shared[place + e * stride] = widened((float)held[e], x.kind);
        }
        at += x.across ? DEPTH * x.row : DEPTH;
    }
};

// HIGH rows of a thread's elements. All are read before one is needed; where rows are `wide`, they
// and what lies in memory are multiples of 16 bytes.
struct Square {
    Pack<LONG> v[HIGH][OVER];

    __device__ inline void read(const REAL *x, i64 rows, i64 columns, i64 row, i64 wide) {
        if (wide) {
#pragma unroll
            for (int i = 0; i < HIGH; i++)
#pragma unroll
                for (int q = 0; q < OVER; q++)
                    if (i < rows && q * (COLUMNS / OVER) < columns)
                        v[i][q] = *(const Pack<LONG> *)(x + i * row + q * (COLUMNS / OVER));
            return;
        }
#pragma unroll
        for (int i = 0; i < HIGH; i++)
#pragma unroll
            for (int j = 0; j < TN; j++)
                if (i < rows && place(j) < columns)
                    v[i][j / LONG].v[j % LONG] = x[i * row + place(j)];
    }
    __device__ inline void write(REAL *x, i64 rows, i64 columns, i64 row, i64 wide) const {
        if (wide) {
#pragma unroll
            for (int i = 0; i < HIGH; i++)
#pragma unroll
                for (int q = 0; q < OVER; q++)
                    if (i < rows && q * (COLUMNS / OVER) < columns)
                        *(Pack<LONG> *)(x + i * row + q * (COLUMNS / OVER)) = v[i][q];
            return;
        }
#pragma unroll
        for (int i = 0; i < HIGH; i++)
#pragma unroll
            for (int j = 0; j < TN; j++)
                if (i < rows && place(j) < columns)
                    x[i * row + place(j)] = v[i][j / LONG].v[j % LONG];
    }
    __device__ static inline int place(int j) { return j / LONG * (COLUMNS / OVER) + j % LONG; }
    __device__ inline void add_to(REAL (*sums)[TN]) const {
#pragma unroll
        for (int i = 0; i < HIGH; i++)
#pragma unroll
            for (int j = 0; j < TN; j++) sums[i][j] = v[i][j / LONG].v[j % LONG] + sums[i][j];
    }
    // Moves the sums here; they start again from 0.
    __device__ inline void take(REAL (*sums)[TN]) {
#pragma unroll
        for (int i = 0; i < HIGH; i++)
#pragma unroll
            for (int j = 0; j < TN; j++) {
                v[i][j / LONG].v[j % LONG] = sums[i][j];
                sums[i][j] = 0;
            }
    }
};

__device__ inline void step(const REAL *a, const REAL *b, REAL (*chain)[TN]) {
    Pack<HIGH> left[DOWN];
    Pack<LONG> right[OVER];
#pragma unroll
    for (int p = 0; p < DOWN; p++) left[p] = *(const Pack<HIGH> *)(a + p * (ROWS / DOWN));
#pragma unroll
    for (int q = 0; q < OVER; q++) right[q] = *(const Pack<LONG> *)(b + q * (COLUMNS / OVER));
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++)
            chain[i][j] =
                fma_(left[i / HIGH].v[i % HIGH], right[j / LONG].v[j % LONG], chain[i][j]);
}

// Rectangles of all products of a batch; where spread, each `number` times: block `first` of k,
// the next one ..., whose sums become parts. The axes of the batch are (.., s1, s2), with steps in
// a and b.
extern "C" __global__ void __launch_bounds__(256, @RESIDENT@) multiply(
    const void *a, i64 a_row, i64 a_kind, i64 a_across,
    const void *b, i64 b_row, i64 b_kind, i64 b_across, const float *scales, const float *table,
    i64 a0, i64 b0, i64 s1, i64 a1, i64 b1, i64 s2, i64 a2, i64 b2, i64 M, i64 N, i64 K,
    i64 first, i64 number, i64 spread, i64 wide, const REAL *bias, const REAL *residual, REAL *out
) {
    alignas(16) __shared__ REAL as[2][DEPTH * Feed<ROWS>::ROW];
    alignas(16) __shared__ REAL bs[2][DEPTH * Feed<COLUMNS>::ROW];
    const int t = threadIdx.x;
    const int tx = ACROSS == 16 ? t / 32 % 2 * 8 + t % 8 : t % ACROSS;
    const int ty = ACROSS == 16 ? t / 64 * 4 + t % 32 / 8 : t / ACROSS;

    const i64 down = (M + ROWS - 1) / ROWS, over = (N + COLUMNS - 1) / COLUMNS;
    i64 job = blockIdx.x;
    if (spread) {
        const i64 jobs = gridDim.x / number, part = job / jobs;
        job -= part * jobs;
        first += part;
        number = 1;
        out += part * (jobs / (down * over)) * M * N;
    }
    const i64 n = job / (down * over);
    job -= n * down * over;
    // Eight rows of rectangles at a time, so that what they read is still in the cache.
    const i64 group = job / (8 * over), top = 8 * group, high = min(down - top, (i64)8);
    const i64 m0 = (top + (job - 8 * group * over) % high) * ROWS;
    const i64 n0 = (job - 8 * group * over) / high * COLUMNS;
    const i64 i2 = n % s2, i1 = n / s2 % s1, i0 = n / s2 / s1;
    out += n * M * N;
    if (residual) residual += n * M * N;

    const i64 from = first * KC, stop = min(K, (first + number) * KC);
    Feed<ROWS> left;
    Feed<COLUMNS> right;
    left.begin({a, a_row, a_kind, a_across, M, K, 0, 0}, i0 * a0 + i1 * a1 + i2 * a2, m0, from);
    right.begin(
        {b, b_row, b_kind, b_across, N, K, scales, table}, i0 * b0 + i1 * b1 + i2 * b2, n0, from
    );
    REAL chain[TM][TN] = {};
    bool fresh = true;

    // Adds the sums of a block of k to what the result holds, and ends the result.
    const auto fold = [&](bool last) {
#pragma unroll
        for (int p = 0; p < DOWN; p++) {
            const i64 m = m0 + p * (ROWS / DOWN) + ty * HIGH, n = n0 + tx * LONG, o = m * N + n;
            REAL (*sums)[TN] = chain + p * HIGH;
            Square held;
            if (!fresh) {
                held.read(out + o, M - m, N - n, N, wide);
                held.add_to(sums);
            }
            if (last && bias) {
                held.read(bias + n, M - m, N - n, 0, wide);
                held.add_to(sums);
            }
            if (last && residual) {
                held.read(residual + o, M - m, N - n, N, wide);
                held.add_to(sums);
            }
            held.take(sums);
            held.write(out + o, M - m, N - n, N, wide);
        }
        fresh = false;
    };

    left.fetch(from);
    right.fetch(from);
    left.put(as[0]);
    right.put(bs[0]);
    __syncthreads();
    int now = 0;
    i64 k0 = from;
    for (bool more = true; more; k0 += DEPTH) {  // once at least: a sum of nothing is 0
        more = k0 + DEPTH < stop;
        if (more) {
            left.fetch(k0 + DEPTH);
            right.fetch(k0 + DEPTH);
        }
        const REAL *x = as[now] + ty * HIGH, *y = bs[now] + tx * LONG;
        if (stop - k0 >= DEPTH) {
#pragma unroll
            for (int k = 0; k < DEPTH; k++)
                step(x + k * Feed<ROWS>::ROW, y + k * Feed<COLUMNS>::ROW, chain);
        } else {
            for (int k = 0; k < (int)(stop - k0); k++)
                step(x + k * Feed<ROWS>::ROW, y + k * Feed<COLUMNS>::ROW, chain);
        }
        now ^= 1;
        if (more) {
            left.put(as[now]);
            right.put(bs[now]);
        }
        if (!more || (k0 + DEPTH) % KC == 0) fold(!more);
        __syncthreads();
    }
}
"""


def _tile_text(name: str, real: str) -> str:
    rows, columns, depth, tm, tn = SHAPES[name][real]
    numbers = {
        "ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "TM": tm, "TN": tn, "KC": KC,
        "BLOCK": BLOCK, "RESIDENT": RESIDENT[name],
    }  # fmt: skip
    text = _TILE
    for word, number in numbers.items():
        text = text.replace(f"@{word}@", str(number))
    return _ELEMENTS + text


_tiles = {name: cuda.Source(functools.partial(_tile_text, name)) for name in SHAPES}
_rest = cuda.Source(
    _ELEMENTS
    + r"""
extern "C" __global__ void add_up(
    const REAL *parts, i64 number, i64 fresh, i64 N, const REAL *bias, const REAL *residual,
    REAL *out, i64 n
) {
    const i64 i = this_thread();
    if (i >= n) return;
    REAL v = fresh ? parts[i] : out[i];
    for (i64 part = fresh; part < number; part++) v = v + parts[part * n + i];
    if (bias) v = v + bias[i % N];
    if (residual) v = residual[i] + v;
    out[i] = v;
}
extern "C" __global__ void widen(const u16 *x, i64 kind, float *out, i64 n) {
    const i64 i = this_thread();
    if (i < n) out[i] = widened(from_bits((int)x[i]), kind);
}
"""
)

# --- cuBLAS --------------------------------------------------------------------------------

# CUDA's numbers for float32, float64, float16 and bfloat16.
_TYPES = {"f": 0, "d": 1, "h": 2, "H": 14}
_SCALARS = {char: np.array([1, 0], char) for char in "fd"}  # what cuBLAS reads alpha and beta from


def _cublas(a, b, transpose_a, transpose_b, batch, M, N, K, bias, residual, out):
    if a.dtype != b.dtype:
        a, b = (_widened(x) if x.itemsize == 2 else x for x in (a, b))
    a, b, ((count, step_a, step_b),) = _batch(_plain(a), _plain(b), batch, 1)
    rows_a, rows_b = (max(x.strides[-2] // x.itemsize, x.shape[-1]) for x in (a, b))
    real, kind = _TYPES[out.dtype.char], _TYPES[a.dtype.char]
    # c += a b needs no pass of its own; other ends do.
    grows = out is residual and bias is None
    one = _SCALARS[out.dtype.char].ctypes.data
    beta = one if grows else one + out.itemsize
    to = cuda.empty(out.shape, out.dtype) if out is residual and not grows else out
    cublas, handle = backend.cupy.cuda.cublas, backend.cupy.cuda.get_cublas_handle()
    # cuBLAS counts columns first, so that it sees transposes, and makes c^T = b^T a^T.
    sizes = int(transpose_b), int(transpose_a), N, M, K, one
    left, right = (b.data.ptr, kind, rows_b), (a.data.ptr, kind, rows_a)
    made = to.data.ptr, real, N
    if count == 1:
        cublas.gemmEx(handle, *sizes, *left, *right, beta, *made, real, -1)
    else:
        cublas.gemmStridedBatchedEx(
            handle, *sizes, *left, step_b, *right, step_a, beta, *made, M * N, count, real, -1
        )
    if not grows and (bias is not None or residual is not None):
        _add_up(to, 1, True, N, bias, residual, out)


def _plain(x):
    """x with rows that do not overlap, as cuBLAS wants them."""
    if x.shape[-2] > 1 and x.strides[-2] < x.shape[-1] * x.itemsize:
        return backend.cupy.ascontiguousarray(x)
    return x
