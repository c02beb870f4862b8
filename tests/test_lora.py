"""What makes LoRA LoRA, claim by claim, and that adapters survive files."""

import gc
import json
import re
import weakref

import numpy as np
import pytest

from afinar.autograd import Tensor, no_grad
from afinar.autograd import linear as linear_op
from afinar.lora import (
    LoRAConfig,
    LoRALinear,
    adapter_json,
    adapter_layout,
    adapter_params,
    adapter_size,
    apply_lora,
    describe,
    layer_from_json,
    layer_to_json,
    load_adapter,
    load_adapter_peft,
    lora_config,
    lora_modules,
    lora_param_groups,
    merge_lora,
    merged_state_dict,
    resolve_targets,
    save_adapter,
    save_adapter_peft,
    saved_modules,
    stack_adapter,
    trainable_line,
    unmerge_lora,
    write_stacked,
)
from afinar.lora.pissa import principal_factors
from afinar.lora.quantized import NF4, QuantizedLinear
from afinar.optim import AdamW, weights_sha256
from afinar.transformer import (
    Transformer,
    TransformerConfig,
    lock_init_seed,
    save_apr,
    save_pretrained,
)
from afinar.transformer.decoder import Decoder, DecoderConfig, preset
from afinar.transformer.dropout import dropout_scope
from afinar.transformer.layers import Linear
from afinar.transformer.safetensors_io import TensorFile, write_safetensors

TOY = DecoderConfig(n_layer=2, n_head=2, d_model=16, block=8)
QV = LoRAConfig(r=4, alpha=8, targets=("q", "v"))


def decoder(seed=0, config=TOY):
    return Decoder(config, seed=seed).eval()


def llama(seed=0, **changes):
    values = {**TransformerConfig.tiny().to_dict(), **changes}
    return Transformer(TransformerConfig.from_dict(values), seed=seed).eval()


def ids(shape=(2, 8), high=100, seed=1234):
    return np.random.default_rng(seed).integers(1, high, shape)


def logits(model, x=None):
    with no_grad():
        return model(ids() if x is None else x).numpy()


def disturb(model, std=0.05, seed=7):
    """Give every trained tensor a random value, as training would."""
    rng = np.random.default_rng(seed)
    for p in adapter_params(model):
        p.data = p.data + (std * rng.standard_normal(p.shape)).astype(p.dtype)


def linear_layer(O, I, bias=False, seed=0):  # noqa: E741
    layer = Linear(I, O, bias)
    layer.weight.data[...] = np.random.default_rng(seed).standard_normal((O, I))
    return layer


# --- the claims of the seed, under their own names -----------------------------------------


def test_an_untrained_adapter_is_the_identity():
    for model in (decoder(), llama()):
        before = logits(model)
        apply_lora(model, LoRAConfig(r=4))
        assert np.array_equal(before, logits(model))


def test_only_the_factors_are_trainable():
    model = decoder()
    trainable = apply_lora(model, QV)
    by_grad = [p for p in model.parameters() if p.requires_grad]
    assert trainable == sum(p.size for p in by_grad)
    assert {id(p) for p in by_grad} == {id(p) for p in adapter_params(model)}


def test_trainable_count_is_the_formula_on_the_card():
    model = decoder()
    assert apply_lora(model, QV) == TOY.n_layer * 2 * 2 * QV.r * TOY.d_model


def test_the_fused_projection_gives_each_target_its_own_factors():
    model = decoder()
    apply_lora(model, QV)
    adapters = dict(lora_modules(model))
    assert set(adapters) == {"blocks.0.attn.qkv", "blocks.1.attn.qkv"}
    qkv, d = adapters["blocks.0.attn.qkv"], TOY.d_model
    assert qkv.slices == ((0, d), (2 * d, 3 * d))
    assert len(qkv.a) == len(qkv.b) == 2
    assert not np.array_equal(qkv.a[0].data, qkv.a[1].data)


def test_the_key_slice_never_moves_when_only_q_and_v_are_adapted():
    model = decoder()
    x = ids()
    keys = []
    d = TOY.d_model
    apply_lora(model, QV)
    for changed in (False, True):
        if changed:
            disturb(model, std=1.0)
        h = model.blocks[0].ln1(model.tokens(x))
        keys.append(model.blocks[0].attn.qkv(h).numpy()[..., d : 2 * d])
    assert np.array_equal(*keys)
    for _, adapter in lora_modules(model):
        weight, base = adapter.merged_weight(), adapter.base.weight.data
        assert np.array_equal(weight[d : 2 * d], base[d : 2 * d])
        assert not np.allclose(weight[:d], base[:d])


def test_merging_reproduces_the_adapted_model_exactly():
    model = decoder()
    apply_lora(model, QV)
    disturb(model)
    adapted = logits(model)
    assert merge_lora(model) == TOY.n_layer
    assert not lora_modules(model)
    np.testing.assert_allclose(adapted, logits(model), rtol=1e-5, atol=1e-6)


def test_a_merged_model_has_the_state_dict_of_a_plain_decoder():
    model = decoder()
    before = set(model.state_dict())
    apply_lora(model, LoRAConfig(r=4))
    assert "blocks.0.attn.qkv.base.weight" in model.state_dict()
    assert "blocks.0.attn.qkv.a.0" in model.state_dict()
    merge_lora(model)
    assert set(model.state_dict()) == before


def test_adapter_round_trips_through_safetensors(tmp_path):
    trained = decoder()
    apply_lora(trained, QV)
    disturb(trained)
    path = save_adapter(trained, tmp_path / "new" / "adapter.safetensors", QV)
    assert path.with_name("adapter_config.json").is_file()
    restored = decoder()
    assert load_adapter(restored, path) == QV
    assert np.array_equal(logits(trained), logits(restored))


def test_the_adapter_is_a_rounding_error_next_to_the_published_model(tmp_path):
    model = Decoder.empty(preset("medium"))
    for p in model.parameters():
        p.data[...] = 0
    config = LoRAConfig(r=8, alpha=16, targets=("q", "v"))
    assert apply_lora(model, config) == 393_216
    assert adapter_size(model) == (393_216, 115_120_128)
    assert 393_216 / 115_120_128 < 0.004
    assert describe(model, config) == (
        "LoRA r=8 alpha=16 on [q, v]: 393,216 trainable of 115,513,344 (0.34 %)"
    )
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    raw = path.read_bytes()
    assert len(raw) - 8 - int.from_bytes(raw[:8], "little") == 1_572_864
    assert adapter_layout(model).numel == 393_216


def test_gradients_reach_the_factors_and_nothing_else():
    model = decoder()
    apply_lora(model, QV)
    model.loss(ids(), ids()).backward()
    assert all(p.grad is not None for p in adapter_params(model))
    for _, adapter in lora_modules(model):
        assert all(not a.grad.any() for a in adapter.a)  # B is zero at first
        assert all(b.grad.any() for b in adapter.b)
        assert adapter.base.weight.grad is None
        assert adapter.base.bias.grad is None
    assert model.tokens.weight.grad is None


def test_targets_are_validated():
    with pytest.raises(ValueError, match="unknown LoRA targets"):
        apply_lora(decoder(), LoRAConfig(targets=("qq",)))
    with pytest.raises(ValueError, match="at least one"):
        apply_lora(decoder(), LoRAConfig(targets=()))


def test_mlp_targets_use_the_feed_forward_width():
    model = decoder(config=DecoderConfig(n_layer=1, n_head=2, d_model=16, d_ff=40, block=8))
    apply_lora(model, LoRAConfig(r=2, targets=("mlp_in", "mlp_out")))
    adapters = dict(lora_modules(model))
    assert adapters["blocks.0.mlp.fc"].slices == ((0, 40),)
    assert adapters["blocks.0.mlp.proj"].slices == ((0, 16),)


def test_scale_follows_alpha_over_r():
    assert LoRALinear(linear_layer(4, 4), 2, 8, 0.0, ((0, 4),)).scale == 4.0
    assert LoRALinear(linear_layer(4, 4), 4, 8, use_rslora=True).scale == 4.0


def test_the_factors_are_built_where_the_weight_they_correct_lives():
    model = decoder()
    apply_lora(model, QV)
    for _, adapter in lora_modules(model):
        for factor in adapter.factors:
            assert type(factor.data) is type(adapter.base.weight.data)
            assert factor.dtype == adapter.base.weight.dtype
    half = linear_layer(4, 4)
    half.weight.requires_grad = False
    half.weight.data = (half.weight.data.view(np.uint32) >> 16).astype(np.uint16)
    assert all(p.dtype == np.float32 for p in LoRALinear(half, 2, 2).factors)


# --- the formula ---------------------------------------------------------------------------


def test_golden_formula():
    """y = x W^T + b + (alpha / r) x A^T B^T, A (r, in), B (out, r)."""
    layer = LoRALinear(linear_layer(5, 3, bias=True), r=2, alpha=6)
    rng = np.random.default_rng(1)
    layer.b[0].data = rng.standard_normal((5, 2)).astype(np.float32)
    layer.base.bias.data = rng.standard_normal(5).astype(np.float32)
    x = rng.standard_normal((4, 3)).astype(np.float32)
    W, A, B, b = (
        p.data.astype(np.float64)
        for p in (layer.base.weight, layer.a[0], layer.b[0], layer.base.bias)
    )

    np.testing.assert_allclose(
        layer(Tensor(x)).numpy(), x @ W.T + b + 3 * x @ A.T @ B.T, rtol=1e-5, atol=1e-6
    )


def test_a_starts_uniform_within_one_over_root_in():
    layer = LoRALinear(linear_layer(64, 400), r=64, alpha=1)
    a = layer.a[0].data
    assert np.abs(a).max() <= 0.05
    assert abs(a.std() - 0.05 / np.sqrt(3)) < 2e-4
    assert not layer.b[0].data.any()


def test_the_seed_in_force_is_the_default():
    with lock_init_seed(3):
        model = decoder()
        apply_lora(model, QV)
    other = decoder()
    apply_lora(other, QV, seed=3)
    assert weights_sha256(model) == weights_sha256(other)


def test_factors_are_a_function_of_seed_path_and_slice():
    states = []
    for seed in (0, 0, 1):
        model = decoder()
        apply_lora(model, QV, seed=seed)
        states.append([a.data for _, m in lora_modules(model) for a in m.a])
    assert all(np.array_equal(x, y) for x, y in zip(states[0], states[1], strict=True))
    assert not any(np.array_equal(x, y) for x, y in zip(states[0], states[2], strict=True))
    assert len({a.tobytes() for a in states[0]}) == 4


def test_dropout_is_drawn_once_per_call_and_only_while_training():

    layer = LoRALinear(linear_layer(8, 6), 2, 2, dropout=0.5, slices=((0, 4), (4, 8)), name="x")
    for b, a in zip(layer.b, layer.a, strict=True):
        a.data = np.eye(2, 6, dtype=np.float32)
        b.data = np.ones((4, 2), np.float32)
    layer.base.weight.data = np.zeros((8, 6), np.float32)  # so that the difference is exact
    x = Tensor(np.ones((50, 6), np.float32))
    plain = layer.base(x).numpy()
    with dropout_scope(0, 0):
        delta = layer.train()(x).numpy() - plain
    assert np.array_equal(delta[:, :4], delta[:, 4:])  # one mask for both slices
    assert set(np.round(np.unique(delta), 3)) == {0, 2, 4}  # each input is 0 or 1 / (1 - p)
    np.testing.assert_allclose(layer.eval()(x).numpy(), plain + 2, rtol=1e-5)


def test_checkpointing_changes_no_bits_of_the_gradients():
    grads = []
    for checkpointing in (None, lambda n: True):
        model = llama()
        apply_lora(model, LoRAConfig(r=4, dropout=0.3, targets="all-linear"))
        disturb(model)
        model.train()
        model.checkpointing = checkpointing
        with dropout_scope(1, 2):
            model.loss(ids(), ids()).backward()
        grads.append([p.grad.tobytes() for p in adapter_params(model)])
    assert grads[0] == grads[1]


def test_training_leaves_the_base_alone():
    model = llama()
    before = {n: a.tobytes() for n, a in model.state_dict().items()}
    apply_lora(model, LoRAConfig(r=4, targets="all_linear"))
    start = [p.data.copy() for p in adapter_params(model)]
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        model.loss(ids(), ids()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer.first_moments) == len(adapter_params(model)) == 28
    assert all(
        not np.array_equal(a, p.data) for a, p in zip(start, adapter_params(model), strict=True)
    )
    after = {n.replace(".base.", "."): p for n, p in model.named_parameters()}
    for name, data in before.items():
        assert after[name].data.tobytes() == data
        assert after[name].grad is None


def test_a_frozen_base_saves_no_activation_that_only_its_gradient_would_need():
    """The input of an MLP's last matrix is kept only if an adapter on that matrix learns."""

    def kept(targets):
        model = llama()
        apply_lora(model, LoRAConfig(r=2, targets=targets))
        refs, down = [], model.model.layers[0].mlp

        class Watch(type(down.down_proj)):
            def __call__(self, x):
                refs.append(weakref.ref(x.data))
                return super().__call__(x)

        down.down_proj.__class__ = Watch
        loss = model.loss(ids(), ids())
        gc.collect()
        alive = refs[0]() is not None
        del loss
        return alive

    assert not kept(("q_proj",))
    assert kept(("down_proj",))


# --- targets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("all_linear", 14),
        (("all_linear",), 14),
        ("all-linear", 14),
        ("attention", 8),
        ("mlp", 6),
        ("qv", 4),
        (("attention", "mlp"), 14),
        (("qv", "down_proj"), 6),
        (("q", "mlp_in"), 6),
        (("self_attn.q_proj",), 2),
        (("model.layers.1.mlp.up_proj",), 1),
        (r".*\.1\..*_proj", 7),
        (r"model\.layers\.0\.self_attn\.[qk]_proj", 2),
        (("lm_head",), 1),
    ],
)
def test_targets_on_a_transformer(targets, count):
    model = llama(tie_word_embeddings=False)
    apply_lora(model, LoRAConfig(r=2, targets=targets))
    assert len(lora_modules(model)) == count


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("v", "q"), {"attn.qkv": ((0, 16), (32, 48))}),
        (("q_proj", "v_proj"), {"attn.qkv": ((0, 16), (32, 48))}),
        (("k", "o_proj"), {"attn.qkv": ((16, 32),), "attn.proj": ((0, 16),)}),
        (("attn.qkv",), {"attn.qkv": ((0, 48),)}),
        (("c_attn",), {"attn.qkv": ((0, 48),)}),
        (("c_proj",), {"attn.proj": ((0, 16),), "mlp.proj": ((0, 16),)}),
        (("attn.c_proj",), {"attn.proj": ((0, 16),)}),
        ("mlp", {"mlp.fc": ((0, 64),), "mlp.proj": ((0, 16),)}),
        (
            "all-linear",
            {
                "attn.qkv": ((0, 48),),
                "attn.proj": ((0, 16),),
                "mlp.fc": ((0, 64),),
                "mlp.proj": ((0, 16),),
            },
        ),
        (
            ("all_linear",),
            {
                "attn.qkv": ((0, 16), (16, 32), (32, 48)),
                "attn.proj": ((0, 16),),
                "mlp.fc": ((0, 64),),
                "mlp.proj": ((0, 16),),
            },
        ),
        (r"transformer\.h\.0\.mlp\.c_fc", {"mlp.fc": ((0, 64),)}),
    ],
)
def test_targets_on_a_decoder(targets, expected):
    model = decoder()
    apply_lora(model, LoRAConfig(r=2, targets=targets))
    found = {n.split(".", 2)[2]: m.slices for n, m in lora_modules(model)}
    assert found == expected


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"targets": ("q", "qq")}, ValueError, r"unknown LoRA targets \['qq'\]; known"),
        ({"targets": ("q", "q")}, ValueError, "twice"),
        ({"targets": ("q", "q_proj")}, ValueError, "twice"),
        ({"targets": ("attention", "qv")}, ValueError, "twice"),
        ({"targets": ("q", "attn.qkv")}, ValueError, "twice"),
        ({"targets": ("gate_proj",)}, ValueError, "unknown LoRA targets"),
        ({"targets": "nothing.*"}, ValueError, "match no linear layer"),
        ({"targets": "("}, ValueError, "no regular expression"),
        ({"targets": ("ln1",)}, TypeError, "is a LayerNorm, not a Linear"),
        ({"targets": ("attn",)}, TypeError, "is a Attention, not a Linear"),
        ({"layers": (2,)}, ValueError, "layer 2 is not one of the model's 0 .. 1"),
        ({"layers": (0, 0)}, ValueError, "name a layer twice"),
        ({"rank_pattern": {"k_proj": 3}}, ValueError, "pattern 'k_proj' matches none"),
        ({"alpha_pattern": {"mlp.fc": 3}}, ValueError, "pattern 'mlp.fc' matches none"),
        ({"modules_to_save": ("norm",)}, ValueError, "names no module"),
        ({"modules_to_save": ("tokens",)}, ValueError, "one tensor"),
        ({"init": "pissa", "r": 17}, ValueError, "takes a rank of at most 16, not 17"),
    ],
)
def test_a_failed_call_changes_nothing(config, error, message):
    model = decoder()
    before = [(n, id(p), p.requires_grad) for n, p in model.named_parameters()]
    with pytest.raises(error, match=message):
        apply_lora(model, LoRAConfig(**{"r": 2, **config}))
    assert before == [(n, id(p), p.requires_grad) for n, p in model.named_parameters()]
    assert apply_lora(model, LoRAConfig(r=2)) > 0


def test_a_second_apply_is_refused():
    model = decoder()
    apply_lora(model, QV)
    disturb(model)
    before = logits(model)
    with pytest.raises(ValueError, match="has adapters"):
        apply_lora(model, QV)
    assert np.array_equal(before, logits(model))
    merge_lora(model)
    with pytest.raises(ValueError, match="kept aside"):
        apply_lora(model, QV)
    unmerge_lora(model)
    merge_lora(model, keep=False)
    assert apply_lora(model, QV) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"r": 0},
        {"r": 2.5},
        {"alpha": 0},
        {"alpha": float("nan")},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"rank_pattern": {"q": 0}},
        {"alpha_pattern": {"q": -1}},
        {"init": "zeros"},
        {"quantize": "int3"},
    ],
)
def test_a_wrong_config_is_refused(wrong):
    with pytest.raises(ValueError, match="LoRAConfig"):
        LoRAConfig(**wrong)


def test_layers_and_patterns():
    model = llama()
    apply_lora(
        model,
        LoRAConfig(
            r=4,
            alpha=8,
            targets=("q_proj", "v_proj"),
            layers=(1,),
            rank_pattern={"v_proj": 2},
            alpha_pattern={r"layers\.1\.self_attn\.q_proj": 3},
        ),
    )
    adapters = dict(lora_modules(model))
    q, v = (adapters[f"model.layers.1.self_attn.{n}_proj"] for n in "qv")
    assert len(adapters) == 2
    assert (q.r, q.scale, v.r, v.scale) == (4, 3 / 4, 2, 4.0)


def test_patterns_reach_the_slices_of_a_fused_matrix():
    model = decoder()
    apply_lora(model, LoRAConfig(r=4, targets=("q", "v"), rank_pattern={"v_proj": 2}))
    m = dict(lora_modules(model))["blocks.0.attn.qkv"]
    assert m.ranks == (4, 2)
    disturb(model)
    adapted = logits(model)
    merge_lora(model)
    np.testing.assert_allclose(adapted, logits(model), rtol=1e-5, atol=1e-6)


# --- merging -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [decoder, llama])
def test_unmerging_restores_the_bits(make):
    model = make()
    apply_lora(model, LoRAConfig(r=4, targets="all_linear"))
    disturb(model)
    digest, adapted = weights_sha256(model), logits(model)
    trained = {id(p) for p in adapter_params(model)}
    merge_lora(model)
    merged = logits(model)
    assert np.abs(merged - adapted).max() <= 1e-5 * np.abs(adapted).max()
    assert not adapter_params(model)
    assert all(p.requires_grad for p in model.parameters())
    unmerge_lora(model)
    assert weights_sha256(model) == digest
    assert np.array_equal(logits(model), adapted)
    assert {id(p) for p in model.parameters() if p.requires_grad} == trained


def test_unmerging_restores_the_bits_though_the_merged_model_was_trained():
    model = decoder()
    apply_lora(model, LoRAConfig(r=4, targets="attention"))
    disturb(model)
    bases = [p.data.tobytes() for _, m in lora_modules(model) for p in m.base.parameters()]
    merge_lora(model)
    optimizer = AdamW(model.parameters(), lr=0.1)
    model.loss(ids(), ids()).backward()
    optimizer.step()
    unmerge_lora(model)
    assert bases == [p.data.tobytes() for _, m in lora_modules(model) for p in m.base.parameters()]


def test_merge_and_unmerge_without_adapters_are_refused():
    model = decoder()
    with pytest.raises(ValueError, match="no LoRA adapters"):
        merge_lora(model)
    with pytest.raises(ValueError, match="no merged adapters"):
        unmerge_lora(model)
    apply_lora(model, QV)
    with pytest.raises(ValueError, match="no merged adapters"):
        unmerge_lora(model)
    merge_lora(model, keep=False)
    with pytest.raises(ValueError, match="no merged adapters"):
        unmerge_lora(model)


def test_merged_state_dict_leaves_the_model_as_it_is():
    model = decoder()
    plain_keys = set(model.state_dict())
    apply_lora(model, LoRAConfig(r=4, targets="all_linear"))
    disturb(model)
    digest = weights_sha256(model)
    state = merged_state_dict(model)
    assert weights_sha256(model) == digest
    assert set(state) == plain_keys
    plain = decoder(seed=1)
    plain.load_state_dict(state)
    merge_lora(model)
    assert np.array_equal(logits(plain), logits(model))


@pytest.mark.parametrize("make", [decoder, llama])
def test_a_merged_tied_head_is_untied(make):
    model = make()
    model.train()
    apply_lora(model, LoRAConfig(r=2, targets=("lm_head",)))
    disturb(model)
    adapted, tied = logits(model), model.config
    state = merged_state_dict(model)
    assert "lm_head.weight" in state
    merge_lora(model)
    np.testing.assert_allclose(logits(model), adapted, atol=1e-5)
    assert model.config != tied
    loose = type(model)(model.config, seed=3)
    loose.load_state_dict(model.state_dict())
    assert np.array_equal(logits(loose), logits(model))
    unmerge_lora(model)
    assert model.config == tied
    assert np.array_equal(logits(model), adapted)


def test_a_tied_head_without_an_adapter_stays_tied():
    model = llama()
    apply_lora(model, LoRAConfig(r=2))
    merge_lora(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in model.state_dict()


# --- variants ------------------------------------------------------------------------------


def test_lora_plus_is_a_learning_rate_of_its_own():
    model = decoder()
    apply_lora(model, QV)
    groups = lora_param_groups(model, lr=0.01, weight_decay=0.1, lora_plus_ratio=16)
    order = [p for g in groups for p in g["params"]]
    assert [id(p) for p in order] == [id(p) for p in model.parameters() if p.requires_grad]
    b = {id(p) for _, m in lora_modules(model) for p in m.b}
    for group in groups:
        for p in group["params"]:
            assert group["lr"] == (0.16 if id(p) in b else 0.01)
    optimizer = AdamW(groups, lr=0.01)
    before = {id(p): p.data.copy() for p in order}
    for p in order:
        p.grad = np.ones(p.shape, np.float32)
        p.data = np.zeros(p.shape, np.float32)
    optimizer.step()
    del before
    for p in order:  # the first Adam step is -lr * sign(g), whatever the gradient's size
        np.testing.assert_allclose(p.data, -0.16 if id(p) in b else -0.01, rtol=1e-5)
    with pytest.raises(ValueError, match="ratio must be positive"):
        lora_param_groups(model, lr=0.01, lora_plus_ratio=0)


def test_dora_is_its_formula():
    layer = LoRALinear(linear_layer(6, 4, bias=True), 2, 4, slices=((0, 2), (3, 6)), use_dora=True)
    rng = np.random.default_rng(0)
    for p in layer.factors:
        p.data = rng.standard_normal(p.shape).astype(np.float32)
    layer.base.bias.data = rng.standard_normal(6).astype(np.float32)

    x = rng.standard_normal((5, 4)).astype(np.float32)
    W = layer.base.weight.data.astype(np.float64).copy()
    for (i, j), a, b, m in zip(layer.slices, layer.a, layer.b, layer.m, strict=True):
        V = W[i:j] + 2 * b.data @ a.data
        W[i:j] = m.data[:, None] * V / np.linalg.norm(V, axis=1, keepdims=True)
    expected = x @ W.T + layer.base.bias.data
    np.testing.assert_allclose(layer(Tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.merged_weight(), W, rtol=1e-5, atol=1e-6)


def test_dora_starts_as_the_identity_and_trains_its_magnitudes():
    model = llama()
    before = logits(model)
    n = apply_lora(model, LoRAConfig(r=2, use_dora=True))
    assert n == 2 * 2 * (2 * (64 + 64) + 64)
    np.testing.assert_allclose(logits(model), before, atol=1e-6)
    model.loss(ids(), ids()).backward()
    assert all(m.grad.any() for _, a in lora_modules(model) for m in a.m)


def test_dora_of_a_row_of_zeros_is_finite():
    base = linear_layer(3, 4)
    base.weight.data = np.zeros((3, 4), np.float32)
    layer = LoRALinear(base, 2, 2, use_dora=True)
    assert np.isfinite(layer.merged_weight()).all()
    assert not layer.merged_weight().any()


def test_trained_norms_travel_with_the_adapter(tmp_path):
    config = LoRAConfig(r=2, modules_to_save=("norms",))
    model = llama()
    apply_lora(model, config)
    disturb(model, 0.3)
    norms = [n for n, p in model.named_parameters() if p.requires_grad and "norm" in n]
    assert len(norms) == 5
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    restored = llama()
    assert load_adapter(restored, path) == config
    assert np.array_equal(logits(model), logits(restored))


# --- 4 bits ---------------------------------------------------------------------------------


def test_int4_by_hand():
    """Blocks of 64, s = max / 7, the first code in the upper half of a byte, halves away from 0."""
    w = np.zeros((2, 64), np.float32)
    w[0, :6] = [7, -7, 2.5, -2.5, 0.49, 3]
    layer = QuantizedLinear(w, None, "int4")
    assert layer.codes[:3].tolist() == [0x79, 0x3D, 0x03]
    assert layer.scales.tolist() == [1, 0]
    assert layer.dequantized()[0, :6].tolist() == [7, -7, 3, -3, 0, 3]
    assert not layer.dequantized()[1].any()


@pytest.mark.parametrize("kind", ["int4", "int4-double", "nf4"])
def test_the_error_of_4_bits_is_bounded(kind):
    w = np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)
    layer = QuantizedLinear(w, None, kind)
    pad = np.zeros(63 * 64, np.float32)
    error, largest = pad.copy(), pad.copy()
    error[:4000], largest[:4000] = np.abs(layer.dequantized() - w).ravel(), np.abs(w).ravel()
    # Half a step of the scale; of nf4 half its widest gap; 8-bit scales are off by half a step.
    step = {"int4": 0.5 / 7, "nf4": (1 - 0.6961928) / 2, "int4-double": 0.5 / 7 + 0.012}[kind]
    largest = largest.reshape(-1, 64).max(axis=1, keepdims=True)
    assert (error.reshape(-1, 64) <= 1.01 * step * largest).all()
    bits = {"int4": 4.5, "nf4": 4.5, "int4-double": 4.2}
    assert layer.nbytes * 8 / w.size < bits[kind] * 1.02


@pytest.mark.parametrize("kind", ["int4", "int4-double", "nf4"])
@pytest.mark.parametrize("shape", [(7, 9), (64, 64), (33, 130)])
def test_a_product_in_4_bits_is_that_of_the_unpacked_matrix(kind, shape):

    rng = np.random.default_rng(0)
    w, x, g = (
        rng.standard_normal(s).astype(np.float32)
        for s in (shape, (2, 5, shape[1]), (2, 5, shape[0]))
    )
    bias = Tensor(rng.standard_normal(shape[0]).astype(np.float32))
    layer = QuantizedLinear(w, bias, kind)
    results = []
    for run in (layer, lambda t: linear_op(t, Tensor(layer.dequantized()), bias)):
        leaf = Tensor(x, requires_grad=True)
        y = run(leaf)
        y.backward(g)
        results += [(y.data.tobytes(), leaf.grad.tobytes())]
    assert results[0] == results[1]


def test_nf4_hits_its_sixteen_values():
    w = np.tile(NF4, 4)[None] * np.float32(3)
    assert np.array_equal(QuantizedLinear(w, None, "nf4").dequantized(), w)


def test_a_4_bit_base_keeps_no_float32_copy():

    model = llama()
    weights = [weakref.ref(m.weight.data) for _, m in model.named_modules() if type(m) is Linear]
    apply_lora(model, LoRAConfig(r=2, quantize="int4"))
    gc.collect()
    assert sum(w() is not None for w in weights) == 1  # the head, which is the embedding too


@pytest.mark.parametrize("kind", ["int4", "int4-double", "nf4"])
def test_a_4_bit_matrix_is_never_unpacked_to_train(kind, monkeypatch):
    model = llama()
    apply_lora(model, LoRAConfig(r=2, quantize=kind))

    def unpacked(self):
        raise AssertionError("unpacked")

    monkeypatch.setattr(QuantizedLinear, "dequantized", unpacked)
    model.loss(ids(), ids()).backward()
    assert all(p.grad is not None for p in adapter_params(model))


@pytest.mark.parametrize("kind", ["int4", "int4-double", "nf4"])
@pytest.mark.parametrize("make", [decoder, llama])
def test_a_4_bit_base_trains_merges_and_comes_back(kind, make):
    model = make()
    linears = [n for n, m in model.named_modules() if type(m) is Linear and n != "lm_head"]
    count = apply_lora(model, LoRAConfig(r=4, quantize=kind))
    assert adapter_size(model)[0] == count
    assert adapter_size(model)[1] == make().num_parameters
    packed = [m for _, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    assert len(packed) == len(linears)
    model.loss(ids(), ids()).backward()
    assert all(p.grad is not None for p in adapter_params(model))
    disturb(model)
    adapted, state = logits(model), merged_state_dict(model)
    assert merge_lora(model) == (2 if make is decoder else 4)
    assert all(p.dtype == np.float32 for p in model.parameters())
    assert np.abs(adapted - logits(model)).max() <= 1e-5 * np.abs(adapted).max()
    assert {n: a.tobytes() for n, a in state.items()} == {
        n: a.tobytes() for n, a in model.state_dict().items()
    }
    assert set(state) == set(make().state_dict())
    unmerge_lora(model)
    assert np.array_equal(logits(model), adapted)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"quantize": "int4"}])
def test_16_bit_bases_merge_into_float32(options):
    model = llama(attention_bias=True)
    rng = np.random.default_rng(0)
    for p in model.parameters():
        p.requires_grad = False
        p.data = p.data + (0.1 * rng.standard_normal(p.shape)).astype(np.float32)
        if p.ndim == 2:  # vectors stay in float32
            p.data = (p.data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    apply_lora(model, LoRAConfig(r=4, modules_to_save=("norms",), **options))
    assert all(p.dtype == np.float32 for p in adapter_params(model))
    model.loss(ids(), ids()).backward()
    disturb(model)
    adapted = logits(model)
    merge_lora(model)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.dtype == attention.q_proj.bias.dtype == np.float32
    assert options.get("quantize") or attention.k_proj.weight.dtype == np.uint16
    assert np.abs(adapted - logits(model)).max() <= 1e-5 * np.abs(adapted).max()


# --- PiSSA ---------------------------------------------------------------------------------


def test_pissa_takes_the_largest_singular_triples():
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.standard_normal((20, 12)))
    v, _ = np.linalg.qr(rng.standard_normal((12, 12)))
    s = 0.7 ** np.arange(12)
    w = (u * s @ v.T).astype(np.float32)
    a, b = principal_factors(w, 3, 2.0, 0, "x")
    np.testing.assert_allclose(2 * b @ a, u[:, :3] * s[:3] @ v[:, :3].T, atol=1e-5)
    np.testing.assert_allclose(2 * b.T @ b, np.diag(s[:3]), atol=1e-5)  # U^T U = 1, descending
    np.testing.assert_allclose(2 * a @ a.T, np.diag(s[:3]), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_pissa_leaves_the_model_as_it_was_and_exports_as_a_plain_adapter(tmp_path, options):
    model = decoder()
    before = logits(model)
    config = LoRAConfig(r=4, alpha=2, targets=("q", "v", "mlp_out"), init="pissa", **options)
    apply_lora(model, config)
    np.testing.assert_allclose(logits(model), before, atol=1e-5)
    assert all(m.b[0].data.any() for _, m in lora_modules(model))
    disturb(model)
    restored = decoder()
    exported = load_adapter_peft(restored, save_adapter_peft(model, tmp_path / "peft"))
    assert exported.init == "default"
    np.testing.assert_allclose(logits(restored), logits(model), atol=2e-5)
    restored = decoder()
    load_adapter(restored, save_adapter(model, tmp_path / "native" / "adapter.safetensors"))
    assert np.array_equal(logits(restored), logits(model))


# --- files ---------------------------------------------------------------------------------


def saved(tmp_path, config=QV):
    model = decoder()
    apply_lora(model, config)
    disturb(model)
    return save_adapter(model, tmp_path / "adapter.safetensors")


def rewrite(path, change):

    file = TensorFile(path)
    tensors = {n: file.read(n) for n in file.entries}
    change(tensors)
    write_safetensors(path, tensors, file.metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blocks.1.attn.qkv.lora_B.1"), r"missing blocks.1.attn.qkv.lora_B.1"),
        (lambda t: t.update(extra=np.zeros(2, np.float32)), "unexpected extra"),
        (
            lambda t: t.update({"blocks.0.attn.qkv.lora_A.0": np.zeros((16, 4), np.float32)}),
            r"blocks.0.attn.qkv.lora_A.0 is \(16, 4\), the model needs \(4, 16\)",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_one_clear_error(tmp_path, change, message):
    path = saved(tmp_path)
    rewrite(path, change)
    model = decoder()
    before = logits(model)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, path)
    assert not lora_modules(model)
    assert all(p.requires_grad for p in model.parameters())
    assert np.array_equal(before, logits(model))


def test_the_config_of_another_adapter_is_noticed(tmp_path):
    path = saved(tmp_path)
    config = path.with_name("adapter_config.json")
    config.write_text(config.read_text().replace('"alpha": 8', '"alpha": 9'))
    with pytest.raises(ValueError, match="not the config that adapter"):
        load_adapter(decoder(), path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"fine_tune_type": "lora", "lora_parameters": {"rank": 8}}', "mlx-lm"),
        ('{"peft_type": "LORA", "r": 8}', "load_adapter_peft"),
        ('{"r": 8, "colour": "red"}', "unknown fields"),
        ("[]", "an object is needed"),
        ("{", "not JSON"),
    ],
)
def test_configs_of_other_kinds_are_refused(tmp_path, text, message):
    path = saved(tmp_path)
    path.with_name("adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_adapter(decoder(), path)


def test_saving_without_adapters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no LoRA adapters to save"):
        save_adapter(decoder(), tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_stacked_tensors(tmp_path):
    model = decoder()
    apply_lora(model, QV)
    disturb(model)
    layout = adapter_layout(model)
    assert (layout.module, layout.layers, layout.scale, layout.width) == ("attn.qkv", 2, 2.0, 16)
    a, b = stack_adapter(model)
    assert a.shape == layout.shape_a == (2, 2, 4, 16)
    assert b.shape == layout.shape_b == (2, 2, 16, 4)
    assert np.array_equal(a[1, 0], lora_modules(model)[1][1].a[0].data)
    path = write_stacked(model, tmp_path / "adapter.bin", "base")
    raw = np.frombuffer(path.read_bytes(), "<f4")
    assert np.array_equal(raw, np.concatenate([a.ravel(), 2 * b.ravel()]))
    about = json.loads(path.with_suffix(".json").read_text())
    assert about["shape_a"] == [2, 2, 4, 16]
    assert about["scale_applied"] == 2.0


def test_blocks_are_stacked_by_number():
    model = Decoder(DecoderConfig(n_layer=11, n_head=1, d_model=4, block=4, vocab=8), seed=0)
    apply_lora(model, LoRAConfig(r=1))
    a, _ = stack_adapter(model)
    assert np.array_equal(a[10, 0], dict(lora_modules(model))["blocks.10.attn.qkv"].a[0].data)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "model has no LoRA adapters"),
        ({"targets": ("q", "mlp_in")}, "adapters on more than one matrix per block"),
        ({"rank_pattern": {r"blocks\.1\.attn\.qkv": 1}, "targets": ("attn.qkv",)}, "same shape"),
        ({"use_dora": True}, "DoRA"),
    ],
)
def test_what_cannot_be_stacked_is_refused(config, message):
    model = decoder()
    if config is not None:
        apply_lora(model, LoRAConfig(r=2, **config))
    with pytest.raises(ValueError, match=message):
        adapter_layout(model)


def test_slices_of_different_widths_cannot_be_stacked():
    model = decoder()
    apply_lora(model, LoRAConfig(r=2, targets=("attn.qkv",)))
    for name, m in lora_modules(model):
        model.set_module(name, LoRALinear(m.base, 2, 2, slices=((0, 10), (20, 48))))
    with pytest.raises(ValueError, match=r"slices of different widths \(\[10, 28\]\)"):
        adapter_layout(model)


def test_adapter_json():
    text = adapter_json(LoRAConfig(r=4, targets=("q",)), "some/base", {"note": 1})
    values = json.loads(text)
    assert text.endswith("}\n")
    assert values["lora"]["targets"] == ["q"]
    assert values["base_model"] == "some/base"
    assert values["note"] == 1


def test_one_layer_as_json():
    base = linear_layer(5, 3)
    layer = LoRALinear(base, 2, 6, use_rslora=True)
    layer.b[0].data = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    text = layer_to_json(layer)
    values = json.loads(text)
    assert (values["version"], values["rank"], values["d_out"], values["d_in"]) == ("1.0", 2, 5, 3)
    back = layer_from_json(text, base)
    assert back.scale == layer.scale
    assert np.array_equal(back.merged_weight(), layer.merged_weight())
    with pytest.raises(ValueError, match=r"Unsupported adapter version: 2\.0"):
        layer_from_json(text.replace('"1.0"', '"2.0"'), base)
    with pytest.raises(ValueError, match="the base is"):
        layer_from_json(text, linear_layer(3, 5))
    with pytest.raises(ValueError, match="needs 6 and 10 values"):
        layer_from_json(json.dumps({**values, "lora_a": [1.0]}), base)


def test_pefts_line():
    model = llama()
    apply_lora(model, LoRAConfig(r=8))
    assert trainable_line(model) == (
        "trainable params: 4,096 || all params: 199,488 || trainable%: 2.0533"
    )


def test_a_module_trained_whole_is_no_target_nor_what_is_below_it():
    model = Transformer(TransformerConfig.tiny(), seed=0)
    with pytest.raises(ValueError, match="match no linear layer"):
        apply_lora(model, LoRAConfig(r=2, targets=["up_proj"], modules_to_save=["mlp"]))
    assert not lora_modules(model)


@pytest.mark.parametrize("save", [save_pretrained, save_apr])
def test_a_tied_head_that_was_adapted_is_not_thrown_away(save, tmp_path):
    model = Transformer(TransformerConfig.tiny(), seed=0)
    apply_lora(model, LoRAConfig(r=2, targets=["lm_head"]))
    for _, layer in lora_modules(model):
        layer.b[0].data = np.ones_like(layer.b[0].data)
    state = merged_state_dict(model)
    with pytest.raises(ValueError, match="one tensor of this model"):
        save(model, tmp_path / "model.apr", state=state)


def test_factors_that_are_not_finite_are_named(tmp_path):
    model, new = decoder(), tmp_path / "new" / "adapter.safetensors"
    apply_lora(model, LoRAConfig(r=2, alpha=4, targets=("q", "v")))
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    factor = lora_modules(model)[1][1].b[0].data
    factor[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"save_adapter: .*qkv\.lora_B\.0' at index 7"):
        save_adapter(model, new)
    assert not new.parent.exists()
    rewrite(path, lambda tensors: tensors.update({"blocks.1.attn.qkv.lora_B.0": factor}))
    plain = decoder()
    with pytest.raises(ValueError, match=r"'blocks\.1\.attn\.qkv\.lora_B\.0' at index 7"):
        load_adapter(plain, tmp_path)
    assert not lora_modules(plain)
    assert all(p.requires_grad for p in plain.parameters())


def test_files_that_are_missing_are_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter.safetensors: no such file"):
        load_adapter(decoder(), tmp_path / "adapter.safetensors")
    model = decoder()
    apply_lora(model, LoRAConfig(r=2, alpha=4, targets=("q", "v")))
    save_adapter(model, tmp_path / "adapter.safetensors")
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"needs adapter_config\.json beside it"):
        load_adapter(decoder(), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[]", "an object is needed, given a list"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"version": "2.0"}, "Unsupported adapter version: 2.0"),
        ({"rank": None}, "rank is None"),
        ({"rank": 0}, "rank is 0"),
        ({"d_in": "6"}, "d_in is '6'"),
        ({"alpha": -1}, "alpha is -1"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"lora_a": "text"}, "lora_a must be a list of finite numbers"),
        ({"lora_b": [None] * 8}, "lora_b must be a list of finite numbers"),
        ({"lora_b": [float("nan")] * 8}, "lora_b must be a list of finite numbers"),
    ],
)
def test_wrong_json_of_a_layer_is_one_sentence(change, message):
    base = linear_layer(4, 6)
    text = layer_to_json(LoRALinear(base, 2, 4))
    text = change if isinstance(change, str) else json.dumps(json.loads(text) | change)
    with pytest.raises(ValueError, match=re.escape(message)):
        layer_from_json(text, base)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("targets", 3),
        ("targets", ["q", 3]),
        ("layers", 1),
        ("layers", "1"),
        ("layers", [1.0]),
        ("layers", [True]),
        ("modules_to_save", "norms"),
        ("modules_to_save", [3]),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {3: 2}),
        ("alpha_pattern", "q_proj"),
        ("use_dora", "no"),
        ("use_rslora", 1),
    ],
)
def test_values_of_the_wrong_type_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"LoRAConfig: {field} is "):
        LoRAConfig(**{field: value})


def test_what_is_no_config_and_what_is_no_ratio():
    with pytest.raises(TypeError, match="apply_lora: a LoRAConfig is needed, given a dict"):
        apply_lora(decoder(), {"r": 2})
    model = decoder()
    apply_lora(model, QV)
    for ratio in (0, -1, np.nan, np.inf, "16"):
        with pytest.raises(ValueError, match="the ratio must be positive, not"):
            lora_param_groups(model, 1e-3, lora_plus_ratio=ratio)


def test_the_other_loader_is_named_and_a_second_adapter_refused(tmp_path):
    model = decoder()
    apply_lora(model, QV)
    native = save_adapter(model, tmp_path / "native" / "adapter.safetensors").parent
    peft = save_adapter_peft(model, tmp_path / "peft")
    with pytest.raises(ValueError, match="peft is a PEFT adapter; load it with load_adapter_peft"):
        load_adapter(decoder(), peft)
    with pytest.raises(ValueError, match="native is a native adapter; load it with load_adapter"):
        load_adapter_peft(decoder(), native)
    before = logits(model)
    for load, folder in ((load_adapter, native), (load_adapter_peft, peft)):
        with pytest.raises(ValueError, match=f"{load.__name__}: this model has adapters"):
            load(model, folder)
    np.testing.assert_array_equal(logits(model), before)


def test_what_is_no_model_is_named(tmp_path):
    for call in (
        lambda: apply_lora("m", LoRAConfig()),
        lambda: resolve_targets("m", LoRAConfig()),
        lambda: merge_lora("m"),
        lambda: unmerge_lora("m"),
        lambda: merged_state_dict("m"),
        lambda: lora_config("m"),
        lambda: lora_modules("m"),
        lambda: adapter_params("m"),
        lambda: saved_modules("m"),
        lambda: lora_param_groups("m", 1e-3),
        lambda: save_adapter("m", tmp_path / "a.safetensors"),
        lambda: save_adapter_peft("m", tmp_path / "a"),
        lambda: load_adapter("m", tmp_path),
        lambda: load_adapter_peft("m", tmp_path),
        lambda: write_stacked("m", tmp_path / "a"),
        lambda: describe("m"),
        lambda: trainable_line("m"),
    ):
        with pytest.raises(TypeError, match=r"^\w+: a model is needed, given a str$"):
            call()
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_saved_with_its_own_config_alone(tmp_path):
    model = decoder()
    apply_lora(model, QV)
    with pytest.raises(ValueError, match="save_adapter: given LoRAConfig"):
        save_adapter(model, tmp_path / "a.safetensors", LoRAConfig(r=QV.r + 1, targets=("q", "v")))
    with pytest.raises(TypeError, match="a LoRAConfig is needed, given a dict"):
        save_adapter(model, tmp_path / "a.safetensors", {"r": 2})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("targets", [None, [], ["zz"], ["ln1"], "zz"])
def test_targets_in_a_file_that_mean_nothing_name_the_file(targets, tmp_path):
    path = saved(tmp_path)
    file = path.with_name("adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"targets": targets}))
    tensors = TensorFile(path)
    arrays = {name: tensors.read(name) for name in tensors.entries}
    write_safetensors(path, arrays, {"config": file.read_text()})
    model = decoder()
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(file))}: .*(targets|ln1 is a LayerNorm)"
    ):
        load_adapter(model, path)
    assert not lora_modules(model)


def test_arguments_of_the_wrong_kind_are_named(tmp_path):
    model = decoder()
    with pytest.raises(TypeError, match="apply_lora: a LoRAConfig is needed, given a dict"):
        apply_lora(model, {"r": 2})
    with pytest.raises(TypeError, match="apply_lora: the seed must be an integer, given 'x'"):
        apply_lora(model, QV, seed="x")
    assert not lora_modules(model)
    apply_lora(model, QV)
    with pytest.raises(ValueError, match="lr and weight_decay must be numbers, given 'x' and 0"):
        lora_param_groups(model, "x")
    with pytest.raises(TypeError, match="base_model_name is a string, not 5"):
        save_adapter_peft(model, tmp_path / "new", 5)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="layer_to_json: a LoRALinear is needed, given a str"):
        layer_to_json("x")
    with pytest.raises(ValueError, match="layer_from_json: not JSON"):
        layer_from_json(5, Linear(2, 3))
    with pytest.raises(TypeError, match="adapter_json: a LoRAConfig is needed, given a str"):
        adapter_json("x", "base")
    with pytest.raises(TypeError, match="LoRALinear: a Linear is needed, given a str"):
        LoRALinear("x", 2, 4)
