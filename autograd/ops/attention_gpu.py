"""Attention on a GPU, in the order of sums at the top of attention.py.

A block takes some rows, queries or keys, and meets a tile of 64 others at a time. Half a warp, 16
threads, owns R of the rows; thread x of it has the columns x, x + 16, x + 32, x + 48 of the tile,
so that the lanes in which l is summed are its own. The products go through shared memory, the
heads a chunk of channels at a time, with the accumulators in registers. Nothing is larger than
the operands, and no two blocks add to one place:

    forward         queries; tiles of keys, ascending, anchored at the segment's first key
    query gradient  queries; tiles of keys, ascending
    key gradients   keys; query heads, ascending, and for each tiles of queries, ascending

Scores are computed again in both gradients: nothing in between must be stored.
"""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import backend, cuda
from . import attention_plan as plan
from .attention import attention_backward, attention_forward
from .dropout import KEEP_8, drop_rule

KINDS = {"f": 0, "d": 0, "H": 1, "h": 2}  # how q, k and v are stored: as bfloat16, as float16
ROWS = {"f": 64, "d": 32}  # of a block
FEW = 8  # of a block where there are no more queries, as in decoding

# By width: rows of half a warp, and blocks that a processor holds at once, as registers permit; of
# the kernels that keep one sum for each row, and of the one that keeps two.
SHAPES = {
    32: ((8, 3), (4, 2)),
    64: ((8, 3), (4, 2)),
    96: ((8, 2), (4, 1)),
    128: ((8, 2), (4, 1)),
    192: ((4, 1), (2, 1)),
    256: ((4, 1), (2, 1)),
}  # other sizes of heads are filled up

_COMMON = (
    KEEP_8
    + r"""
// W channels of a head; D of them are real, the rest zeros. LD is a row of CHUNK channels in shared
// memory, LP one of 64 scores: four more than it holds, so that neighbours are in other banks.
constexpr int CHUNK = 32, LD = CHUNK + 4, LP = 68;
constexpr int HALVES = ROWS / R, THREADS = 16 * HALVES;  // of a block
constexpr int TILES = (ROWS + 64) * LD;                  // elements of two chunks
constexpr int KEEP = TILES / W;                          // rows of W channels in their place
constexpr int BATCH = KEEP >= 64 ? 64 : KEEP >= 32 ? 32 : KEEP >= 16 ? 16 : 8;
constexpr int COLUMNS = W / 16, STEP = W % 64 ? 2 : 4;  // of a thread; side by side

struct alignas(4 * sizeof(REAL)) Quad { REAL v[4]; };

__device__ inline float most(float x, float y) { return fmaxf(x, y); }
__device__ inline double most(double x, double y) { return fmax(x, y); }
// The largest of half a warp. A NaN may be passed over: it makes the sum of the row NaN.
__device__ inline REAL most_of_16(REAL x) {
    for (int step = 8; step; step /= 2) x = most(x, __shfl_xor_sync(0xffffffffu, x, step, 16));
    return x;
}

// An array (B, N, heads, D), all but its last axis strided.
struct Heads { const void *x; i64 kind, b, n, h; };

// to[r][d] = x[r][d] * factor, where r < count and d < D, else 0: a warp reads 32 channels
template <int N, int WIDE, int LEAD, class T>
__device__ inline void fill(REAL *to, const T *x, i64 step, i64 count, i64 D, REAL factor) {
    const int first = threadIdx.x / 32;
    for (int d = threadIdx.x % 32; d < WIDE; d += 32) {
        const T *from = x + first * step + d;
        const i64 rows = d < D ? count : 0;
#pragma unroll 8
        for (int r = first; r < N; r += THREADS / 32, from += step * (THREADS / 32))
            to[r * LEAD + d] = r < rows ? widened(*from) * factor : (REAL)0;
    }
}
// The same for rows n, n + 1 ... of a head, channels from d on.
template <int N, int WIDE, int LEAD>
__device__ inline void fetch(REAL *to, Heads x, i64 b, i64 n, i64 h, i64 count, i64 d, i64 D,
                             REAL factor) {
    const i64 at = b * x.b + n * x.n + h * x.h + d;
    if (x.kind == 0)
        fill<N, WIDE, LEAD>(to, (const REAL *)x.x + at, x.n, count, D - d, factor);
    else if (x.kind == 1)
        fill<N, WIDE, LEAD>(to, (const u16 *)x.x + at, x.n, count, D - d, factor);
    else
        fill<N, WIDE, LEAD>(to, (const short *)x.x + at, x.n, count, D - d, factor);
}

// s[r][c]: the chain over d of row r and column c, for the thread's R rows and four columns
__device__ inline void score(REAL *tiles, Heads x, i64 xn, i64 xh, i64 x_count, REAL x_factor,
                             Heads y, i64 yn, i64 yh, i64 y_count, REAL y_factor, i64 b, i64 D,
                             REAL (&s)[R][4]) {
    const int half = threadIdx.x / 16, lane = threadIdx.x % 16;
    REAL *rows = tiles, *columns = tiles + ROWS * LD;
#pragma unroll
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 4; c++) s[r][c] = 0;
    for (int d0 = 0; d0 < W; d0 += CHUNK) {
        __syncthreads();
        fetch<ROWS, CHUNK, LD>(rows, x, b, xn, xh, x_count, d0, D, x_factor);
        fetch<64, CHUNK, LD>(columns, y, b, yn, yh, y_count, d0, D, y_factor);
        __syncthreads();
#pragma unroll 2
        for (int d = 0; d < CHUNK; d += 4) {
            Quad row[R], column[4];
#pragma unroll
            for (int r = 0; r < R; r++)
                row[r] = *(const Quad *)(rows + (r * HALVES + half) * LD + d);
#pragma unroll
            for (int c = 0; c < 4; c++)
                column[c] = *(const Quad *)(columns + (c * 16 + lane) * LD + d);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int r = 0; r < R; r++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        s[r][c] = fma_(row[r].v[e], column[c].v[e], s[r][c]);
        }
    }
}

// Which channel a thread's column n is.
__device__ inline int channel(int n) {
    return n / STEP * 16 * STEP + threadIdx.x % 16 * STEP + n % STEP;
}

// What stands for a pair that is not seen: all bits set. It is no term of a chain.
__device__ inline float blank(float) { return from_bits(-1); }
__device__ inline double blank(double) { return from_bits((i64)-1); }

template <bool PARTIAL>
__device__ inline void add_batch(const REAL *p, const REAL *y, REAL (&sum)[R][COLUMNS]) {
#pragma unroll 1
    for (int j = 0; j < BATCH; j += 4) {
        Quad row[R];
#pragma unroll
        for (int r = 0; r < R; r++)
            row[r] = *(const Quad *)(p + (r * HALVES + threadIdx.x / 16) * LP + j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            REAL column[COLUMNS];
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) column[n] = y[(j + e) * W + channel(n)];
#pragma unroll
            for (int r = 0; r < R; r++) {
                const bool seen = !PARTIAL || bits_of(row[r].v[e]) != -1;
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) {
                    const REAL next = fma_(row[r].v[e], column[n], sum[r][n]);
                    sum[r][n] = seen ? next : sum[r][n];
                }
            }
        }
    }
}
// The chains over the tile's 64 go on: sum[r][d] += p[r][j] y[j][d]
__device__ inline void multiply(REAL *tiles, const REAL *p, Heads y, i64 n, i64 h, i64 count,
                                REAL factor, i64 b, i64 D, bool partial, REAL (&sum)[R][COLUMNS]) {
    for (int j = 0; j < 64; j += BATCH) {
        __syncthreads();
        fetch<BATCH, W, W>(tiles, y, b, n + j, h, count - j, 0, D, factor);
        __syncthreads();
        if (partial) add_batch<true>(p + j, tiles, sum);
        else add_batch<false>(p + j, tiles, sum);
    }
}

// Query p, counted among the keys, sees key s iff s - p <= reach, p - s < window, and both are of
// one segment, which need be asked only where a segment has others between its keys: `holes`.
struct Sight { const i64 *segments; i64 holes, reach, window; };

__device__ inline bool sees(Sight sight, i64 row, i64 p, i64 s) {
    if (s - p > sight.reach || p - s >= sight.window) return false;
    return !sight.holes || sight.segments[row + p] == sight.segments[row + s];
}
// Whether queries from p on, to the last, all see keys s to s_last.
__device__ inline bool all_see(Sight sight, i64 p, i64 p_last, i64 s, i64 s_last) {
    return !sight.holes && s_last - p <= sight.reach && p_last - s < sight.window;
}

// Dropout of the scores of one tile: bits for 64 keys of each query, which 9 blocks of 8 cover.
struct Rule { i64 key0, key1, threshold; REAL boost; };

__device__ inline void draw(unsigned char *drawn, Rule rule, i64 first, i64 S, int queries) {
    for (int i = threadIdx.x; i < 9 * queries; i += THREADS)
        drawn[i] = keep_8(rule.key0, rule.key1, ((first + i / 9 * S) >> 3) + i % 9, rule.threshold);
}
__device__ inline REAL factor_of(const unsigned char *drawn, Rule rule, i64 first, i64 S, int query,
                                 int key) {
    const int place = (int)((first + query * S) & 7) + key;
    return drawn[query * 9 + place / 8] >> place % 8 & 1 ? rule.boost : (REAL)0;
}
"""
)

_FORWARD = r"""
// items: batch row, first query, queries, first key, end of the keys
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention_forward(
    const i64 *items, const void *q, const void *k, const void *v, i64 kind, i64 q_b, i64 q_t,
    i64 q_h, i64 k_b, i64 k_s, i64 k_h, i64 v_b, i64 v_s, i64 v_h, const i64 *segments, i64 holes,
    i64 reach, i64 window, REAL scale, i64 key0, i64 key1, i64 threshold, REAL boost, REAL *out,
    REAL *lse, i64 T, i64 S, i64 H, i64 G, i64 D) {
    __shared__ Quad shared[(TILES + ROWS * LP) / 4];
    __shared__ unsigned char drawn[9 * 64];
    REAL *tiles = (REAL *)shared, *probabilities = tiles + TILES;
    const Heads queries = {q, kind, q_b, q_t, q_h}, keys = {k, kind, k_b, k_s, k_h};
    const Heads values = {v, kind, v_b, v_s, v_h};
    const Sight sight = {segments, holes, reach, window};
    const Rule rule = {key0, key1, threshold, boost};
    const i64 *item = items + blockIdx.x / H * 5;
    const i64 b = item[0], t0 = item[1], n = item[2], first = item[3], end = item[4];
    const i64 h = blockIdx.x % H, kv = h / (H / G), p0 = t0 + S - T;
    const int half = threadIdx.x / 16, lane = threadIdx.x % 16;

    REAL m[R], l[R], o[R][COLUMNS];
#pragma unroll
    for (int r = 0; r < R; r++) {
        m[r] = -infinity<REAL>(), l[r] = 0;
        for (int c = 0; c < COLUMNS; c++) o[r][c] = 0;
    }
    const i64 near = p0 - window + 1, far = p0 + n + reach;
    const i64 start = near > first ? first + (near - first) / 64 * 64 : first;
    for (i64 k0 = start; k0 < (end < far ? end : far); k0 += 64) {
        const i64 nk = end - k0 < 64 ? end - k0 : 64;
        const bool partial = nk < 64 || !all_see(sight, p0, p0 + n - 1, k0, k0 + 63);
        const i64 word = ((b * H + h) * T + t0) * S + k0;
        REAL s[R][4];
        if (threshold) draw(drawn, rule, word, S, ROWS);
        score(tiles, queries, t0, h, n, scale, keys, k0, kv, nk, 1, b, D, s);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = r * HALVES + half;
            bool seen[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int j = c * 16 + lane;
                seen[c] = !partial || (row < n && j < nk && sees(sight, b * S, p0 + row, k0 + j));
                s[r][c] = seen[c] ? s[r][c] : -infinity<REAL>();
            }
            const REAL before = m[r];
            REAL top = most(most(s[r][0], s[r][1]), most(s[r][2], s[r][3]));
            top = most(before, most_of_16(top));
            const REAL base = top > -infinity<REAL>() ? top : (REAL)0;
#pragma unroll
            for (int c = 0; c < 4; c++) s[r][c] = exp_flushed_(s[r][c] - base);
            const REAL shrink = exp_flushed_(before - base);
            m[r] = top;
            l[r] = fma_(l[r], shrink, tree_sum(((s[r][0] + s[r][1]) + s[r][2]) + s[r][3]));
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) o[r][c] = o[r][c] * shrink;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int j = c * 16 + lane;
                if (threshold) s[r][c] = s[r][c] * factor_of(drawn, rule, word, S, row, j);
                probabilities[row * LP + j] = seen[c] ? s[r][c] : blank((REAL)0);
            }
        }
        multiply(tiles, probabilities, values, k0, kv, nk, 1, b, D, partial, o);
    }

#pragma unroll
    for (int r = 0; r < R; r++) {
        const int row = r * HALVES + half;
        if (row >= n) continue;
        const i64 t = t0 + row;
        const REAL inverse = l[r] != 0 ? 1 / l[r] : l[r];
        if (lane == 0) lse[(b * H + h) * T + t] = l[r] != 0 ? m[r] + log_(l[r]) : l[r];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (channel(c) < D) out[((b * T + t) * H + h) * D + channel(c)] = o[r][c] * inverse;
    }
}
"""

_DELTA = r"""
// delta (B, H, T): g out along the last axis, 16 threads a row
template <class T>
__device__ inline REAL dot(const REAL *g, const T *out, i64 D) {
    REAL total = 0;
    for (i64 d = this_lane(); d < D; d += 16) total = fma_(g[d], (REAL)widened(out[d]), total);
    return tree_sum(total);
}
extern "C" __global__ void find_delta(const REAL *g, i64 g_b, i64 g_t, i64 g_h, const void *out,
                                      i64 kind, REAL *delta, i64 T, i64 H, i64 D, i64 n) {
    const i64 row = this_row(), i = row < n ? row : 0, h = i % H, t = i / H % T, b = i / H / T;
    const REAL *from = g + b * g_b + t * g_t + h * g_h;
    const REAL total = kind == 0   ? dot(from, (const REAL *)out + i * D, D)
                       : kind == 1 ? dot(from, (const u16 *)out + i * D, D)
                                   : dot(from, (const short *)out + i * D, D);
    if (row < n && this_lane() == 0) delta[(b * H + h) * T + t] = total;
}
"""

_HARDEN = r"""
// From a score and g v: P, which dropout may have changed, in s; P (dP - delta) in d
__device__ inline void harden(REAL &s, REAL &d, REAL lse, REAL delta, bool drops, REAL factor) {
    const REAL p = exp_flushed_(s - lse);
    if (drops) d = d * factor;
    s = drops ? p * factor : p;
    d = p * (d - delta);
}
"""

_QUERY_GRADIENT = (
    _HARDEN
    + r"""
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) query_gradient(
    const i64 *items, const void *g, i64 g_b, i64 g_t, i64 g_h, const void *q, const void *k,
    const void *v, i64 kind, i64 q_b, i64 q_t, i64 q_h, i64 k_b, i64 k_s, i64 k_h, i64 v_b,
    i64 v_s, i64 v_h, const i64 *segments, i64 holes, i64 reach, i64 window, REAL scale, i64 key0,
    i64 key1, i64 threshold, REAL boost, const REAL *lse, const REAL *delta, REAL *dq, i64 T, i64 S,
    i64 H, i64 G, i64 D) {
    __shared__ Quad shared[(TILES + ROWS * LP) / 4];
    __shared__ unsigned char drawn[9 * 64];
    REAL *tiles = (REAL *)shared, *gradients = tiles + TILES;
    const Heads arriving = {g, 0, g_b, g_t, g_h}, queries = {q, kind, q_b, q_t, q_h};
    const Heads keys = {k, kind, k_b, k_s, k_h}, values = {v, kind, v_b, v_s, v_h};
    const Sight sight = {segments, holes, reach, window};
    const Rule rule = {key0, key1, threshold, boost};
    const i64 *item = items + blockIdx.x / H * 5;
    const i64 b = item[0], t0 = item[1], n = item[2], first = item[3], end = item[4];
    const i64 h = blockIdx.x % H, kv = h / (H / G), p0 = t0 + S - T;
    const int half = threadIdx.x / 16, lane = threadIdx.x % 16;

    REAL sums[R], deltas[R], o[R][COLUMNS];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int row = r * HALVES + half;
        const i64 at = (b * H + h) * T + t0 + (row < n ? row : 0);
        sums[r] = lse[at], deltas[r] = delta[at];
        for (int c = 0; c < COLUMNS; c++) o[r][c] = 0;
    }
    const i64 near = p0 - window + 1, far = p0 + n + reach;
    for (i64 k0 = near > first ? near : first; k0 < (end < far ? end : far); k0 += 64) {
        const i64 nk = end - k0 < 64 ? end - k0 : 64;
        const bool partial = nk < 64 || !all_see(sight, p0, p0 + n - 1, k0, k0 + 63);
        const i64 word = ((b * H + h) * T + t0) * S + k0;
        REAL s[R][4], d[R][4];
        if (threshold) draw(drawn, rule, word, S, ROWS);
        score(tiles, queries, t0, h, n, scale, keys, k0, kv, nk, 1, b, D, s);
        score(tiles, arriving, t0, h, n, 1, values, k0, kv, nk, 1, b, D, d);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = r * HALVES + half;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int j = c * 16 + lane;
                const REAL kept = threshold ? factor_of(drawn, rule, word, S, row, j) : (REAL)1;
                harden(s[r][c], d[r][c], sums[r], deltas[r], threshold, kept);
                const bool seen =
                    !partial || (row < n && j < nk && sees(sight, b * S, p0 + row, k0 + j));
                gradients[row * LP + j] = seen ? d[r][c] : blank((REAL)0);
            }
        }
        multiply(tiles, gradients, keys, k0, kv, nk, 1, b, D, partial, o);
    }

#pragma unroll
    for (int r = 0; r < R; r++) {
        const int row = r * HALVES + half;
        if (row >= n) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (channel(c) < D)
                dq[((b * T + t0 + row) * H + h) * D + channel(c)] = o[r][c] * scale;
    }
}
"""
)

_KEY_GRADIENTS = (
    _HARDEN
    + r"""
// items: batch row, first key, keys, first query, end of the queries
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) key_gradients(
    const i64 *items, const void *g, i64 g_b, i64 g_t, i64 g_h, const void *q, const void *k,
    const void *v, i64 kind, i64 q_b, i64 q_t, i64 q_h, i64 k_b, i64 k_s, i64 k_h, i64 v_b,
    i64 v_s, i64 v_h, const i64 *segments, i64 holes, i64 reach, i64 window, REAL scale, i64 key0,
    i64 key1, i64 threshold, REAL boost, const REAL *lse, const REAL *delta, REAL *dk, REAL *dv,
    i64 T, i64 S, i64 H, i64 G, i64 D) {
    __shared__ Quad shared[(TILES + ROWS * LP) / 4];
    __shared__ unsigned char drawn[9 * 64];
    REAL *tiles = (REAL *)shared, *weights = tiles + TILES;
    const Heads arriving = {g, 0, g_b, g_t, g_h}, queries = {q, kind, q_b, q_t, q_h};
    const Heads keys = {k, kind, k_b, k_s, k_h}, values = {v, kind, v_b, v_s, v_h};
    const Sight sight = {segments, holes, reach, window};
    const Rule rule = {key0, key1, threshold, boost};
    const i64 *item = items + blockIdx.x / G * 5;
    const i64 b = item[0], k0 = item[1], nk = item[2], first = item[3], end = item[4];
    const i64 kv = blockIdx.x % G;
    const int half = threadIdx.x / 16, lane = threadIdx.x % 16;

    const i64 near = k0 - reach - (S - T), far = k0 + nk - 1 + window - (S - T);
    for (i64 h = kv * (H / G); h < (kv + 1) * (H / G); h++) {
        REAL dk_sum[R][COLUMNS], dv_sum[R][COLUMNS];
#pragma unroll
        for (int r = 0; r < R; r++)
            for (int c = 0; c < COLUMNS; c++) dk_sum[r][c] = 0, dv_sum[r][c] = 0;
        for (i64 t0 = near > first ? near : first; t0 < (end < far ? end : far); t0 += 64) {
            const i64 n = end - t0 < 64 ? end - t0 : 64, p0 = t0 + S - T;
            const bool partial = n < 64 || !all_see(sight, p0, p0 + 63, k0, k0 + nk - 1);
            const i64 word = ((b * H + h) * T + t0) * S + k0;
            REAL s[R][4], d[R][4];
            if (threshold) draw(drawn, rule, word, S, 64);
            score(tiles, keys, k0, kv, nk, 1, queries, t0, h, n, scale, b, D, s);
            score(tiles, values, k0, kv, nk, 1, arriving, t0, h, n, 1, b, D, d);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int y = c * 16 + lane;
                const i64 at = (b * H + h) * T + t0 + (y < n ? y : 0);
                const REAL sum = lse[at], own = delta[at];
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const int row = r * HALVES + half;
                    const REAL kept = threshold ? factor_of(drawn, rule, word, S, y, row) : (REAL)1;
                    harden(s[r][c], d[r][c], sum, own, threshold, kept);
                    const bool seen =
                        !partial || (row < nk && y < n && sees(sight, b * S, p0 + y, k0 + row));
                    d[r][c] = seen ? d[r][c] : blank((REAL)0);
                    weights[row * LP + y] = seen ? s[r][c] : blank((REAL)0);
                }
            }
            multiply(tiles, weights, arriving, t0, h, n, 1, b, D, partial, dv_sum);
            __syncwarp();  // the half warps read their own rows of weights only
#pragma unroll
            for (int r = 0; r < R; r++)
                for (int c = 0; c < 4; c++)
                    weights[(r * HALVES + half) * LP + c * 16 + lane] = d[r][c];
            multiply(tiles, weights, queries, t0, h, n, scale, b, D, partial, dk_sum);
        }
        const bool more = h > kv * (H / G);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = r * HALVES + half;
            if (row >= nk) continue;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                if (channel(c) >= D) continue;
                const i64 at = ((b * S + k0 + row) * G + kv) * D + channel(c);
                dk[at] = more ? dk[at] + dk_sum[r][c] : dk_sum[r][c];
                dv[at] = more ? dv[at] + dv_sum[r][c] : dv_sum[r][c];
            }
        }
    }
}
"""
)


def _source(text: str, width: int, shape: tuple[int, int], rows: int | None = None) -> Any:
    def whole(real: str) -> str:
        n = rows or ROWS[real[0]]
        resident = shape[1] if real == "float" else 1
        names = f"W = {width}, ROWS = {n}, R = {shape[0]}, RESIDENT = {resident}"
        return f"constexpr int {names};{_COMMON}{text}"

    return cuda.Source(whole)


_SOURCES = {
    width: {
        "attention_forward": _source(_FORWARD, width, one),
        "few_rows": _source(_FORWARD, width, (1, 4), FEW),
        "query_gradient": _source(_QUERY_GRADIENT, width, one),
        "key_gradients": _source(_KEY_GRADIENTS, width, two),
    }
    for width, (one, two) in SHAPES.items()
}
_delta = cuda.Source(_DELTA)


def _width(D: int) -> int:
    """The head size that there is a source for."""
    width = next((w for w in SHAPES if w >= D), None)
    if width is None:
        raise ValueError(f"attention: heads of size {D} given, on a GPU at most {max(SHAPES)}")
    return width


@attention_forward.gpu
def attention_forward_gpu(q, k, v, scale, causal, segments, window, dropout, key):
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    width, dtype = _width(D), scale.dtype
    few = T <= FEW
    rows, each = (FEW, 1) if few else (ROWS[dtype.char], SHAPES[width][0][0])
    items, holes, whole = _queries(B, T, S, plan.segment_names(segments), rows)
    out, lse = _new(whole, (B, T, H, D), dtype), _new(whole, (B, H, T), dtype)
    _SOURCES[width]["few_rows" if few else "attention_forward"](
        "attention_forward", len(items) * H, 16 * rows // each, items, *_operands(q, k, v),
        *_masks(segments, holes, causal, window), scale, *drop_rule(dropout, key, dtype), out, lse,
        T, S, H, G, D, real=dtype,
    )  # fmt: skip
    return out, lse


@attention_backward.gpu
def attention_backward_gpu(g, q, k, v, out, lse, scale, causal, segments, window, dropout, key):
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    width, dtype = _width(D), scale.dtype
    rows = ROWS[dtype.char]
    delta, N = cuda.empty((B, H, T), dtype), B * T * H
    _delta(
        "find_delta", cuda.row_blocks(N), cuda.THREADS, *_strided(g), out, KINDS[out.dtype.char],
        delta, T, H, D, N, real=dtype,
    )  # fmt: skip

    def run(name, each, parts, items, holes, *results):
        _SOURCES[width][name](
            name, len(items) * parts, 16 * rows // each, items, *_strided(g), *_operands(q, k, v),
            *_masks(segments, holes, causal, window), scale, *drop_rule(dropout, key, dtype), lse,
            delta, *results, T, S, H, G, D, real=dtype,
        )  # fmt: skip

    (one, _), (two, _) = SHAPES[width]
    items, holes, whole = _queries(B, T, S, plan.segment_names(segments), rows)
    dq = _new(whole, (B, T, H, D), dtype)
    run("query_gradient", one, H, items, holes, dq)
    items, holes, whole = _keys(B, T, S, plan.segment_names(segments), rows)
    dk, dv = (_new(whole, (B, S, G, D), dtype) for _ in range(2))
    run("key_gradients", two, G, items, holes, dk, dv)
    return dq, dk, dv


def _new(whole, shape, dtype):
    """Room for a result; what no block will write is 0."""
    return cuda.empty(shape, dtype) if whole else backend.cupy.zeros(shape, dtype)


def _strided(x):
    return x, *(s // x.itemsize for s in x.strides[:3])


def _operands(q, k, v):
    steps = [n for x in (q, k, v) for n in _strided(x)[1:]]
    return q, k, v, KINDS[q.dtype.char], *steps


def _masks(segments, holes, causal, window):
    return (
        _on_gpu(segments.tobytes()) if holes else 0,
        int(holes),
        *plan.sight(causal, window),
    )


# --- what there is to do, moved to the GPU once for all layers ---------------------------------


@functools.lru_cache(maxsize=32)
def _on_gpu(names: bytes) -> Any:
    return cuda.asarray(np.frombuffer(names, np.int64))


@functools.lru_cache(maxsize=32)
def _queries(B: int, T: int, S: int, names: bytes | None, rows: int) -> tuple[Any, bool, bool]:
    """Items of at most `rows` queries, those with the most keys first; holes; whether these are
    all queries."""
    items, holes = plan.forward_items(B, T, S, names, rows)
    return cuda.asarray(items), holes, int(items[:, 2].sum()) == B * T


@functools.lru_cache(maxsize=32)
def _keys(B: int, T: int, S: int, names: bytes | None, rows: int) -> tuple[Any, bool, bool]:
    """The same of keys: batch row, first key, keys, and the queries of their segment."""
    runs, holes = plan.runs(B, S, S, names)
    items = [
        (b, s, min(rows, s0 + n - s), max(first - (S - T), 0), end - (S - T))
        for b, s0, n, first, end in runs.tolist()
        for s in range(s0, s0 + n, rows)
    ]
    if names is None:
        items = [(b, s, n, 0, T) for b, s, n, _, _ in items]
    items.sort(key=lambda item: item[1] + S - T - item[3])
    table = np.array(items, np.int64).reshape(-1, plan.RUN)
    return cuda.asarray(table), holes, int(table[:, 2].sum()) == B * S
