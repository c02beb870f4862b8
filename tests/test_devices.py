"""What is said about devices where there is no GPU; memory that ends, on any device."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from afinar.autograd import Tensor, backend
from afinar.autograd.device import (
    beside,
    device_of,
    release_memory,
    resolve_device,
    to_device,
    to_host,
    why_no_gpu,
    with_memory,
)
from afinar.train import TransformerTrainConfig, TransformerTrainer
from afinar.train.bits import device_for
from afinar.train.cli import main
from afinar.transformer import Transformer, TransformerConfig, generate

HERE = Path(__file__).parent


def broken(error):
    def fail():
        raise error

    return fail


def fake(devices=lambda: 1, compiler=lambda: (12, 9)):
    """A CuPy that is there, and finds these devices and this compiler."""

    class Array:
        pass

    runtime, nvrtc = SimpleNamespace(getDeviceCount=devices), SimpleNamespace(getVersion=compiler)
    return SimpleNamespace(ndarray=Array, cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc))


NO_DRIVER = RuntimeError(
    "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
)
CASES = {
    "no CuPy": (None, ("CuPy is needed", "pip install 'afinar[gpu]'", "No module named 'cupy'")),
    "no driver": (
        fake(broken(NO_DRIVER)),
        ("NVIDIA driver", "a GPU", "cudaErrorInsufficientDriver"),
    ),
    "no device": (fake(lambda: 0), ("no GPU that it can see",)),
    "no compiler": (
        fake(compiler=broken(RuntimeError('Failure finding "libnvrtc.so.12": No such file\nmore'))),
        ("no CUDA compiler", "pip install 'afinar[gpu]'", "libnvrtc.so.12"),
    ),
}


@pytest.fixture(params=CASES)
def says(request, monkeypatch):
    """What must be said where a GPU is asked for and cannot be used."""
    cupy, words = CASES[request.param]
    monkeypatch.setattr(backend, "cupy", cupy)
    monkeypatch.setattr(backend, "no_cupy", "No module named 'cupy'")
    return words


def check(sentence, words):
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


def test_a_gpu_that_cannot_be_used_is_one_sentence(says):
    check(why_no_gpu(), says)
    with pytest.raises(ValueError, match='device: "gpu" was asked for; ') as raised:
        resolve_device("gpu")
    check(str(raised.value), says)
    model = Transformer(TransformerConfig.tiny())
    with pytest.raises(ValueError, match="was asked for") as raised:
        model.to("gpu")
    check(str(raised.value), says)
    config = TransformerTrainConfig(model_config=model.config, device="gpu")
    with pytest.raises(ValueError, match="was asked for") as raised:
        TransformerTrainer(config)
    check(str(raised.value), says)


def test_auto_is_the_cpu_there(says):
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    model = Transformer(TransformerConfig.tiny())
    assert model.to("auto").device == "cpu"
    config = TransformerTrainConfig(model_config=model.config, device="auto")
    assert TransformerTrainer.with_model(model, config).device == "cpu"
    release_memory()


@pytest.mark.parametrize(
    "args",
    [
        ["train", "--preset", "tiny", "--out", "run"],
        ["generate", "nowhere", "--prompt", "x"],
        ["eval", "--model", "nowhere", "--data", "nowhere"],
    ],
)
def test_the_command_says_it_before_it_begins(says, args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*args, "--device", "gpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    check(line, says)
    assert not list(tmp_path.iterdir())


def test_a_usable_gpu_is_taken(monkeypatch):
    monkeypatch.setattr(backend, "cupy", fake())
    assert why_no_gpu() is None
    assert resolve_device("auto") == resolve_device("gpu") == "gpu"


def test_an_unknown_device():
    with pytest.raises(ValueError, match='"cpu", "gpu" or "auto" needed, given \'tpu\''):
        resolve_device("tpu")
    with pytest.raises(ValueError, match="given 'cuda'"):
        Transformer(TransformerConfig.tiny()).to("cuda")


def test_the_package_works_with_a_cupy_that_has_no_driver():
    """Real CuPy imports without a driver, and so does the stand-in."""
    code = (
        "from afinar.autograd import Tensor, backend\n"
        "from afinar.autograd.device import why_no_gpu\n"
        "assert backend.cupy is not None\n"
        "print(why_no_gpu())\n"
        "x = Tensor([1.0, 2.0], requires_grad=True)\n"
        "(x * x).sum().backward()\n"
        "print(x.grad.tolist())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(HERE / "cuda_on_cpu"), "CUDA_ON_CPU_NO_DEVICE": "1"},
    )  # fmt: skip
    sentence, grad = run.stdout.splitlines()
    check(sentence, CASES["no driver"][1])
    assert grad == "[2.0, 4.0]"


def test_arrays_of_the_cpu_stay_as_they_are():
    x = np.arange(3)
    assert to_host(x) is to_device(x, "cpu") is beside(x, np.ones(1)) is x
    assert device_of(x) == Tensor([1.0]).device == "cpu"
    assert to_host([1, 2]).tolist() == [1, 2]


# --- memory that ends ----------------------------------------------------------------------


def test_a_run_is_repeated_once_when_memory_ends():
    tries = []

    def run():
        tries.append(len(tries))
        if len(tries) == 1:
            raise MemoryError("no more")
        return "done"

    assert with_memory(run, "it", "make it smaller") == "done"
    assert tries == [0, 1]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Out of memory allocating 5 bytes\nand so on"),
        RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("cudaErrorMemoryAllocation: out of memory"),
    ],
)
def test_a_second_failure_says_what_to_do(error):
    with pytest.raises(MemoryError) as raised:
        with_memory(broken(error), "a step", "make it smaller", again=broken(error))
    first = str(error).split("\n")[0]
    assert str(raised.value) == (
        f"a step: too much for the memory, tried twice; make it smaller ({first})"
    )


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="something else"):
        with_memory(broken(RuntimeError("something else")), "a step", "make it smaller")


def test_what_the_first_try_held_is_gone_before_the_second(monkeypatch):
    import weakref

    class Big:
        pass

    held, alive = [], []

    def run():
        big = Big()
        held.append(weakref.ref(big))
        if len(held) == 1:
            raise MemoryError("no more")
        alive.append(held[0]() is not None)
        return big

    with_memory(run, "it", "less")
    assert alive == [False]


def test_a_step_on_a_cpu_is_repeated_too(monkeypatch):
    from afinar.optim import weights_sha256
    from afinar.train import LMBatch

    ids = np.arange(16).reshape(2, 8)
    found = []
    for fails in (False, True):
        config = TransformerTrainConfig(
            model_config=TransformerConfig.tiny(), accumulation_steps=2, checkpoint_config="blocks"
        )
        trainer = TransformerTrainer(config)
        backward, calls = Tensor.backward, []

        def half(self, grad=None, backward=backward, calls=calls, fails=fails):
            calls.append(1)
            backward(self, grad)
            if fails and len(calls) == 2:  # gradients have been added, and the memory ends
                raise MemoryError("no more")

        monkeypatch.setattr(Tensor, "backward", half)
        for k in range(2):
            trainer.train_batch(LMBatch(ids + k, ids + k + 1))
        monkeypatch.undo()
        found.append((trainer.last.loss, trainer.last.grad_norm, weights_sha256(trainer.model)))
        assert len(calls) == (4 if fails else 2)
    assert found[0] == found[1]


def test_generation_on_a_cpu_is_repeated_too(monkeypatch):
    model = Transformer(TransformerConfig.tiny(), seed=1)
    want = generate(model, [1, 2, 3], max_new_tokens=3)
    head, calls = type(model.lm_head).__call__, []

    def once(self, x):
        if self is model.lm_head:
            calls.append(1)
            if len(calls) == 1:  # keys and values are in the cache already
                raise MemoryError("no more")
        return head(self, x)

    monkeypatch.setattr(type(model.lm_head), "__call__", once)
    assert generate(model, [1, 2, 3], max_new_tokens=3) == want
    assert calls


# --- which device a record needs -------------------------------------------------------------


@pytest.fixture
def _mode():
    from afinar.autograd import is_deterministic, set_deterministic

    before = is_deterministic()
    yield
    set_deterministic(before)


@pytest.mark.usefixtures("_mode")
def test_records_that_hold_everywhere_are_replayed_in_that_order(monkeypatch):
    from afinar.autograd import is_deterministic, set_deterministic

    set_deterministic(False)
    assert device_for([{"step": 0}, {"step": 1}], "cpu") == "cpu"
    assert is_deterministic()


@pytest.mark.usefixtures("_mode")
def test_records_of_one_device_need_that_one(monkeypatch):
    monkeypatch.setattr(backend, "cupy", None)
    with pytest.raises(ValueError, match=r"computed on a GPU in its fast mode.*; CuPy is needed"):
        device_for([{"device": "gpu"}], "auto")
    monkeypatch.setattr(backend, "cupy", fake())
    assert device_for([{"device": "gpu"}], "auto") == "gpu"
    assert device_for([{"device": "cpu"}], "auto") == "cpu"
    with pytest.raises(ValueError, match=r"fast mode, .*--device gpu\), or train with"):
        device_for([{"device": "gpu"}], "cpu")
    with pytest.raises(ValueError, match="computed on a CPU in 16 bits"):
        device_for([{"device": "cpu"}], "gpu")
    with pytest.raises(ValueError, match="partly on one device"):
        device_for([{"device": "gpu"}, {}], "auto")
