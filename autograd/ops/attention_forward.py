"""The forward pass of attention on a CPU, tile by tile."""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

import numpy as np

from ..lanes import LANES, fma, less, load, maximum, select, splat, store, tree_max, tree_sum
from ..launch import body, device
from ..mathf import exp_flushed, log
from .attention_plan import TILE
from .attention_tiles import (
    STRIP,
    clear,
    cover,
    draw,
    fetch,
    find_live,
    pack,
    product,
    put,
    scores,
    span,
)


def forward_size(rows: int, D: int) -> int:
    """Elements of a thread's workspace."""
    return 2 * rows * D + 2 * rows + 2 * TILE * D + 2 * STRIP * TILE + TILE


@body
def attention_forward_cpu(
    i, thread, items, parts, q, k, v, segments, holes, reach, window, scale,
    key0, key1, threshold, boost, blanks, work, out, lse,
):  # fmt: skip
    # owns the queries of one item in `H // parts` heads that share their keys
    T, H, D = q.shape[1], q.shape[2], q.shape[3]
    S, G = k.shape[1], k.shape[2]
    item, part = i // parts, i % parts
    b, t0, n, first, end = (
        items[item, 0], items[item, 1], items[item, 2], items[item, 3], items[item, 4]
    )  # fmt: skip
    heads, one, step, stride = H // parts, out.dtype.type(1), np.int64(1), np.int64(TILE)
    h0, kv = part * heads, part * heads // (H // G)
    rows = heads * n  # row r is query t0 + r % n of head h0 + r // n
    padded = (rows + STRIP - 1) // STRIP * STRIP
    p0 = t0 + S - T  # the first query's place among the keys

    w = work[thread]
    qs = np.int64(0)  # (rows, D)
    acc = qs + padded * D  # (rows, D)
    kt = acc + padded * D  # (D, TILE)
    vs = kt + TILE * D  # (TILE, D)
    s = vs + TILE * D  # (STRIP, TILE)
    factor = s + STRIP * TILE  # (STRIP, TILE), of dropout
    live = factor + STRIP * TILE  # (TILE)
    m = live + TILE  # (rows), maxima
    total = m + padded  # (rows)
    for y in range(heads):
        fetch(q, b, t0, h0 + y, n, scale, w, qs + y * n * D)
    clear(w, qs + rows * D, (padded - rows + padded) * D)  # acc too
    for r in range(rows):
        w[m + r], w[total + r] = -np.inf, 0

    start = first + (max(first, p0 - window + 1) - first) // TILE * TILE
    for k0 in range(start, min(end, p0 + n + reach), TILE):
        nk = min(TILE, end - k0)
        fetch(k, b, k0, kv, nk, one, w, vs)
        pack(w, vs, kt, nk, D)
        fetch(v, b, k0, kv, nk, one, w, vs)
        if holes:
            find_live(segments, b, p0, k0, nk, w, live)
        for r in range(0, rows, STRIP):
            t, count = r % n, min(STRIP, rows - r)
            near, far = (p0 + t, p0 + t + count - 1) if t + count <= n else (p0, p0 + n - 1)
            low, all_low, all_high, high = span(near - k0, far - k0, nk, reach, window)
            if high <= low:
                continue
            if holes:
                all_low = all_high = high
            whole = all_low == 0 and all_high == TILE
            scores(w, qs + r * D, kt, D, low, high, s)
            if threshold:
                for y in range(count):
                    h, t = h0 + (r + y) // n, t0 + (r + y) % n
                    word = ((b * H + h) * T + t) * S + k0
                    draw(key0, key1, threshold, boost, word, w, factor + y * TILE)
            soften(
                w, s, count, m + r, total + r, acc + r * D, D, whole, r, n, p0 - k0, nk, reach,
                window, holes, live, threshold, factor, blanks,
            )  # fmt: skip
            product(w, s, stride, step, vs, acc + r * D, D, low, all_low, all_high, high)

    for r in range(rows):
        h, t, sum_ = h0 + r // n, t0 + r % n, w[total + r]
        lse[b, h, t] = w[m + r] + log(sum_) if sum_ != 0 else sum_
        inverse = one / sum_ if sum_ != 0 else sum_
        for d in range(acc + r * D, acc + (r + 1) * D, LANES):
            store(w, d, load(w, d) * inverse)
    for y in range(heads):
        put(w, acc + y * n * D, n, one, out, b, t0, h0 + y)


@device(forceinline=False)
def soften(
    w, s, count, m, total, acc, D, whole, r, n, p0, nk, reach,
    window, holes, live, threshold, factor, blanks,
):  # fmt: skip
    """Turn the scores of rows r .. r + count - 1 to probabilities under each maximum so far."""
    least, other, low, high = splat(w.dtype.type(-np.inf)), load(blanks, 0), 0, TILE
    for y in range(count):
        o = s + y * TILE
        if not whole:
            p = p0 + (r + y) % n
            low, high = max(0, p + 1 - window), min(nk, p + 1 + reach)
            cover(w, o, low, high, holes, live, least)
        x0, x1, x2, x3 = load(w, o), load(w, o + 16), load(w, o + 32), load(w, o + 48)
        before = w[m + y]
        top = maximum(before, tree_max(maximum(maximum(x0, x1), maximum(x2, x3))))
        base = select(less(w.dtype.type(-np.inf), top), top, w.dtype.type(0))
        x0, x1 = exp_flushed(x0 - base), exp_flushed(x1 - base)
        x2, x3 = exp_flushed(x2 - base), exp_flushed(x3 - base)
        shrink = exp_flushed(before - base)
        w[m + y] = top
        w[total + y] = fma(w[total + y], shrink, tree_sum(((x0 + x1) + x2) + x3))
        if shrink != 1:
            for d in range(acc + y * D, acc + (y + 1) * D, LANES):
                store(w, d, load(w, d) * shrink)
        if threshold:
            f = factor + y * TILE
            x0, x1 = x0 * load(w, f), x1 * load(w, f + 16)
            x2, x3 = x2 * load(w, f + 32), x3 * load(w, f + 48)
        store(w, o, x0)
        store(w, o + 16, x1)
        store(w, o + 32, x2)
        store(w, o + 48, x3)
        if not whole:
            cover(w, o, low, high, holes, live, other)
