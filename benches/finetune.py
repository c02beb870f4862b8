"""The LoRA step at the shapes of SmolLM2-135M, beside PyTorch with PEFT: time and peak memory.

30 layers, hidden 576, 9 and 3 heads, intermediate 1536, vocabulary 49152, tied; r 8 on q and v;
4 x 256 tokens; random weights. Each measurement is a process of its own, since the peak of the
resident memory is one number per process; the processes take turns.

`python -m benches.finetune ours|peft [options]` is one such process; it prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .harness import Row, optional, peak_memory, tokens

BATCH, LENGTH, ROUNDS, STEPS = 4, 256, 3, 3
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_kv_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def our_step(storage: str, precision: str, checkpointed: bool, folder: str) -> Callable[[], float]:
    """Our LoRA step on the checkpoint in `folder`."""
    from afinar.autograd.precision import compute_in
    from afinar.lora import LoRAConfig, adapter_params, apply_lora
    from afinar.optim import AdamW, clip_grad_norm
    from afinar.transformer import load_pretrained

    model = load_pretrained(folder, dtype=storage)
    apply_lora(model, LoRAConfig(r=8, alpha=16, targets=("q_proj", "v_proj")), seed=0)
    if checkpointed:
        model.checkpointing = lambda layer: layer % 5 == 0
    parameters = list(adapter_params(model))
    optimizer = AdamW(parameters, lr=1e-4)
    ids, targets = tokens(BATCH, LENGTH, SHAPE["vocab_size"])

    def step() -> float:
        optimizer.zero_grad()
        with compute_in(precision):
            loss = model.loss(ids, targets)
            loss.backward()
        clip_grad_norm(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step


def peft_step(precision: str, folder: str) -> Callable[[], float]:
    """The same with transformers and PEFT."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    ids, targets = map(torch.from_numpy, tokens(BATCH, LENGTH, SHAPE["vocab_size"]))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]).float(), targets.view(-1)
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step


def write_checkpoint(folder: str) -> None:
    """Random weights of the shape, stored in bfloat16 as the real model's are."""
    from afinar.transformer import Transformer, TransformerConfig, save_pretrained

    config = TransformerConfig(**SHAPE)
    save_pretrained(Transformer(config, seed=0), folder, dtype="bfloat16")


def one(argv: list[str]) -> None:
    """One process: some steps, their median time, the first loss and the peak memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=["ours", "peft"])
    parser.add_argument("folder")
    parser.add_argument("--storage", default="float32")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    if args.who == "ours":
        from afinar.autograd import set_num_threads

        set_num_threads(args.threads)
        step = our_step(args.storage, args.precision, args.checkpointed, args.folder)
    else:
        import torch

        torch.set_num_threads(args.threads)
        step = peft_step(args.precision, args.folder)
    first = step()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    print(json.dumps({"seconds": seconds, "peak": peak_memory(), "loss": first}))


def rows(threads: int) -> Iterator[Row]:
    """Our ways of storing the base, beside PEFT in float32 and in bf16 autocast."""
    ours = {
        "float32": [],
        "float32, base in bfloat16": ["--storage", "bfloat16"],
        "float32, checkpointed": ["--checkpointed"],
        "bfloat16": ["--precision", "bf16"],
        "bfloat16, base in bfloat16": ["--precision", "bf16", "--storage", "bfloat16"],
    }
    peers = {"float32": [], "bf16 autocast": ["--precision", "bf16"]} if optional("peft") else {}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder)
        for _ in range(ROUNDS):
            for who, name, options in (
                *(("ours", n, o) for n, o in ours.items()),
                *(("peft", n, o) for n, o in peers.items()),
            ):
                argv = [who, folder, *options, "--threads", str(threads)]
                done = subprocess.run(
                    [sys.executable, "-m", "benches.finetune", *argv],
                    capture_output=True,
                    text=True,
                    check=True,
                    env=os.environ | {"NUMBA_NUM_THREADS": str(threads)},
                )
                found.setdefault((who, name), []).append(json.loads(done.stdout))

    def median(who: str, name: str, what: str) -> float:
        return statistics.median(f[what] for f in found[who, name])

    for name in ours:
        against = "bf16 autocast" if name.startswith("bfloat16") else "float32"
        if not peers:
            yield Row("finetune", f"LoRA step, {name}", threads, median("ours", name, "seconds"))
            continue
        if abs(median("ours", name, "loss") - median("peft", against, "loss")) > 2e-2:
            raise AssertionError(f"{name}: the peer computes another loss")
        peak = median("ours", name, "peak")
        share = peak / median("peft", "float32", "peak")
        limit = 0.4 if "base in" in name or "checkpointed" in name else 0.5
        yield Row(
            "finetune",
            f"LoRA step, {name}",
            threads,
            median("ours", name, "seconds"),
            median("peft", against, "seconds"),
            f"PEFT {against}",
            None if "checkpointed" in name else 1.3 if name.startswith("bfloat16") else 1.5,
            f"peak {peak / 1e6:.0f} MB, {share:.2f} of theirs (target {limit})",
        )


if __name__ == "__main__":
    np.seterr(all="ignore")
    one(sys.argv[1:])
