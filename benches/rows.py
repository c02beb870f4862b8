"""Steps bound by memory: norms, rotary positions, SwiGLU, embedding, forward and backward.

Each stands beside PyTorch's own and beside a plain copy loop that moves as many bytes as the step
must: every input read once, every output written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from afinar.autograd import launch
from afinar.autograd.ops.activation import swiglu_backward, swiglu_forward
from afinar.autograd.ops.embedding import embedding_backward, embedding_rows
from afinar.autograd.ops.norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from afinar.autograd.ops.rope import rope_rotate, rope_table

from .harness import Row, close, in_turns, optional

torch = optional("torch")

# Arrays larger than the last cache: what is compared is the bandwidth of memory.
B, T, H, D, C, I, V = 32, 512, 9, 64, 576, 1536, 49152  # noqa: E741
N = B * T
CHUNK = 1 << 13


@launch.body
def copy(i, x, out):
    a, o = x[i * CHUNK : (i + 1) * CHUNK], out[i * CHUNK : (i + 1) * CHUNK]
    for n in range(a.size):
        o[n] = a[n]


def rows(threads: int) -> Iterator[Row]:
    """Two rows for each step: against the copy loop, against PyTorch."""
    for name, moved, ours, theirs in steps():
        source = np.ones(moved // 8, np.float32)
        target = np.empty_like(source)
        runs = [ours, lambda s=source, t=target: copy(-(-s.size // CHUNK), s, t)]
        if torch is not None:
            for a, e in zip(_listed(ours()), _listed(theirs()), strict=True):
                close(a, e.detach().numpy())
            runs.append(theirs)
        times = in_turns(*runs, seconds=0.5)
        note = f"{moved / times[0] / 1e9:.1f} GB/s"
        yield Row("rows", name, threads, times[0], times[1], "copy loop", 0.8, note)
        if torch is not None:
            yield Row("rows", name, threads, times[0], times[2], "PyTorch", 1.0)


def steps() -> Iterator[tuple[str, int, Callable, Callable]]:
    """(name, bytes that must move, ours, PyTorch's)"""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    x, g, weight, bias = draw(N, C), draw(N, C), draw(C), draw(C)
    _, r = rms_norm_forward(x, weight, 1e-6)
    yield (
        f"rms_norm {N} x {C}",
        2 * x.nbytes,
        lambda: rms_norm_forward(x, weight, 1e-6)[0],
        *_peer(lambda F, x, w: F.rms_norm(x, (C,), w, 1e-6), None, x, weight),
    )
    yield (
        "rms_norm backward",
        3 * x.nbytes,
        lambda: rms_norm_backward(g, x, weight, r, True),
        *_peer(lambda F, x, w: F.rms_norm(x, (C,), w, 1e-6), g, x, weight),
    )
    _, mean, r1 = layer_norm_forward(x, weight, bias, 1e-5)
    yield (
        f"layer_norm {N} x {C}",
        2 * x.nbytes,
        lambda: layer_norm_forward(x, weight, bias, 1e-5)[0],
        *_peer(lambda F, x, w, b: F.layer_norm(x, (C,), w, b), None, x, weight, bias),
    )
    yield (
        "layer_norm backward",
        3 * x.nbytes,
        lambda: layer_norm_backward(g, x, weight, mean, r1),
        *_peer(lambda F, x, w, b: F.layer_norm(x, (C,), w, b), g, x, weight, bias),
    )

    q = x.reshape(B, T, H, D)
    cos, sin = rope_table(np.arange(T), D)

    def turn(F: Any, q: Any) -> Any:
        c, s = (torch.from_numpy(a)[:, None] for a in (cos, sin))
        a, b = q.chunk(2, dim=-1)
        return torch.cat([a * c - b * s, b * c + a * s], dim=-1)

    yield (
        f"rope {B} x {T} x {H} x {D}",
        2 * q.nbytes,
        lambda: rope_rotate(q, cos[None], sin[None]),
        *_peer(turn, None, q),
    )

    gate, up, dy = (draw(N // 4, I) for _ in range(3))
    yield (
        f"swiglu {N // 4} x {I}",
        3 * up.nbytes,
        lambda: swiglu_forward(gate, up),
        *_peer(lambda F, a, b: F.silu(a) * b, None, gate, up),
    )
    yield (
        "swiglu backward",
        5 * up.nbytes,
        lambda: swiglu_backward(dy, gate, up),
        *_peer(lambda F, a, b: F.silu(a) * b, dy, gate, up),
    )

    table, ids = draw(V, C), rng.integers(0, V, N)
    yield (
        f"embedding {N} of {V} x {C}",
        2 * x.nbytes,
        lambda: embedding_rows(table, ids),
        *_peer(lambda F, w: F.embedding(torch.from_numpy(ids), w), None, table),
    )
    yield (
        "embedding backward",
        x.nbytes + table.nbytes,
        lambda: embedding_backward(g, ids, V),
        *_peer(lambda F, w: F.embedding(torch.from_numpy(ids), w), g, table),
    )


def _peer(fn: Callable, g: Any, *arrays: np.ndarray) -> tuple[Callable]:
    """The same in PyTorch: the result, or given g the gradients of the inputs."""
    if torch is None:
        return (lambda: None,)
    F = torch.nn.functional
    inputs = [torch.from_numpy(a).requires_grad_(g is not None) for a in arrays]
    if g is None:
        return (lambda: fn(F, *inputs),)
    out, g = fn(F, *inputs), torch.from_numpy(g)
    return (lambda: torch.autograd.grad(out, inputs, g, retain_graph=True),)


def _listed(x: Any) -> list:
    return list(x) if isinstance(x, tuple) else [x]
