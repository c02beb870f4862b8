"""The backward pass of attention on a CPU, tile by tile."""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

from ..lanes import load, row_dot, store
from ..launch import body, device
from ..mathf import exp
from .attention_plan import TILE
from .attention_tiles import (
    STRIP,
    alive,
    draw,
    find_live,
    masked,
    offset,
    pack,
    product,
    row_stride,
    scores,
    span,
)


def backward_size(rows: int, D: int) -> int:
    """Elements of a thread's workspace."""
    return 3 * rows * D + 2 * rows + 4 * TILE * D + 2 * TILE * TILE + 2 * TILE


@body
def attention_backward_cpu(
    i, thread, squares, parts, g, q, k, v, out, lse, segments, holes, scale, reach, window,
    key0, key1, threshold, boost, blanks, work, dq, dk, dv,
):  # fmt: skip
    # owns, of one square and `H // parts` heads that share their keys, the queries' rows of dq
    # and the keys' rows of dk and dv, whose axis of heads has `parts`
    B, T, H, D = q.shape
    S, G = k.shape[1], k.shape[2]
    b, t0, n, k_low, k_high, new_keys, new_queries, ready = squares[i // parts]
    part = i % parts
    padded = (n + STRIP - 1) // STRIP * STRIP
    zero = dq.dtype.type(0)

    w = work[thread]
    qs, w = w[: padded * D], w[padded * D :]  # q, scaled
    gs, w = w[: padded * D], w[padded * D :]
    dqs, w = w[: padded * D], w[padded * D :]
    kt, w = w[: TILE * D], w[TILE * D :]
    vt, w = w[: TILE * D], w[TILE * D :]
    dks, w = w[: TILE * D], w[TILE * D :]
    dvs, w = w[: TILE * D], w[TILE * D :]
    p, w = w[: TILE * TILE], w[TILE * TILE :]  # probabilities
    ds, w = w[: TILE * TILE], w[TILE * TILE :]  # gradient of the scores
    live, factor, w = w[:TILE], w[TILE : 2 * TILE], w[2 * TILE :]
    delta = w[:n]
    qs[n * D :] = 0
    gs[n * D :] = 0

    heads = H // parts
    kv = part * heads // (H // G)
    for h in range(part * heads, (part + 1) * heads):
        for r in range(n):
            at, t = r * D, t0 + r
            x, y, z = q[b, t, h], g[b, t, h], dq[b, t, h]
            for d in range(D):
                qs[at + d] = x[d] * scale
                gs[at + d] = y[d]
                dqs[at + d] = zero if new_queries else z[d]
            delta[r] = row_dot(gs[at : at + D], out[b, t, h])

        for k0 in range(k_low, k_high, TILE):
            nk = min(TILE, k_high - k0)
            pack(k, b, k0, kv, nk, kt)
            pack(v, b, k0, kv, nk, vt)
            if holes:
                find_live(segments, b, t0 + S - T, k0, nk, live)
            for j in range(nk):
                for d in range(D):
                    dks[j * D + d] = zero if new_keys else dk[b, k0 + j, part, d]
                    dvs[j * D + d] = zero if new_keys else dv[b, k0 + j, part, d]
            k_at, k_row = offset(k, b, k0, kv), row_stride(k)

            for r0 in range(0, n, TILE):
                m = min(TILE, n - r0)
                p0 = t0 + r0 + S - T - k0  # the first query's place among the tile's keys
                low, _, _, high = span(p0, p0 + m - 1, nk, 0, reach, window)
                if high <= low:
                    continue
                for r in range(0, m, STRIP):
                    stop = min(r + STRIP, m)
                    low, all_low, all_high, high = span(p0 + r, p0 + stop - 1, nk, 0, reach, window)
                    if high <= low:
                        continue
                    if holes:
                        all_low = all_high = high
                    scores(qs[(r0 + r) * D :], STRIP, kt, D, low, high, p[r * TILE :])
                    scores(gs[(r0 + r) * D :], STRIP, vt, D, low, high, ds[r * TILE :])
                    whole = all_low == 0 and all_high == TILE
                    for y in range(r, stop):
                        t = t0 + r0 + y
                        if threshold:
                            word = ((b * H + h) * T + t) * S + k0
                            draw(key0, key1, threshold, boost, word, factor)
                        seen = max(0, p0 + y + 1 - window), min(nk, p0 + y + 1 + reach)
                        at = y * TILE
                        harden(
                            p[at : at + TILE], ds[at : at + TILE], lse[b, h, t], delta[r0 + y],
                            whole, seen, holes, live, threshold, factor, blanks,
                        )  # fmt: skip
                    product(
                        ds, r * TILE, TILE, 1, k, k_at, k_row,
                        dqs, (r0 + r) * D, D, low, all_low, all_high, high,
                    )  # fmt: skip
                for j in range(0, nk, STRIP):
                    last = min(j + STRIP, nk) - 1
                    low, high = max(0, j - reach - p0), min(m, last + window - p0)
                    all_low, all_high = max(low, last - reach - p0), min(high, j + window - p0)
                    if high <= low:
                        continue
                    if holes or all_high < all_low or j + STRIP > nk:
                        all_low = all_high = high
                    product(
                        p, j, 1, TILE, gs, r0 * D, D,
                        dvs, j * D, D, low, all_low, all_high, high,
                    )  # fmt: skip
                    product(
                        ds, j, 1, TILE, qs, r0 * D, D,
                        dks, j * D, D, low, all_low, all_high, high,
                    )  # fmt: skip

            for j in range(nk):
                if not holes or live[j] != 0:
                    a, c = dk[b, k0 + j, part], dv[b, k0 + j, part]
                    if h == part * heads:
                        for d in range(D):
                            a[d] = dks[j * D + d]
                            c[d] = dvs[j * D + d]
                    else:
                        for d in range(D):
                            a[d] += dks[j * D + d]
                            c[d] += dvs[j * D + d]

        for r in range(n):
            z = dq[b, t0 + r, h]
            for d in range(D):
                z[d] = dqs[r * D + d] * scale if ready else dqs[r * D + d]


@device(forceinline=False)
def harden(p, ds, lse, delta, whole, seen, holes, live, threshold, factor, blanks):
    """From scores and g v: probabilities P and dS = P (dP - delta) of one row."""
    low, high = seen
    other = load(blanks, 0)
    for c in range(0, TILE, 16):
        y = exp(load(p, c) - lse)
        dy = load(ds, c)
        kept = y
        if threshold:
            dy, kept = dy * load(factor, c), kept * load(factor, c)
        dy = y * (dy - delta)
        if not whole:
            kept, dy = masked(kept, c, low, high, other), masked(dy, c, low, high, other)
            if holes:
                kept, dy = alive(kept, c, live, other), alive(dy, c, live, other)
        store(p, c, kept)
        store(ds, c, dy)


@body
def sum_heads(i, partial, out):  # owns out[i]
    G, D = out.shape[1:]
    R = partial.shape[1] // G
    for g in range(G):
        row = out[i, g]
        for h in range(g * R, g * R + R):
            more = partial[i, h]
            for d in range(D):
                row[d] = more[d] if h == g * R else row[d] + more[d]
