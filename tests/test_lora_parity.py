"""Against PEFT itself, live: logits, gradients, training steps, and files both ways."""

import warnings

import numpy as np
import pytest

from afinar.autograd import no_grad
from afinar.lora import (
    LoRAConfig,
    adapter_params,
    apply_lora,
    load_adapter_peft,
    lora_modules,
    lora_param_groups,
    save_adapter_peft,
    saved_modules,
    trainable_line,
)
from afinar.optim import SGD, AdamW
from afinar.transformer import Transformer, TransformerConfig
from afinar.transformer.decoder import Decoder, DecoderConfig

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

V = 60
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
VARIANTS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora_rslora": {"use_dora": True, "use_rslora": True},
    "patterns": {"rank_pattern": "first", "alpha_pattern": "first"},
    "norms": {"modules_to_save": "norms"},
    "one_layer": {"layers": (1,)},
}


def models(family):
    """Ours and theirs with the same random weights, norms and biases too."""
    torch.manual_seed(0)
    if family == "gpt2":
        theirs = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=V,
                n_positions=16,
                n_embd=32,
                n_layer=2,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
        config = DecoderConfig(
            vocab=V, n_layer=2, n_head=2, d_model=32, block=16, activation="gelu_tanh"
        )
        ours = Decoder(config, seed=0)
    else:
        kind = family.capitalize()
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": V,
            "max_position_embeddings": 32,
            "rms_norm_eps": 1e-6,
        }
        if family == "qwen3":
            sizes["head_dim"] = 12
        if family == "mistral":
            sizes["sliding_window"] = 5
        theirs = getattr(transformers, f"{kind}ForCausalLM")(
            getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=False)
        )
        more = {"attention_bias": family == "qwen2", "qk_norm": family == "qwen3"}
        ours = Transformer(TransformerConfig(**sizes, **more), seed=0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    state = theirs.state_dict()
    for name, p in ours.named_parameters(hf=True):
        p.data = flip(name, state[name].numpy()).copy()
    return ours, theirs


def flip(name, a):
    """GPT-2's Conv1D stores (in, out)."""
    return a.T if a.ndim == 2 and any(c in name for c in (".c_attn", ".c_proj", ".c_fc")) else a


def configs(family, variant):
    """The same adapter for us and for PEFT."""
    gpt2 = family == "gpt2"
    targets = ["c_attn", "mlp.c_proj"] if gpt2 else ["q_proj", "v_proj", "down_proj"]
    options = dict(VARIANTS[variant])
    first = "transformer.h.0.attn.c_attn" if gpt2 else "layers.0.self_attn.q_proj"
    if options.get("rank_pattern"):
        options.update(rank_pattern={first: 3}, alpha_pattern={first: 5})
    theirs = dict(options)
    if options.get("modules_to_save"):
        options["modules_to_save"] = ("norms",)
        theirs["modules_to_save"] = (
            ["ln_1", "ln_2", "ln_f"]
            if gpt2
            else [
                "input_layernorm",
                "post_attention_layernorm",
                "model.norm",
                *(("q_norm", "k_norm") if family == "qwen3" else ()),
            ]
        )
    if "layers" in theirs:
        theirs["layers_to_transform"] = list(theirs.pop("layers"))
    ours = LoRAConfig(r=4, alpha=8, targets=targets, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=targets,
            fan_in_fan_out=gpt2,
            task_type="CAUSAL_LM",
            **{k: v for k, v in theirs.items() if v},
        )
    return ours, theirs


def ids(seed=0):
    return np.random.default_rng(seed).integers(1, V, (2, 10))


def our_logits(model):
    with no_grad():
        return model(ids()).numpy()


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(ids())).logits.numpy()


def randomise(parameters, seed=1):
    rng = np.random.default_rng(seed)
    for p in parameters:
        noise = (0.1 * rng.standard_normal(p.shape)).astype(np.float32)
        if isinstance(p, torch.Tensor):
            with torch.no_grad():
                p.add_(torch.tensor(noise))
        else:
            p.data = p.data + noise


def our_tensors(model):
    """Every trained tensor by PEFT's name."""
    hf = getattr(model, "hf_name", lambda n: n)
    found = {}
    for name, m in lora_modules(model):
        found[f"{hf(name)}.lora_A"], found[f"{hf(name)}.lora_B"] = m.a[0], m.b[0]
        if m.m:
            found[f"{hf(name)}.lora_magnitude_vector"] = m.m[0]
    for name, module in saved_modules(model):
        found.update({f"{hf(name)}.{k}": p for k, p in module.named_parameters()})
    return found


def their_tensors(model):
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
            for kind in ("lora_A", "lora_B", "lora_magnitude_vector"):
                name = name.replace(f".{kind}.default.weight", f".{kind}")
            found[name] = p
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_our_folder_gives_our_logits_in_peft_and_no_warning(family, variant, tmp_path):
    ours, theirs = models(family)
    apply_lora(ours, configs(family, variant)[0])
    randomise(adapter_params(ours))
    save_adapter_peft(ours, tmp_path, "toy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own
        loaded = peft.PeftModel.from_pretrained(theirs, tmp_path)
    assert np.abs(their_logits(loaded) - our_logits(ours)).max() < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_peft_folder_gives_pefts_logits_here(family, variant, tmp_path):
    ours, theirs = models(family)
    our_config, their_config = configs(family, variant)
    wrapped = peft.get_peft_model(theirs, their_config)
    randomise([p for p in wrapped.parameters() if p.requires_grad])
    wrapped.save_pretrained(tmp_path)
    config = load_adapter_peft(ours, tmp_path)
    assert (config.r, config.alpha) == (our_config.r, our_config.alpha)
    assert set(config.targets) == set(our_config.targets)
    assert np.abs(their_logits(wrapped) - our_logits(ours)).max() < 1e-4
    assert our_tensors(ours).keys() == their_tensors(wrapped).keys()
    total = sum(p.numel() for p in wrapped.parameters())
    if variant != "norms":  # PEFT counts the frozen originals of trained modules too
        trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
        assert trainable_line(ours) == (
            f"trainable params: {trained:,d} || all params: {total:,d} || "
            f"trainable%: {100 * trained / total:.4f}"
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_and_five_steps(family, variant):
    ours, theirs = models(family)
    our_config, their_config = configs(family, variant)
    apply_lora(ours, our_config)
    wrapped = peft.get_peft_model(theirs, their_config)
    mine, reference = our_tensors(ours), their_tensors(wrapped)
    assert mine.keys() == reference.keys()
    randomise(adapter_params(ours))
    with torch.no_grad():
        for name, p in reference.items():
            p.copy_(torch.tensor(mine[name].numpy()))
    optimizer = AdamW(lora_param_groups(ours, lr=1e-2), lr=1e-2)
    torch_optimizer = torch.optim.AdamW(reference.values(), lr=1e-2, weight_decay=0.0)
    for step in range(5):
        x, y = ids(step), ids(step + 100)
        loss = ours.loss(x, y, ignore_index=-100)
        loss.backward()
        logits = wrapped(torch.tensor(x)).logits
        expected = torch.nn.functional.cross_entropy(
            logits.reshape(-1, V), torch.tensor(y).reshape(-1)
        )
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
        if step == 0:
            for name, p in reference.items():
                np.testing.assert_allclose(
                    mine[name].grad, p.grad.numpy(), rtol=1e-3, atol=2e-5, err_msg=name
                )
        optimizer.step()
        optimizer.zero_grad()
        torch_optimizer.step()
        torch_optimizer.zero_grad()
    for name, p in reference.items():
        np.testing.assert_allclose(
            mine[name].numpy(), p.detach().numpy(), rtol=1e-3, atol=2e-4, err_msg=name
        )


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}])
@pytest.mark.parametrize("targets", [("q", "v"), "all_linear", ("k", "mlp_out")])
def test_slices_export_as_one_pair(targets, options, tmp_path):
    ours, theirs = models("gpt2")
    apply_lora(ours, LoRAConfig(r=4, alpha=8, targets=targets, **options))
    randomise(adapter_params(ours))
    save_adapter_peft(ours, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own
        loaded = peft.PeftModel.from_pretrained(theirs, tmp_path)
    assert np.abs(their_logits(loaded) - our_logits(ours)).max() < 1e-4
    again, _ = models("gpt2")
    load_adapter_peft(again, tmp_path)
    np.testing.assert_allclose(our_logits(again), our_logits(ours), atol=1e-4)


@pytest.mark.parametrize(
    "targets",
    ["all-linear", r".*\.mlp\..*_proj", ["self_attn.q_proj", "model.layers.1.mlp.up_proj"]],
)
def test_the_rules_for_targets_are_pefts(targets, tmp_path):
    ours, theirs = models("llama")
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(theirs, config)
    randomise([p for p in wrapped.parameters() if p.requires_grad])
    wrapped.save_pretrained(tmp_path)
    expected = {n.rpartition(".lora_")[0] for n in their_tensors(wrapped)}
    load_adapter_peft(ours, tmp_path)
    assert {n for n, _ in lora_modules(ours)} == expected
    assert np.abs(their_logits(wrapped) - our_logits(ours)).max() < 1e-4
    fresh, _ = models("llama")
    apply_lora(fresh, LoRAConfig(r=2, targets=targets))
    assert {n for n, _ in lora_modules(fresh)} == expected


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
RULES = {
    "exclude a list": {"target_modules": ATTENTION, "exclude_modules": ["k_proj", "o_proj"]},
    "exclude whole names": {
        "target_modules": ATTENTION,
        "exclude_modules": ["model.layers.0.self_attn.q_proj"],
    },
    "exclude an expression": {
        "target_modules": ATTENTION,
        "exclude_modules": r".*layers\.1\..*[kv]_proj",
    },
    "all but": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "a layer": {"target_modules": ATTENTION, "layers_to_transform": 1},
    "layers by pattern": {
        "target_modules": ["q_proj", "up_proj"],
        "layers_to_transform": [0],
        "layers_pattern": "layers",
    },
    "layers by patterns": {
        "target_modules": ["q_proj", "up_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["blocks", "layers"],
    },
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {r".*\.mlp\..*": 3, "^model.layers.0.self_attn.q_proj": 5, "v_proj": 1},
        "alpha_pattern": {r"layers\.\d\.self_attn\.[qv]_proj": 7},
    },
    "patterns, first wins": {
        "target_modules": ["q_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 3, "q_proj": 4},
        "use_rslora": True,
    },
    "trained whole": {
        "target_modules": "all-linear",
        "modules_to_save": ["down_proj", "embed_tokens"],
    },
    "head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
}
GPT2_RULES = {
    "all-linear": {"target_modules": "all-linear", "use_dora": True},
    "an expression": {"target_modules": r".*\.h\.1\..*\.c_(attn|proj)"},
    "layers by pattern": {
        "target_modules": ["c_attn", "c_fc"],
        "layers_to_transform": [1],
        "layers_pattern": "h",
    },
    "patterns": {"target_modules": ["c_attn", "c_proj"], "rank_pattern": {r".*\.mlp\..*": 3}},
    "trained whole": {"target_modules": ["c_attn"], "modules_to_save": ["wpe", "mlp.c_fc"]},
}


@pytest.mark.parametrize(
    ("family", "rule", "dtype"),
    [
        *(("llama", rule, "float32") for rule in RULES),
        *(("gpt2", rule, "float32") for rule in GPT2_RULES),
        *(
            (family, rule, dtype)
            for family in ("llama", "gpt2")
            for rule in ("patterns", "trained whole")
            for dtype in ("bfloat16", "float16")
        ),
    ],
)
def test_more_rules_of_pefts_configs(family, rule, dtype, tmp_path):
    options = (RULES if family == "llama" else GPT2_RULES)[rule]
    ours, theirs = models(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(
            r=2, lora_alpha=4, fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM", **options
        )
        wrapped = peft.get_peft_model(theirs, config)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    randomise(trained)
    with torch.no_grad():
        for p in trained:  # values that 16 bits hold
            p.copy_(p.to(getattr(torch, dtype)).float())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(tmp_path)
    if dtype != "float32":
        from safetensors.torch import load_file, save_file

        path = tmp_path / "adapter_model.safetensors"
        short = {k: a.to(getattr(torch, dtype)) for k, a in load_file(path).items()}
        save_file(short, path)
    load_adapter_peft(ours, tmp_path)
    mine, reference = our_tensors(ours), their_tensors(wrapped)
    assert mine.keys() == reference.keys()
    assert np.abs(their_logits(wrapped) - our_logits(ours)).max() < 1e-4

    # And what we write of it, PEFT reads.
    save_adapter_peft(ours, tmp_path / "ours")
    _, fresh = models(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(fresh, tmp_path / "ours")
    assert np.abs(their_logits(again) - our_logits(ours)).max() < 1e-4


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_are_refused(bias, tmp_path):
    ours, theirs = models("qwen2")
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(target_modules=["q_proj"], bias=bias))
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"bias = '{bias}' changes the maths"):
        load_adapter_peft(ours, tmp_path)
    assert not lora_modules(ours)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_pissa_starts_from_pefts_factors(use_rslora):
    """Singular vectors have a sign of their own; the product of the factors has none."""
    ours, theirs = models("llama")
    before = our_logits(ours)
    options = {"r": 4, "use_rslora": use_rslora}
    config = LoRAConfig(alpha=8, targets=("q_proj",), init="pissa", **options)
    apply_lora(ours, config)
    wrapped = peft.get_peft_model(
        theirs,
        peft.LoraConfig(
            lora_alpha=8, target_modules=["q_proj"], init_lora_weights="pissa", **options
        ),
    )
    state = dict(wrapped.named_parameters())
    for name, m in lora_modules(ours):
        path = f"base_model.model.{name}"
        a = state[f"{path}.lora_A.default.weight"].detach().numpy()
        b = state[f"{path}.lora_B.default.weight"].detach().numpy()
        np.testing.assert_allclose(m.b[0].numpy() @ m.a[0].numpy(), b @ a, atol=1e-5)
        np.testing.assert_allclose(np.abs(m.a[0].numpy()), np.abs(a), atol=1e-4)
        np.testing.assert_allclose(np.abs(m.b[0].numpy()), np.abs(b), atol=1e-4)
        base = state[f"{path}.base_layer.weight"].detach().numpy()
        np.testing.assert_allclose(m.base.weight.numpy(), base, atol=1e-5)
    assert np.abs(our_logits(ours) - before).max() < 1e-4
    assert np.abs(their_logits(wrapped) - before).max() < 1e-4


def test_lora_plus_is_pefts():
    """Five steps with its optimizer, which gives B's a rate of their own."""
    from peft.optimizers import create_loraplus_optimizer

    ours, theirs = models("llama")
    apply_lora(ours, LoRAConfig(r=4, alpha=8, targets=("q_proj", "v_proj")))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    wrapped = peft.get_peft_model(theirs, config)
    mine, reference = our_tensors(ours), their_tensors(wrapped)
    randomise(adapter_params(ours))
    with torch.no_grad():
        for name, p in reference.items():
            p.copy_(torch.tensor(mine[name].numpy()))
    optimizer = AdamW(lora_param_groups(ours, lr=1e-3, lora_plus_ratio=16.0), lr=1e-3)
    torch_optimizer = create_loraplus_optimizer(
        wrapped, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.0
    )
    for step in range(5):
        x, y = ids(step), ids(step + 100)
        ours.loss(x, y, ignore_index=-100).backward()
        logits = wrapped(torch.tensor(x)).logits
        flat = logits.reshape(-1, V), torch.tensor(y).reshape(-1)
        torch.nn.functional.cross_entropy(*flat).backward()
        for o in (optimizer, torch_optimizer):
            o.step()
            o.zero_grad()
    for name, p in reference.items():
        np.testing.assert_allclose(
            mine[name].numpy(), p.detach().numpy(), rtol=1e-3, atol=2e-4, err_msg=name
        )


def test_adapter_names_and_old_keys(tmp_path):
    """A second adapter lies in its own folder; old files keep names inside the keys."""
    ours, theirs = models("llama")
    wrapped = peft.get_peft_model(
        theirs,
        peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        adapter_name="lora",
    )
    randomise([p for p in wrapped.parameters() if p.requires_grad])
    wrapped.save_pretrained(tmp_path)
    load_adapter_peft(ours, tmp_path / "lora")
    expected = their_logits(wrapped)
    assert np.abs(expected - our_logits(ours)).max() < 1e-4

    from safetensors.torch import save_file

    raw = {
        k: v.contiguous()
        for k, v in wrapped.state_dict().items()
        if "lora_" in k or "modules_to_save" in k
    }
    save_file(raw, tmp_path / "lora" / "adapter_model.safetensors")
    ours, _ = models("llama")
    load_adapter_peft(ours, tmp_path / "lora")
    assert np.abs(expected - our_logits(ours)).max() < 1e-4


# --- decision D-085 ------------------------------------------------------------------------


class TorchBlock(torch.nn.Module):
    def __init__(self, C, H):
        super().__init__()
        nn = torch.nn
        self.H = H
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(C, 3 * C), "proj": nn.Linear(C, C)})
        self.mlp = nn.ModuleDict({"fc": nn.Linear(C, 4 * C), "proj": nn.Linear(4 * C, C)})

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            part.reshape(B, T, self.H, -1).transpose(1, 2)
            for part in self.attn["qkv"](self.ln1(x)).chunk(3, dim=-1)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["proj"](y.transpose(1, 2).reshape(B, T, C))
        h = torch.nn.functional.gelu(self.mlp["fc"](self.ln2(x)))
        return x + self.mlp["proj"](h)


class TorchDecoder(torch.nn.Module):
    """The seed's decoder, written anew in torch."""

    def __init__(self, c):
        super().__init__()
        nn = torch.nn
        self.tokens = nn.Embedding(c.vocab, c.d_model)
        self.positions = nn.Embedding(c.block, c.d_model)
        self.blocks = nn.ModuleList(TorchBlock(c.d_model, c.n_head) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab, bias=False)
        self.lm_head.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def test_d085_six_sgd_steps_give_pefts_losses():
    config = DecoderConfig(vocab=64, n_layer=2, n_head=2, d_model=32, block=16)
    ours = Decoder(config, seed=0)
    theirs = TorchDecoder(config)
    state = {n: torch.tensor(p.numpy()) for n, p in ours.named_parameters()}
    theirs.load_state_dict({**state, "lm_head.weight": state["tokens.weight"]})
    trained = apply_lora(ours, LoRAConfig(r=4, alpha=8, targets=("attn_out",)))
    wrapped = peft.get_peft_model(
        theirs, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["attn.proj"])
    )
    reference = their_tensors(wrapped)
    assert trained == sum(p.numel() for p in reference.values())
    with torch.no_grad():
        for name, m in lora_modules(ours):
            reference[f"{name}.lora_A"].copy_(torch.tensor(m.a[0].numpy()))
    mine = SGD(adapter_params(ours), lr=0.5)
    yours = torch.optim.SGD(reference.values(), lr=0.5)
    for step in range(6):
        rng = np.random.default_rng(step)
        x, y = rng.integers(1, 64, (2, 4, 16))
        loss = ours.loss(x, y)
        expected = torch.nn.functional.cross_entropy(
            wrapped(torch.tensor(x)).reshape(-1, 64), torch.tensor(y).reshape(-1)
        )
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        for result, optimizer in ((loss, mine), (expected, yours)):
            result.backward()
            optimizer.step()
            optimizer.zero_grad()
