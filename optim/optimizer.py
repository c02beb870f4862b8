"""What all optimizers share: parameter groups, the step count, and a state with a name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..autograd.backend import FLOATS, array_module
from ..autograd.device import beside, device_of, to_device, to_host
from ..autograd.tape import may_write
from ..autograd.tensor import Tensor


class Optimizer:
    """Updates parameters from their `.grad`.

    `params` are Tensors, or groups: dicts with "params" and any of the options that the class
    takes. Options not given in a group have the values given to the constructor. Parameters are
    numbered through all groups in order; that numbering is part of the saved state.

    A parameter without a gradient is left alone. The first step gives each parameter an array of
    the optimizer's own; later steps write into it, unless a graph still needs it. What the
    optimizer keeps for a parameter follows it to the device where it lives.
    """

    def __init__(self, params: Iterable[Any], **defaults: Any):
        self._check(defaults)
        given = list(params)
        if not given:
            raise ValueError(f"{type(self).__name__}: no parameters given")
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        self.groups: list[dict[str, Any]] = []
        self.step_count = 0
        self._lr = float(defaults["lr"])
        for group in groups:
            unknown = group.keys() - defaults.keys() - {"params", "names"}
            if unknown:
                raise ValueError(
                    f"{type(self).__name__}: unknown options {sorted(unknown)} in a group; "
                    f"known: {sorted(defaults)}"
                )
            group = {**defaults, **group, "params": list(group["params"])}
            self._check(group)
            # Setting `lr` keeps the ratio between the groups.
            lr = group.pop("lr")
            group["lr_ratio"] = 1.0 if lr == self._lr else lr / self._lr
            self.groups.append(group)
        self.params: list[Tensor] = [p for group in self.groups for p in group["params"]]
        for p in self.params:
            if not isinstance(p, Tensor) or p.dtype not in FLOATS:
                raise TypeError(
                    f"{type(self).__name__}: float32 or float64 Tensors needed, given {p!r:.80}"
                )
        if len({id(p) for p in self.params}) < len(self.params):
            raise ValueError(f"{type(self).__name__}: a parameter is given twice")
        self._owned: list[Any] = [None] * len(self.params)

    def _check(self, options: dict[str, Any]) -> None:
        name = type(self).__name__
        if not (math.isfinite(options["lr"]) and options["lr"] >= 0):
            raise ValueError(f"{name}: lr must be finite and not negative, given {options['lr']}")
        decay = options.get("weight_decay", 0.0)
        if not (math.isfinite(decay) and decay >= 0):
            raise ValueError(f"{name}: weight_decay must not be negative, given {decay}")

    @property
    def lr(self) -> float:
        """The learning rate of the next step. Setting it keeps the ratios between groups."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._check({"lr": value})
        self._lr = float(value)

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for p in self.params:
            p.grad = None

    def _ready(self, n: int) -> tuple[Any, Any] | None:
        """The array of parameter n, ready to be written to, and its gradient."""
        p = self.params[n]
        if p.grad is None:
            return None
        g = p.grad if p.grad.flags.c_contiguous else array_module(p.grad).ascontiguousarray(p.grad)
        if device_of(g) != p.device:
            raise ValueError(
                f"{type(self).__name__}: parameter {n} is on the {p.device}, its gradient on the "
                f"{device_of(g)}; move both with model.to"
            )
        if g.shape != p.shape or g.dtype != p.dtype:
            raise ValueError(
                f"{type(self).__name__}: parameter {n} is {p.dtype} {p.shape}, "
                f"its gradient {g.dtype} {g.shape}"
            )
        if p.data is not self._owned[n] or not may_write(p.data):
            self._owned[n] = p.data = p.data.copy(order="C")
        return p.data, g

    # --- state ---

    _slots: tuple[str, ...] = ()  # attributes that are lists with one array or None a parameter

    def state_dict(self) -> dict[str, Any]:
        """The step count, the learning rate, and arrays by parameter number."""
        return {
            "step_count": self.step_count,
            "lr": self._lr,
            "shapes": [list(p.shape) for p in self.params],
            **{
                slot: [None if a is None else a.copy() for a in getattr(self, slot)]
                for slot in self._slots
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an optimizer of the same parameters."""
        name, shapes = type(self).__name__, [list(p.shape) for p in self.params]
        if set(state) != {"step_count", "lr", "shapes", *self._slots}:
            raise ValueError(f"{name}: this is not a state of {name}: it holds {sorted(state)}")
        if [list(s) for s in state["shapes"]] != shapes:
            raise ValueError(
                f"{name}: the state is of parameters of other shapes, "
                f"{_difference(state['shapes'], shapes)}"
            )
        for slot in self._slots:
            arrays = state[slot]
            if len(arrays) not in (0, len(shapes)):
                raise ValueError(f"{name}: {len(arrays)} {slot} for {len(shapes)} parameters")
            for n, a in enumerate(arrays):
                if a is not None and (
                    list(a.shape) != shapes[n] or a.dtype != self.params[n].dtype
                ):
                    raise ValueError(
                        f"{name}: {slot}[{n}] is {a.dtype} {a.shape}, "
                        f"the parameter {self.params[n].dtype} {self.params[n].shape}"
                    )
        for slot in self._slots:
            setattr(self, slot, [self._placed(n, a) for n, a in enumerate(state[slot])])
        self.step_count = int(state["step_count"])
        self._lr = float(state["lr"])

    def _placed(self, n: int, a: Any) -> Any:
        """A copy of an array for parameter n, where that lives."""
        return None if a is None else to_device(a.copy(order="C"), self.params[n].device)

    def _slot(self, slot: str, n: int) -> Any:
        """The array of parameter n in `slot`, where that lives; zeros at first."""
        arrays = getattr(self, slot)
        if not arrays:
            arrays.extend([None] * len(self.params))
        if arrays[n] is None:
            arrays[n] = array_module(self.params[n].data).zeros_like(self.params[n].data)
        arrays[n] = beside(arrays[n], self.params[n].data)
        return arrays[n]


def _difference(theirs: list, ours: list) -> str:
    if len(theirs) != len(ours):
        return f"{len(theirs)} of them, {len(ours)} are here"
    n = next(n for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if list(a) != list(b))
    return f"number {n} is {tuple(theirs[n])}, here {tuple(ours[n])}"


def little_endian(array: Any) -> memoryview:
    """The bytes of an array, C order, little endian."""
    array = to_host(array)
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).data.cast("B")


def moments_sha256(step_count: int, first: list[Any], second: list[Any]) -> str:
    """SHA-256 of an Adam state: a tag, the step count, and per slot the moments.

    The byte stream: `aprender-train:adamw:optstate:v1`, the step count as u64; then for `m` and
    for `v` the letter, the number of slots as u64, and for each slot `some`, its length as u64
    and its float32 numbers (float64 for float64 parameters), or `none`. All little endian.
    """
    sha = hashlib.sha256(b"aprender-train:adamw:optstate:v1")
    sha.update(step_count.to_bytes(8, "little"))
    for tag, slots in ((b"m", first), (b"v", second)):
        sha.update(tag + len(slots).to_bytes(8, "little"))
        for a in slots:
            if a is None:
                sha.update(b"none")
            else:
                sha.update(b"some" + a.size.to_bytes(8, "little"))
                sha.update(little_endian(a))
    return sha.hexdigest()


def weights_sha256(model: Any) -> str:
    """SHA-256 of all weights of a model, trained or not. A tied weight appears once.

    The byte stream: `afinar:weights:v1`, the number of parameters as u64; then for each of
    `model.named_parameters()`, in that order: the length of its name as u64 and the name in
    UTF-8, the same for the name of its type ("float32", "float64", "uint16": bfloat16 bits), the
    number of axes and each length as u64, and its numbers in C order. All little endian.
    """
    return tensors_sha256(model.named_parameters())


def tensors_sha256(named: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of named tensors, in the given order; the byte stream is that of `weights_sha256`."""
    named = list(named)
    sha = hashlib.sha256(b"afinar:weights:v1" + len(named).to_bytes(8, "little"))
    for name, tensor in named:
        for text in (name.encode(), tensor.dtype.name.encode()):
            sha.update(len(text).to_bytes(8, "little") + text)
        for n in (tensor.ndim, *tensor.shape):
            sha.update(n.to_bytes(8, "little"))
        sha.update(little_endian(tensor.data))
    return sha.hexdigest()
