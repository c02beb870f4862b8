"""A stand-in for CuPy without a GPU: arrays are NumPy's, CUDA sources are compiled for the CPU.

Only what the engine uses is here, and as strict as in CuPy: an array of the GPU never becomes one
of the CPU by itself, and the two never meet in one operation.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import _cublas

EMULATED = True
__version__ = "0 (emulated on the CPU)"


class ndarray:  # noqa: N801 - CuPy's name
    """An array that pretends to live on a GPU."""

    __array_priority__ = 100

    def __init__(self, host):
        self._host = host

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return _wrap(getattr(ufunc, method)(*_unwrap(inputs), **_unwrap(options)))

    def __array_function__(self, function, kinds, args, options):
        return _wrap(function(*_unwrap(args), **_unwrap(options)))

    def get(self):
        return self._host.copy()

    @property
    def device(self):
        return cuda.Device(0)

    @property
    def data(self):
        root = self._host
        while isinstance(root.base, np.ndarray):
            root = root.base
        return _Pointer(*(a.__array_interface__["data"][0] for a in (self._host, root)))

    @property
    def base(self):
        return None if self._host.base is None else ndarray(self._host.base)

    @property
    def flags(self):
        """As little as CuPy tells; nothing can be made read-only."""
        return _Flags(*(self._host.flags[n] for n in ("C_CONTIGUOUS", "F_CONTIGUOUS", "OWNDATA")))

    @property
    def T(self):  # noqa: N802
        return ndarray(self._host.T)

    def __getattr__(self, name):
        if name in (
            "__array_interface__",
            "__array_struct__",
            "ctypes",
            "__buffer__",
            "setflags",
            "byteswap",
            "tofile",
            "newbyteorder",
        ):
            raise AttributeError(name)
        found = getattr(self._host, name)
        if not callable(found) or isinstance(found, np.dtype | np.generic):
            return found

        def method(*args, **options):
            return _wrap(found(*_unwrap(args), **_unwrap(options)))

        return method

    def __getitem__(self, index):
        return _wrap(self._host[_unwrap(index, indexing=True)])

    def __setitem__(self, index, value):
        self._host[_unwrap(index, indexing=True)] = _unwrap(value)

    def __iter__(self):
        return (self[n] for n in range(len(self)))

    def __len__(self):
        return len(self._host)

    def __bool__(self):
        return bool(self._host)

    def __int__(self):
        return int(self._host)

    def __index__(self):
        return self._host.__index__()

    def __float__(self):
        return float(self._host)

    def __repr__(self):
        return repr(self._host)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _operator(name):
    def method(self, *others):
        if any(isinstance(o, np.ndarray) and o.ndim for o in others):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        out = getattr(self._host, name)(*_unwrap(others))
        if name.startswith("__i") and name != "__invert__":
            return self
        return _wrap(out)

    return method


_OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv mod pow rpow "
    "neg abs invert and rand iand or ror ior xor lshift rshift rlshift rrshift matmul rmatmul "
    "lt le gt ge eq ne"
)
for _name in _OPERATORS.split(" "):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))


class _Flags(NamedTuple):
    c_contiguous: bool
    f_contiguous: bool
    owndata: bool


class _Memory(NamedTuple):
    ptr: int


class _Pointer:
    """Where an array begins, and the memory that it was cut from."""

    def __init__(self, ptr, start):
        self.ptr, self.mem = ptr, _Memory(start)


def _wrap(x):
    if isinstance(x, tuple | list):
        return type(x)(_wrap(v) for v in x)
    # As in CuPy, a reduction to one number is still an array.
    return ndarray(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x


def _unwrap(x, indexing=False):
    if isinstance(x, ndarray):
        return x._host
    if isinstance(x, tuple | list):
        return type(x)(_unwrap(v, indexing) for v in x)
    if isinstance(x, dict):
        return {k: _unwrap(v) for k, v in x.items()}
    if isinstance(x, np.ndarray) and x.ndim and not indexing:
        raise TypeError(f"Unsupported type {type(x)}")
    return x


def asarray(x, dtype=None, order=None):
    """A copy of what comes from the CPU."""
    if isinstance(x, ndarray):
        return ndarray(np.asarray(x._host, dtype, order=order))
    return array(x, dtype, order=order or "K")


def array(x, dtype=None, copy=True, order="K"):
    host = np.array(x._host if isinstance(x, ndarray) else x, dtype, order=order)
    cuda.memory.count(host.nbytes)
    return ndarray(host)


def asnumpy(x):
    return x.get() if isinstance(x, ndarray) else np.asarray(x)


def empty(shape, dtype=float, order="C"):
    """Filled with NaN, or with the largest integer, so that nobody relies on zeros."""
    host = np.empty(shape, dtype, order)
    cuda.memory.count(host.nbytes)
    host.fill(np.nan if host.dtype.kind == "f" else np.iinfo(host.dtype).max
              if host.dtype.kind in "iu" else 1)  # fmt: skip
    return ndarray(host)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    found = getattr(np, name)
    if isinstance(found, type) or not callable(found):
        return found

    def function(*args, **options):
        return _wrap(found(*_unwrap(args), **_unwrap(options)))

    return function


# --- CUDA sources ----------------------------------------------------------------------------

_HERE = Path(__file__).parent.parent
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([\w, ]+\)\s+)?(\w+)\(([^)]*)\)'
)


class RawModule:
    """A CUDA source, compiled by g++ on top of runtime.h."""

    def __init__(self, code, options=(), backend="nvrtc"):
        self.code, self.defines = code, [o for o in options if o.startswith("-D")]
        self.waits = "__sync" in code or "__shfl" in code
        self.library = None

    def get_function(self, name):
        self.library = self.library or _compile(self.code, self.defines)
        return RawKernel(self, name)


class RawKernel:
    def __init__(self, module, name):
        self.module, self.name = module, name
        self.call = getattr(module.library, f"call_{name}")
        body = module.code.split(f" {name}(", 1)
        assert len(body) == 2, f"{name}: no such function in the source"

    def __call__(self, grid, block, args, shared_mem=0, first=0, blocks=None):
        """`first` and `blocks` (of the stand-in only) run a part of the grid."""
        assert len(grid) == len(block) == 1, "the stand-in has one-dimensional grids"
        held = [_argument(a) for a in args]
        table = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        stuck = self.module.library.run_blocks(
            self.call, table, ctypes.c_longlong(first),
            ctypes.c_longlong(grid[0] if blocks is None else blocks),
            ctypes.c_longlong(grid[0]), ctypes.c_int(block[0]), ctypes.c_int(self.module.waits),
        )  # fmt: skip
        assert not stuck, f"{self.name}: threads of a block wait at different places"


def _argument(a):
    if isinstance(a, ndarray):
        return ctypes.c_void_p(a.data.ptr)
    assert isinstance(a, np.generic), f"a kernel was given {type(a)}"
    kinds = {"f": ctypes.c_float, "d": ctypes.c_double, "i": ctypes.c_int, "q": ctypes.c_longlong,
             "l": ctypes.c_longlong, "I": ctypes.c_uint, "Q": ctypes.c_ulonglong,
             "L": ctypes.c_ulonglong}  # fmt: skip
    return kinds[a.dtype.char](a.item())  # a NumPy scalar: others have no definite size in CuPy


def _compile(code, defines):
    calls = []
    for name, params in _KERNEL.findall(code):
        types = [p.strip().rsplit(None, 1) for p in params.split(",") if p.strip()]
        types = [(t + "*" * n.count("*")).replace("__restrict__", "") for t, n in types]
        given = ", ".join(f"*({t}*)a[{n}]" for n, t in enumerate(types))
        calls.append(f'extern "C" void call_{name}(void **a) {{ {name}({given}); }}')
    text = '#include "runtime.h"\n' + code.replace("__restrict__", "") + "\n" + "\n".join(calls)
    flags = ["-std=c++17", "-O2", "-mfma", "-ffp-contract=off", "-fPIC", "-shared", "-w",
             "-fno-strict-aliasing", *defines]  # fmt: skip
    key = hashlib.sha256((text + (_HERE / "runtime.h").read_text() + repr(flags)).encode())
    folder = Path(
        os.environ.get("CUDA_ON_CPU_CACHE") or Path(tempfile.gettempdir()) / "cuda_on_cpu"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key.hexdigest()[:24]}.so"
    if not path.exists():
        source, made = path.with_suffix(f".{os.getpid()}.cpp"), path.with_suffix(f".{os.getpid()}")
        source.write_text(text)
        run = subprocess.run(["g++", *flags, f"-I{_HERE}", str(source), "-o", str(made)],
                             capture_output=True, text=True)  # fmt: skip
        if run.returncode:
            raise RuntimeError(f"g++ refused the source:\n{run.stderr[:4000]}")
        source.unlink()
        os.replace(made, path)
    return ctypes.CDLL(str(path))


# --- the device ------------------------------------------------------------------------------


class _Cuda:
    class Device:
        def __init__(self, id=0):
            self.id = id

        def synchronize(self):
            pass

    class runtime:  # noqa: N801
        class CUDARuntimeError(RuntimeError):
            pass

        @staticmethod
        def getDeviceCount():  # noqa: N802
            if os.environ.get("CUDA_ON_CPU_NO_DEVICE"):
                raise _Cuda.runtime.CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver "
                                                     "version is insufficient for CUDA runtime "
                                                     "version")  # fmt: skip
            return 1

        @staticmethod
        def getDevice():  # noqa: N802
            return 0

        @staticmethod
        def getDeviceProperties(id):  # noqa: N802
            return {"name": b"Emulated GPU"}

    class nvrtc:  # noqa: N801
        @staticmethod
        def getVersion():  # noqa: N802
            return 13, 0

    class memory:  # noqa: N801
        class OutOfMemoryError(MemoryError):
            pass

        fail_at: int | None = None  # a request of this many bytes or more does not fit
        freed = 0

        @classmethod
        def count(cls, nbytes):
            if cls.fail_at is not None and nbytes >= cls.fail_at:
                raise cls.OutOfMemoryError(f"Out of memory allocating {nbytes} bytes")

    cublas = _cublas

    @staticmethod
    def get_cublas_handle():
        return 0

    class Stream:
        class null:  # noqa: N801
            @staticmethod
            def synchronize():
                pass


cuda = _Cuda
sys.modules["cupy.cuda"] = cuda  # pyright: ignore[reportArgumentType]


class _Pool:
    def used_bytes(self):
        return 0

    def total_bytes(self):
        return 0

    def free_all_blocks(self):
        cuda.memory.freed += 1


_pool = _Pool()


def get_default_memory_pool():
    return _pool
