"""The fused-qkv decoder: its sizes, its maths and its errors."""

import json

import numpy as np
import pytest

from afinar.autograd import Tensor, no_grad
from afinar.transformer.decoder import Decoder, DecoderConfig, preset
from afinar.transformer.dropout import dropout_scope

TOY = DecoderConfig(n_layer=2, n_head=2, d_model=16, block=8)


def ids(shape=(2, 8), high=100, seed=0):
    return np.random.default_rng(seed).integers(1, high, shape)


@pytest.mark.parametrize(
    ("name", "total", "without_positions"),
    [
        ("tiny", 5_309_952, 5_258_752),
        ("small", 38_971_392, 38_868_992),
        ("medium", 115_120_128, 114_966_528),
    ],
)
def test_parameter_counts_of_the_presets(name, total, without_positions):
    model = Decoder.empty(preset(name))
    assert model.num_parameters == model.num_params(non_embedding=False) == total
    assert model.num_params() == without_positions


def test_the_toy_model_has_39200_parameters():
    assert Decoder(TOY, seed=0).num_parameters == 39_200


def test_the_default_config_is_the_small_preset():
    assert DecoderConfig() == preset("small")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_model": 30, "n_head": 4}, "not divisible"),
        ({"d_model": 30, "n_head": 2, "pos": "rope"}, "even head dimension"),
        ({"block": 0}, "block must be positive"),
        ({"vocab": -1}, "vocab must be positive"),
        ({"d_ff": 0}, "d_ff must be positive"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"dropout": float("nan")}, "dropout must be in"),
        ({"eps": float("nan")}, "eps must be between"),
        ({"eps": 0}, "eps must be between"),
        ({"n_layer": True}, "n_layer must be positive"),
        ({"d_model": 512.0}, "d_model must be positive"),
        ({"tie": "no"}, "tie must be True or False"),
        ({"pos": ["rope"]}, "pos is"),
        ({"activation": ["gelu"]}, "activation is"),
        ({"pos": "alibi"}, "pos is"),
        ({"activation": "relu"}, "activation is"),
    ],
)
def test_a_wrong_config_is_refused_by_field(wrong, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**wrong)


def test_numbers_of_numpy_become_numbers_of_python():
    given = DecoderConfig(n_layer=np.int64(2), d_model=np.int32(16), n_head=2, eps=np.float64(0.5))
    assert json.loads(json.dumps(given.to_dict())) == {
        **DecoderConfig().to_dict(),
        "n_layer": 2,
        "d_model": 16,
        "n_head": 2,
        "eps": 0.5,
    }


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="unknown name 'huge'"):
        preset("huge")


def test_initial_weights_are_a_function_of_seed_and_name():
    a, b, c = Decoder(TOY, seed=1), Decoder(TOY, seed=1), Decoder(TOY, seed=2)
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters(), strict=True):
        assert np.array_equal(p.data, q.data)
        if p.ndim == 2:
            assert not np.array_equal(p.data, r.data), name
    assert not np.array_equal(a.blocks[0].attn.qkv.weight.data, a.blocks[1].attn.qkv.weight.data)


def test_initial_spread():
    model = Decoder(DecoderConfig(n_layer=2, n_head=4, d_model=128, vocab=500), seed=0)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            std = 0.02 / 2 if name.endswith("proj.weight") else 0.02  # sqrt(2 * 2 layers) = 2
            assert abs(p.data.std() / std - 1) < 0.02, name
            assert abs(p.data.mean()) < 0.001, name
        else:
            assert np.all(p.data == (1 if "ln" in name and name.endswith("weight") else 0)), name


@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_a_token_never_changes_what_came_before(pos):
    model = Decoder(DecoderConfig(n_layer=2, n_head=2, d_model=16, block=8, pos=pos), seed=0)
    x = ids()
    y = x.copy()
    y[:, 5] += 1
    with no_grad():
        a, b = model(x).numpy(), model(y).numpy()
    assert np.array_equal(a[:, :5], b[:, :5])
    assert not np.array_equal(a[:, 5], b[:, 5])


def test_padding_is_never_counted():
    model = Decoder(TOY, seed=0)
    x = ids((1, 8))
    short = model.loss(x[:, :5], x[:, :5]).item()
    padded = x.copy()
    padded[:, 5:] = 0
    assert model.loss(padded, padded).item() == pytest.approx(short, abs=1e-6)


def test_all_padding_gives_zero_and_no_gradient():
    model = Decoder(TOY, seed=0)
    loss = model.loss(ids(), np.zeros((2, 8), int))
    assert loss.item() == 0
    loss.backward()
    assert all(not np.any(p.grad) for p in model.parameters() if p.grad is not None)


def test_a_long_sequence_is_refused_and_next_logits_crops():
    model = Decoder(TOY, seed=0)
    with pytest.raises(ValueError, match="sequence of 9 tokens is longer than block 8"):
        model(ids((1, 9)))
    long = ids((1, 11))
    expected = model(long[:, -8:]).numpy()[:, -1]
    np.testing.assert_allclose(model.next_logits(long).numpy(), expected, atol=1e-6)


def test_a_tied_head_sums_both_gradients():
    tied = Decoder(TOY, seed=0)
    loose = Decoder(DecoderConfig(n_layer=2, n_head=2, d_model=16, block=8, tie=False), seed=0)
    state = tied.state_dict()
    loose.load_state_dict({**state, "lm_head.weight": state["tokens.weight"]})
    for model in (tied, loose):
        model.loss(ids(), ids()).backward()
    both = loose.tokens.weight.grad + loose.lm_head.weight.grad
    np.testing.assert_allclose(tied.tokens.weight.grad, both, rtol=1e-5, atol=1e-7)


def test_dropout_masks_follow_the_scope():
    model = Decoder(DecoderConfig(n_layer=2, n_head=2, d_model=16, block=8, dropout=0.3), seed=0)

    def logits(seed, step):
        with dropout_scope(seed, step), no_grad():
            return model(ids()).numpy()

    assert np.array_equal(logits(1, 2), logits(1, 2))
    assert not np.array_equal(logits(1, 2), logits(1, 3))
    assert not np.array_equal(logits(1, 2), logits(2, 2))
    assert not np.array_equal(model(ids()).numpy(), model(ids()).numpy())
    model.eval()
    assert np.array_equal(logits(1, 2), logits(1, 3))


def test_checkpointing_changes_no_bits():
    grads = []
    for checkpointing in (None, lambda n: True, lambda n: n == 1):
        model = Decoder(
            DecoderConfig(n_layer=2, n_head=2, d_model=16, block=8, dropout=0.2), seed=0
        )
        model.checkpointing = checkpointing
        with dropout_scope(0, 7):
            model.loss(ids(), ids()).backward()
        grads.append([p.grad.tobytes() for p in model.parameters()])
    assert grads[0] == grads[1] == grads[2]


def test_gpt2_names():
    names = dict(Decoder(TOY, seed=0).named_parameters(hf=True))
    assert {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.1.ln_2.bias",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_proj.weight",
        "transformer.ln_f.weight",
    } <= names.keys()


def test_finite_differences_of_every_parameter():
    """Along one direction, in float64: (f(+h) - f(-h)) / 2 h = <gradient, direction>."""
    config = DecoderConfig(n_layer=1, n_head=2, d_model=8, block=4, vocab=11, pos="rope")
    model = Decoder(config, seed=0)
    x, y = np.array([[1, 2, 3, 4]]), np.array([[2, 3, 4, 0]])
    rng = np.random.default_rng(0)
    for p in model.parameters():
        p.data = p.data.astype(np.float64) + 0.1 * rng.standard_normal(p.shape)
        p.requires_grad = False
        p._leaf = None
        p.requires_grad = True
    model.loss(x, y).backward()
    for name, p in model.named_parameters():
        direction, at, h = rng.standard_normal(p.shape), p.data, 1e-5
        values = []
        for sign in (1, -1):
            p.data = at + sign * h * direction
            values.append(model.loss(x, y).item())
        p.data = at
        slope = (values[0] - values[1]) / (2 * h)
        assert slope == pytest.approx((p.grad * direction).sum(), rel=1e-5, abs=1e-8), name


@pytest.mark.parity
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_logits_and_gradients_of_gpt2(activation):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = DecoderConfig(
        n_layer=2, n_head=2, d_model=16, block=8, vocab=50, activation=activation
    )
    model = Decoder(config, seed=0)
    rng = np.random.default_rng(0)
    for p in model.parameters():
        p.data = p.data + 0.1 * rng.standard_normal(p.shape).astype(np.float32)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50,
            n_positions=8,
            n_embd=16,
            n_layer=2,
            n_head=2,
            activation_function="gelu" if activation == "gelu" else "gelu_new",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )

    def flip(name, a):  # Conv1D stores (in, out)
        return a.T if name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and a.ndim == 2 else a

    state = {n: torch.tensor(flip(n, p.data)) for n, p in model.named_parameters(hf=True)}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    theirs.load_state_dict(state, strict=False)
    x = ids((2, 8), 50)
    logits = theirs(torch.tensor(x)).logits
    np.testing.assert_allclose(model(x).numpy(), logits.detach().numpy(), atol=2e-5)
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 50), torch.tensor(x).reshape(-1))
    loss.backward()
    model.loss(x, x).backward()
    grads = dict(theirs.named_parameters())
    for name, p in model.named_parameters(hf=True):
        np.testing.assert_allclose(
            p.grad, flip(name, grads[name].grad.numpy()), atol=2e-5, err_msg=name
        )


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="2030"):
        Decoder(TOY, seed=0)([[2030]])
    with pytest.raises(ValueError, match="targets of that shape"):
        Decoder(TOY, seed=0).loss(ids(), ids((2, 7)))


def test_segments_separate_texts_that_share_a_row():
    model = Decoder(TOY, seed=0)
    a, b = ids((1, 3)), ids((1, 5), seed=1)
    packed = model(np.concatenate([a, b], 1), segments=[[0, 0, 0, 1, 1, 1, 1, 1]]).numpy()
    np.testing.assert_allclose(packed[:, :3], model(a).numpy(), atol=1e-6)
    np.testing.assert_allclose(packed[:, 3:], model(b).numpy(), atol=1e-6)


def test_the_decoder_is_a_tensor_function():
    assert isinstance(Decoder(TOY, seed=0)(ids()), Tensor)
