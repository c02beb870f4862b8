"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..autograd import cuda
from ..autograd.backend import kernel
from ..autograd.device import device_of
from ..autograd.launch import body
from . import table
from .optimizer import Optimizer


class SGD(Optimizer):
    """velocity = momentum velocity - lr grad;  p = p + velocity."""

    _slots = ("velocities",)

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0):
        self.velocities: list[Any] = []
        super().__init__(params, lr=lr, momentum=momentum)

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        if not 0 <= options.get("momentum", 0.0) < 1:
            raise ValueError(f"SGD: momentum must be in [0, 1), given {options['momentum']}")

    def step(self, grad_scale: float = 1.0) -> None:
        """One update of every parameter that has a gradient, which counts `grad_scale` times."""
        updates, n = [], 0
        for group in self.groups:
            constants = grad_scale, self._lr * group["lr_ratio"], group["momentum"]
            for _ in group["params"]:
                if ready := self._ready(n):
                    updates.append((*ready, self._slot("velocities", n), constants))
                n += 1
        self.step_count += 1
        table.update_all(_source, "sgd", [u for u in updates if device_of(u[0]) == "gpu"])
        for p, g, velocity, constants in updates:
            if device_of(p) == "cpu":
                sgd_update(p, g, velocity, constants, (p, velocity))


@kernel
def sgd_update(p, g, velocity, constants, out):
    """The equation of SGD, written to out = (p, velocity).

    The constants: gradient scale, learning rate, momentum.
    """
    scale, lr, momentum = map(p.dtype.type, constants)
    out[1][...] = velocity * momentum - (g * scale) * lr
    out[0][...] = p + out[1]


@sgd_update.cpu
def _sgd_update_cpu(p, g, velocity, constants, out):
    flat = [a.reshape(-1) for a in (p, g, velocity, *out)]
    p, g, velocity, p_out, velocity_out = flat
    constants = np.array(constants).astype(p.dtype)
    _update_chunk(-(-p.size // CHUNK), p, g, velocity, constants, p_out, velocity_out)


CHUNK = 1 << 14


@body
def _update_chunk(i, p, g, velocity, constants, p_out, velocity_out):
    scale, lr, momentum = constants[0], constants[1], constants[2]
    mine = slice(i * CHUNK, (i + 1) * CHUNK)
    p, g, velocity = p[mine], g[mine], velocity[mine]
    p_out, velocity_out = p_out[mine], velocity_out[mine]
    for j in range(p.size):
        new = velocity[j] * momentum - (g[j] * scale) * lr
        velocity_out[j] = new
        p_out[j] = p[j] + new


# --- GPU -----------------------------------------------------------------------------------

_source = cuda.Source(
    table.LOOKUP
    + r"""
extern "C" __global__ void sgd(const i64 *table, i64 count, const REAL *constants) {
    const i64 *row = row_of(table, count, 5, blockIdx.x);
    const REAL *c = constants + (row - table) / 5 * 3;
    REAL *__restrict__ p = (REAL *)row[2], *__restrict__ velocity = (REAL *)row[4];
    const REAL *__restrict__ g = (const REAL *)row[3];
    const i64 start = (blockIdx.x - row[0]) * 4096, end = start + 4096;
    const i64 stop = end < row[1] ? end : row[1];
    for (i64 j = start + threadIdx.x; j < stop; j += blockDim.x) {
        const REAL next = velocity[j] * c[2] - (g[j] * c[0]) * c[1];
        velocity[j] = next;
        p[j] = p[j] + next;
    }
}
"""
)


@sgd_update.gpu
def _sgd_update_gpu(p, g, velocity, constants, out):
    for new, old in zip(out, (p, velocity), strict=True):
        if new is not old:
            new[...] = old
    table.update_all(_source, "sgd", [(out[0], g, out[1], constants)])
