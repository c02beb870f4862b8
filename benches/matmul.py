"""Matrix products beside NumPy's BLAS and, in bfloat16, beside our float32 and PyTorch's linear."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from afinar.autograd.ops.gemm import gemm
from afinar.autograd.ops.rounding import round_bfloat16

from .harness import Row, close, in_turns, optional

TOKENS = (256, 1024, 2048)
LAYERS = ((384, 384), (576, 576), (576, 1536), (1536, 576), (896, 4864), (4864, 896))  # I, O
RANKS = (4, 8, 16, 64)
FORMS = {"x W^T": (False, True), "g W": (False, False), "g^T x": (True, False)}


def _operands(form: str, tokens: int, I: int, O: int, dtype: Any) -> tuple[Any, Any]:  # noqa: E741
    """x W^T, g W or g^T x of a layer with I inputs and O outputs."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(s, np.float32) for s in ((tokens, I), (O, I), (tokens, O)))
    pair = {"x W^T": (x, w), "g W": (g, w), "g^T x": (g, x)}[form]
    return pair[0].astype(dtype), pair[1].astype(dtype)


def _blas(a: Any, b: Any, ta: bool, tb: bool) -> Any:
    return (a.T if ta else a) @ (b.T if tb else b)


def _beside_blas(form: str, tokens: int, I: int, O: int, dtype: Any) -> list[float]:  # noqa: E741
    a, b = _operands(form, tokens, I, O, dtype)
    ta, tb = FORMS[form]
    runs: list[Callable] = [lambda: gemm(a, b, ta, tb), lambda: _blas(a, b, ta, tb)]
    close(runs[0](), runs[1]())
    return in_turns(*runs, seconds=0.2)


def _in_bfloat16(form: str, tokens: int, I: int, O: int) -> list[float]:  # noqa: E741
    a, b = _operands(form, tokens, I, O, np.float32)
    ta, tb = FORMS[form]
    runs: list[Callable] = [
        lambda: gemm(round_bfloat16(a), round_bfloat16(b), ta, tb),
        lambda: gemm(a, b, ta, tb),
    ]
    torch = optional("torch")
    if torch is not None:  # its operands already are in bfloat16, and so is its result
        x, y = torch.tensor(a).bfloat16(), torch.tensor(b).bfloat16()
        x, y = x.T if ta else x, y.T if tb else y
        runs.append(lambda: x @ y)
    close(runs[0](), runs[1](), rtol=0.02)
    return in_turns(*runs, seconds=0.2)


def _mean(times: list[list[float]], n: int) -> float:
    return float(np.exp(np.mean(np.log([t[n] for t in times]))))


def rows(threads: int) -> Iterator[Row]:
    """Geometric means over the shapes of a training step, and the worst one."""
    layers = [(t, *layer) for t in TOKENS for layer in LAYERS]
    skinny = [(t, 576, r) for t in TOKENS for r in RANKS]
    skinny += [(t, r, 576) for t in TOKENS for r in RANKS]
    yield from float32(threads)
    yield from _means("float64", layers[::3], np.float64, threads, 0.9)
    yield from _means("rank 4 to 64", skinny, np.float32, threads, 1.3)
    for form in FORMS:
        times = [_in_bfloat16(form, *shape) for shape in layers[len(LAYERS) :]]
        name = f"bfloat16, {form}"
        yield Row("matmul", name, threads, _mean(times, 0), _mean(times, 1), "our float32", 1.7)
        if len(times[0]) == 3:
            yield Row("matmul", name, threads, _mean(times, 0), _mean(times, 2), "torch", 1.0)


def float32(threads: int) -> Iterator[Row]:
    """The rows that matter most."""
    shapes = [(t, *layer) for t in TOKENS for layer in LAYERS]
    yield from _means("float32", shapes, np.float32, threads, 0.97)


def _means(name: str, shapes: list, dtype: Any, threads: int, target: float) -> Iterator[Row]:
    pools = optional("threadpoolctl")
    note = "" if pools else "threads of BLAS as they are: install threadpoolctl"
    if "OPENBLAS_CORETYPE" in os.environ:
        note += f" BLAS told to be {os.environ['OPENBLAS_CORETYPE']}"
    for form in FORMS:
        with pools.threadpool_limits(threads) if pools else contextlib.nullcontext():
            times = [_beside_blas(form, *shape, dtype) for shape in shapes]
        worst = min(range(len(times)), key=lambda n: times[n][1] / times[n][0])
        ratio = times[worst][1] / times[worst][0]
        yield Row(
            "matmul", f"{name}, {form}", threads, _mean(times, 0), _mean(times, 1),
            "BLAS", target, f"worst {ratio:.2f} at {shapes[worst]} {note}",
        )  # fmt: skip
