"""Causal attention with grouped queries beside PyTorch's: training steps and decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from afinar.autograd import Tensor, attention, no_grad

from .harness import Row, close, in_turns, optional

H, G, D = 9, 3, 64
TRAINING = ((4, 256, 1.5), (4, 512, 1.5), (1, 2048, 1.2))  # B, T, the ratio to reach
DECODING = ((1, 512), (1, 2048))  # B, S


def _arrays(B: int, T: int, S: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, D), (B, T, H, D)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def _ours(q: Any, k: Any, v: Any, g: Any) -> Callable[[], list[Any]]:
    leaves = [Tensor(x, requires_grad=True) for x in (q, k, v)]

    def step() -> list[Any]:
        for x in leaves:
            x.grad = None
        out = attention(*leaves)
        out.backward(g)
        return [out.data, *(x.grad for x in leaves)]

    return step


def _theirs(q: Any, k: Any, v: Any, g: Any) -> Callable[[], list[Any]] | None:
    torch = optional("torch")
    if torch is None:
        return None
    *leaves, g = (torch.tensor(x).transpose(1, 2) for x in (q, k, v, g))
    for x in leaves:
        x.requires_grad_()

    def step() -> list[Any]:
        for x in leaves:
            x.grad = None
        out = _attend(*leaves, is_causal=True)
        out.backward(g)
        return [x.transpose(1, 2).detach().numpy() for x in (out, *(x.grad for x in leaves))]

    return step


def _attend(*arrays: Any, is_causal: bool = False) -> Any:
    attend = optional("torch").nn.functional.scaled_dot_product_attention
    return attend(*arrays, is_causal=is_causal, enable_gqa=True)


def rows(threads: int) -> Iterator[Row]:
    """Forward and backward of a batch; one token after S cached ones."""
    for B, T, target in TRAINING:
        arrays = _arrays(B, T, T)
        ours, theirs = _ours(*arrays), _theirs(*arrays)
        runs: list[Callable] = [ours]
        if theirs is not None:
            runs.append(theirs)
            for a, b in zip(ours(), theirs(), strict=True):
                close(a, b)
        times = [*in_turns(*runs, seconds=2.0), None]
        flops = 14 * B * H * T * T * D / 2  # the causal half: 4 forward, 10 backward
        yield Row(
            "attention", f"forward + backward, B {B} T {T}", threads, times[0], times[1],
            "torch", target, f"{flops / times[0] / 1e9:.0f} GFLOP/s",
        )  # fmt: skip
    for B, S in DECODING:
        q, k, v, _ = _arrays(B, 1, S)
        with no_grad():
            torch = optional("torch")
            runs = [lambda q=q, k=k, v=v: attention(q, k, v).numpy()]
            if torch is not None:
                moved = [torch.tensor(x).transpose(1, 2) for x in (q, k, v)]
                runs.append(lambda moved=moved: _attend(*moved).transpose(1, 2))
                close(runs[0](), runs[1]().numpy())
            times = [*in_turns(*runs), None]
        yield Row("attention", f"one token after {S}", threads, times[0], times[1], "torch")
