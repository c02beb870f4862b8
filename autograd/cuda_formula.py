"""A formula in Python as CUDA: what the CPU compiles by Numba is traced once and written in C.

    >>> def cube(x):
    ...     return x * x * x
    >>> print(write("cube", cube, "float"), end="")
    __device__ inline float cube(float a0) {
        const auto t0 = a0 * a0;
        const auto t1 = t0 * a0;
        return t1;
    }

So there is one formula, and the GPU makes the same operations in the same order as the CPU. The
names that a formula uses (`fma`, `select`, `exp` ...) are looked up in `TWINS` while it is traced.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import lanes, mathf


class Value:
    """The name of a value in C. What is done with it is written down."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, trace: Trace, name: str):
        self.trace, self.name = trace, name


class Trace:
    """The lines written so far, for one of the two types of float."""

    def __init__(self, real: str):
        self.real, self.lines = real, []
        self.dtype = np.dtype({"float": np.float32, "double": np.float64}[real])

    def put(self, form: str, *operands: Any) -> Value:
        """A new value: the form, its braces filled with the operands."""
        name = f"t{len(self.lines)}"
        text = form.format(*(self.text(x) for x in operands))
        self.lines.append(f"    const auto {name} = {text};\n")
        return Value(self, name)

    def text(self, x: Any) -> str:
        """An operand in C."""
        if isinstance(x, Value):
            return x.name
        if isinstance(x, np.integer):
            return f"({'int' if x.itemsize == 4 else 'i64'}){int(x)}"
        # Exactly, whatever the value: by its bits.
        x = self.dtype.type(x)
        return f"from_bits(({'int' if x.itemsize == 4 else 'i64'}){x.view(f'i{x.itemsize}')})"


def _method(form: str, swapped: bool = False) -> Callable:
    def method(self: Value, *others: Any) -> Value:
        return self.trace.put(form, *((*others, self) if swapped else (self, *others)))

    return method


for _name, _sign in {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "or": "|"}.items():
    setattr(Value, f"__{_name}__", _method(f"{{}} {_sign} {{}}"))
    setattr(Value, f"__r{_name}__", _method(f"{{}} {_sign} {{}}", swapped=True))
for _name, _sign in {"lt": "<", "gt": ">", "eq": "=="}.items():
    setattr(Value, f"__{_name}__", _method(f"{{}} {_sign} {{}}"))
Value.__neg__ = _method("-{}")  # pyright: ignore[reportAttributeAccessIssue]


def twin(form: str) -> Callable:
    """What writes the form, its braces filled with the operands."""

    def call(*operands: Any) -> Any:
        trace = next(x.trace for x in operands if isinstance(x, Value))
        return trace.put(form, *operands)

    return call


def _horner(x: Any, coefficients: tuple) -> Any:
    p = coefficients[0]
    for c in coefficients[1:]:
        p = x.trace.put("fma_({}, {}, {})", p, x, c)
    return p


# What a formula calls, and what is written for it.
TWINS: dict[Any, Callable] = {
    lanes.fma: twin("fma_({}, {}, {})"),
    lanes.horner: _horner,
    lanes.absolute: twin("absolute({})"),
    lanes.copysign: twin("with_sign({}, {})"),
    lanes.select: twin("{} ? {} : {}"),
    lanes.less: twin("{} < {}"),
    lanes.is_zero: twin("{} == 0"),
    lanes.bits: twin("bits_of({})"),
    lanes.from_bits: twin("from_bits({})"),
    lanes.int_to_float: twin("to_real({})"),
    lanes.iadd: twin("added({}, {})"),
    lanes.isub: twin("taken({}, {})"),
    lanes.ishl: twin("shifted({}, {})"),
    lanes.ishr: twin("{} >> {}"),
    lanes.iand: twin("{} & {}"),
    mathf.sqrt: twin("root({})"),
    mathf.larger: twin("larger({}, {})"),
    **{f: twin(f"{f.__name__}_({{}})") for f in mathf.FUNCTIONS},
}


def write(name: str, formula: Callable, real: str) -> str:
    """The formula as a CUDA function of numbers that are "float" or "double"."""
    args, lines, (result,) = _trace(formula, real)
    params = ", ".join(f"{real} {a}" for a in args)
    return f"__device__ inline {real} {name}({params}) {{\n{lines}    return {result};\n}}\n"


def write_loop(formula: Callable, real: str) -> str:
    """A CUDA kernel `run` over arrays: out0[i], ... = formula(x[i], y[i], ...).

    A parameter named `condition` is an array of bool.
    """
    args, lines, results = _trace(formula, real)
    names = inspect.signature(formula).parameters
    params = [f"const {'bool' if n == 'condition' else real} *{n}" for n in names]
    params += [f"{real} *out{n}" for n in range(len(results))]
    reads = "".join(f"    const auto {a} = {n}[i];\n" for a, n in zip(args, names, strict=True))
    writes = "".join(f"    out{n}[i] = {r};\n" for n, r in enumerate(results))
    return (
        f'extern "C" __global__ void run({", ".join(params)}, i64 n) {{\n'
        f"    const i64 i = this_thread();\n    if (i >= n) return;\n{reads}{lines}{writes}}}\n"
    )


def _trace(formula: Callable, real: str) -> tuple[list[str], str, list[str]]:
    """Names of the parameters, the lines, and names of the results."""
    trace = Trace(real)
    args = [f"a{n}" for n in range(len(inspect.signature(formula).parameters))]
    found = _traced(formula)(*(Value(trace, a) for a in args))
    found = found if isinstance(found, tuple) else (found,)
    return args, "".join(trace.lines), [trace.text(r) for r in found]


def _traced(formula: Callable) -> Callable:
    """The same Python code, with the names in it replaced by what writes C."""
    code = formula.__code__
    names = {n: _replaced(v) for n, v in formula.__globals__.items() if n in code.co_names}
    cells = tuple(types.CellType(_replaced(c.cell_contents)) for c in formula.__closure__ or ())
    return types.FunctionType(code, {**names, "__builtins__": builtins}, closure=cells)


class _Twins:
    """A module of which a formula calls functions."""

    def __init__(self, module: Any):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return _replaced(getattr(self.module, name))


def _replaced(x: Any) -> Any:
    if x is mathf or x is lanes:
        return _Twins(x)
    if isinstance(x, types.FunctionType) or hasattr(x, "py_func") or hasattr(x, "_defn"):
        if x in TWINS:
            return TWINS[x]
        formula = getattr(x, "py_func", x)
        return _traced(formula) if isinstance(formula, types.FunctionType) else x
    return x


@functools.cache
def functions() -> str:
    """The functions of `mathf`, in both types: exp_, log_, tanh_ ..."""
    return "".join(
        write(f"{f.__name__}_", f.write(numbers), real)
        for f in mathf.FUNCTIONS
        for real, numbers in mathf.FORMATS.items()
    )
