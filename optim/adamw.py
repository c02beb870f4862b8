"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

    m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g g
    p = (1 - lr decay) p - step m / (sqrt(v) k + eps)

with the corrections c = 1 - b^t for the moments' start at zero in one of two forms:

    torch         step = lr / c1             k = 1 / sqrt(c2)     eps is added to sqrt(v / c2)
    epsilon_hat   step = lr sqrt(c2) / c1    k = 1                eps is added to sqrt(v)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import carray, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from ..autograd import cuda, launch
from ..autograd.backend import array_module, kernel
from ..autograd.device import device_of
from ..autograd.launch import body
from . import table
from .optimizer import Optimizer, moments_sha256


class AdamW(Optimizer):
    """AdamW over Tensors or groups of them; a group decays by exactly its own `weight_decay`.

    `form` says where eps stands (see the top of this file). `step_count` counts calls of `step`;
    `first_moments` and `second_moments` are empty before the first step, then have an array, or
    None (never a gradient so far), for each parameter.

    >>> from afinar.autograd import Tensor
    >>> p = Tensor([1.0, -1.0], requires_grad=True)
    >>> optimizer = AdamW([p], lr=0.1, weight_decay=0.0)
    >>> (p * p).sum().backward()
    >>> optimizer.step()
    >>> p.data
    array([ 0.9, -0.9], dtype=float32)
    """

    _slots = ("first_moments", "second_moments")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        form: str = "torch",
    ):
        if form not in ("torch", "epsilon_hat"):
            raise ValueError(
                f'{type(self).__name__}: form is "torch" or "epsilon_hat", not {form!r}'
            )
        self.form = form
        self.first_moments: list[Any] = []
        self.second_moments: list[Any] = []
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        name = type(self).__name__
        if "betas" in options and not all(0 <= b < 1 for b in options["betas"]):
            raise ValueError(f"{name}: betas must be in [0, 1), given {options['betas']}")
        if "eps" in options and not options["eps"] > 0:
            raise ValueError(f"{name}: eps must be positive, given {options['eps']}")

    @property
    def step_count(self) -> int:
        """How often `step` was called."""
        return self._step_count

    @step_count.setter
    def step_count(self, n: int) -> None:
        self._step_count = n
        # Powers of the betas as running products: `**` has other bits on other machines.
        self._powers: dict[float, float] = {}

    def _power(self, beta: float) -> float:
        if beta not in self._powers:
            product = 1.0
            for _ in range(self._step_count):
                product *= beta
            self._powers[beta] = product
        return self._powers[beta]

    def step(self, grad_scale: float = 1.0) -> None:
        """One update of every parameter that has a gradient, which counts `grad_scale` times.

        Scaling here saves a pass over the gradients and gives the bits of scaling them before.
        """
        updates: list[tuple] = []
        owners: list[dict[str, Any]] = []
        n = 0
        for group in self.groups:
            for _ in group["params"]:
                if ready := self._ready(n):
                    m, v = self._slot("first_moments", n), self._slot("second_moments", n)
                    updates.append((*ready, m, v))
                    owners.append(group)
                n += 1
        # All memory that it takes is there: from here on nothing fails, and the step counts.
        self._powers = {b: self._power(b) * b for group in self.groups for b in group["betas"]}
        self._step_count += 1
        constants = {id(group): self._constants(group, grad_scale) for group in self.groups}
        _update([(*u, constants[id(group)]) for u, group in zip(updates, owners, strict=True)])
        if not self.first_moments:  # slots exist from the first step on, filled or not
            self.first_moments = [None] * len(self.params)
            self.second_moments = [None] * len(self.params)

    def _constants(self, group: dict[str, Any], grad_scale: float) -> tuple[float, ...]:
        lr, (b1, b2) = self._lr * group["lr_ratio"], group["betas"]
        c1, root = 1 - self._power(b1), math.sqrt(1 - self._power(b2))
        if self.form == "torch":
            step, k = lr / c1, 1 / root
        else:
            step, k = lr * root / c1, 1.0
        decay = 1 - lr * group["weight_decay"]
        return grad_scale, b1, 1 - b1, b2, 1 - b2, decay, step, k, group["eps"]

    def state_sha256(self) -> str:
        """The name of the optimizer's state; the bytes are those of `moments_sha256`."""
        return moments_sha256(self.step_count, self.first_moments, self.second_moments)


class Adam(AdamW):
    """Adam without weight decay (Kingma & Ba 2015, arXiv:1412.6980)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        form: str = "torch",
    ):
        super().__init__(params, lr, betas, eps, weight_decay=0.0, form=form)


# --- one parameter (reference), and all of them in one launch ------------------------------


def _update(updates: list[tuple]) -> None:
    """Updates of (p, g, m, v, constants), written to p, m and v."""
    here = [u for u in updates if device_of(u[0]) == "cpu"]
    table.update_all(_source, "adamw", [u for u in updates if device_of(u[0]) == "gpu"])
    if launch.JIT:
        _update_all(here)
    else:
        for p, g, m, v, constants in here:
            adamw_update(p, g, m, v, constants, (p, m, v))


@kernel
def adamw_update(p, g, m, v, constants, out):
    """The equations at the top of this file, written to out = (p, m, v).

    The constants, rounded to the type of p: gradient scale, b1, 1 - b1, b2, 1 - b2, 1 - lr decay,
    step, k, eps.
    """
    xp = array_module(p)
    scale, b1, a1, b2, a2, decay, step, k, eps = map(p.dtype.type, constants)
    g = g * scale
    out[1][...] = m * b1 + g * a1
    out[2][...] = v * b2 + (g * g) * a2
    out[0][...] = p * decay - (out[1] * step) / (xp.sqrt(out[2]) * k + eps)


@adamw_update.cpu
@adamw_update.gpu
def _adamw_update(p, g, m, v, constants, out):
    for new, old in zip(out, (p, m, v), strict=True):
        if new is not old:
            new[...] = old
    _update([(out[0], g, out[1], out[2], constants)])


CHUNK = 1 << 14


def _update_all(updates: list[tuple]) -> None:
    """One launch over chunks of all parameters: a row of addresses says where each one lies."""
    for dtype in (np.float32, np.float64):
        mine = [u for u in updates if u[0].dtype == dtype]
        if not mine:
            continue
        sizes = np.array([u[0].size for u in mine])
        chunks = -(-sizes // CHUNK)
        owner = np.repeat(np.arange(len(mine)), chunks)
        start = (np.arange(len(owner)) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * CHUNK
        addresses = np.array([[a.ctypes.data for a in u[:4]] for u in mine], np.int64)
        rows = addresses[owner] + start[:, None] * np.dtype(dtype).itemsize
        lengths = np.minimum(sizes[owner] - start, CHUNK)
        places = np.concatenate([rows, lengths[:, None], owner[:, None]], axis=1).astype(np.int64)
        constants = np.array([u[4] for u in mine]).astype(dtype)
        _update_chunk(len(places), np.ascontiguousarray(places), constants)


def _as_pointer(typingctx, address, like):
    """An address as a pointer to numbers of the type in `like`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), codegen


_pointer: Any = intrinsic(_as_pointer)


@body
def _update_chunk(i, table, constants):
    n = table[i, 4]
    p = carray(_pointer(table[i, 0], constants), n)
    g = carray(_pointer(table[i, 1], constants), n)
    m = carray(_pointer(table[i, 2], constants), n)
    v = carray(_pointer(table[i, 3], constants), n)
    c = constants[table[i, 5]]
    scale, b1, a1, b2, a2, decay, step, k, eps = (
        c[0],
        c[1],
        c[2],
        c[3],
        c[4],
        c[5],
        c[6],
        c[7],
        c[8],
    )
    for j in range(n):
        gj = g[j] * scale
        mj = m[j] * b1 + gj * a1
        vj = v[j] * b2 + (gj * gj) * a2
        m[j], v[j] = mj, vj
        p[j] = p[j] * decay - (mj * step) / (np.sqrt(vj) * k + eps)


# --- GPU -----------------------------------------------------------------------------------

_source = cuda.Source(
    table.LOOKUP
    + r"""
extern "C" __global__ void adamw(const i64 *table, i64 count, const REAL *constants) {
    const i64 *row = row_of(table, count, 6, blockIdx.x);
    const REAL *c = constants + (row - table) / 6 * 9;
    const REAL scale = c[0], b1 = c[1], a1 = c[2], b2 = c[3], a2 = c[4], decay = c[5];
    const REAL step = c[6], k = c[7], eps = c[8];
    REAL *__restrict__ p = (REAL *)row[2], *__restrict__ m = (REAL *)row[4];
    REAL *__restrict__ v = (REAL *)row[5];
    const REAL *__restrict__ g = (const REAL *)row[3];
    const i64 start = (blockIdx.x - row[0]) * 4096, end = start + 4096;
    const i64 stop = end < row[1] ? end : row[1];
    for (i64 j = start + threadIdx.x; j < stop; j += blockDim.x) {
        const REAL gj = g[j] * scale;
        const REAL mj = m[j] * b1 + gj * a1;
        const REAL vj = v[j] * b2 + (gj * gj) * a2;
        m[j] = mj;
        v[j] = vj;
        p[j] = p[j] * decay - (mj * step) / (root(vj) * k + eps);
    }
}
"""
)
