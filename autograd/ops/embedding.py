"""Looking rows of a table up."""

# N looked-up rows, a table of V rows of C channels.

from __future__ import annotations

import numpy as np

from .. import cuda
from ..backend import array_module, is_array, kernel
from ..buffers import empty
from ..device import beside
from ..launch import body, device
from ..tape import op
from ..tile import LINE, ask_for
from .gemm import widen


@op
def embedding(weight, ids):
    """weight[ids]; a table of bfloat16 bits is read as float32.

    weight (V, C), ids (...) -> (..., C)
    """
    if weight.ndim != 2:
        raise ValueError(f"embedding: a weight (V, C) needed, given shape {weight.shape}")
    V, C = weight.shape
    ids = beside(as_ids("embedding", "id", ids, V), weight)
    shape, ids = ids.shape, ids.reshape(-1)
    rows = embedding_rows(weight, ids)  # (N, C)
    return rows.reshape(*shape, C), (
        lambda g: embedding_backward(g.reshape(ids.size, C), ids, V),
        None,
    )


def as_ids(op_name, noun, ids, V, ignored=None):
    """The ids as int64, if each is in 0 .. V - 1 or is `ignored`."""
    if not is_array(ids) or ids.dtype.kind not in "iu":
        kind = ids.dtype if is_array(ids) else type(ids).__name__
        raise TypeError(f"{op_name}: {noun}s are integers in an array, given {kind}")
    if ids.size and (ids.min() < 0 or ids.max() >= V):
        wrong = (ids < 0) | (ids >= V)
        if ignored is not None:
            wrong &= ids != ignored
        if wrong.any():
            where = tuple(int(n[0]) for n in wrong.nonzero())
            aside = "" if ignored is None else f" and is not ignore_index, {ignored}"
            raise ValueError(
                f"{op_name}: {noun} {int(ids[where])} at index {where} is not in 0 .. {V - 1}"
                f"{aside}"
            )
    return ids.astype(np.int64, order="C", copy=False)


@kernel
def embedding_rows(weight, ids):
    return widen(weight[ids])


@kernel
def embedding_backward(g, ids, V):
    """The rows of g added up per id: from 0, positions ascending."""
    out = array_module(g).zeros((V, g.shape[-1]), g.dtype)
    array_module(g).add.at(out, ids, g)
    return out


# --- CPU -----------------------------------------------------------------------------------

ROWS = 64  # per index of a body: long against a launch, short against a thread's share


@body
def gather_cpu(i, weight, ids, out):  # owns ROWS rows of out
    for n in range(ROWS * i, min(ROWS * (i + 1), ids.size)):
        _ask_for_row(weight, ids[min(n + AHEAD, ids.size - 1)])
        row, to = weight[ids[n]], out[n]
        for c in range(out.shape[1]):
            to[c] = row[c]


@body
def gather_widened_cpu(i, bits, ids, out):  # bfloat16 is the upper half of a float32
    for n in range(ROWS * i, min(ROWS * (i + 1), ids.size)):
        _ask_for_row(bits, ids[min(n + AHEAD, ids.size - 1)])
        row, to = bits[ids[n]], out[n]
        for c in range(out.shape[1]):
            to[c] = np.uint32(row[c]) << np.uint32(16)


AHEAD = 4  # rows: the next ones are anywhere in the table
_ask = ask_for(1)


@device
def _ask_for_row(x, n):
    row = x.ctypes.data + n * x.strides[0]
    for at in range(0, x.strides[0], LINE):
        _ask(row + at)


@embedding_rows.cpu
def embedding_rows_cpu(weight, ids):
    n, shape = -(-ids.size // ROWS), (ids.size, weight.shape[1])
    if weight.dtype == np.uint16:
        out = empty(shape, np.float32)
        gather_widened_cpu(n, weight, ids, out.view(np.uint32))
    else:
        out = empty(shape, weight.dtype)
        gather_cpu(n, weight, ids, out)
    return out


@body
def scatter_cpu(i, g, keys, out):  # owns ROWS rows of out; a key is id * N + position, ascending
    low, high = ROWS * i, min(ROWS * (i + 1), out.shape[0])
    N, zero = keys.size, out.dtype.type(0)
    k, end = 0, N  # the first key of a row from low on is in [k, end]
    while k < end:
        middle = (k + end) // 2
        if keys[middle] < low * N:
            k = middle + 1
        else:
            end = middle
    for v in range(low, high):
        to, stop = out[v], (v + 1) * N
        for c in range(to.size):
            to[c] = zero
        while k < N and keys[k] < stop:
            _ask_for_row(g, keys[min(k + AHEAD, N - 1)] % N)
            row = g[keys[k] % N]
            for c in range(to.size):
                to[c] += row[c]
            k += 1


@embedding_backward.cpu
def embedding_backward_cpu(g, ids, V):
    keys = ids * ids.size + np.arange(ids.size)
    keys.sort()  # by id, then by position
    out = empty((V, g.shape[1]), g.dtype)
    scatter_cpu(-(-V // ROWS), g, keys, out)
    return out


# --- GPU -----------------------------------------------------------------------------------

# A thread an element of the result.
_source = cuda.Source(r"""
extern "C" __global__ void gather(const REAL *weight, const i64 *ids, REAL *out, i64 C, i64 n) {
    const i64 i = this_thread();
    if (i < n) out[i] = weight[ids[i / C] * C + i % C];
}
extern "C" __global__ void gather_widened(const u16 *bits, const i64 *ids, float *out, i64 C,
                                          i64 n) {
    const i64 i = this_thread();
    if (i < n) out[i] = widened(bits[ids[i / C] * C + i % C]);
}

// Where the keys of each id begin; a key is id * N + position, and keys ascend.
extern "C" __global__ void find_starts(const i64 *keys, i64 *start, i64 N, i64 n) {
    const i64 v = this_thread();
    if (v >= n) return;
    i64 low = 0, high = N;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (keys[middle] < v * N) low = middle + 1;
        else high = middle;
    }
    start[v] = low;
}
extern "C" __global__ void scatter(const REAL *g, const i64 *keys, const i64 *start, REAL *out,
                                   i64 N, i64 C, i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const i64 c = i % C, v = i / C;
    REAL total = 0;
    for (i64 k = start[v]; k < start[v + 1]; k++) total = total + g[(keys[k] - v * N) * C + c];
    out[i] = total;
}
""")


def _by_element(name, out, *args):
    """Launch a function with a thread for each element of `out`."""
    _source(name, cuda.blocks(out.size), cuda.THREADS, *args, out.size, real=out.dtype)


@embedding_rows.gpu
def embedding_rows_gpu(weight, ids):
    wide = weight.dtype == np.uint16
    out = cuda.empty((ids.size, weight.shape[1]), np.float32 if wide else weight.dtype)
    _by_element("gather_widened" if wide else "gather", out, weight, ids, out, out.shape[1])
    return out


@embedding_backward.gpu
def embedding_backward_gpu(g, ids, V):
    N, C = ids.size, g.shape[1]
    keys = ids * N + array_module(ids).arange(N)
    if N:
        keys.sort()  # by id, then by position: all differ
    start = cuda.empty(V + 1, np.int64)
    _source("find_starts", cuda.blocks(V + 1), cuda.THREADS, keys, start, N, V + 1)
    out = cuda.empty((V, C), g.dtype)
    _by_element("scatter", out, g, keys, start, out, N, C)
    return out
