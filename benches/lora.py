"""What an adapter costs on a linear layer, and what freezing the base saves in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from afinar.autograd import Tensor
from afinar.autograd.tape import Node, _captured
from afinar.lora import LoRAConfig, LoRALinear, apply_lora
from afinar.lora.quantized import QuantizedLinear
from afinar.transformer import Transformer
from afinar.transformer.layers import Linear

from .harness import Row, close, in_turns, tokens
from .step import small_llama

TOKENS = 1024
# inputs, outputs, adapted slices: SmolLM2's q, its MLP, and q and v of GPT-2's fused matrix
LAYERS = (
    ("576 -> 576", 576, 576, None),
    ("576 -> 1536", 576, 1536, None),
    ("768 -> 2304, q and v", 768, 2304, ((0, 768), (1536, 2304))),
)


def rows(threads: int) -> Iterator[Row]:
    """Forward and backward beside the plain frozen layer; then activations of a whole model."""
    rng = np.random.default_rng(0)
    for name, I, O, slices in LAYERS:  # noqa: E741
        x, g = (rng.standard_normal((TOKENS, n), dtype=np.float32) for n in (I, O))
        plain = Linear(I, O, bias=False)
        plain.weight = Tensor(rng.standard_normal((O, I), dtype=np.float32) / 32)
        for r in (8, 64):
            layer = LoRALinear(plain, r, 2 * r, slices=slices)
            for b in layer.b:
                b.data = rng.standard_normal(b.shape, dtype=np.float32) / 32
            close(layer(Tensor(x)).data, x @ layer.merged_weight().T)
            times = in_turns(_run(layer, x, g), _run(plain, x, g), seconds=0.5)
            note = f"+{100 * (times[0] / times[1] - 1):.0f} %"
            title = f"adapter r {r}, {name}, {TOKENS} tokens"
            yield Row("lora", title, threads, times[0], times[1], "plain layer", None, note)
    yield _activations(threads)
    yield from _packed(threads)


def _packed(threads: int) -> Iterator[Row]:
    """A frozen matrix in 4 bits beside the same in float32: forward and backward."""
    rng = np.random.default_rng(0)
    O, I = 1536, 576  # noqa: E741
    x, g = (rng.standard_normal((TOKENS, n), dtype=np.float32) for n in (I, O))
    weight = rng.standard_normal((O, I), dtype=np.float32) / 32
    for kind in ("int4", "nf4"):
        packed, plain = QuantizedLinear(weight, None, kind), Linear(I, O, bias=False)
        plain.weight = Tensor(packed.dequantized())
        runs = _run(packed, x, g), _run(plain, x, g)
        close(runs[0](), runs[1]())
        times = in_turns(*runs, seconds=0.5)
        note = f"{packed.nbytes / 2**20:.2f} of {weight.nbytes / 2**20:.2f} MiB"
        title = f"{kind} matrix, {I} -> {O}, {TOKENS} tokens"
        yield Row("lora", title, threads, times[0], times[1], "float32 matrix", None, note)


def _run(layer: Any, x: Any, g: Any) -> Callable[[], Any]:
    leaf = Tensor(x, requires_grad=True)

    def step() -> Any:
        leaf.grad = None
        for p in layer.parameters():
            p.grad = None
        layer(leaf).backward(g)
        return leaf.grad

    return step


def _activations(threads: int) -> Row:
    """The step of the small Llama with adapters on q and v, beside training it whole."""
    ids, targets = tokens(2, 256, 512)
    steps, kept = [], []
    for adapted in (True, False):
        model = Transformer(small_llama(), seed=0)
        if adapted:
            apply_lora(model, LoRAConfig(r=8))

        def step(model: Transformer = model) -> Tensor:
            for p in model.parameters():
                p.grad = None
            return model.loss(ids, targets)

        kept.append(_saved(step(), model))
        steps.append(lambda step=step: step().backward())
    times = in_turns(*steps, seconds=1.0)
    note = f"activations {kept[0] / 2**20:.1f} MiB, whole model {kept[1] / 2**20:.1f} MiB"
    name = "LoRA step r 8 on q, v, 6 layers, 2 x 256"
    return Row("lora", name, threads, times[0], times[1], "full step", None, note)


def _saved(loss: Tensor, model: Transformer) -> int:
    """Bytes that the graph of `loss` keeps for its backward pass, parameters not counted."""
    parameters = {id(_owner(p.data)) for p in model.parameters()}
    arrays: dict[int, Any] = {}
    nodes: list[Node | None] = [loss.node]
    seen: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        nodes.extend(node.parents)
        for array in _captured(node.vjp):
            if id(_owner(array)) not in parameters:
                arrays[id(_owner(array))] = _owner(array)
    return sum(a.nbytes for a in arrays.values())


def _owner(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
