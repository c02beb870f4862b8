"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..autograd.backend import kernel
from ..autograd.launch import body
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
        self.step_count += 1
        n = 0
        for group in self.groups:
            constants = np.array([grad_scale, self._lr * group["lr_ratio"], group["momentum"]])
            for _ in group["params"]:
                if ready := self._ready(n):
                    p, g = ready
                    velocity = self._slot("velocities", n)
                    sgd_update(p, g, velocity, constants, (p, velocity))
                n += 1


@kernel
def sgd_update(p, g, velocity, constants, out):
    """The equation of SGD, written to out = (p, velocity).

    The constants: gradient scale, learning rate, momentum.
    """
    scale, lr, momentum = constants.astype(p.dtype)
    out[1][...] = velocity * momentum - (g * scale) * lr
    out[0][...] = p + out[1]


@sgd_update.cpu
def _sgd_update_cpu(p, g, velocity, constants, out):
    flat = [a.reshape(-1) for a in (p, g, velocity, *out)]
    p, g, velocity, p_out, velocity_out = flat
    constants = constants.astype(p.dtype)
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
