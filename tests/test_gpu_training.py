"""Training on a GPU: the bits of the CPU in deterministic float32, its loss in the fast modes."""

import contextlib

import numpy as np
import pytest

from afinar.autograd import Tensor, compute_in, set_deterministic
from afinar.autograd.backend import KERNELS, cupy
from afinar.autograd.device import beside, to_host, why_no_gpu
from afinar.autograd.random import make_key, normal, raw_words
from afinar.lora import LoRAConfig, adapter_params, apply_lora, lora_param_groups, merge_lora
from afinar.optim import SGD, AdamW, clip_grad_norm, grad_norm, weights_sha256
from afinar.transformer import Decoder, DecoderConfig, Transformer, TransformerConfig, generate
from afinar.transformer.dropout import dropout_scope

pytestmark = pytest.mark.gpu
if (why := why_no_gpu()) is not None:
    pytest.skip(why, allow_module_level=True)


@pytest.fixture(autouse=True)
def _deterministic():
    set_deterministic(True)
    yield
    set_deterministic(False)


def drawn(name, *shape, dtype=np.float32):
    return normal(make_key("test", 0, name), shape).astype(dtype)


# --- optimizers ----------------------------------------------------------------------------

SHAPES = [(70, 130), (1,), (4096,), (4097,), (0, 3), (3, 4096)]


def parameters(device, dtype):
    made = []
    for n, shape in enumerate(SHAPES):
        p = Tensor(drawn(f"p{n}", *shape, dtype=dtype), requires_grad=True)
        made.append(p)
        if device == "gpu":
            p.data = cupy.asarray(p.data)
    return made


def give_gradients(params, step):
    for n, p in enumerate(params):
        g = drawn(f"g{n} {step}", *p.shape, dtype=p.dtype)
        # A gradient need not lie as its parameter does.
        p.grad = beside(np.asfortranarray(g) if n == 0 else g, p.data)


MAKERS = {
    "AdamW": lambda ps: AdamW(ps, lr=1e-2, weight_decay=0.1),
    "epsilon_hat": lambda ps: AdamW(ps, lr=1e-2, form="epsilon_hat"),
    "groups": lambda ps: AdamW(
        [{"params": ps[:2], "weight_decay": 0.5}, {"params": ps[2:], "lr": 0.3}], lr=0.1
    ),
    "SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", MAKERS)
def test_optimizers_give_the_bits_of_the_cpu(name, dtype):
    found = []
    for device in ("cpu", "gpu"):
        params = parameters(device, dtype)
        optimizer = MAKERS[name](params)
        for step in range(3):
            give_gradients(params, step)
            if step == 1:
                params[2].grad = None
            optimizer.step(grad_scale=0.7)
        slots = [a for slot in optimizer._slots for a in getattr(optimizer, slot)]
        found.append([to_host(a).tobytes() for a in (*(p.data for p in params), *slots)])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_norm_of_gradients_has_the_bits_of_the_cpu_and_is_read_once(dtype, monkeypatch):
    norms, grads, reads = [], [], []
    for device in ("cpu", "gpu"):
        params = parameters(device, dtype)
        give_gradients(params, 0)
        params[3].grad = None
        if device == "gpu":
            get = cupy.ndarray.get
            with contextlib.suppress(TypeError):  # CuPy's own class cannot be changed
                monkeypatch.setattr(cupy.ndarray, "get", lambda a: reads.append(a) or get(a))
        norms.append((grad_norm(params), clip_grad_norm(params, 1.0)))
        monkeypatch.undo()
        grads.append([to_host(p.grad).tobytes() for p in params if p.grad is not None])
    assert norms[0] == norms[1]
    assert grads[0] == grads[1]
    assert len(reads) in (0, 2)


def test_a_gradient_that_is_not_finite_gives_such_a_norm():
    params = parameters("gpu", np.float32)
    give_gradients(params, 0)
    params[4 - 1].grad[4096] = np.inf
    assert clip_grad_norm(params, 1.0) == np.inf


def test_moments_follow_their_parameters():
    params = parameters("cpu", np.float32)
    optimizer = AdamW(params, lr=1e-2)
    for step, device in enumerate(("cpu", "gpu", "cpu")):
        for p in params:
            p.data = cupy.asarray(p.data) if device == "gpu" else to_host(p.data)
        give_gradients(params, step)
        optimizer.step()
        if step == 1:
            state = optimizer.state_dict()
            assert {type(a) for a in state["first_moments"]} == {cupy.ndarray}
    straight = parameters("cpu", np.float32)
    other = AdamW(straight, lr=1e-2)
    for step in range(3):
        give_gradients(straight, step)
        other.step()
    assert optimizer.state_sha256() == other.state_sha256()
    other.load_state_dict(state)
    assert {type(a) for a in other.first_moments} == {np.ndarray}


def test_a_gradient_on_another_device_is_refused():
    p = Tensor([1.0, 2.0], requires_grad=True)
    p.grad = cupy.asarray(np.ones(2, np.float32))
    with pytest.raises(ValueError, match="parameter 0 is on the cpu, its gradient on the gpu"):
        AdamW([p]).step()


@pytest.mark.parametrize("maker", [AdamW, SGD])
def test_an_update_leaves_alone_what_a_graph_still_needs(maker):
    p = Tensor(cupy.asarray(drawn("p", 3)), requires_grad=True)
    optimizer = maker([p], lr=0.1)
    (p * p).sum().backward()
    optimizer.step()
    before = p.data.get()
    loss = (p * p).sum()
    optimizer.step()
    assert (p.data.get() != before).all()
    p.zero_grad()
    loss.backward()
    assert p.grad.get().tolist() == (before + before).tolist()


@pytest.mark.parametrize(
    "name", [n for n in sorted(KERNELS) if n.split(".")[0] in ("adamw", "sgd", "linear")]
)
def test_kernels_of_other_parts_have_a_body_for_the_gpu(name):
    assert cupy in KERNELS[name].fast
