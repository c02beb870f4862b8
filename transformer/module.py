"""`Module`: a tree of named parameters, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from ..autograd import Tensor
from ..autograd.backend import array_module, is_array
from ..autograd.device import resolve_device, to_device, to_host, with_memory


class Module:
    """A part of a model. Its attributes say what it has, in the order of their definition.

    A Tensor is a parameter, a Module is a child, and a list holds several of either; anything
    else is no part of the tree. Parameters and modules are named by their paths, such as
    `model.layers.0.self_attn.q_proj.weight`. A subclass defines `__call__`.
    """

    training = True
    held: tuple[str, ...] = ()  # attributes that are arrays and no parameters, but move with them
    __call__: Callable[..., Any]

    # --- the tree ---

    def _items(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self).items():
            if isinstance(value, (Tensor, Module)):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", v) for i, v in enumerate(value))

    def _walk(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter below, by its path; shared ones as often as they are reached."""
        for name, value in self._items():
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, Module):
                yield from ((f"{name}.{below}", p) for below, p in value._walk())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(path, parameter), in a fixed order, frozen ones too; a shared one once."""
        seen = set()
        for name, parameter in self._walk():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `named_parameters`."""
        return [p for _, p in self.named_parameters()]

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for p in self.parameters():
            p.zero_grad()

    @property
    def num_parameters(self) -> int:
        """The number of values in all parameters; shared ones count once."""
        return sum(p.size for p in self.parameters())

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """(path, module) of this module, whose path is "", and of all below it."""
        yield "", self
        for name, value in self._items():
            if isinstance(value, Module):
                yield from (
                    (f"{name}.{below}" if below else name, m) for below, m in value.named_modules()
                )

    def get_module(self, path: str) -> Module:
        """The module at `path`; KeyError names a path that leads nowhere."""
        found: Any = self
        for step in path.split(".") if path else ():
            if isinstance(found, list):
                found = found[int(step)] if step.isdigit() and int(step) < len(found) else None
            else:
                found = vars(found).get(step) if isinstance(found, Module) else None
        if not isinstance(found, Module):
            raise KeyError(f"{type(self).__name__} has no module {path!r}")
        return found

    def set_module(self, path: str, module: Module) -> None:
        """Put `module` in the place of the one at `path`, which must exist."""
        self.get_module(path)
        above, _, name = path.rpartition(".")
        if not name.isdigit():
            setattr(self.get_module(above), name, module)
            return
        above, _, field = above.rpartition(".")
        vars(self.get_module(above))[field][int(name)] = module

    # --- training or not ---

    def train(self, mode: bool = True) -> Module:
        """Set `training`, here and below, for layers that differ while training (dropout)."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """`train(False)`."""
        return self.train(False)

    # --- where it lives ---

    @property
    def device(self) -> str:
        """ "cpu" or "gpu": where the parameters live; ValueError if there are some on each."""
        found = sorted({p.device for p in self.parameters()})
        if len(found) > 1:
            raise ValueError(
                f"device: {type(self).__name__} has parameters on the CPU and on the GPU; "
                'call .to("cpu") or .to("gpu")'
            )
        return found[0] if found else "cpu"

    def to(self, device: str) -> Self:
        """Move all parameters, and their gradients, to the "cpu" or the "gpu"; returns the module.

        "auto" is the GPU if one can be used. ValueError if "gpu" cannot be; it says what is needed.
        MemoryError if the module does not fit there; it is on the CPU then.
        """
        device = resolve_device(device)
        try:
            with_memory(
                lambda: self._move(device),
                f"to: {self.num_parameters:,} values",
                "take a smaller model, or hold its weights in bfloat16",
            )
        except MemoryError:
            self._move("cpu")
            raise
        return self

    def _move(self, device: str) -> None:
        for p in self.parameters():
            p.data = to_device(p.data, device)
            p.grad = None if p.grad is None else to_device(p.grad, device)
        for _, module in self.named_modules():
            for name in module.held:
                setattr(module, name, to_device(getattr(module, name), device))

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """The array of each parameter by its path (not copies), where the model lives."""
        return {name: p.data for name, p in self.named_parameters()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy arrays into the parameters of the same paths.

        Raises ValueError, before anything is changed, if names are missing or unexpected, or if a
        shape differs; it names them. The alias of a shared parameter may be in `state` if it holds
        the same values.
        """
        check_state("load_state_dict", state)
        own = dict(self.named_parameters())
        first = {id(p): name for name, p in own.items()}
        aliases = {name: first[id(p)] for name, p in self._walk() if name not in own}
        state = dict(state)
        for alias, name in aliases.items():
            if alias in state:
                value = state.pop(alias)
                first_value = state.setdefault(name, value)
                if not np.array_equal(to_host(value), to_host(first_value)):
                    raise ValueError(
                        f"load_state_dict: {alias} and {name} are one parameter of this model, "
                        "but the given arrays differ"
                    )
        check_names("load_state_dict", own, state)
        given = {name: a.shape if is_array(a) else np.shape(a) for name, a in state.items()}
        check_shapes("load_state_dict", {k: p.shape for k, p in own.items()}, given)
        for name, p in own.items():
            p.data = _as_array(state[name], p)


def check_model(what: str, model: Any, kind: type = Module) -> None:
    """Raise TypeError if `model` is none of this kind."""
    if not isinstance(model, kind):
        raise TypeError(f"{what}: a model is needed, given a {type(model).__name__}")


def _as_array(value: Any, parameter: Tensor) -> Any:
    """A copy of the value, of the parameter's type and where it lives."""
    value = to_device(value if is_array(value) else np.asarray(value), parameter.device)
    return array_module(parameter.data).array(value, dtype=parameter.dtype, order="C")


def check_state(what: str, state: Any) -> None:
    """Raise TypeError if `state` is no dict of arrays."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{what}: a dict of arrays is needed, given a {type(state).__name__}")


def check_names(what: str, wanted: Any, given: Any) -> None:
    """Raise ValueError that lists the names that are missing from `given`, and the unexpected."""
    missing = [name for name in wanted if name not in given]
    unexpected = [name for name in given if name not in wanted]
    if missing or unexpected:
        parts = [
            f"{kind} {_some(names)}"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise ValueError(f"{what}: the tensors do not match the model: {', '.join(parts)}")


def check_shapes(what: str, wanted: dict[str, tuple], given: dict[str, tuple]) -> None:
    """Raise ValueError that names the tensors whose shapes are not the wanted ones."""
    wrong = [
        f"{name} is {tuple(given[name])}, the model needs {shape}"
        for name, shape in wanted.items()
        if tuple(given[name]) != shape
    ]
    if wrong:
        raise ValueError(f"{what}: shapes do not match: {_some(wrong, '; ')}")


def _some(names: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - 8} more" if len(names) > 8 else ""
    return separator.join(names[:8]) + more
