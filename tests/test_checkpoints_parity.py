"""Each family at toy size beside transformers: files, logits, gradients and AdamW steps."""

import json
import os

import numpy as np
import pytest

from afinar.autograd import no_grad
from afinar.optim import AdamW, clip_grad_norm
from afinar.transformer import Decoder, generate, load_pretrained, save_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5, "num_key_value_heads": 4}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0, "head_dim": 12}),
    "llama-linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral-all": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3-biases": ("Qwen3", {"head_dim": 8, "attention_bias": True, "rms_norm_eps": 1e-5}),
    "gpt2": ("GPT2", {}),
    "gpt2-untied": (
        "GPT2",
        {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu"},
    ),
}


@pytest.fixture(params=FAMILIES, scope="module")
def pair(request, tmp_path_factory):
    """A model of transformers with random values everywhere, and its folder."""
    family, settings = FAMILIES[request.param]
    sizes = dict(SIZES)
    if family == "GPT2":
        names = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
        sizes = {k: SIZES[k] for k in names} | {"n_embd": 32, "n_layer": 3, "n_head": 4}
        sizes |= {"n_positions": 64, "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
    config = getattr(transformers, f"{family}Config")(**(sizes | settings))
    torch.manual_seed(1)
    cls = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    theirs = getattr(transformers, cls)(config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.normal_(1.0 if p.ndim == 1 and not name.endswith("bias") else 0.0, 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, folder


IDS = np.random.default_rng(0).integers(3, 61, (2, 23))


def logits_of(theirs, ids=IDS):
    with torch.no_grad():
        return theirs(torch.tensor(ids)).logits.numpy()


def named(ours, theirs):
    """(name, our parameter, their parameter, whether it is transposed there)."""
    other = dict(theirs.named_parameters())
    for name, p in ours.named_parameters(hf=True):
        turned = isinstance(ours, Decoder) and name.endswith(
            ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        )
        yield name, p, other.pop(name), turned
    assert not other, "every parameter of theirs is one of ours"


def test_logits_and_the_way_back(pair, tmp_path):
    theirs, folder = pair
    ours = load_pretrained(folder)
    with no_grad():
        logits = ours(IDS).numpy()
    np.testing.assert_allclose(logits, logits_of(theirs), atol=2e-5, rtol=2e-5)
    save_pretrained(ours, tmp_path)
    again, report = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    np.testing.assert_array_equal(logits_of(again.eval()), logits_of(theirs))
    # Without what was kept of the config that came in, ours alone must describe the model.
    ours.source = None
    save_pretrained(ours, tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    again, report = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    np.testing.assert_array_equal(logits_of(again.eval()), logits_of(theirs))


def test_version_4_of_the_config(pair, tmp_path):
    theirs, folder = pair
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype", None)
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(folder / "model.safetensors")
    with no_grad():
        logits = load_pretrained(tmp_path)(IDS).numpy()
    np.testing.assert_allclose(logits, logits_of(theirs), atol=2e-5, rtol=2e-5)


def test_loss_gradients_and_five_adamw_steps(pair):
    theirs, folder = pair
    ours = load_pretrained(folder)
    theirs = type(theirs).from_pretrained(folder).eval()
    # eps well above rounding: some gradients are 0 but for it (a bias of all keys changes nothing),
    # and Adam would make steps of full size out of their noise.
    settings = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
    our_steps = AdamW(ours.parameters(), **settings)
    their_steps = torch.optim.AdamW(theirs.parameters(), **settings)
    for step in range(5):
        ids = np.random.default_rng(step).integers(3, 61, (2, 23))
        our_loss = ours.loss(ids[:, :-1], ids[:, 1:])
        their_loss = theirs(torch.tensor(ids), labels=torch.tensor(ids)).loss
        np.testing.assert_allclose(our_loss.item(), their_loss.item(), rtol=2e-5)
        our_steps.zero_grad()
        their_steps.zero_grad()
        our_loss.backward()
        their_loss.backward()
        if step == 0:
            for name, p, q, turned in named(ours, theirs):
                want = q.grad.numpy().T if turned else q.grad.numpy()
                scale = np.abs(want).max()
                np.testing.assert_allclose(p.grad / scale, want / scale, atol=2e-5, err_msg=name)
        ours_norm = clip_grad_norm(ours.parameters(), 0.5)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item()
        np.testing.assert_allclose(ours_norm, norm, rtol=2e-5)
        our_steps.step()
        their_steps.step()
    for name, p, q, turned in named(ours, theirs):
        want = q.detach().numpy().T if turned else q.detach().numpy()
        np.testing.assert_allclose(p.data, want, atol=2e-5, err_msg=name)


def test_greedy_continuation(pair):
    theirs, folder = pair
    prompt = IDS[:1, :6]
    want = theirs.generate(
        torch.tensor(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    got = generate(load_pretrained(folder), prompt.tolist(), max_new_tokens=12)
    assert got[0] == want[0, 6:].tolist()


def test_sharded_and_half_precision(tmp_path):
    config = transformers.Qwen2Config(**SIZES)
    theirs = transformers.Qwen2ForCausalLM(config).eval()
    for dtype in (torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype)
        theirs.to(dtype).save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").exists()
        short = type(theirs).from_pretrained(folder, dtype=torch.float32).eval()
        with no_grad():
            logits = load_pretrained(folder)(IDS).numpy()
        np.testing.assert_allclose(logits, logits_of(short), atol=2e-5, rtol=2e-5)


def test_generation_options_filter_as_transformers_do():
    from transformers.generation import logits_process as theirs

    from afinar.transformer.generate import Options, _Picker

    logits = np.random.default_rng(0).normal(0, 3, 50).astype(np.float32)
    prompt = [1, 7, 7, 30]
    scores = torch.tensor(logits)[None]
    scores = theirs.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt]), scores)
    for warp in (
        theirs.TemperatureLogitsWarper(0.7),
        theirs.TopKLogitsWarper(12),
        theirs.TopPLogitsWarper(0.8),
    ):
        scores = warp(None, scores)
    allowed = set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())
    options = {"max_new_tokens": 1, "temperature": 0.7, "top_k": 12, "top_p": 0.8}
    options["repetition_penalty"] = 1.3
    drawn = {_Picker([prompt], Options(seed=seed, **options))(0, logits) for seed in range(400)}
    assert drawn == allowed


# --- a real model --------------------------------------------------------------------------

FOLDER = os.environ.get("AFINAR_SMOLLM2")
REAL = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 7042, 314, 260, 3575, 282]
REAL += [4649, 28, 284, 11452, 314, 260, 3575, 282, 4521, 30]


@pytest.mark.real
@pytest.mark.skipif(FOLDER is None, reason="AFINAR_SMOLLM2 names no folder")
def test_smollm2_beside_transformers():
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with no_grad():
        logits = load_pretrained(FOLDER)([REAL]).numpy()
    np.testing.assert_allclose(logits, logits_of(theirs.eval(), [REAL]), atol=2e-3, rtol=0)
