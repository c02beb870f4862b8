"""The end of a language model: cross-entropy, alone and fused with the layer before it.

Each row is a forward and a backward pass. Beside linear_cross_entropy the note says how much
memory it takes beyond its inputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from afinar.autograd import Tensor, buffers, cross_entropy, linear_cross_entropy

from .harness import Row, close, in_turns, optional

torch = optional("torch")


def rows(threads: int) -> Iterator[Row]:
    """The shapes of a real model's head, and of a small one's."""
    for N, C, V, tuned, target in (
        (1024, 576, 49152, "weight", 1.3),
        (1024, 576, 49152, "frozen weight", None),
        (2048, 384, 512, "weight", None),
    ):
        x, weight, targets = _draw(N, C), _draw(V, C) * np.float32(0.05), _ids(V, N)
        trained = tuned == "weight"

        def ours(
            x: Any = x, weight: Any = weight, targets: Any = targets, t: bool = trained
        ) -> Any:
            leaves = Tensor(x, requires_grad=True), Tensor(weight, requires_grad=t)
            linear_cross_entropy(*leaves, targets).backward()
            return [leaf.grad for leaf in leaves if leaf.grad is not None]

        theirs = _peer(x, weight, targets, trained)
        name = f"linear_cross_entropy {N} x {C} x {V}, {tuned}"
        yield _compare(name, threads, ours, theirs, target, f"{_beyond(ours):.0f} MB beyond")

    for N, V in ((1024, 49152), (2048, 512)):
        x, targets = _draw(N, V), _ids(V, N)

        def alone(x: Any = x, targets: Any = targets) -> Any:
            leaf = Tensor(x, requires_grad=True)
            cross_entropy(leaf, targets).backward()
            return [leaf.grad]

        theirs = _peer(x, None, targets, False)
        yield _compare(f"cross_entropy {N} x {V}", threads, alone, theirs, 1.0)


def _compare(
    name: str,
    threads: int,
    ours: Callable,
    theirs: Callable | None,
    target: float | None,
    note: str = "",
) -> Row:
    if theirs is None:
        return Row("losses", name, threads, *in_turns(ours), note=note)
    for a, b in zip(ours(), theirs(), strict=True):
        close(a, b.numpy())
    times = in_turns(ours, theirs, seconds=2.0)
    return Row("losses", name, threads, *times, "PyTorch", target, note)


def _beyond(run: Callable) -> float:
    """Megabytes held at the peak of `run`, but for the gradients that it returns."""
    before = buffers.in_use()
    buffers.reset_peak()
    grads = run()
    return (buffers.peak() - before - sum(g.nbytes for g in grads)) / 1e6


def _peer(x: Any, weight: Any, targets: Any, trained: bool) -> Callable | None:
    if torch is None:
        return None
    F, labels = torch.nn.functional, torch.from_numpy(targets)
    leaves = [torch.from_numpy(x).requires_grad_()]
    if weight is not None:
        leaves.append(torch.from_numpy(weight).requires_grad_(trained))

    def run() -> Any:
        loss = F.cross_entropy(F.linear(*leaves) if weight is not None else leaves[0], labels)
        return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])

    return run


def _draw(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _ids(V: int, n: int) -> Any:
    return np.random.default_rng(0).integers(0, V, n)
