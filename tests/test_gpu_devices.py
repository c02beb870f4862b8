"""Models and arrays on a GPU: how they get there and back, what they refuse, memory that ends."""

import json
import sys

import numpy as np
import pytest

from afinar.autograd import Tensor, checkpoint
from afinar.autograd.backend import Kernel, cupy, reference_bodies
from afinar.autograd.device import to_host, why_no_gpu
from afinar.autograd.tape import may_write
from afinar.lora import (
    LoRAConfig,
    adapter_params,
    apply_lora,
    layer_from_json,
    layer_to_json,
    lora_modules,
    merge_lora,
    save_adapter,
    save_adapter_peft,
    unmerge_lora,
)
from afinar.lora.linear import plain_linear
from afinar.optim import weights_sha256
from afinar.train import LMBatch, TransformerTrainConfig, TransformerTrainer
from afinar.train.evaluate import evaluate_batches
from afinar.train.losses import LOSSES
from afinar.transformer import (
    Decoder,
    DecoderConfig,
    Transformer,
    TransformerConfig,
    generate,
    save_apr,
    save_pretrained,
)
from beyond_memory import emulated

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
if (why := why_no_gpu()) is not None:
    pytest.skip(why, allow_module_level=True)

LLAMA = TransformerConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_kv_heads=1, vocab_size=61, max_position_embeddings=48,
)  # fmt: skip
GPT = DecoderConfig(vocab=61, n_layer=1, n_head=2, d_model=24, block=48)
IDS = np.arange(22).reshape(2, 11)


def llama():
    return Transformer(LLAMA, seed=2)


# --- models move ---------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_goes_to_the_gpu_and_back(tied):
    model = Transformer(TransformerConfig(**{**vars(LLAMA), "tie_word_embeddings": tied}), seed=2)
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    before, names = weights_sha256(model), [n for n, _ in model.named_parameters()]
    grads = [p.grad for p in model.parameters()]
    assert model.to("gpu") is model
    assert model.device == "gpu"
    assert {type(x) for p in model.parameters() for x in (p.data, p.grad)} == {cupy.ndarray}
    assert [n for n, _ in model.named_parameters()] == names
    assert weights_sha256(model) == before
    model.to("cpu")
    assert {type(x) for p in model.parameters() for x in (p.data, p.grad)} == {np.ndarray}
    assert weights_sha256(model) == before
    for p, g in zip(model.parameters(), grads, strict=True):
        np.testing.assert_array_equal(p.grad, g)
    assert model.to("auto").device == "gpu"


def test_a_model_in_two_places_says_so():
    model = llama()
    model.lm_head.to("gpu")
    with pytest.raises(ValueError, match="parameters on the CPU and on the GPU"):
        _ = model.device


def test_state_crosses_devices():
    ours, theirs = llama(), Transformer(LLAMA, seed=9).to("gpu")
    want = weights_sha256(ours)
    theirs.load_state_dict(ours.state_dict())
    assert (weights_sha256(theirs), theirs.device) == (want, "gpu")
    ours = Transformer(LLAMA, seed=8)
    ours.load_state_dict(theirs.state_dict())
    assert (weights_sha256(ours), ours.device) == (want, "cpu")


def test_mixing_devices_is_one_sentence():
    x, y = Tensor(np.ones(3, np.float32)), Tensor(cupy.asarray(np.ones(3, np.float32)))
    with pytest.raises(ValueError, match="one array is on the CPU and one on the GPU"):
        x + y


@pytest.mark.parametrize("make", [llama, lambda: Decoder(GPT, seed=2)])
def test_files_have_the_same_bytes_from_either_device(make, tmp_path):
    for device in ("cpu", "gpu"):
        model = make().to(device)
        save_pretrained(model, tmp_path / device)
        if isinstance(model, Transformer):
            save_apr(model, tmp_path / device / "model.apr")
    for path in (tmp_path / "cpu").iterdir():
        assert path.read_bytes() == (tmp_path / "gpu" / path.name).read_bytes()


VARIANTS = {
    "plain": LoRAConfig(r=3),
    "dora": LoRAConfig(r=2, use_dora=True),
    "pissa": LoRAConfig(r=2, init="pissa"),
    "int4": LoRAConfig(r=2, quantize="int4"),
    "int4-double": LoRAConfig(r=2, quantize="int4-double"),
    "nf4": LoRAConfig(r=2, quantize="nf4"),
    "whole": LoRAConfig(r=2, modules_to_save=("norms",)),
}


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VARIANTS)
def test_adapters_are_the_same_from_either_device(name, when, tmp_path):
    """Put on a model that moves afterwards, or on one that is on the GPU already."""
    found = []
    for device in ("cpu", "gpu"):
        model = llama()
        if when == "before":
            apply_lora(model, VARIANTS[name], seed=4)
        model.to(device)
        if when == "after":
            apply_lora(model, VARIANTS[name], seed=4)
        assert {p.device for p in adapter_params(model)} == {device}
        logits = to_host(model(IDS).data).tobytes()
        save_adapter(model, tmp_path / device / "own/adapter.safetensors")
        if "4" not in name:
            save_adapter_peft(model, tmp_path / device / "peft")
        before = weights_sha256(model)
        merge_lora(model)
        merged = weights_sha256(model)
        model.to("cpu").to(device)
        unmerge_lora(model)
        found.append((logits, before, merged, weights_sha256(model), model.device == device))
    assert found[0] == found[1]
    assert found[0][1] == found[0][3]
    for path in (tmp_path / "cpu").rglob("*.*"):
        other = tmp_path / "gpu" / path.relative_to(tmp_path / "cpu")
        assert path.read_bytes() == other.read_bytes()


def test_adapters_kept_aside_follow_the_model():
    model = llama()
    apply_lora(model, LoRAConfig(r=2, quantize="int4-double"))
    merge_lora(model)
    model.to("gpu")
    unmerge_lora(model)
    assert model.device == "gpu"
    assert model(IDS).device == "gpu"


def test_one_layer_as_json():
    model = llama().to("gpu")
    apply_lora(model, LoRAConfig(r=2))
    layer = lora_modules(model)[0][1]
    text = layer_to_json(layer)
    base = plain_linear(cupy.asarray(np.ones((32, 32), np.float32)), None)
    again = layer_from_json(text, base)
    assert {p.device for p in again.factors} == {"gpu"}
    assert json.loads(layer_to_json(again)) == json.loads(text)


# --- generation ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}]
)
@pytest.mark.parametrize("make", [llama, lambda: Decoder(GPT, seed=2)])
def test_a_text_goes_on_as_on_the_cpu(make, options, monkeypatch):
    prompts = [[1, 2, 3, 4, 5], [7], [9, 8]]
    cpu = generate(make(), prompts, max_new_tokens=6, **options)
    monkeypatch.setattr(sys.modules["afinar.transformer.generate"], "DecodeStep", None)
    assert generate(make().to("gpu"), prompts, max_new_tokens=6, **options) == cpu


# --- losses --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"CausalLM", "Weighted", "SampleWeighted"}))
def test_losses_take_targets_of_the_cpu(name):
    x = np.cos(np.arange(12, dtype=np.float32)).reshape(4, 3)
    y = np.sin(np.arange(12, dtype=np.float32)).reshape(4, 3)
    found = []
    for data in (x, cupy.asarray(x)):
        p = Tensor(data, requires_grad=True)
        loss = LOSSES[name]()(p, y)
        loss.backward()
        weighted = LOSSES["SampleWeighted"](LOSSES[name](), [1, 2, 0, 1])(p, y)
        found.append((loss.item(), weighted.item(), to_host(p.grad).tobytes()))
    assert found[0] == found[1]


# --- what a graph saved --------------------------------------------------------------------


def test_what_a_graph_saved_is_known():
    x = Tensor(cupy.asarray(np.ones((3, 4), np.float32)), requires_grad=True)
    assert may_write(x.data)
    out = (x * x).sum()
    assert not may_write(x.data)
    assert not may_write(x.data[1:])
    out.backward()
    assert may_write(x.data)
    again = checkpoint(lambda y: y * x, x)
    assert not may_write(x.data)
    del again
    assert may_write(x.data)
    assert not may_write(cupy.broadcast_to(x.data[0], (5, 4)))


def test_a_repeated_gradient_is_not_written_into():
    # The gradient of a mean is one number seen 12 times; that of the second use is added to it.
    found = []
    for move in (np.asarray, cupy.asarray):
        x = Tensor(move(np.arange(12, dtype=np.float32).reshape(3, 4)), requires_grad=True)
        y = x * 3.0
        (y.mean() + (y * y).sum()).backward()
        found.append(to_host(x.grad).tobytes())
    assert found[0] == found[1]


# --- dispatch ------------------------------------------------------------------------------


def test_a_kernel_without_a_body_for_the_gpu_raises():
    def twice(x):
        return x + x

    kernel = Kernel(twice)
    x = cupy.asarray(np.ones(3, np.float32))
    with pytest.raises(RuntimeError, match="twice has no body for the GPU"):
        kernel(x)
    with reference_bodies():
        assert kernel(x).get().tolist() == [2, 2, 2]


# --- memory that ends ----------------------------------------------------------------------


class Ends:
    """Memory that refuses the requests whose numbers are given, counted from now."""

    def __init__(self, monkeypatch, *refused):
        self.asked = self.freed = 0
        allocate = cupy.empty

        def empty(*args, **options):
            self.asked += 1
            if self.asked in refused:
                raise cupy.cuda.memory.OutOfMemoryError(1000, 2000)
            return allocate(*args, **options)

        monkeypatch.setattr(cupy, "empty", empty)
        monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: self)

    def free_all_blocks(self):
        self.freed += 1

    def used_bytes(self):
        return 0

    total_bytes = used_bytes


def training(device="gpu", **settings):
    config = TransformerTrainConfig(model_config=LLAMA, device=device, **settings)
    return TransformerTrainer.with_model(llama(), config)


def batches():
    return [LMBatch((IDS + n) % 61, (IDS + n + 1) % 61) for n in range(2)]


def stepped(trainer):
    for one in batches():
        trainer.train_batch(one)
    return trainer.last.loss, trainer.last.grad_norm, weights_sha256(trainer.model)


@pytest.mark.parametrize("at", [1, 60, 90, 180])
def test_a_step_is_tried_again_with_the_same_result(at, monkeypatch):
    """Wherever memory ends once: in either micro-batch, forward or backward, or in the step."""
    want = stepped(training(accumulation_steps=2))
    trainer = training(accumulation_steps=2)
    ends = Ends(monkeypatch, at)
    assert stepped(trainer) == want
    assert ends.asked > at, "the window has fewer requests than that"
    assert ends.freed == 1


def test_memory_that_ends_in_the_optimizer(monkeypatch):
    want = stepped(training(accumulation_steps=2))
    trainer, failed = training(accumulation_steps=2), []
    step = trainer.optimizer._slot

    def slot(name, n):
        if n == 3 and not failed:
            failed.append(n)
            raise cupy.cuda.memory.OutOfMemoryError(1000, 2000)
        return step(name, n)

    monkeypatch.setattr(trainer.optimizer, "_slot", slot)
    assert stepped(trainer) == want
    assert failed


def test_memory_that_does_not_suffice_says_what_to_reduce(monkeypatch):
    trainer = training()
    before = weights_sha256(trainer.model)
    Ends(monkeypatch, *range(20, 10_000))
    with pytest.raises(MemoryError) as raised:
        trainer.train_batch(batches()[0])
    says = str(raised.value)
    assert says.startswith("train_batch: 2 sequences of 11 tokens: too much for the memory")
    for way in ("batch smaller", "accumulate", "sequences shorter", "checkpointing", "bf16"):
        assert way in says
    monkeypatch.undo()
    assert weights_sha256(trainer.model) == before


@emulated
def test_a_model_that_does_not_fit_stays_on_the_cpu(monkeypatch):
    memory, model = cupy.cuda.memory, llama()
    before, freed = weights_sha256(model), memory.freed
    monkeypatch.setattr(memory, "fail_at", model.lm_head.weight.data.nbytes)
    with pytest.raises(MemoryError, match=r"to: [\d,]+ values: too much .* hold its weights in bf"):
        model.to("gpu")
    assert (weights_sha256(model), model.device) == (before, "cpu")
    assert memory.freed == freed + 1


def test_memory_that_ends_elsewhere(monkeypatch):
    model = llama().to("gpu")
    want = generate(model, [1, 2, 3], max_new_tokens=3), evaluate_batches(model, batches())
    Ends(monkeypatch, 15)
    assert generate(model, [1, 2, 3], max_new_tokens=3) == want[0]
    monkeypatch.undo()
    Ends(monkeypatch, 15)
    assert evaluate_batches(model, batches()) == want[1]
    monkeypatch.undo()
    Ends(monkeypatch, *range(15, 10_000))
    with pytest.raises(MemoryError, match="evaluate: 2 sequences of 11 tokens"):
        evaluate_batches(model, batches())
    with pytest.raises(MemoryError, match="generate: 1 texts of 6 tokens"):
        generate(model, [1, 2, 3], max_new_tokens=3)
