"""The tape: how a result remembers its inputs, and how gradients find their way back.

An op is one function on arrays that returns `(out, vjp)`. `vjp` is either

- a tuple with one function per input, when the gradients are separate: only the needed ones are
  kept, and what the others had captured is freed at once (a frozen weight costs no activation);
- or one function that returns the gradients of all inputs, when they share work.

Nodes point at nodes, never at values: what stays alive is what the kept functions captured.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import heapq
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .backend import Kept, array_module, is_array, is_keeping, keeping
from .tensor import OPS, Tensor

Vjp = Any  # Callable | tuple[Callable | None, ...]

_recording: contextvars.ContextVar[bool] = contextvars.ContextVar("recording", default=True)
_order = itertools.count()
# Within the first run of a checkpointed stretch: the trainable leaves that it reads.
_read_leaves: contextvars.ContextVar[dict[int, Tensor] | None] = contextvars.ContextVar(
    "read_leaves", default=None
)


class Node:
    """One op in the graph, or one leaf.

    `order` counts creations: every user of a node is younger than the node itself.
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "leaf",
        "name",
        "order",
        "parents",
        "saved",
        "shape",
        "vjp",
    )

    def __init__(self, name: str, out: Any, parents: tuple[Node | None, ...] = (), vjp: Vjp = None):
        self.name, self.shape, self.dtype = name, out.shape, out.dtype
        self.parents, self.vjp = parents, vjp
        self.order = next(_order)
        self.leaf: weakref.ref[Tensor] | None = None
        self.saved = _guard(vjp)

    def release(self) -> None:
        """Forget what was saved for the backward pass."""
        self.vjp = None
        _unguard(self.saved)
        self.saved = ()

    def __del__(self) -> None:
        _unguard(self.saved)

    def __repr__(self) -> str:
        return f"<{self.name} -> {self.shape}>"


def leaf_node(tensor: Tensor) -> Node:
    """A node whose gradient is added to `tensor.grad`."""
    node = Node("leaf", tensor.data)
    node.leaf = weakref.ref(tensor)
    return node


def is_recording() -> bool:
    """Whether ops remember their inputs."""
    return _recording.get()


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Within this block ops remember nothing."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


def op(fn: Callable | None = None, *, needs: bool = False, register: bool = True) -> Any:
    """Turn `fn(*arrays, **options) -> (out, vjp)` into a differentiable operation on Tensors.

    Inputs are Tensors, arrays or numbers; options are anything else. With `needs=True` the
    function also gets `needs`, a tuple that says which inputs will want a gradient. It enters
    `OPS` under its own name, so that the tests find it.
    """
    if fn is None:
        return functools.partial(op, needs=needs, register=register)

    signature = inspect.signature(fn)
    parameters = [p for p in signature.parameters.values() if p.name != "needs"]
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)

    @functools.wraps(fn)
    def apply(*inputs: Any, **options: Any) -> Tensor:
        if len(inputs) > len(positional) and not variadic:  # options given by position
            inputs, more = inputs[: len(positional)], inputs[len(positional) :]
            if len(more) > len(keywords):
                raise TypeError(f"{fn.__name__}: {len(more) - len(keywords)} arguments too many")
            options |= dict(zip(keywords, more, strict=False))
        for name, default in positional[
            len(inputs) :
        ]:  # `bias=b` is an input too, and so is no bias
            if default is inspect.Parameter.empty and name not in options:
                raise TypeError(f"{fn.__name__}: {name} is missing")
            inputs += (options.pop(name, default),)
        parents: tuple[Node | None, ...] = ()
        read = _read_leaves.get()
        if read is not None:
            read.update((id(x), x) for x in inputs if isinstance(x, Tensor) and x.requires_grad)
        if _recording.get():
            parents = tuple(x.node if isinstance(x, Tensor) else None for x in inputs)
        recorded = any(p is not None for p in parents)
        if needs:
            options["needs"] = tuple(p is not None for p in parents) or (False,) * len(inputs)
        out, vjp = fn(*(x.data if isinstance(x, Tensor) else x for x in inputs), **options)
        result = Tensor(out)
        if recorded:
            if isinstance(vjp, tuple):  # forget what only an unneeded gradient would have read
                vjp = tuple(f if p else None for f, p in zip(vjp, parents, strict=True))
            result.node = Node(fn.__name__, out, parents, vjp)
        return result

    # What `help` shows: what a caller gives.
    apply.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    if register:
        OPS[fn.__name__] = apply
    return apply


# --- backward ------------------------------------------------------------------------------


def backward(root: Tensor, grad: Any = None) -> None:
    """Add d(root)/d(leaf) to `leaf.grad` for every leaf that `root` was computed from.

    Youngest first: when a node is reached, all its users have been, so its gradient is whole.
    That is also one fixed order for every sum.
    """
    if root.node is None:
        raise RuntimeError("backward: this tensor depends on nothing that requires a gradient")
    xp = array_module(root.data)
    if grad is None:
        grad = xp.ones_like(root.data)
    else:
        grad = grad.data if isinstance(grad, Tensor) else xp.asarray(grad, dtype=root.data.dtype)
        if grad.shape != root.shape:
            raise ValueError(
                f"backward: the gradient has shape {grad.shape}, the tensor {root.shape}"
            )

    table = _Gradients()
    table.add(root.node, grad, owned=False)
    with _recording_set(False):
        while table:
            node, g, owned = table.pop()
            if node.leaf is not None:
                _store(node.leaf(), g, owned)
            elif isinstance(node.vjp, _Checkpoint):
                rerun = node.vjp
                node.release()
                again = rerun.run()
                if again.node is not None:
                    table.add(again.node, g, owned)
            else:
                _pull(node, g, table)


class _Gradients:
    """The gradients that are not whole yet, and which node comes next."""

    def __init__(self) -> None:
        self.sums: dict[Node, tuple[Any, bool]] = {}
        self.queue: list[tuple[int, Node]] = []

    def __bool__(self) -> bool:
        return bool(self.queue)

    def add(self, node: Node, g: Any, owned: bool) -> None:
        """Add `g`; `owned` says that nobody else reads it, so that later sums may go into it."""
        if node not in self.sums:
            heapq.heappush(self.queue, (-node.order, node))
            self.sums[node] = g, owned
            return
        total, mine = self.sums[node]
        total = _sum_of(total, g, into=total if mine else g if owned else None)
        self.sums[node] = total, is_array(total)  # NumPy's scalars cannot be written into

    def pop(self) -> tuple[Node, Any, bool]:
        node = heapq.heappop(self.queue)[1]
        return node, *self.sums.pop(node)


def _pull(node: Node, g: Any, table: _Gradients) -> None:
    """Run the vjp of `node` once, then free what it had saved."""
    vjp = node.vjp
    if vjp is None:
        raise RuntimeError(
            f"backward: the graph of {node.name!r} has been used and freed; compute the result anew"
        )
    shared = None if isinstance(vjp, tuple) else vjp(g)
    seen = [g]
    for n, parent in enumerate(node.parents):
        if parent is None:
            continue
        dx = shared[n] if shared is not None else vjp[n](g)
        if dx is None:
            continue
        if dx.shape != parent.shape:
            dx = _sum_to(dx, parent.shape)
        if dx.dtype != parent.dtype:
            dx = dx.astype(parent.dtype)
        owned = may_write(dx) and not any(_share(dx, s) for s in seen)
        seen.append(dx)
        table.add(parent, dx, owned)
    node.release()


def _store(tensor: Tensor | None, g: Any, owned: bool) -> None:
    if tensor is None:
        return  # nobody can see this gradient
    if tensor.grad is None:
        tensor.grad = g if owned and g.flags.c_contiguous else g.copy()
    else:
        tensor.grad = _sum_of(tensor.grad, g, into=None)


def _sum_of(a: Any, b: Any, into: Any) -> Any:
    from .ops.elementwise import add_arrays

    return add_arrays(a, b, into)


def _sum_to(g: Any, shape: tuple[int, ...]) -> Any:
    from .ops.reduce import sum_to

    return sum_to(g, shape)


@contextlib.contextmanager
def _recording_set(flag: bool) -> Iterator[None]:
    token = _recording.set(flag)
    try:
        yield
    finally:
        _recording.reset(token)


# --- gradient checkpointing ----------------------------------------------------------------


class _Checkpoint:
    """A stretch of the forward pass that will be run again."""

    def __init__(self, fn: Callable, inputs: tuple[Any, ...], leaves: list[Tensor], kept: Kept):
        self.fn, self.leaves, self.kept = fn, leaves, kept
        self.inputs = [(x.data, x.node) if isinstance(x, Tensor) else (x, None) for x in inputs]
        self.context = contextvars.copy_context()  # precision and the like, as in the first run

    def run(self) -> Tensor:
        self.kept.again = True

        def again() -> Tensor:
            with _recording_set(True), keeping(self.kept):
                return self.fn(*(_rejoin(*pair) for pair in self.inputs))

        return self.context.run(again)


def _rejoin(data: Any, node: Node | None) -> Any:
    if not is_array(data):
        return data
    tensor = Tensor(data)
    tensor.node = node
    return tensor


def checkpoint(fn: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`fn(*inputs)`, computed again in the backward pass instead of remembered.

    Chen et al. 2016, arXiv:1604.06174. When its turn in the backward pass comes, the stretch is
    run again and its nodes join the same queue, so that every sum has the order it would have
    had: gradients have the same bits as without. Parameters that `fn` reaches by closure count.

    Within `keep_results` a stretch is one whole: a `checkpoint` in it changes nothing.
    """
    if not _recording.get() or is_keeping():
        return fn(*inputs)
    kept = Kept(_keep_names.get())
    leaves: dict[int, Tensor] = {}
    token = _read_leaves.set(leaves)
    try:
        with no_grad(), keeping(kept):
            result = fn(*inputs)
    finally:
        _read_leaves.reset(token)
    if (outer := _read_leaves.get()) is not None:
        outer.update(leaves)
    parents = tuple(x.node if isinstance(x, Tensor) else None for x in inputs)
    again = Tensor(result.data)
    rerun = _Checkpoint(fn, inputs, list(leaves.values()), kept)
    again.node = Node("checkpoint", result.data, parents, rerun)
    return again


# The kernels whose results a checkpointed stretch remembers.
_keep_names: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "keep_names", default=frozenset()
)


@contextlib.contextmanager
def keep_results(*kernels: str) -> Iterator[None]:
    """Within this block `checkpoint` keeps what these kernels return, by name, such as "gemm".

    The second run then costs only what is between them.
    """
    token = _keep_names.set(frozenset(kernels))
    try:
        yield
    finally:
        _keep_names.reset(token)


# --- saved arrays are not written into ------------------------------------------------------

# id of an array -> [array, how many nodes saved it, views to free with it]. Only arrays that
# were writable are here. Of the GPU's, which cannot be made read-only, the address of the memory
# -> [an array in it, how many nodes saved one].
_guarded: dict[int | tuple[str, int], list[Any]] = {}


def may_write(array: Any) -> bool:
    """Whether nobody else needs what is in the array: no graph saved it, no element is two."""
    if isinstance(array, np.ndarray | np.generic):  # a reference body may return a number
        return array.flags.writeable
    return 0 not in array.strides and _memory(array) not in _guarded


def _memory(array: Any) -> tuple[str, int]:
    """What stands for the GPU memory that an array lies in, possibly with others."""
    return "gpu", array.data.mem.ptr


def _share(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return np.may_share_memory(a, b)
    return _memory(a) == _memory(b)


def _guard(vjp: Vjp) -> tuple[int | tuple[str, int], ...]:
    """Make what `vjp` captured read-only, until the node lets it go."""
    keys: list[int | tuple[str, int]] = []
    for array in _captured(vjp):
        if not isinstance(array, np.ndarray):
            key = _memory(array)
            _guarded.setdefault(key, [array, 0])[1] += 1
            keys.append(key)
            continue
        while type(array) is np.ndarray:  # a write through the array it is a view of counts
            key = id(array)
            if key in _guarded:
                _guarded[key][1] += 1
                keys.append(key)
            elif array.flags.writeable and isinstance(array.base, np.ndarray | None):
                # memory of others (a buffer, a torch tensor) could not be made writable again
                array.flags.writeable = False
                _guarded[key] = [array, 1]
                keys.append(key)
            array = array.base
    return tuple(keys)


def _unguard(keys: tuple[int | tuple[str, int], ...]) -> None:
    for key in reversed(keys):  # bases first: a view cannot be made writable before them
        entry = _guarded[key]
        entry[1] -= 1
        if entry[1]:
            continue
        del _guarded[key]
        array, _, *waiting = entry
        if not isinstance(array, np.ndarray):
            continue
        base = _guarded.get(id(array.base))
        if base is not None:  # somebody else still needs the memory: it is freed with them
            base.append(array)
            continue
        for a in (array, *waiting):
            a.flags.writeable = True


def _captured(vjp: Vjp) -> Iterator[Any]:
    if isinstance(vjp, _Checkpoint):
        yield from (data for data, _ in vjp.inputs if is_array(data))
        yield from (leaf.data for leaf in vjp.leaves)
        return
    for fn in vjp if isinstance(vjp, tuple) else (vjp,):
        for cell in getattr(fn, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell may still be empty
                if is_array(cell.cell_contents):
                    yield cell.cell_contents
