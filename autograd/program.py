"""Many bodies in one launch: for steps so short that starting each body would cost more than it.

A program is a list of calls `body(n, *args)` on arrays that stay where they are. All threads run
through the list together: each takes indices of a call, as in a launch of its own, until none is
left, waits until all are done, and goes on to the next call. The results are those of the calls one
by one.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.np.arrayobj import make_array

from .launch import (
    _ONLY_PRANGE,
    JIT,
    Body,
    _cached_njit,
    _call,
    _flat,
    _kind,
    _take_next,
    _threads,
    get_num_threads,
    intrinsic,
)

_LINE = 8  # a counter has a cache line of its own
_PATIENCE = 2000  # looks at a counter before the processor is left to others


class Program:
    """Calls of bodies, made ready once and run many times.

    `add` returns the call's number; `place` says where in `words` a dimension of one of its
    arrays stands, so that a view can grow between two runs without being passed anew.
    """

    def __init__(self) -> None:
        self.words = np.zeros(0, np.int64)
        self.parts: list[Any] = []
        self.calls: list[tuple[int, int, int]] = []  # entry, first word, indices
        self.offsets: list[list[int]] = []
        self.kept: list[Any] = []  # the arrays live as long as the program
        self.threads = get_num_threads()  # workspaces were made for so many

    def add(self, body: Body, n: int, *args: Any) -> int:
        """Append `body(n, *args)`."""
        key = tuple(_kind(a) for a in args)
        entry, code, layout = body.compiled.get(key) or body._compile(key)
        words = np.frombuffer(layout.pack(code, *_flat(args)), np.int64)
        start = sum(map(len, self.parts))
        sizes = [len(_flat((a,))) for a in args]
        self.offsets.append([start + 1 + sum(sizes[:k]) for k in range(len(args))])
        self.parts.append(words)
        self.calls.append((entry, start, n))
        self.kept.append(args)
        return len(self.calls) - 1

    def place(self, call: int, argument: int, axis: int) -> int:
        """Where in `words` the length of an axis of an array argument stands."""
        return self.offsets[call][argument] + 5 + axis

    def finish(self) -> Program:
        """Lay the words out; nothing can be added afterwards."""
        self.words = np.concatenate(self.parts)
        self.table = np.array(self.calls, np.int64)
        self.counters = np.zeros((2 * len(self.calls), _LINE), np.int64)
        return self

    def run(self) -> None:
        """All calls, one after the other."""
        threads = min(get_num_threads(), self.threads)
        if threads == 1:
            _run_in_turn(self.table, self.words)
            return
        self.counters[::2] = threads  # the next index to draw
        self.counters[1::2] = 0
        with _threads.lock:
            numba.set_num_threads(threads)
            _run_together(self.table, self.words, threads, self.counters)


def _in_turn(table: Any, words: Any) -> None:
    for c in range(len(table)):
        for i in range(table[c, 2]):
            _call(table[c, 0], words[table[c, 1] :], i, 0)


def _together(table: Any, words: Any, threads: int, counters: Any) -> None:
    for thread in numba.prange(threads):
        for c in range(len(table)):
            n, own = table[c, 2], words[table[c, 1] :]
            drawn, done = counters[2 * c], counters[2 * c + 1]
            mine = looks = 0
            i = np.int64(thread)
            while i < n:
                _call(table[c, 0], own, i, np.int64(thread))
                mine += 1
                i = _take_next(drawn)
            _count(done, mine)
            while _read(done) < n:
                looks += 1
                if looks > _PATIENCE:
                    _yield()


@intrinsic
def _count(typingctx: Any, counter: Any, n: Any) -> Any:
    """Add n; what was written before is seen by whoever reads the sum."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        data = make_array(sig.args[0])(context, b, args[0]).data
        b.atomic_rmw("add", data, args[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(counter, types.int64), codegen


@intrinsic
def _read(typingctx: Any, counter: Any) -> Any:
    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        data = make_array(sig.args[0])(context, b, args[0]).data
        return b.load_atomic(data, "acquire", 8)

    return types.int64(counter), codegen


@intrinsic
def _yield(typingctx: Any) -> Any:
    """Let another process have the processor."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        function = b.module.globals.get("sched_yield") or ir.Function(b.module, kind, "sched_yield")
        b.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


if JIT:
    _run_together = _cached_njit(_together, parallel=_ONLY_PRANGE)
    _run_in_turn = _cached_njit(_in_turn)
