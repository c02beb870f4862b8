"""What holds for every adapter: properties over drawn models, targets, ranks and values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import Tensor, no_grad
from afinar.autograd import linear as linear_op
from afinar.autograd.testing import gradcheck
from afinar.lora import (
    LoRAConfig,
    LoRALinear,
    adapter_params,
    apply_lora,
    load_adapter,
    load_adapter_peft,
    lora_modules,
    merge_lora,
    merged_state_dict,
    save_adapter,
    save_adapter_peft,
    unmerge_lora,
)
from afinar.lora.linear import add_columns, add_slices
from afinar.optim import weights_sha256
from afinar.transformer import Transformer, TransformerConfig
from afinar.transformer.decoder import Decoder, DecoderConfig
from afinar.transformer.layers import Linear
from afinar.transformer.safetensors_io import TensorFile, write_safetensors

SEED_NAMES = ("q", "k", "v", "attn_out", "mlp_in", "mlp_out")


@st.composite
def adapted(draw, trained=True):
    """A function that makes a plain small model, a config for it, and the model adapted."""
    seed = draw(st.integers(0, 5))
    if draw(st.booleans()):
        config = DecoderConfig(
            vocab=20,
            n_layer=2,
            n_head=2,
            d_model=8,
            block=8,
            pos=draw(st.sampled_from(["learned", "rope"])),
        )

        def make():
            return Decoder(config, seed=seed).eval()
    else:
        config = TransformerConfig(
            hidden_size=8,
            num_attention_heads=2,
            num_kv_heads=draw(st.sampled_from([1, 2])),
            intermediate_size=12,
            num_hidden_layers=2,
            vocab_size=20,
            max_position_embeddings=8,
            attention_bias=draw(st.booleans()),
            tie_word_embeddings=draw(st.booleans()),
        )

        def make():
            return Transformer(config, seed=seed).eval()

    lora = LoRAConfig(
        r=draw(st.integers(1, 9)),
        alpha=draw(st.sampled_from([1, 8, 16, 0.5])),
        targets=draw(st.lists(st.sampled_from(SEED_NAMES), min_size=1, unique=True)),
        layers=draw(st.sampled_from([None, (0,), (1,), (0, 1)])),
        use_rslora=draw(st.booleans()),
        use_dora=draw(st.booleans()),
        modules_to_save=draw(st.sampled_from([None, ("norms",)])),
    )
    model = make()
    apply_lora(model, lora, seed=seed)
    if trained:
        rng = np.random.default_rng(draw(st.integers(0, 100)))
        for p in adapter_params(model):
            p.data = p.data + (0.2 * rng.standard_normal(p.shape)).astype(np.float32)
    return make, lora, model


X = np.random.default_rng(0).integers(1, 20, (2, 6))


def logits(model):
    with no_grad():
        return model(X).numpy()


@given(adapted(trained=False))
def test_identity_at_the_start(case):
    make, lora, model = case
    if lora.use_dora:  # m / n is 1 up to the rounding of one division
        np.testing.assert_allclose(logits(model), logits(make()), atol=1e-6)
    else:
        assert np.array_equal(logits(model), logits(make()))


@given(adapted())
def test_merging_and_unmerging_is_the_identity_in_bits(case):
    _, _, model = case
    digest, before = weights_sha256(model), logits(model)
    for _ in range(2):
        merge_lora(model)
        unmerge_lora(model)
    assert weights_sha256(model) == digest
    assert np.array_equal(logits(model), before)


@given(adapted())
def test_adapted_and_merged_logits_agree(case):
    make, _, model = case
    before, state = logits(model), merged_state_dict(model)
    merge_lora(model)
    assert np.abs(before - logits(model)).max() <= 1e-5 * max(np.abs(before).max(), 1)
    assert set(model.state_dict()) == set(make().state_dict())
    assert {n: a.tobytes() for n, a in state.items()} == {
        n: a.tobytes() for n, a in model.state_dict().items()
    }


@given(adapted())
def test_only_the_adapter_receives_gradients(case):
    _, _, model = case
    model.loss(X, X).backward()
    trained = {id(p) for p in adapter_params(model)}
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (id(p) in trained), name


@given(adapted())
def test_slices_outside_the_targets_never_move(case):
    make, _, model = case
    plain = make()
    h = np.random.default_rng(1)
    for name, m in lora_modules(model):
        base = plain.get_module(name)
        x = Tensor(h.standard_normal((3, base.weight.shape[1])).astype(np.float32))
        rows = np.ones(base.weight.shape[0], bool)
        for start, stop in m.slices:
            rows[start:stop] = False
        assert np.array_equal(m(x).numpy()[:, rows], base(x).numpy()[:, rows])
        assert np.array_equal(m.merged_weight()[rows], base.weight.data[rows])


@given(adapted(), st.randoms())
def test_a_file_round_trip_is_exact_whatever_the_order_of_keys(tmp_path_factory, case, random):
    make, lora, model = case
    path = tmp_path_factory.mktemp("adapter") / "adapter.safetensors"
    save_adapter(model, path)
    file = TensorFile(path)
    names = list(file.entries)
    random.shuffle(names)
    tensors = {n: file.read(n) for n in names}
    write_safetensors(path, tensors, file.metadata)
    restored = make()
    assert load_adapter(restored, path) == lora
    assert [p.data.tobytes() for p in adapter_params(restored)] == [
        p.data.tobytes() for p in adapter_params(model)
    ]
    assert np.array_equal(logits(restored), logits(model))


@given(adapted())
def test_a_peft_round_trip_keeps_the_logits(tmp_path_factory, case):
    make, lora, model = case
    folder = save_adapter_peft(model, tmp_path_factory.mktemp("peft"))
    restored = make()
    config = load_adapter_peft(restored, folder)
    assert (config.use_rslora, config.use_dora) == (lora.use_rslora, lora.use_dora)
    np.testing.assert_allclose(logits(restored), logits(model), atol=1e-5)
    again = save_adapter_peft(restored, tmp_path_factory.mktemp("peft"))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()


# --- gradients -----------------------------------------------------------------------------


@given(st.integers(0, 3), st.integers(1, 4), st.booleans(), st.booleans())
def test_gradients_of_an_adapted_layer(rows, r, use_dora, whole):
    rng = np.random.default_rng(rows)
    base = Linear(5, 6)
    base.weight = Tensor(rng.standard_normal((6, 5)))
    base.bias = Tensor(rng.standard_normal(6))
    slices = ((0, 6),) if whole else ((0, 2), (3, 6))
    layer = LoRALinear(base, r, 2.0, slices=slices, use_dora=use_dora)
    n = len(slices)
    arrays = [rng.standard_normal(p.shape) for p in layer.factors]
    fixed = [
        (base.weight.data[i:j] + 2.0 / r * b @ a)
        for (i, j), a, b in zip(slices, arrays[:n], arrays[n : 2 * n], strict=True)
    ]
    norms = [np.linalg.norm(w, axis=1) for w in fixed]

    def plain(x, *factors):
        """The formula with the norms as constants, which is how DoRA differentiates."""
        y = linear_op(x, base.weight, base.bias)
        w_x = linear_op(x, base.weight)
        parts = []
        for k, (i, j) in enumerate(slices):
            update = linear_op(linear_op(x, factors[k]), factors[n + k]) * (2.0 / r)
            if use_dora:
                ratio = factors[2 * n + k] / Tensor(norms[k])
                update = (ratio - 1) * w_x[..., i:j] + ratio * update
            parts.append(update)
        return add_slices(y, *parts, slices=slices)

    x = rng.standard_normal((rows, 5))
    gradcheck(plain, x, *arrays)
    grads = []
    for run in (plain, None):
        tensors = [Tensor(a, requires_grad=True) for a in (x, *arrays)]
        if run is None:
            layer.a, layer.b, layer.m = (
                tensors[1 : n + 1],
                tensors[n + 1 : 2 * n + 1],
                tensors[2 * n + 1 :],
            )
            out = layer(tensors[0])
        else:
            out = run(*tensors)
        out.backward(np.arange(out.size, dtype=float).reshape(out.shape))
        grads.append([t.grad for t in tensors])
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 5), st.sampled_from(["f4", "f8"]))
def test_the_fast_body_of_add_columns_is_its_reference(rows, width, start, dtype):
    rng = np.random.default_rng(rows)
    delta = rng.standard_normal((rows, width)).astype(dtype)
    out = rng.standard_normal((rows, start + width + 2)).astype(dtype)
    expected = out.copy()
    add_columns.reference(delta, start, expected)
    add_columns(delta, start, out)
    assert np.array_equal(out, expected)


def test_a_wrong_gradient_would_be_noticed():
    layer = LoRALinear(Linear(3, 3, False), 2, 2)
    layer.base.weight.data = np.zeros((3, 3), np.float32)

    def wrong(x, a, b):
        return linear_op(linear_op(x, a), b.detach())

    rng = np.random.default_rng(0)
    with pytest.raises(AssertionError):
        gradcheck(wrong, *(rng.standard_normal(s) for s in ((2, 3), (2, 3), (3, 2))))
