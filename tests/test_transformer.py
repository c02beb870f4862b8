"""Modules, configs and the Llama family: structure, init, invariances, errors."""

import dataclasses
import threading

import numpy as np
import pytest

from afinar.autograd import Tensor, no_grad, rope_table
from afinar.transformer import (
    Decoder,
    DecoderConfig,
    Module,
    Transformer,
    TransformerConfig,
    generate,
    lock_init_seed,
    preset,
)
from afinar.transformer.layers import Linear

TINY = TransformerConfig.tiny()
FULL = dataclasses.replace(
    TINY,
    num_kv_heads=1,
    head_dim=16,
    attention_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def model():
    return Transformer(FULL, seed=1)


# --- modules -------------------------------------------------------------------------------


class Pair(Module):
    def __init__(self):
        self.b, self.note, self.parts = Linear(2, 3), "no part of it", [Linear(3, 3, bias=False)]
        self.a = Tensor([1.0])
        self.twice = self.parts[0]


def test_a_module_is_a_tree_in_definition_order():
    pair = Pair()
    names = [name for name, _ in pair.named_parameters()]
    assert names == ["b.weight", "b.bias", "parts.0.weight", "a"]
    assert pair.num_parameters == 6 + 3 + 9 + 1
    assert [name for name, _ in pair.named_modules()] == ["", "b", "parts.0", "twice"]
    assert pair.get_module("parts.0") is pair.twice
    new = Linear(3, 3)
    pair.set_module("parts.0", new)
    assert pair.parts[0] is new
    assert not pair.eval().parts[0].training
    assert pair.train().b.training
    for path in ("parts.1", "a", "note", "b.c"):
        with pytest.raises(KeyError, match=path):
            pair.get_module(path)


def test_state_goes_round_and_what_does_not_fit_is_named(model):
    other = Transformer(FULL, seed=2)
    other.load_state_dict(model.state_dict())
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(a.data, b.data)
        assert a.data is not b.data
    name = "model.layers.0.self_attn.q_norm.weight"
    state = model.state_dict()
    kept = state.pop(name)
    with pytest.raises(ValueError, match=f"missing {name}, unexpected other"):
        other.load_state_dict(state | {"other": kept})
    with pytest.raises(ValueError, match=rf"{name} is \(15,\), the model needs \(16,\)"):
        other.load_state_dict(state | {name: kept[1:]})


def test_tied_weights_may_come_twice_if_they_are_equal():
    model = Transformer(TINY)
    table = model.model.embed_tokens.weight.data
    model.load_state_dict(model.state_dict() | {"lm_head.weight": table.copy()})
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight are one"):
        model.load_state_dict(model.state_dict() | {"lm_head.weight": table + 1})


# --- configs -------------------------------------------------------------------------------


def test_sizes_of_the_presets():
    assert len(Transformer(TINY).parameters()) == 20
    assert Transformer(TINY).num_parameters == 195_392
    untied = Transformer(dataclasses.replace(TINY, tie_word_embeddings=False))
    assert [name for name, _ in untied.named_parameters()][-1] == "lm_head.weight"
    assert TransformerConfig.qwen3_4b().q_dim == 4096
    assert TransformerConfig.from_size_str("0.5B") == TransformerConfig.qwen2_0_5b()
    with pytest.raises(ValueError, match=r"Known sizes: codebert, 0.5B, 4B, 7B, 9B"):
        TransformerConfig.from_size_str("3B")


def test_published_parameter_counts():
    for config, count in (
        (TransformerConfig.llama2_7b(), 6_738_415_616),
        (TransformerConfig.mistral_7b(), 7_241_732_096),
        (TransformerConfig.qwen2_0_5b(), 494_032_768),
        (TransformerConfig.qwen2_7b(), 7_615_616_512),
        (TransformerConfig.qwen3_4b(), 4_022_468_096),
    ):
        assert Transformer.empty(config).num_parameters == count


def test_the_two_names_of_the_number_of_kv_heads():
    sizes = TINY.to_dict()
    sizes.pop("num_kv_heads")
    config = TransformerConfig(**sizes, num_key_value_heads=1)
    assert (config.num_kv_heads, config.num_key_value_heads, config.kv_dim) == (1, 1, 32)
    assert TransformerConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="num_kv_heads is 2"):
        TransformerConfig(**sizes, num_key_value_heads=1, num_kv_heads=2)
    with pytest.raises(ValueError, match="unknown hidden; known: hidden_size"):
        TransformerConfig.from_dict({"hidden": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; needed: a positive integer"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5"),
        ({"num_kv_heads": 3}, "num_attention_heads is 2; needed: a multiple of num_kv_heads, 3"),
        ({"head_dim": None, "hidden_size": 63}, "hidden_size is 63"),
        ({"head_dim": 15}, "head_dim is 15; needed: an even number"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; needed: a positive number"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0; needed: a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": "1e4"}, "rope_theta is 1e4"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"qk_norm_eps": float("nan")}, "qk_norm_eps is nan"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"intermediate_size": float("nan")}, "intermediate_size is nan"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"layer_types": 5}, "layer_types is 5; needed: a list of strings"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"architecture": ["decoder"]}, "architecture is"),
        ({"hf_model_type": 5}, "hf_model_type is 5; needed: a string"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor nan"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ("full_attention",)}, "layer_types is 1 entries"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window is None"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling is type 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear with factor None"),
        ({"architecture": "both"}, "architecture is both"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_what_is_config_only_is_refused_by_name():
    with pytest.raises(ValueError, match="codebert"):
        Transformer(TransformerConfig.codebert())
    with pytest.raises(ValueError, match="qwen3_5_9b"):
        Transformer(TransformerConfig.qwen3_5_9b())


def test_hugging_face_names():
    names = {
        "llama2_7b": ("LlamaForCausalLM", "llama"),
        "mistral_7b": ("MistralForCausalLM", "mistral"),
        "qwen2_7b": ("Qwen2ForCausalLM", "qwen2"),
        "qwen3_4b": ("Qwen3ForCausalLM", "qwen3"),
        "codebert": ("BertModel", "roberta"),
    }
    for name, (architecture, kind) in names.items():
        config = getattr(TransformerConfig, name)()
        assert (config.hf_architecture_name, config.hf_model_type_name) == (architecture, kind)


# --- parameters ----------------------------------------------------------------------------


def test_order_of_the_parameters(model):
    names = [name for name, _ in model.named_parameters()]
    assert names[:2] == ["model.embed_tokens.weight", "model.norm.weight"]
    at = "model.layers.0."
    block = [name.removeprefix(at) for name in names if name.startswith(at)]
    assert block == [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"self_attn.{x}_proj.bias" for x in "qkvo"),
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")),
    ]
    assert names[-1] == "lm_head.weight"


def test_init_is_a_function_of_seed_and_name():
    a, b = Transformer(TINY, seed=5).state_dict(), Transformer(TINY, seed=6).state_dict()
    deeper = Transformer(dataclasses.replace(TINY, num_hidden_layers=3), seed=5).state_dict()
    matrices = [name for name in a if a[name].ndim == 2]
    for name in a:
        np.testing.assert_array_equal(a[name], deeper[name])
    seen = {a[name].tobytes() for name in matrices} | {b[name].tobytes() for name in matrices}
    assert len(seen) == 2 * len(matrices)
    values = np.concatenate([a[name].ravel() for name in matrices])
    assert abs(values.mean()) < 2e-4
    assert abs(values.std() - 0.02) < 2e-4
    lag = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(lag) < 0.01
    assert all((a[name] == 1).all() for name in a if name not in matrices)


def test_the_seed_in_force():
    def table(seed=None):
        return Transformer(TINY, seed).model.embed_tokens.weight.data.tobytes()

    assert table() == table(42)
    with lock_init_seed(7):
        assert table() == table(7)
        with lock_init_seed(8):
            assert table() == table(8)
        assert table() == table(7)
        assert table(42) != table()
    assert table() == table(42)
    with pytest.raises(TypeError, match="'7'"), lock_init_seed("7"):
        pass


def test_threads_with_different_seeds_do_not_see_each_other():
    found, barrier = {}, threading.Barrier(4)

    def make(seed):
        with lock_init_seed(seed):
            barrier.wait()
            found[seed] = Transformer(TINY).model.embed_tokens.weight.data.tobytes()

    threads = [threading.Thread(target=make, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for seed, table in found.items():
        assert table == Transformer(TINY, seed).model.embed_tokens.weight.data.tobytes()


# --- the forward pass ----------------------------------------------------------------------

IDS = np.random.default_rng(3).integers(0, 1000, (2, 70))


def logits_of(model, *args, **kw):
    with no_grad():
        return model(*args, **kw).numpy()


def test_shapes_and_one_row_alone(model):
    logits = logits_of(model, IDS)
    assert logits.shape == (2, 70, 1000)
    np.testing.assert_array_equal(logits_of(model, IDS[1]), logits[1])
    np.testing.assert_array_equal(logits_of(model, IDS[1].tolist()), logits[1])


def test_a_token_changes_no_logits_before_it(model):
    changed = IDS.copy()
    changed[:, 40] += 1
    changed %= 1000
    a, b = logits_of(model, IDS), logits_of(model, changed)
    np.testing.assert_array_equal(a[:, :40], b[:, :40])
    assert (a[:, 40:] != b[:, 40:]).any(axis=-1).all()


def test_a_window_bounds_what_is_seen():
    model = Transformer(dataclasses.replace(TINY, sliding_window=3), seed=1)
    changed = IDS.copy()
    changed[:, 10] = (changed[:, 10] + 1) % 1000
    differ = (logits_of(model, IDS) != logits_of(model, changed)).any(axis=-1)
    assert differ[:, 10:15].all()  # two layers of two positions back each
    assert not differ[:, 15:].any()


def test_packed_texts_get_the_logits_that_they_have_alone(model):
    a, b = IDS[0, :9], IDS[1, :30]
    packed = np.concatenate([a, b])[None]
    segments = np.repeat([[0, 1]], [9, 30], axis=1)
    together = logits_of(model, packed, segments=segments)[0]
    np.testing.assert_array_equal(together[:9], logits_of(model, a))
    np.testing.assert_array_equal(together[9:], logits_of(model, b))


def test_padding_changes_nothing(model):
    row = IDS[0, :20]
    for left in (0, 1, 13):
        padded = np.zeros((1, 40), np.int64)
        padded[0, left : left + 20] = row
        segments = np.full((1, 40), -1)
        segments[0, left : left + 20] = 0
        logits = logits_of(model, padded, segments=segments)[0, left : left + 20]
        np.testing.assert_array_equal(logits, logits_of(model, row))


def test_only_distances_matter_to_rotary_positions():
    model = Transformer(TINY, seed=1)
    near = logits_of(model, IDS[:, :8])
    far = logits_of(model, IDS[:, :8], positions=np.arange(8) + 400)
    np.testing.assert_allclose(near, far, atol=2e-5)
    spread = logits_of(model, IDS[:, :8], positions=np.arange(8) * 50)
    assert np.abs(near - spread).max() > 1e-3


def test_checkpointing_changes_no_bits(model):
    def gradients(policy):
        model.checkpointing = policy
        model.zero_grad()
        loss = model.loss(IDS[:, :-1], IDS[:, 1:])
        loss.backward()
        return [loss.data, *(p.grad for p in model.parameters())]

    plain = gradients(None)
    for policy in (lambda n: True, lambda n: n == 1, lambda n: False):
        for a, b in zip(plain, gradients(policy), strict=True):
            np.testing.assert_array_equal(a, b)
    model.checkpointing = None


def test_loss_of_a_uniform_model_is_log_v():
    model = Transformer(TINY)
    model.lm_head.weight.data[...] = 0
    targets = np.where(IDS % 3 == 0, -100, IDS)
    assert abs(model.loss(IDS, targets).item() - np.log(1000)) < 1e-5
    assert model.loss(IDS, np.full_like(IDS, -100)).item() == 0


def test_every_weight_has_its_gradient_by_differences(model):
    ids, rng = IDS[:, :12], np.random.default_rng(0)
    for p in model.parameters():
        p.data[...] += rng.normal(0, 0.05, p.shape)
    model.zero_grad()
    model.loss(ids, ids[:, ::-1]).backward()
    for name, p in model.named_parameters():
        # one random direction, along which float32 differences are still good
        u = rng.normal(size=p.shape).astype(np.float32)
        u *= np.float32(0.5 / np.sqrt((u * u).sum()))
        kept, sides = p.data.copy(), []
        for sign in (1, -1):
            p.data = kept + np.float32(sign * 0.1) * u
            sides.append(np.float64(model.loss(ids, ids[:, ::-1], reduction="sum").data))
        p.data = kept
        slope = (sides[0] - sides[1]) / 0.2 / ids.size
        norm = float(np.sqrt((p.grad.astype(np.float64) ** 2).sum()))
        assert abs(slope - float((p.grad * u).sum())) < 0.02 * norm + 2e-5, name


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        ([], {}, ValueError, "at least one token"),
        ([[]], {}, ValueError, "at least one token"),
        ([[1, 1000]], {}, ValueError, r"1000 at \(0, 1\) is not in 0 .. 999"),
        ([[-1]], {}, ValueError, r"-1 at \(0, 0\)"),
        ([[1.5]], {}, TypeError, "integers are needed"),
        ([[[1]]], {}, ValueError, r"\(B, T\) is needed"),
        ([[1] * 513], {}, ValueError, "512 is not in 0 .. 511"),
        ([[1, 2]], {"positions": [0, 600]}, ValueError, "600 is not in"),
        ([[1, 2]], {"positions": [0, -1]}, ValueError, "-1 is not in"),
        ([[1, 2]], {"positions": [0]}, ValueError, "positions: integers of shape"),
        ([[1, 2]], {"segments": [0, 0]}, ValueError, "segments: integers of shape"),
    ],
)
def test_wrong_input_never_reaches_a_kernel(model, ids, options, error, message):
    with pytest.raises(error, match=message):
        model(ids, **options)


def test_llama_3_frequencies():
    """The published values for theta 500000, head size 64, factor 32, 8192 positions."""
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    _, plain = rope_table(np.arange(2), 64, 500000.0)
    _, scaled = rope_table(np.arange(2), 64, 500000.0, scaling)
    freq = np.arcsin(scaled[1].astype(np.float64))  # the angle at position 1
    expected = {14: 3.2114460e-3, 15: 1.2905479e-3, 16: 4.2955680e-4}
    expected |= {17: 9.7082878e-5, 18: 1.9461638e-5, 31: 9.4183067e-8}
    for i, value in expected.items():
        assert abs(freq[i] / value - 1) < 1e-6
    np.testing.assert_array_equal(scaled[:, :15], plain[:, :15])
    np.testing.assert_allclose(scaled[1, 18:], plain[1, 18:] / 32, rtol=1e-6)
    np.testing.assert_allclose(
        rope_table(np.arange(9), 8, 100.0, {"rope_type": "linear", "factor": 4.0})[0][8],
        rope_table(np.arange(9), 8, 100.0)[0][2],
        rtol=1e-6,
    )


def test_arguments_of_the_wrong_kind_are_named():
    model = Transformer(TINY, seed=0)
    for make, message in (
        (lambda: Transformer({}), "Transformer: a TransformerConfig is needed, given a dict"),
        (lambda: Transformer(DecoderConfig()), "a TransformerConfig is needed, given a DecoderC"),
        (lambda: Decoder(TINY), "Decoder: a DecoderConfig is needed, given a TransformerConfig"),
        (lambda: Transformer(TINY, seed="x"), "Transformer: the seed must be an integer"),
        (lambda: Transformer(TINY, seed=1.0), "the seed must be an integer, given 1.0"),
        (lambda: TransformerConfig.from_dict([1]), "a dict is needed, given a list"),
        (lambda: TransformerConfig.from_apr_metadata([1]), "a dict is needed, given a list"),
        (lambda: generate(model, [1]), r"^generate missing 1 required .* 'max_new_tokens'"),
        (lambda: generate(model, [1], max_new_tokens=1, n=1), r"^generate got .* argument 'n'"),
    ):
        with pytest.raises(TypeError, match=message):
            make()
    for call, name in ((model, "ids"), (lambda x: model.loss([[1], [2]], x), "targets")):
        with pytest.raises(ValueError, match=f"^{name}: rows of one length are needed"):
            call([[1], [1, 2]])
    with pytest.raises(ValueError, match="preset: unknown name"):
        preset(["tiny"])
