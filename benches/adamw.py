"""AdamW over the parameters of the 10.8 M-parameter Llama: beside a copy loop and PyTorch.

A step reads p, g, m, v and writes p, m, v: 28 bytes a parameter, where a copy moves 8.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from afinar.autograd import Tensor
from afinar.autograd.launch import body
from afinar.optim import AdamW
from afinar.transformer import Transformer

from .harness import Row, close, in_turns, optional
from .step import small_llama

CHUNK = 1 << 14


@body
def copy_chunk(i, x, out):
    """out = x."""
    source, target = x[i * CHUNK : (i + 1) * CHUNK], out[i * CHUNK : (i + 1) * CHUNK]
    for j in range(source.size):
        target[j] = source[j]


def rows(threads: int) -> Iterator[Row]:
    """One step of our optimizer."""
    rng = np.random.default_rng(0)
    shapes = [p.shape for p in Transformer(small_llama(), seed=1).parameters()]
    data = [rng.standard_normal(s, dtype=np.float32) for s in shapes]
    grads = [rng.standard_normal(s, dtype=np.float32) for s in shapes]
    ours = [Tensor(a.copy(), requires_grad=True) for a in data]
    for p, g in zip(ours, grads, strict=True):
        p.grad = g
    optimizer = AdamW(ours)
    source = np.concatenate([a.reshape(-1) for a in data])
    target = np.empty_like(source)
    chunks = -(-source.size // CHUNK)

    runs = {"copy": lambda: copy_chunk(chunks, source, target)}
    torch = optional("torch")
    if torch is not None:
        for name, fused in (("PyTorch", False), ("PyTorch fused", True)):
            theirs = [torch.nn.Parameter(torch.tensor(a)) for a in data]
            for p, g in zip(theirs, grads, strict=True):
                p.grad = torch.tensor(g)
            runs[name] = torch.optim.AdamW(theirs, fused=fused).step
            check = [Tensor(a.copy(), requires_grad=True) for a in data]
            for p, g in zip(check, grads, strict=True):
                p.grad = g
            AdamW(check).step()
            runs[name]()
            close(check[0].data, theirs[0].detach().numpy(), 1e-5)
    t, copy, *others = in_turns(optimizer.step, *runs.values())
    name = f"AdamW, {source.size:,} parameters"
    yield Row("adamw", name, threads, t, copy * 28 / 8, "a copy's bandwidth", 0.8)
    for peer, time in zip(list(runs)[1:], others, strict=True):
        yield Row("adamw", name, threads, t, time, peer, 1.0)
