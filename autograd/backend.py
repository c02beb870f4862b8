"""Where arrays live: NumPy on the CPU, CuPy on the GPU. The only file that imports CuPy."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from . import launch

cupy: Any = None
no_cupy = ""  # why, in the words of Python or of CuPy
try:
    import cupy  # pyright: ignore[reportMissingImports]
except ImportError as error:
    no_cupy = str(error).strip().partition("\n")[0]

KERNELS: dict[str, Kernel] = {}

# What the fast bodies compute in. 16-bit storage travels as bits: uint16 is always bfloat16,
# int16 is always float16; nothing else in the engine has these two types.
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


_reference_only: contextvars.ContextVar[bool] = contextvars.ContextVar("reference", default=False)


@contextlib.contextmanager
def reference_bodies() -> Iterator[None]:
    """Within this block every kernel runs its reference body, for comparison."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


ARRAYS = (np.ndarray,) if cupy is None else (np.ndarray, cupy.ndarray)


def is_array(x: Any) -> bool:
    """Whether `x` is an array of either device."""
    return isinstance(x, ARRAYS)


def array_module(x: Any) -> ModuleType:
    """`cupy` if `x` is on the GPU, else `numpy`."""
    return cupy if cupy is not None and isinstance(x, cupy.ndarray) else np


class Kernel:
    """One computation with up to three bodies: a reference, a CPU one and a GPU one.

    The reference is plain array code. It runs on either device and says what the other two must
    compute; the tests hold them to it. A call goes to the fast body of the device that its first
    array lives on. Fast bodies get C-contiguous arrays, except for the arguments named in
    `strides`, whose last axis alone must be contiguous; they write only to arrays that they made,
    or that are named `out`.
    """

    __name__: str

    def __init__(self, reference: Callable, strides: tuple[str, ...] = ()):
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.fast: dict[ModuleType, Callable] = {}
        names = list(inspect.signature(reference).parameters)
        self.by_stride = {names.index(name) for name in strides}
        KERNELS[f"{reference.__module__.rpartition('.')[2]}.{reference.__name__}"] = self

    def cpu(self, body: Callable) -> Callable:
        """Attach the body for NumPy arrays."""
        self.fast[np] = body
        return body

    def gpu(self, body: Callable) -> Callable:
        """Attach the body for CuPy arrays."""
        if cupy is not None:
            self.fast[cupy] = body
        return body

    def __call__(self, *args: Any) -> Any:
        module = np if cupy is None else self._module(args)
        body = self.fast.get(module)
        if body is None and module is not np and not _reference_only.get():
            raise RuntimeError(
                f"{self.__name__} has no body for the GPU, and its reference has other bits"
            )
        if body is None or _reference_only.get() or (module is np and not launch.JIT):
            body = self.reference
        else:
            args = tuple([self._layout(n, a) if is_array(a) else a for n, a in enumerate(args)])
        kept = _kept.get()
        if kept is None or self.__name__ not in kept.names:
            return body(*args)
        return kept.result(functools.partial(body, *args))

    def _module(self, args: tuple) -> ModuleType:
        """Where the first array is, and so must be all others."""
        modules = [array_module(a) for a in args if is_array(a)] or [np]
        if any(module is not modules[0] for module in modules):
            raise ValueError(
                f"{self.__name__}: one array is on the CPU and one on the GPU; "
                "move both to one device"
            )
        return modules[0]

    def _layout(self, n: int, a: Any) -> Any:
        if a.flags.c_contiguous:
            return a
        if n in self.by_stride and (a.shape[-1] == 1 or a.strides[-1] == a.itemsize):
            return a
        return array_module(a).ascontiguousarray(a)


def kernel(reference: Callable | None = None, *, strides: tuple[str, ...] = ()) -> Any:
    """Make `reference` a `Kernel`, to which `.cpu` and `.gpu` attach fast bodies."""
    if reference is None:
        return functools.partial(kernel, strides=strides)
    return Kernel(reference, strides)


# --- results that a second run need not compute ----------------------------------------------


class Kept:
    """What some kernels returned in the first run of a checkpointed stretch.

    The second run makes the same calls in the same order and gets these results, each once.
    """

    def __init__(self, names: frozenset[str]):
        self.names = names
        self.results: deque[Any] = deque()
        self.again = False

    def result(self, run: Callable[[], Any]) -> Any:
        """The result of a kernel call: computed in the first run, remembered in the second."""
        if self.again:
            return self.results.popleft()
        self.results.append(run())
        return self.results[-1]


_kept: contextvars.ContextVar[Kept | None] = contextvars.ContextVar("kept", default=None)


def is_keeping() -> bool:
    """Whether results of kernels are being kept, or handed out again."""
    kept = _kept.get()
    return kept is not None and bool(kept.names)


@contextlib.contextmanager
def keeping(kept: Kept | None) -> Iterator[None]:
    """Within this block the results of its kernels go into `kept`, or come from there."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
