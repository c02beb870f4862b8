"""In what precision matrix products are computed, and the scaler that float16 needs.

Weights, moments and every tensor between two ops stay float32. In a 16-bit mode a matrix product
rounds its operands (to the nearest, ties to even) and keeps them so for its backward pass; sums
are float32. Micikevicius et al. 2018, arXiv:1710.03740.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import cuda
from .backend import array_module, kernel
from .buffers import empty
from .launch import body


class Precision(enum.Enum):
    """A number format that matrix products can read."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def size(self) -> int:
        """Bytes of one number."""
        return 4 if self is Precision.FP32 else 2


def as_precision(name: str | Precision) -> Precision:
    """The precision of that name."""
    try:
        return Precision(name)
    except ValueError:
        raise ValueError(f'precision: "fp32", "fp16" or "bf16" needed, given {name!r}') from None


# --- what is in force ----------------------------------------------------------------------

_compute: contextvars.ContextVar[str] = contextvars.ContextVar("compute", default="fp32")
_deterministic = False


def compute_dtype() -> str:
    """What matrix products compute in here: "fp32", "fp16" or "bf16"."""
    return _compute.get()


@contextlib.contextmanager
def compute_in(precision: str | Precision) -> Iterator[None]:
    """Within this block matrix products compute in `precision`.

    >>> with compute_in("bf16"):
    ...     compute_dtype()
    'bf16'
    """
    token = _compute.set(as_precision(precision).value)
    try:
        yield
    finally:
        _compute.reset(token)


def set_deterministic(flag: bool) -> None:
    """Ask for bits that are the same on every kind of machine, at the price of speed.

    In float32 on a CPU they always are. With the flag a GPU follows the CPU's order of sums, and
    the 16-bit modes take a portable body in place of the hardware's own instruction.
    """
    global _deterministic
    _deterministic = bool(flag)


def is_deterministic() -> bool:
    """Whether `set_deterministic(True)` is in force."""
    return _deterministic


# --- configuration -------------------------------------------------------------------------


@dataclass(frozen=True)
class PrecisionConfig:
    """How a model is trained: the precision of its products, and the loss scaling.

    float16 starts at a scale of 65536 and adapts it; the other two need none. `initial_scale`
    and `dynamic_scaling` override that. `max_scale` keeps the scale finite.

    >>> PrecisionConfig("fp16").scale, PrecisionConfig("bf16").scale
    (65536.0, 1.0)
    """

    compute: str = "fp32"
    initial_scale: float | None = None
    dynamic_scaling: bool | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", as_precision(self.compute).value)
        if not (math.isfinite(self.max_scale) and self.max_scale >= 1):
            raise ValueError(
                f"max_scale: a finite number of at least 1 needed, given {self.max_scale}"
            )
        if self.initial_scale is not None and not 1 <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale: between 1 and max_scale ({self.max_scale}) needed, "
                f"given {self.initial_scale}"
            )
        if not self.growth_factor > 1 or not 0 < self.backoff_factor < 1:
            raise ValueError(
                "growth_factor must be above 1 and backoff_factor between 0 and 1, given "
                f"{self.growth_factor} and {self.backoff_factor}"
            )
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval: at least 1 needed, given {self.growth_interval}")

    @property
    def precision(self) -> Precision:
        """The precision of matrix products."""
        return Precision(self.compute)

    @property
    def is_mixed(self) -> bool:
        """Whether products are computed in 16 bits."""
        return self.compute != "fp32"

    @property
    def scale(self) -> float:
        """The scale that the loss starts with."""
        if self.initial_scale is not None:
            return float(self.initial_scale)
        return min(65536.0, self.max_scale) if self.compute == "fp16" else 1.0

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts."""
        return self.compute == "fp16" if self.dynamic_scaling is None else self.dynamic_scaling

    def with_initial_scale(self, scale: float) -> PrecisionConfig:
        """The same with another scale at the start."""
        return replace(self, initial_scale=scale)

    def with_dynamic_scaling(self, flag: bool) -> PrecisionConfig:
        """The same with the scale adapting, or not."""
        return replace(self, dynamic_scaling=flag)


# --- loss scaling --------------------------------------------------------------------------


class GradScaler:
    """Keeps small float16 gradients from vanishing: the loss is multiplied by `scale`, gradients
    are divided by it, and the scale is halved whenever one of them overflows.

        scaler.scale_loss(loss).backward()
        valid = all([scaler.unscale_and_check(p.grad) for p in params])
        if valid: optimizer.step()
        scaler.update(valid)

    A scale that does not adapt counts nothing.
    """

    def __init__(self, scale: float = 65536.0, config: PrecisionConfig | None = None):
        self.config = config or PrecisionConfig("fp16").with_initial_scale(scale)
        self.scale = self.config.scale
        self.overflow_count = self.successful_steps = self.since_growth = 0

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> GradScaler:
        """The scaler that a precision needs."""
        return cls(config=config)

    def scale_loss(self, loss: Any) -> Any:
        """The loss, multiplied by the scale."""
        return loss if self.scale == 1 else loss * self.scale

    def unscale_grad(self, grad: Any) -> Any:
        """The gradient, divided by the scale."""
        return grad * grad.dtype.type(1 / self.scale)

    def unscale_and_check(self, grad: Any) -> bool:
        """Divide `grad` by the scale, in place; whether all of it is finite."""
        if self.scale != 1:
            grad *= grad.dtype.type(1 / self.scale)
        return bool(all_finite(grad))

    def update(self, valid: bool) -> None:
        """Take note of a step that was valid, or of one that overflowed."""
        if not self.config.dynamic:
            return
        if valid:
            self.successful_steps += 1
            self.since_growth += 1
            if self.since_growth >= self.config.growth_interval:
                self.scale = min(self.scale * self.config.growth_factor, self.config.max_scale)
                self.since_growth = 0
        else:
            self.overflow_count += 1
            self.scale = max(self.scale * self.config.backoff_factor, 1.0)
            self.since_growth = 0

    @property
    def stats(self) -> tuple[float, int, int]:
        """(scale, overflows, successful steps)."""
        return self.scale, self.overflow_count, self.successful_steps

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {
            "scale": self.scale,
            "overflow_count": self.overflow_count,
            "successful_steps": self.successful_steps,
            "since_growth": self.since_growth,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict()`."""
        missing = self.state_dict().keys() ^ state.keys()
        if missing:
            raise ValueError(
                f"GradScaler: the state has missing or unknown fields {sorted(missing)}"
            )
        self.scale = float(state["scale"])
        self.overflow_count = int(state["overflow_count"])
        self.successful_steps = int(state["successful_steps"])
        self.since_growth = int(state["since_growth"])


BLOCK = 1 << 16


@kernel
def all_finite(x):
    """Whether no element is infinite or NaN."""
    return array_module(x).isfinite(x).all()


@all_finite.cpu
def _all_finite_cpu(x):
    x = x.reshape(-1)
    wrong = empty(-(-x.size // BLOCK), np.int64)
    _count_wrong(len(wrong), x, wrong)
    return not wrong.any()


@body
def _count_wrong(i, x, out):
    n, part = 0, x[i * BLOCK : (i + 1) * BLOCK]
    for j in range(part.size):
        # An infinite or NaN x - x is NaN, which differs from itself.
        d = part[j] - part[j]
        n += d != d
    out[i] = n


_source = cuda.Source(r"""
extern "C" __global__ void find_wrong(const REAL *x, int *wrong, i64 n) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    bool found = false;
    for (i64 i = this_thread(); i < n; i += step) found |= x[i] - x[i] != 0;
    if (found) *wrong = 1;  // whoever comes first: all write the same
}
""")


@all_finite.gpu
def _all_finite_gpu(x):
    wrong = cuda.empty(1, np.int32)
    wrong.fill(0)
    count = min(cuda.blocks(x.size), BLOCK)
    _source("find_wrong", count, cuda.THREADS, x, wrong, x.size, real=x.dtype)
    return wrong[0] == 0
