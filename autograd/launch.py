"""How a CPU kernel runs: one compiled driver, many small bodies.

A *body* is a plain function of an index and arrays, compiled by Numba:

    @body
    def scale_row(i, x, factor, out):
        for c in range(x.shape[1]):
            out[i, c] = x[i, c] * factor

    scale_row(N, x, np.float32(2), out)     # i = 0 .. N - 1, over the threads

Numba can make a parallel function of each such loop, but every one of them costs a second to
compile. Here one parallel driver, `_run`, is compiled once; it gets a body as an address and its
arguments as a row of 64-bit words, so that a body costs what a plain loop costs.

Each thread begins with the index of its own number; an atomic counter hands out the rest, to
whoever is free. So no sum may cross indices: each index owns what it writes, and a result never
depends on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config as _numba_config
from numba.extending import intrinsic as _intrinsic
from numba.np.arrayobj import make_array
from numba.np.numpy_support import from_dtype

# Numba makes the attributes of `config` at import, and drops an intrinsic's first parameter:
# no checker can know.
config: Any = _numba_config
intrinsic: Any = _intrinsic

JIT = not config.DISABLE_JIT

# One compile policy. fastmath stays off: it lets LLVM reorder sums and assume that nothing is
# infinite. The numpy error model divides without a check for zero that would stop vectorisation.
_POLICY: dict[str, Any] = {
    "error_model": "numpy",
    "nogil": True,
    "fastmath": False,
    "boundscheck": False,
}

# The lanes of the vectors that kernels spell out. Any value gives the same bits.
VECTOR_WIDTH = int(os.environ.get("AFINAR_VECTOR_WIDTH", "0"))
if VECTOR_WIDTH not in (0, 4, 8, 16):
    raise ValueError(f"AFINAR_VECTOR_WIDTH must be 4, 8 or 16, not {VECTOR_WIDTH}")
if not VECTOR_WIDTH:
    _features = os.environ.get("NUMBA_CPU_FEATURES")
    _wide = "+avx512f" in _features if _features else llvm.get_host_cpu_features().get("avx512f")
    VECTOR_WIDTH = 16 if _wide else 8


def device(fn: Callable | None = None, **options: Any) -> Any:
    """Compile a helper that bodies call; small ones are always inlined."""
    if fn is None:
        return functools.partial(device, **options)
    options = {"forceinline": True, **_POLICY, **options}
    return numba.njit(fn, **options)


class Body:
    """A function of an index, made parallel: `body(n, *args)` calls it for 0 .. n - 1."""

    def __init__(self, fn: Callable):
        functools.update_wrapper(self, fn)
        self.fn = fn
        # A second parameter named `thread` gets the thread's number, for workspaces made outside.
        self.takes_thread = list(inspect.signature(fn).parameters)[1] == "thread"
        self.compiled: dict[tuple, tuple[int, int, struct.Struct]] = {}
        self.dispatcher: Any = None

    def __call__(self, n: int, *args: Any) -> None:
        if n <= 0:
            return
        key = tuple([_kind(a) for a in args])
        entry, start, layout = self.compiled.get(key) or self._compile(key)
        words = np.frombuffer(layout.pack(start, *_flat(args)), np.int64)
        threads = min(_threads.count, n)
        if threads == 1 or _threads.forked:
            _run_serial(entry, words, n)
        else:
            with _threads.lock:
                numba.set_num_threads(threads)
                _run(entry, words, n, threads, np.array([threads], np.int64))

    def _compile(self, key: tuple) -> tuple[int, int, struct.Struct]:
        with _threads.lock:
            if self.dispatcher is None:
                self.dispatcher = _cached_njit(self.fn)
            signature = (types.int64,) * (1 + self.takes_thread) + tuple(map(_numba_type, key))
            self.dispatcher.compile(signature)
            result = self.dispatcher.overloads[signature]
            start = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
            letters = "".join(_letters(k) for k in key)
            entry = _entry(self.takes_thread, letters)
            words = {"q": "q", "d": "d", "f": "f4x", "I": "I4x"}
            layout = struct.Struct("=q" + "".join(words[c] for c in letters))
            self.compiled[key] = entry, start, layout
            return self.compiled[key]


body = Body


class strided:  # noqa: N801 - reads as a word in a call: scale_row(N, strided(x), out)
    """Marks an argument that a body reads by its strides; all others must be C-contiguous."""

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array


# --- arguments as 64-bit words -------------------------------------------------------------


def _kind(a: Any) -> Any:
    if isinstance(a, np.ndarray):
        return a.dtype.char, a.ndim
    if isinstance(a, strided):
        return a.array.dtype.char, a.array.ndim, "A"
    if isinstance(a, tuple):  # of integers, named or not
        return type(a), len(a)
    return type(a)


def _numba_type(kind: Any) -> Any:
    if not isinstance(kind, tuple):
        return _SCALARS.get(kind, (types.int64, "q"))[0]
    of, size, *layout = kind
    if isinstance(of, str):
        return types.Array(from_dtype(np.dtype(of)), size, layout[0] if layout else "C")
    return (
        types.UniTuple(types.int64, size)
        if of is tuple
        else types.NamedUniTuple(types.int64, size, of)
    )


_SCALARS: dict[Any, tuple[Any, str]] = {
    float: (types.float64, "d"),
    np.float64: (types.float64, "d"),
    np.float32: (types.float32, "f"),
    np.uint32: (types.uint32, "I"),
}


def _letters(kind: Any) -> str:
    if not isinstance(kind, tuple):
        return _SCALARS.get(kind, (types.int64, "q"))[1]
    of, size, *_ = kind
    return "q" * (5 + 2 * size if isinstance(of, str) else size)


def _flat(args: tuple) -> list:
    """Numba's own layout of an array: owner, parent, items, item size, data, shape, strides."""
    words: list[Any] = []
    for a in args:
        if isinstance(a, tuple):
            words += a
            continue
        if isinstance(a, strided):
            a = a.array
        elif isinstance(a, np.ndarray) and not a.flags.c_contiguous:
            raise AssertionError("a body needs C-contiguous arrays, or strided(...)")
        if isinstance(a, np.ndarray):
            words += (0, 0, a.size, a.itemsize, address(a), *a.shape, *a.strides)
        else:
            words.append(a)
    return words


_word_at = ctypes.c_size_t.from_address
_HEADER = object.__basicsize__


def address(x: Any) -> int:
    """Where an array's data begins; 0 for None.

    NumPy's binary interface puts this word first, after the header of any Python object. To ask
    for `x.ctypes.data` takes ten times as long, a microsecond, which small products notice.
    """
    return 0 if x is None else _word_at(id(x) + _HEADER).value


@functools.cache
def _entry(takes_thread: bool, letters: str) -> int:
    """The address of `void entry(words, i, thread)`, which spreads the words over the registers.

    The first word is the body's address; the calling convention is Numba's: a place for the
    result, a place for an exception (bodies raise none), then the arguments.
    """
    i64, ptr, i32 = ir.IntType(64), ir.IntType(8).as_pointer(), ir.IntType(32)
    kinds = {"q": i64, "d": ir.DoubleType(), "f": ir.FloatType(), "I": i32}
    module = ir.Module("entry")
    function = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [i64.as_pointer(), i64, i64]), "entry"
    )
    b = ir.IRBuilder(function.append_basic_block())
    words, index, thread = function.args

    def word(n: int, kind: Any) -> Any:
        return b.load(b.bitcast(b.gep(words, [ir.Constant(i64, n)]), kind.as_pointer()))

    lead = [index, thread] if takes_thread else [index]
    args = [word(n + 1, kinds[c]) for n, c in enumerate(letters)]
    spot = [b.alloca(ptr), b.alloca(ptr)]
    signature = ir.FunctionType(i32, [s.type for s in spot] + [a.type for a in lead + args])
    b.call(b.inttoptr(word(0, i64), signature.as_pointer()), [*spot, *lead, *args])
    b.ret_void()

    machine = llvm.Target.from_default_triple().create_target_machine(opt=1)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _engines.append(engine)  # the code lives as long as the engine
    return engine.get_function_address("entry")


_engines: list[Any] = []


# --- the driver ----------------------------------------------------------------------------


@intrinsic
def _call(typingctx: Any, entry: Any, words: Any, i: Any, thread: Any) -> Any:
    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        entry, words, i, thread = args
        data = make_array(sig.args[1])(context, b, words).data
        signature = ir.FunctionType(ir.VoidType(), [data.type, i.type, thread.type])
        b.call(b.inttoptr(entry, signature.as_pointer()), [data, i, thread])
        return context.get_dummy_value()

    return types.void(entry, words, i, thread), codegen


@intrinsic
def _take_next(typingctx: Any, counter: Any) -> Any:
    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        data = make_array(sig.args[0])(context, b, args[0]).data
        return b.atomic_rmw("add", data, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(counter), codegen


def _run_parallel(entry: int, words: Any, n: int, threads: int, counter: Any) -> None:
    for thread in numba.prange(threads):
        # Where two launches are cut alike, what a thread reads is still in its core's cache.
        i = np.int64(thread)
        while i < n:
            _call(entry, words, i, np.int64(thread))
            i = _take_next(counter)


def _run_one(entry: int, words: Any, n: int) -> None:
    for i in range(n):
        _call(entry, words, i, 0)


def _cached_njit(fn: Callable, **options: Any) -> Any:
    """njit with the disk cache in a folder of our own, named by a hash of all kernel sources.

    Numba notices a change in a function's own file only; a helper in another file, or a constant
    from the environment, would leave old code in the cache.
    """
    folder = _cache_folder()
    before = config.CACHE_DIR
    try:
        config.CACHE_DIR = folder or before
        return numba.njit(fn, cache=folder is not None, **_POLICY, **options)
    finally:
        config.CACHE_DIR = before


@functools.cache
def _cache_folder() -> str | None:
    here = Path(__file__).parent
    sha = hashlib.sha256(f"{numba.__version__} {VECTOR_WIDTH}".encode())
    for source in sorted(here.rglob("*.py")):
        sha.update(source.read_bytes())
    root = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "afinar"
    )
    folder = Path(root) / f"kernels-{sha.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".probe{os.getpid()}").touch()
        (folder / f".probe{os.getpid()}").unlink()
    except OSError:
        return None  # nowhere to write: compile anew, rather than fail
    return str(folder)


_ONLY_PRANGE = {
    k: k == "prange"
    for k in (
        "prange",
        "comprehension",
        "reduction",
        "inplace_binop",
        "setitem",
        "numpy",
        "stencil",
        "fusion",
    )
}
if JIT:
    _run = _cached_njit(_run_parallel, parallel=_ONLY_PRANGE)
    _run_serial = _cached_njit(_run_one)


# --- threads -------------------------------------------------------------------------------


class _Threads:
    def __init__(self) -> None:
        self.count = config.NUMBA_NUM_THREADS
        self.forked = False
        self.lock = threading.RLock()  # workqueue aborts on two launches at once

    def after_fork(self) -> None:
        # GNU OpenMP kills a forked child that starts a parallel region. One thread gives the
        # same bits.
        self.forked = True
        self.lock = threading.RLock()


_threads = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.after_fork)


def set_num_threads(n: int) -> None:
    """Use `n` threads from now on; results do not depend on it."""
    most = config.NUMBA_NUM_THREADS
    if not isinstance(n, int) or not 1 <= n <= most:
        raise ValueError(
            f"set_num_threads: {n!r} asked for, between 1 and {most} possible "
            "(set NUMBA_NUM_THREADS before Python starts for more)"
        )
    _threads.count = n


def get_num_threads() -> int:
    """The number of threads that kernels use."""
    return 1 if _threads.forked else _threads.count


def threading_layer() -> str:
    """Numba's threading layer ("omp", "workqueue", "tbb"), started if need be."""
    if not JIT:
        return "none"
    _idle(2, 0)
    try:
        return numba.threading_layer()  # pyright: ignore[reportPrivateImportUsage]
    except ValueError:  # one thread so far: no layer was started
        return "none"


@body
def _idle(i, zero):  # does nothing, so that a layer starts
    pass
