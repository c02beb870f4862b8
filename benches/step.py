"""A full training step of a 10.8 M-parameter Llama, batch 8 x 256, beside PyTorch's.

`python -m benches step` times it. Model-FLOP utilisation counts the causal half of attention and
no recomputation; its peak is the best 2048 x 2048 x 2048 matmul of the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from afinar.autograd import Tensor, no_grad
from afinar.autograd.precision import compute_in
from afinar.optim import AdamW, clip_grad_norm
from afinar.transformer import Transformer, TransformerConfig

from .harness import Row, in_turns, tokens
from .peers import build, copy_weights, torch

BATCH, LENGTH = 8, 256


def small_llama(layers: int = 6) -> TransformerConfig:
    """10.8 M parameters: vocabulary 512, hidden 384, intermediate 1024, 6 layers, 6 heads, tied."""
    return TransformerConfig(
        vocab_size=512,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=6,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def flops(config: TransformerConfig, batch: int, length: int) -> float:
    """Of one forward and backward pass: 6 per weight and token, 6 C T per token for attention."""
    inner, C, L = config.intermediate_size, config.hidden_size, config.num_hidden_layers
    weights = L * (2 * C * C + 2 * C * config.kv_dim + 3 * C * inner) + C * config.vocab_size
    return batch * length * (6 * weights + 6 * L * C * length)


def our_step(model: Transformer, ids: Any, targets: Any, mode: str = "fp32") -> Callable[[], float]:
    """A function that takes one step and returns its loss."""
    optimizer = AdamW(model.parameters(), lr=1e-4)
    parameters = model.parameters()

    def step() -> float:
        optimizer.zero_grad()
        with compute_in(mode):
            loss = model.loss(ids, targets)
            loss.backward()
        clip_grad_norm(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step


def torch_step(
    model: Any, ids: Any, targets: Any, bf16: bool = False, lr: float = 1e-4, device: str = "cpu"
) -> Callable:
    """The same in PyTorch."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    ids, targets = (torch.from_numpy(x).to(device) for x in (ids, targets))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step


def matmul_peak() -> float:
    """FLOP/s of the best of five 2048 x 2048 x 2048 products."""
    a = Tensor(np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32))
    best = float("inf")
    with no_grad():
        for _ in range(6):
            start = time.perf_counter()
            a @ a
            best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


def rows(threads: int, seconds: float = 8.0) -> Iterator[Row]:
    """The step in float32 and bfloat16, beside PyTorch eager, compiled and autocast."""
    config = small_llama()
    ids, targets = tokens(BATCH, LENGTH, config.vocab_size)
    ours = our_step(Transformer(config, seed=1), ids, targets)
    half = our_step(Transformer(config, seed=1), ids, targets, "bf16")
    peers: dict[str, Callable] = {}
    if torch is not None:
        for name in ("eager", "compile", "autocast"):
            theirs = build(config)
            copy_weights(Transformer(config, seed=1), theirs)
            runner = torch.compile(theirs) if name == "compile" else theirs
            step = torch_step(runner, ids, targets, bf16=name == "autocast")
            try:
                first = step()
            except Exception as error:  # no compiler on this machine
                if name != "compile":
                    raise
                yield Row("step", f"torch.compile: {type(error).__name__}", threads, 0.0)
                continue
            loss = Transformer(config, seed=1).loss(ids, targets).item()
            if not abs(first - loss) < 2e-2:
                if name != "compile":
                    raise AssertionError(f"{name}: the peer's loss is {first}, ours {loss}")
                # Held to AVX2, PyTorch's compiler departs from its own eager mode: no peer then.
                yield Row("step", f"torch.compile: loss {first:.3f}, not {loss:.3f}", threads, 0.0)
                continue
            peers[name] = step
    names = list(peers)
    t32, t16, *others = in_turns(ours, half, *peers.values(), seconds=seconds)
    share = flops(config, BATCH, LENGTH) / t32 / matmul_peak()
    note = f"{share:.0%} of the matmul peak (target 82%)"
    if not names:
        yield Row("step", "Llama 10.8 M, 8 x 256, float32", threads, t32, note=note)
    targets_of = {"eager": 1.2, "compile": 1.1, "autocast": 1.3}
    for name, t in zip(names, others, strict=True):
        kind, mine = ("bfloat16", t16) if name == "autocast" else ("float32", t32)
        yield Row(
            "step", f"Llama 10.8 M, 8 x 256, {kind}", threads, mine, t, f"PyTorch {name}",
            targets_of[name], note if name == "eager" else "",
        )  # fmt: skip
