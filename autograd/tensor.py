"""`Tensor`: an array, its gradient, and the place in the graph that it came from.

Every method is one line that looks its op up in the registry; what an op computes, and how its
gradient does, stands in `ops/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .backend import FLOATS, is_array
from .device import device_of, to_host

if TYPE_CHECKING:
    from .tape import Node

OPS: dict[str, Callable[..., Tensor]] = {}


class Tensor:
    """An array that remembers how it was computed.

    `data` is float32 or float64 (other numbers become float32), or uint16: the bits of bfloat16
    weights, which cannot require a gradient. `grad` is None or an array of the shape and dtype of
    `data`. Tensors are values: while a graph still needs `data` for its backward pass, NumPy
    refuses to write into it. CuPy, for arrays on a GPU, cannot; only the optimizers see it there.

    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    array([2., 4.], dtype=float32)
    """

    __slots__ = ("__weakref__", "_leaf", "data", "grad", "node")
    __array_priority__ = 1000  # NumPy arrays on the left give way to the methods here
    __array_ufunc__ = None

    def __init__(self, data: Any, requires_grad: bool = False):
        if isinstance(data, Tensor):
            raise TypeError("Tensor: given a Tensor; use .detach() for a new leaf on the same data")
        if not is_array(data):
            plain = not isinstance(data, np.generic)
            data = np.asarray(data)
            if plain and data.dtype == np.float64:
                data = data.astype(np.float32)
        if data.dtype not in FLOATS and data.dtype != np.uint16:
            if data.dtype.kind not in "fiub":
                raise TypeError(f"Tensor: numbers needed, given an array of {data.dtype}")
            data = data.astype(np.float32)
        self.data = data
        self.grad: Any = None
        self.node: Node | None = None
        self._leaf: Node | None = None
        self.requires_grad = requires_grad

    # --- the graph ---

    @property
    def requires_grad(self) -> bool:
        """Whether a backward pass brings a gradient here, or through here."""
        return self.node is not None

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        from .tape import leaf_node

        if self.backward_op is not None:
            if not flag:
                raise ValueError("requires_grad: only a leaf can be frozen; use .detach()")
            return
        if flag and self.data.dtype not in FLOATS:
            raise TypeError(
                "requires_grad: bfloat16 bits cannot be trained; trainable weights are float32"
            )
        if flag and self._leaf is None:
            self._leaf = leaf_node(self)
        self.node = self._leaf if flag else None

    @property
    def backward_op(self) -> Node | None:
        """The node that computes the gradients of this tensor's inputs; None for a leaf."""
        return self.node if self.node is not self._leaf else None

    def backward(self, grad: Any = None) -> None:
        """Add the gradient of this tensor to `.grad` of every leaf that it was computed from.

        `grad` is the gradient that arrives here, of this tensor's shape; ones if not given.
        """
        from .tape import backward

        backward(self, grad)

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self.grad = None

    def detach(self) -> Tensor:
        """A new leaf on the same data, with no history."""
        return Tensor(self.data)

    # --- the array ---

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        """The type of the numbers."""
        return self.data.dtype

    @property
    def device(self) -> str:
        """ "cpu" or "gpu": where the data lives."""
        return device_of(self.data)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.data.size

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        body = np.array2string(self.numpy(), separator=", ", threshold=20, prefix="Tensor(")
        tail = ", requires_grad=True" if self.requires_grad else ""
        kind = "" if self.data.dtype == np.float32 else f", dtype={self.data.dtype}"
        return f"Tensor({body}{kind}{tail})"

    def __bool__(self) -> bool:
        return bool(self.data)

    def __float__(self) -> float:
        return float(self.item())

    def item(self) -> float:
        """The one number in here, as a Python float."""
        if self.data.size != 1:
            raise ValueError(f"item: one element needed, the tensor has shape {self.shape}")
        return self.data.item()

    def numpy(self) -> np.ndarray:
        """The data as a NumPy array (a copy if it lives on the GPU)."""
        return to_host(self.data)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a Tensor is not an array: use .numpy(), or an op of afinar.autograd")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "item assignment: tensors are values and cannot be written into; "
            "build the result with stack, concat or where"
        )

    # --- operators and methods: one op each ---

    def __add__(self, other: Any) -> Tensor:
        return OPS["add"](self, other)

    def __radd__(self, other: Any) -> Tensor:
        return OPS["add"](other, self)

    def __sub__(self, other: Any) -> Tensor:
        return OPS["sub"](self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return OPS["sub"](other, self)

    def __mul__(self, other: Any) -> Tensor:
        return OPS["mul"](self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return OPS["mul"](other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return OPS["div"](self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return OPS["div"](other, self)

    def __pow__(self, exponent: float) -> Tensor:
        return OPS["pow"](self, exponent=exponent)

    def __neg__(self) -> Tensor:
        return OPS["neg"](self)

    def __matmul__(self, other: Any) -> Tensor:
        return OPS["matmul"](self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return OPS["matmul"](other, self)

    def __getitem__(self, index: Any) -> Tensor:
        return OPS["getitem"](self, index=index)

    def exp(self) -> Tensor:
        """e to the power of each element."""
        return OPS["exp"](self)

    def log(self) -> Tensor:
        """The natural logarithm of each element."""
        return OPS["log"](self)

    def sqrt(self) -> Tensor:
        """The square root of each element."""
        return OPS["sqrt"](self)

    def tanh(self) -> Tensor:
        """The hyperbolic tangent of each element."""
        return OPS["tanh"](self)

    def sigmoid(self) -> Tensor:
        """1 / (1 + exp(-x)) of each element."""
        return OPS["sigmoid"](self)

    def relu(self) -> Tensor:
        """max(x, 0) of each element."""
        return OPS["relu"](self)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The sum over `axis` (an int, several, or all)."""
        return OPS["sum"](self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The mean over `axis` (an int, several, or all)."""
        return OPS["mean"](self, axis=axis, keepdims=keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The maximum over `axis` (an int, several, or all)."""
        return OPS["max"](self, axis=axis, keepdims=keepdims)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape."""
        return OPS["reshape"](self, shape=shape[0] if len(shape) == 1 else shape)

    def swapaxes(self, axis1: int, axis2: int) -> Tensor:
        """Two axes exchanged."""
        return OPS["swapaxes"](self, axis1=axis1, axis2=axis2)

    def permute(self, *axes: int) -> Tensor:
        """The axes in another order."""
        return OPS["permute"](self, axes=axes)

    @property
    def T(self) -> Tensor:  # noqa: N802 - NumPy's name
        """The last two axes exchanged."""
        return OPS["swapaxes"](self, axis1=-1, axis2=-2)

    def broadcast_to(self, shape: tuple[int, ...]) -> Tensor:
        """Repeated to `shape` by NumPy's rules."""
        return OPS["broadcast_to"](self, shape=shape)

    def cast(self, dtype: Any) -> Tensor:
        """In float32 or float64."""
        return OPS["cast"](self, dtype=dtype)
