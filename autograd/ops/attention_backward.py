"""The backward pass of attention on a CPU, tile by tile."""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

from ..lanes import LANES, load, row_dot, splat, store
from ..launch import body, device
from ..mathf import exp_flushed
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
    return 3 * rows * D + 2 * rows + 4 * TILE * D + 2 * TILE * TILE + STRIP * TILE + TILE


@body
def attention_backward_cpu(
    i, thread, squares, parts, g, q, k, v, out, lse, segments, holes, reach, window, scale,
    key0, key1, threshold, boost, blanks, work, dq, dk, dv,
):  # fmt: skip
    # owns, of one square and `H // parts` heads that share their keys, the queries' rows of dq
    # and the keys' rows of dk and dv, whose axis of heads has `parts`
    _, T, H, D = q.shape
    S, G = k.shape[1], k.shape[2]
    b, t0, n, k_low, k_high, new_keys, new_queries, ready = squares[i // parts]
    part = i % parts
    padded = (n + STRIP - 1) // STRIP * STRIP
    zeros = splat(dq.dtype.type(0))

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
    factor, w = w[: STRIP * TILE], w[STRIP * TILE :]
    live, w = w[:TILE], w[TILE:]
    delta = w[:n]
    qs[n * D :] = 0
    gs[n * D :] = 0

    heads = H // parts
    kv = part * heads // (H // G)
    for h in range(part * heads, (part + 1) * heads):
        for r in range(n):
            at, t = r * D, t0 + r
            q_at, g_at, dq_at = offset(q, b, t, h), offset(g, b, t, h), offset(dq, b, t, h)
            for d in range(0, D, LANES):
                store(qs, at + d, load(q, q_at + d) * scale)
                store(gs, at + d, load(g, g_at + d))
                store(dqs, at + d, zeros if new_queries else load(dq, dq_at + d))
            delta[r] = row_dot(gs[at : at + D], out[b, t, h])

        for k0 in range(k_low, k_high, TILE):
            nk = min(TILE, k_high - k0)
            pack(k, b, k0, kv, nk, kt)
            pack(v, b, k0, kv, nk, vt)
            if holes:
                find_live(segments, b, t0 + S - T, k0, nk, live)
            for j in range(nk):
                at = offset(dk, b, k0 + j, part)
                for d in range(0, D, LANES):
                    store(dks, j * D + d, zeros if new_keys else load(dk, at + d))
                    store(dvs, j * D + d, zeros if new_keys else load(dv, at + d))
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
                    if threshold:
                        for y in range(r, stop):
                            word = ((b * H + h) * T + t0 + r0 + y) * S + k0
                            draw(key0, key1, threshold, boost, word, factor, (y - r) * TILE)
                    harden(
                        p, ds, r, stop, lse[b, h], t0 + r0, delta, r0, p0, nk, reach, window,
                        whole, holes, live, threshold, factor, blanks,
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
                    at = offset(dk, b, k0 + j, part)
                    for d in range(0, D, LANES):
                        x, y = load(dks, j * D + d), load(dvs, j * D + d)
                        if h > part * heads:
                            x, y = load(dk, at + d) + x, load(dv, at + d) + y
                        store(dk, at + d, x)
                        store(dv, at + d, y)

        for r in range(n):
            at = offset(dq, b, t0 + r, h)
            for d in range(0, D, LANES):
                x = load(dqs, r * D + d)
                store(dq, at + d, x * scale if ready else x)


@device(forceinline=False)
def harden(
    p, ds, r, stop, lse, t0, delta, r0, p0, nk, reach, window,
    whole, holes, live, threshold, factor, blanks,
):  # fmt: skip
    """From scores and g v: probabilities P and dS = P (dP - delta) of rows r .. stop - 1."""
    other, low, high = load(blanks, 0), 0, TILE
    for y in range(r, stop):
        log_sum, mean = lse[t0 + y], delta[r0 + y]
        if not whole:
            low, high = max(0, p0 + y + 1 - window), min(nk, p0 + y + 1 + reach)
        for c in range(0, TILE, LANES):
            at = y * TILE + c
            x, dx = exp_flushed(load(p, at) - log_sum), load(ds, at)
            kept = x
            if threshold:
                dropped = load(factor, at - r * TILE)
                dx, kept = dx * dropped, x * dropped
            dx = x * (dx - mean)
            if not whole:
                kept, dx = masked(kept, c, low, high, other), masked(dx, c, low, high, other)
                if holes:
                    kept, dx = alive(kept, c, live, other), alive(dx, c, live, other)
            store(p, at, kept)
            store(ds, at, dx)


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
