"""On a GPU: products, attention and the training step of a 125 M-parameter Llama.

`python -m benches gpu`. The peers are PyTorch's operations on the same GPU in the same process;
where there is no GPU, one row says what is missing. A time is that of the host until the GPU has
finished. TF32 is off on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from afinar.autograd import Tensor, attention, set_deterministic
from afinar.autograd.device import finish, gpu_memory, gpu_name, to_device, to_host, why_no_gpu
from afinar.autograd.ops.gemm import gemm
from afinar.autograd.ops.rounding import round_bfloat16
from afinar.transformer import Transformer, TransformerConfig

from .harness import Row, close, in_turns, optional, tokens
from .peers import build, copy_weights
from .step import flops, our_step, torch_step

BATCH, LENGTH = 8, 1024
# M, N, K of the products of that step: x W^T, and g^T x, whose sums are long.
PRODUCTS = {"x W^T": (8192, 2048, 768), "g W": (8192, 768, 2048), "g^T x": (2048, 768, 8192)}
FORMS = {"x W^T": (False, True), "g W": (False, False), "g^T x": (True, False)}
HEADS = ((8, 1024), (2, 4096))  # B, T with H 12, D 64
BATCHES, LENGTHS = (1, 2, 4, 8), (256, 512, 1024, 2048, 4096)

_measured: list[int] = []


def rows(threads: int) -> Iterator[Row]:
    """All rows once: what a GPU does is the same for any number of threads of the host."""
    if _measured:
        return
    _measured.append(threads)
    missing = why_no_gpu()
    if missing is not None:
        yield Row("gpu", "skipped", threads, 0.0, note=missing)
        return
    torch = optional("torch")
    if torch is not None and not torch.cuda.is_available():
        torch = None
    if torch is not None:
        torch.backends.cuda.matmul.allow_tf32 = False
    for row in (*_products(torch), *_attention(torch), *_steps(torch), *_growth()):
        row.threads = threads
        row.note = f"{row.note} {gpu_name()}".strip()
        yield row


def llama(layers: int = 12, width: int = 768, vocabulary: int = 50304) -> TransformerConfig:
    """By default 124 M parameters: 12 layers of 768, the head tied to the embedding."""
    return TransformerConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=max(LENGTHS),
        tie_word_embeddings=True,
    )


def _times(*runs: Callable[[], Any], seconds: float = 1.0) -> list[float]:
    """`in_turns`, each run until the GPU has finished, PyTorch's stream included."""

    def finished(run: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            run()
            finish("gpu")  # the default stream, which PyTorch uses too

        return call

    return in_turns(*map(finished, runs), seconds=seconds)


def _there(*arrays: np.ndarray) -> list[Any]:
    return [to_device(a, "gpu") for a in arrays]


def _in_order(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same with the CPU's order of sums."""

    def call() -> Any:
        set_deterministic(True)
        try:
            return run()
        finally:
            set_deterministic(False)

    return call


# --- products ---------------------------------------------------------------------------------


def _products(torch: Any) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    for form, (M, N, K) in PRODUCTS.items():
        ta, tb = FORMS[form]
        shapes = (K, M) if ta else (M, K), (N, K) if tb else (K, N)
        host = [rng.standard_normal(s, np.float32) for s in shapes]
        a, b = _there(*host)
        halves = round_bfloat16(a), round_bfloat16(b)

        def fast(a: Any = a, b: Any = b, ta: bool = ta, tb: bool = tb) -> Any:
            return gemm(a, b, ta, tb)

        def half(halves: Any = halves, ta: bool = ta, tb: bool = tb) -> Any:
            return gemm(*halves, ta, tb)

        ordered = _in_order(fast)
        close(to_host(ordered()), to_host(fast()))
        runs = [ordered, fast, half]
        if torch is not None:
            x, y = (torch.tensor(h, device="cuda") for h in host)
            x, y = x.T if ta else x, y.T if tb else y
            close(to_host(fast()), (x @ y).cpu().numpy())
            x16, y16 = x.bfloat16(), y.bfloat16()
            close(to_host(half()), (x16 @ y16).float().cpu().numpy(), rtol=0.02)
            runs += [lambda x=x, y=y: x @ y, lambda x=x16, y=y16: x @ y]
        t_ordered, t_fast, t_half, *peers = _times(*runs, seconds=0.5)
        rate = f"{2e-12 * M * N * K / t_ordered:.1f} TFLOP/s"
        yield Row(
            "gpu", f"{form} in the CPU's order", 0, t_ordered, t_fast, "cuBLAS", 0.5, rate
        )  # fmt: skip
        for kind, t, peer in zip(("float32", "bfloat16"), (t_fast, t_half), peers, strict=False):
            rate = f"{2e-12 * M * N * K / t:.1f} TFLOP/s"
            yield Row("gpu", f"{form}, {kind}", 0, t, peer, "PyTorch", 0.95, rate)


# --- attention --------------------------------------------------------------------------------


def _attention(torch: Any) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    H, D = 12, 64
    for B, T in HEADS:
        host = [rng.standard_normal((B, T, H, D), dtype=np.float32) for _ in range(4)]
        *arrays, g = _there(*host)
        leaves = [Tensor(x, requires_grad=True) for x in arrays]

        def ours(leaves: Any = leaves, g: Any = g) -> list[Any]:
            for x in leaves:
                x.grad = None
            attention(*leaves).backward(g)
            return [x.grad for x in leaves]

        runs: list[Callable] = [ours]
        if torch is not None:
            theirs = _peer_attention(torch, *host)
            for a, b in zip(ours(), theirs(), strict=True):
                close(to_host(a), b.transpose(1, 2).cpu().numpy())
            runs.append(theirs)
        times = [*_times(*runs), None]
        rate = f"{14 * B * H * T * T * D / 2 / times[0] * 1e-12:.1f} TFLOP/s of the causal half"
        name = f"attention forward + backward, B {B} T {T}"
        yield Row("gpu", name, 0, times[0], times[1], "PyTorch", None, rate)


def _peer_attention(torch: Any, q: Any, k: Any, v: Any, g: Any) -> Callable[[], list[Any]]:
    *leaves, g = (torch.tensor(x, device="cuda").transpose(1, 2) for x in (q, k, v, g))
    attend = torch.nn.functional.scaled_dot_product_attention
    for x in leaves:
        x.requires_grad_()

    def step() -> list[Any]:
        for x in leaves:
            x.grad = None
        attend(*leaves, is_causal=True).backward(g)
        return [x.grad for x in leaves]

    return step


# --- the step ---------------------------------------------------------------------------------


def _model(config: TransformerConfig) -> Transformer:
    return Transformer(config, seed=1).to("gpu")


def _peer_step(config: TransformerConfig, ids: Any, targets: Any, mode: str, compiled: bool) -> Any:
    torch = optional("torch")
    theirs = build(config)
    copy_weights(Transformer(config, seed=1), theirs)
    runner = torch.compile(theirs.cuda()) if compiled else theirs.cuda()
    return torch_step(runner, ids, targets, bf16=mode == "bf16", device="cuda")


def _steps(torch: Any) -> Iterator[Row]:
    config = llama()
    ids, targets = tokens(BATCH, LENGTH, config.vocab_size)
    for mode in ("fp32", "bf16"):
        runs = {"": our_step(_model(config), ids, targets, mode)}
        if mode == "fp32":
            runs["our CPU's order"] = _in_order(our_step(_model(config), ids, targets))
        first = runs[""]()
        for name in ("eager", "compile") if torch is not None else ():
            try:
                theirs = _peer_step(config, ids, targets, mode, name == "compile")
                loss = theirs()
            except Exception as error:  # no compiler for the GPU on this machine
                if name != "compile":
                    raise
                yield Row("gpu", f"torch.compile: {type(error).__name__}", 0, 0.0)
                continue
            if not abs(loss - first) < 2e-2:
                raise AssertionError(f"{name}: the peer computes another loss")
            runs[f"PyTorch {name}"] = theirs
        t, *others = _times(*runs.values(), seconds=4.0)
        rate = flops(config, BATCH, LENGTH) / t * 1e-12
        note = f"{rate:.0f} TFLOP/s, {gpu_memory()[1] / 2**30:.1f} GiB in the pool"
        title = f"Llama 124 M, {BATCH} x {LENGTH}, {mode}"
        if not others:
            yield Row("gpu", title, 0, t, note=note)
        aims = {"PyTorch eager": 1.0, "PyTorch compile": 0.8}
        for name, peer in zip(list(runs)[1:], others, strict=True):
            yield Row("gpu", title, 0, t, peer, name, aims.get(name), note)
    yield _overhead(torch)


def _overhead(torch: Any) -> Row:
    """The same layers, so small that the GPU waits for the host."""
    config = llama(width=64, vocabulary=256)
    ids, targets = tokens(1, 16, config.vocab_size)
    runs = [our_step(_model(config), ids, targets)]
    if torch is not None:
        runs.append(_peer_step(config, ids, targets, "fp32", False))
    times = [*_times(*runs, seconds=2.0), None]
    return Row("gpu", "the host's part of a step", 0, times[0], times[1], "PyTorch eager")


def _growth() -> Iterator[Row]:
    config = llama()

    def step(batch: int, length: int) -> Callable:
        return our_step(_model(config), *tokens(batch, length, config.vocab_size))

    def each(shapes: list[tuple[int, int]]) -> list[float]:
        return [_times(step(*shape))[0] for shape in shapes]  # one model at a time in memory

    in_batch = each([(B, LENGTH) for B in BATCHES])
    for B, t in zip(BATCHES, in_batch, strict=True):
        line = in_batch[-1] * B / BATCHES[-1]
        yield Row("gpu", f"step of batch {B} x {LENGTH}", 0, t, line, "a straight line")
    count = BATCH * LENGTH
    in_length = each([(count // T, T) for T in LENGTHS])
    base = in_length[0] / flops(config, count // LENGTHS[0], LENGTHS[0])
    for T, t in zip(LENGTHS, in_length, strict=True):
        expected = base * flops(config, count // T, T)
        note = f"{t / count * 1e6:.2f} µs per token"
        yield Row("gpu", f"{count} tokens in rows of {T}", 0, t, expected, "FLOPs", note=note)
