"""A reverse-mode autograd engine in NumPy and Numba, with CuPy for the GPU."""

from . import ops
from .backend import KERNELS
from .launch import get_num_threads, set_num_threads
from .ops import *  # noqa: F403
from .precision import (
    GradScaler,
    Precision,
    PrecisionConfig,
    compute_in,
    is_deterministic,
    set_deterministic,
)
from .tape import checkpoint, no_grad
from .tensor import OPS, Tensor
from .testing import gradcheck
