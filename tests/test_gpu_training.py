"""Training on a GPU: the bits of the CPU in deterministic float32, its loss in the fast modes."""

import contextlib
import functools
import json

import numpy as np
import pytest

from afinar.autograd import PrecisionConfig, Tensor, set_deterministic
from afinar.autograd.backend import KERNELS, cupy
from afinar.autograd.device import beside, to_host, why_no_gpu
from afinar.autograd.random import make_key, normal, raw_words
from afinar.lora import LoRAConfig, apply_lora
from afinar.lora.linear import add_columns
from afinar.optim import SGD, AdamW, clip_grad_norm, grad_norm, weights_sha256
from afinar.optim.adamw import adamw_update
from afinar.train import (
    EarlyStopping,
    LMBatch,
    TransformerTrainConfig,
    TransformerTrainer,
    fit,
    load_snapshot,
    save_snapshot,
)
from afinar.train.cli import main
from afinar.train.evaluate import evaluate_batches
from afinar.transformer import Decoder, DecoderConfig, Transformer, TransformerConfig
from beyond_memory import emulated, endless, last_block, without_pages  # noqa: F401 - fixtures

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
if (why := why_no_gpu()) is not None:
    pytest.skip(why, allow_module_level=True)


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


def counted(get, reads):
    return lambda a: reads.append(a) or get(a)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_norm_of_gradients_has_the_bits_of_the_cpu_and_is_read_once(dtype, monkeypatch):
    norms, grads, reads = [], [], []
    for device in ("cpu", "gpu"):
        params = parameters(device, dtype)
        give_gradients(params, 0)
        params[3].grad = None
        if device == "gpu":
            with contextlib.suppress(TypeError):  # CuPy's own class cannot be changed
                monkeypatch.setattr(cupy.ndarray, "get", counted(cupy.ndarray.get, reads))
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


@emulated
@pytest.mark.usefixtures("last_block", "without_pages")
def test_a_parameter_of_more_elements_than_31_bits_count():
    size = (1 << 31) + 4096
    arrays, last = [], [drawn(f"last {n}", 4096) for n in range(4)]
    last[3] *= last[3]  # second moments
    for values in last:
        arrays.append(endless(size, np.float32))
        arrays[-1]._host[-4096:] = values
    constants = 0.5, 0.9, 0.1, 0.99, 0.01, 0.999, 0.1, 1.1, 1e-8
    p, g, m, v = arrays
    adamw_update(p, g, m, v, constants, (p, m, v))
    adamw_update(*last, constants, (last[0], *last[2:]))
    for big, small in zip(arrays, last, strict=True):
        assert (big._host[-4096:] == small).all()
    add_columns(g.reshape(-1, 1 << 12), 0, p.reshape(-1, 1 << 12))
    assert (p._host[-256:] == (last[0] + last[1])[-256:]).all()


# --- training ------------------------------------------------------------------------------

V = 41
LLAMA = TransformerConfig(
    hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
    num_kv_heads=2, vocab_size=V, max_position_embeddings=32,
)  # fmt: skip
QWEN = TransformerConfig(
    hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_kv_heads=2, vocab_size=V, max_position_embeddings=32, attention_bias=True, qk_norm=True,
    tie_word_embeddings=True, sliding_window=7,
)  # fmt: skip
GPT = DecoderConfig(vocab=V, n_layer=2, n_head=3, d_model=24, block=32, dropout=0.1)


def batch(n, B=2, T=11, **more):
    words = raw_words(make_key("batch", n), B * (T + 1)) % np.uint64(V)
    tokens = words.astype(np.int64).reshape(B, T + 1)
    return LMBatch(tokens[:, :-1], tokens[:, 1:], **more)


def ragged(n):
    return batch(n, lengths=np.array([11, 3 + n % 8]))


def packed(n):
    segments = np.array([[0] * 4 + [1] * 7, [0] * 5 + [1] * 3 + [-1] * 3])
    within = [[*range(4), *range(7)], [*range(5), *range(3), *range(3)]]
    return batch(n, segments=segments, positions=np.array(within))


def trainer_of(shape, device, lora=None, **settings):
    model = (Transformer if isinstance(shape, TransformerConfig) else Decoder)(shape, seed=3)
    if lora is not None:
        apply_lora(model, lora, seed=5)
    config = {"lr": 3e-3, "warmup_steps": 2, "device": device, **settings}
    config = TransformerTrainConfig(model_config=shape, **config)
    return TransformerTrainer.with_model(model, config)


def train(trainer, start, stop, draw=batch):
    """What each step found, and the digests in the end."""
    found = []
    for n in range(start, stop):
        for k in range(trainer.config.accumulation_steps):
            trainer.train_batch(draw(n * trainer.config.accumulation_steps + k))
        r = trainer.last
        norm = r.grad_norm if np.isfinite(r.grad_norm) else None
        found.append((r.step, r.loss, r.lr, norm, r.tokens, r.skipped))
    return [*found, weights_sha256(trainer.model), trainer.optimizer_state_sha256()]


RUNS = {
    "llama": (LLAMA, batch, {"deterministic": True}),
    "qwen": (QWEN, ragged, {"weight_decay": 0.1, "max_grad_norm": 0.5}),
    "accumulated": (LLAMA, packed, {"accumulation_steps": 3}),
    "checkpointed": (LLAMA, batch, {"checkpoint_config": "blocks", "accumulation_steps": 2}),
    "products kept": (QWEN, batch, {"checkpoint_config": "matmuls"}),
    "dropout": (GPT, batch, {"accumulation_steps": 2, "checkpoint_config": "blocks"}),
    "lora": (LLAMA, batch, {"lora": LoRAConfig(r=4, dropout=0.2, targets="all-linear")}),
    "lora slices": (GPT, batch, {"lora": LoRAConfig(r=3, targets=("q", "v"))}),
    "dora": (LLAMA, batch, {"lora": LoRAConfig(r=2, use_dora=True, modules_to_save=("norms",))}),
    "4 bits": (LLAMA, batch, {"lora": LoRAConfig(r=4, quantize="int4-double")}),
    "nf4": (LLAMA, batch, {"lora_rank": 2, "quantize_nf4": True}),
}


def some_slow(names, quick):
    """All names, those that are not among the quick ones marked slow."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize(
    "name", some_slow(RUNS, ("llama", "accumulated", "dropout", "lora", "nf4"))
)
def test_twenty_steps_have_the_digests_of_the_cpu(name):
    shape, draw, settings = RUNS[name]
    found = []
    for device in ("cpu", "gpu"):
        trainer = trainer_of(shape, device, **settings)
        assert trainer.model.device == device
        found.append(train(trainer, 0, 20 if name == "llama" else 4, draw))
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_deterministic_runs_have_the_digests_of_the_cpu(precision):
    found = [
        train(trainer_of(LLAMA, device, precision_config=precision), 0, 4)
        for device in ("cpu", "gpu")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "name", some_slow(["llama", "lora", "checkpointed", "products kept", "dropout"], ("llama",))
)
def test_the_fast_modes_come_near_the_cpu(name, precision):
    set_deterministic(False)
    shape, draw, settings = RUNS[name]
    settings = {k: v for k, v in settings.items() if k != "deterministic"}
    cpu = train(trainer_of(shape, "cpu", **settings), 0, 3, draw)
    gpu = train(trainer_of(shape, "gpu", precision_config=precision, **settings), 0, 3, draw)
    for mine, theirs in zip(gpu[:3], cpu[:3], strict=True):
        # Half a unit of 8 bits is 0.4 %; the loss averages over many roundings.
        near = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}[precision]
        assert mine[1] == pytest.approx(theirs[1], rel=near)
        assert mine[3] == pytest.approx(theirs[3], rel=10 * near)


def test_the_scaler_drops_a_window_that_overflows():
    precision = PrecisionConfig("fp16").with_initial_scale(2.0**19)
    found = []
    for device in ("cpu", "gpu"):
        trainer = trainer_of(LLAMA, device, precision_config=precision)
        found.append((train(trainer, 0, 4), trainer.grad_scaler_stats))
    assert found[0] == found[1]
    assert found[1][1] == (2.0**18, 1, 3)


@pytest.mark.parametrize("name", some_slow(["llama", "lora", "nf4"], ("llama",)))
@pytest.mark.parametrize("way", [("cpu", "gpu"), ("gpu", "cpu")])
def test_a_snapshot_moves_to_the_other_device(name, way, tmp_path):
    shape, draw, settings = RUNS[name]
    straight = train(trainer_of(shape, "cpu", **settings), 0, 4, draw)
    first = trainer_of(shape, way[0], **settings)
    train(first, 0, 2, draw)
    save_snapshot(tmp_path, first)
    second = trainer_of(shape, way[1], **settings)
    load_snapshot(tmp_path, second)
    assert second.model.device == way[1]
    assert train(second, 2, 4, draw)[2:] == straight[4:]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_early_stopping_restores_the_best_weights_where_they_were(device):
    shape = TransformerConfig.tiny()
    it = trainer_of(shape, device, lr=0.5, max_grad_norm=None, warmup_steps=0)
    stopping = EarlyStopping(patience=2, restore_best=True)
    batches = [batch(0), batch(1)]
    result = fit(it, batches, epochs=20, valid=batches, callbacks=[stopping])
    assert result.stopped
    assert {isinstance(a, np.ndarray) for a in stopping.state().values() if np.ndim(a)} == {True}
    assert evaluate_batches(it.model, batches)["loss"] == pytest.approx(min(result.val_losses))


def test_an_evaluation_has_the_bits_of_the_cpu():
    found = []
    for device in ("cpu", "gpu"):
        model = Transformer(QWEN, seed=1).to(device)
        found.append(evaluate_batches(model, [ragged(0), packed(1)]))
    assert found[0] == found[1]


def test_a_step_tells_the_memory_in_use(monkeypatch):
    class Pool:
        used_bytes, total_bytes = (lambda self: 3 << 20), (lambda self: 5 << 20)

    trainer = trainer_of(LLAMA, "gpu")
    monkeypatch.setattr(cupy, "get_default_memory_pool", Pool)
    train(trainer, 0, 1)
    assert trainer.last.gpu_memory == (3 << 20, 5 << 20)
    assert trainer_of(LLAMA, "cpu").last is None


# --- the command ---------------------------------------------------------------------------

TOY = ["--batch", "2", "--seq-len", "8", "--steps", "4", "--lr", "3e-3", "--preset", "toy"]
TOY += ["--eval-every", "2", "--eval-rows", "2", "--digest-every", "1", "--snapshot-every", "2"]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `afinar` on a small text and model; returns its status and what it printed."""
    set_deterministic(False)
    toy = classmethod(lambda cls: cls(**{**vars(LLAMA), "vocab_size": 257}))
    monkeypatch.setattr(TransformerConfig, "toy", toy, raising=False)
    monkeypatch.setattr("afinar.train.session.sample", lambda run: ("", ""))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{k} squared is {k * k}.\n" for k in range(60)))

    def run(*args):
        status = main([str(a) for a in args])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def digests(folder):
    return json.loads((folder / "digests.json").read_text())


def test_a_deterministic_run_on_a_gpu_is_verified_on_a_cpu(command, tmp_path):
    train = functools.partial(command, "train", *TOY, "--data", "text.txt", "--deterministic")
    assert train("--out", "a", "--device", "gpu")[0] == 0
    assert train("--out", "b", "--device", "cpu")[0] == 0
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    for device in ("cpu", "gpu", "auto"):
        assert command("verify", "a", "--device", device)[0] == 0
    assert command("verify", "a", "--device", "cpu", "--from", "2")[0] == 0
    for rest in (
        ("eval", "--model", "a", "--data", "text.txt", "--seq-len", 8),
        ("generate", "a", "--prompt", "9 sq", "--max-new-tokens", 5, "--temperature", 0),
    ):
        there, here = command(*rest, "--device", "gpu"), command(*rest, "--device", "cpu")
        assert there == here
        assert there[0] == 0
    environment = json.loads((tmp_path / "a/environment.json").read_text())
    (session,) = environment["sessions"]
    assert (session["device"], session["deterministic"]) == ("gpu", True)
    assert session["gpu"]
    rows = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert all({"gpu_used_mb", "gpu_held_mb"} <= row.keys() for row in rows)


def test_a_plain_run_on_a_cpu_is_verified_on_a_gpu(command, tmp_path):
    assert command("train", *TOY, "--data", "text.txt", "--out", "a", "--device", "cpu")[0] == 0
    assert command("verify", "a", "--device", "gpu")[0] == 0


def test_a_fast_run_on_a_gpu_says_that_it_holds_there_alone(command, tmp_path):
    assert command("train", *TOY, "--data", "text.txt", "--out", "a", "--device", "gpu")[0] == 0
    assert {r["device"] for r in digests(tmp_path / "a")["steps"]} == {"gpu"}
    assert command("verify", "a")[0] == 0
    status, printed = command("verify", "a", "--device", "cpu")
    assert status == 2
    assert "computed on a GPU in its fast mode, whose bits no other device has" in printed


def test_a_run_is_resumed_on_another_device(command, tmp_path, monkeypatch):
    from afinar.train import session

    def stop_at_two(row):
        stopping.append(row["step"])
        return row

    stopping = []
    steps = session.steps
    train = functools.partial(command, "train", *TOY, "--data", "text.txt", "--deterministic")
    assert train("--out", "straight", "--device", "cpu")[0] == 0
    monkeypatch.setattr(session, "steps", lambda run, last: map(stop_at_two, steps(run, 2)))
    assert train("--out", "a", "--device", "gpu")[0] == 1
    monkeypatch.undo()
    monkeypatch.setattr("afinar.train.session.sample", lambda run: ("", ""))
    monkeypatch.chdir(tmp_path)
    toy = classmethod(lambda cls: cls(**{**vars(LLAMA), "vocab_size": 257}))
    monkeypatch.setattr(TransformerConfig, "toy", toy, raising=False)
    assert command("train", "--resume", "a", "--device", "cpu")[0] == 0
    assert digests(tmp_path / "a") == digests(tmp_path / "straight")
