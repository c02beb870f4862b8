"""Reading PEFT folders without PEFT: names, rules, and what is refused by name."""

import json
import re

import numpy as np
import pytest

from afinar.autograd import no_grad
from afinar.lora import (
    LoRAConfig,
    adapter_params,
    apply_lora,
    load_adapter_peft,
    lora_modules,
    save_adapter,
    save_adapter_peft,
)
from afinar.transformer import Transformer, TransformerConfig
from afinar.transformer.decoder import Decoder, DecoderConfig
from afinar.transformer.safetensors_io import TensorFile, write_safetensors

X = np.random.default_rng(0).integers(1, 20, (2, 6))


def llama(**changes):
    values = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "vocab_size": 20,
        "max_position_embeddings": 8,
        **changes,
    }
    return Transformer(TransformerConfig(**values), seed=0).eval()


def gpt2():
    return Decoder(DecoderConfig(vocab=20, n_layer=2, n_head=2, d_model=8, block=8), seed=0).eval()


def logits(model):
    with no_grad():
        return model(X).numpy()


def folder_of(model, config, path):
    apply_lora(model, config)
    rng = np.random.default_rng(0)
    for p in adapter_params(model):
        p.data = p.data + (0.2 * rng.standard_normal(p.shape)).astype(np.float32)
    return save_adapter_peft(model, path, "base")


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_keys(folder, change):
    path = folder / "adapter_model.safetensors"
    file = TensorFile(path)
    tensors = {change(n): file.read(n) for n in file.entries}
    write_safetensors(path, {n: a for n, a in tensors.items() if n}, file.metadata)


def test_the_files_are_pefts(tmp_path):
    model = llama()
    folder = folder_of(model, LoRAConfig(r=2, alpha=6, use_rslora=True), tmp_path / "new")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config == {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "base_model_name_or_path": "base",
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": True,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
    }
    file = TensorFile(folder / "adapter_model.safetensors")
    assert file.metadata == {"format": "pt"}
    assert file.entries.keys() == {
        f"base_model.model.model.layers.{n}.self_attn.{p}_proj.lora_{x}.weight"
        for n in (0, 1)
        for p in "qv"
        for x in "AB"
    }
    entry = file.entries["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert (entry.shape, entry.dtype) == ((2, 8), "F32")


def test_slices_become_one_pair_with_a_block_each(tmp_path):
    model = gpt2()
    folder = folder_of(model, LoRAConfig(r=2, alpha=8, targets=("q", "v")), tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (4, 16, True)
    assert config["target_modules"] == ["c_attn"]
    file = TensorFile(folder / "adapter_model.safetensors")
    b = file.read("base_model.model.transformer.h.0.attn.c_attn.lora_B.weight")
    m = dict(lora_modules(model))["blocks.0.attn.qkv"]
    expected = np.zeros((24, 4), np.float32)
    expected[:8, :2], expected[16:, 2:] = m.b[0].data, m.b[1].data
    assert np.array_equal(b, expected)


def test_slices_of_different_scales_keep_them(tmp_path):
    model = gpt2()
    config = LoRAConfig(r=4, alpha=8, targets=("q", "v"), rank_pattern={"v": 1}, layers=(1,))
    folder = folder_of(model, config, tmp_path)
    restored = gpt2()
    load_adapter_peft(restored, folder)
    np.testing.assert_allclose(logits(restored), logits(model), atol=1e-5)
    assert [n for n, _ in lora_modules(restored)] == ["blocks.1.attn.qkv"]


@pytest.mark.parametrize(
    ("targets", "written"),
    [
        ("all_linear", None),
        (("mlp_out", "attn_out"), ["c_proj"]),
        (("attn_out",), ["attn.c_proj"]),
        (("blocks.1.mlp.fc",), ["transformer.h.1.mlp.c_fc"]),
    ],
)
def test_targets_are_written_as_short_as_is_exact(targets, written, tmp_path):
    model = gpt2()
    folder = folder_of(model, LoRAConfig(r=2, targets=targets), tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == (written or ["c_attn", "c_fc", "c_proj"])
    restored = gpt2()
    load_adapter_peft(restored, folder)
    np.testing.assert_allclose(logits(restored), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("lora_bias", True),
        ("use_qalora", True),
        ("layer_replication", [[0, 1]]),
        ("alora_invocation_tokens", [1]),
        ("target_parameters", ["mlp.weight"]),
        ("trainable_token_indices", [1]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("use_bdlora", {"nblocks": 2}),
        ("peft_type", "LOHA"),
    ],
)
def test_fields_that_change_the_maths_are_refused_by_name(field, value, tmp_path):
    folder = folder_of(llama(), LoRAConfig(r=2), tmp_path)
    edit_config(folder, **{field: value})
    model = llama()
    with pytest.raises(ValueError, match=field):
        load_adapter_peft(model, folder)
    assert not lora_modules(model)


def test_unknown_fields_are_ignored_with_a_note(tmp_path):
    folder = folder_of(llama(), LoRAConfig(r=2), tmp_path)
    edit_config(folder, a_new_field=3, another=None, fan_in_fan_out=None, revision="main")
    with pytest.warns(UserWarning, match=r"unknown fields \['a_new_field'\]"):
        load_adapter_peft(llama(), folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: None if "layers.1" in n and "v_proj.lora_B" in n else n, "missing .*v_proj"),
        (lambda n: n.replace("q_proj", "k_proj"), "missing .*q_proj.*unexpected .*k_proj"),
        (lambda n: n.replace("base_model.model.", "model."), "does not begin with"),
        (lambda n: n.replace("lora_A.weight", "lora_embedding_A"), "embedding"),
    ],
)
def test_keys_that_do_not_fit_are_named(change, message, tmp_path):
    folder = folder_of(llama(), LoRAConfig(r=2), tmp_path)
    edit_keys(folder, change)
    model = llama()
    with pytest.raises(ValueError, match=message):
        load_adapter_peft(model, folder)
    assert not lora_modules(model)
    assert all(p.requires_grad for p in model.parameters())


def test_shapes_that_do_not_fit_are_named(tmp_path):
    folder = folder_of(llama(), LoRAConfig(r=2), tmp_path)
    edit_config(folder, r=3)
    with pytest.raises(ValueError, match=r"q_proj.lora_A is \(2, 8\), the model needs \(3, 8\)"):
        load_adapter_peft(llama(), folder)


def test_the_adapters_name_is_stripped_once_and_at_the_end(tmp_path):
    model = llama()
    folder = folder_of(model, LoRAConfig(r=2, modules_to_save=("lm_head",)), tmp_path)

    def old(name):
        name = name.replace("lm_head.weight", "lm_head.modules_to_save.lora.weight")
        return name.replace(".weight", ".lora.weight") if "lora_" in name else name

    edit_keys(folder, old)
    restored = llama()
    load_adapter_peft(restored, folder)
    assert np.array_equal(logits(restored), logits(model))


def test_two_adapters_in_one_file_are_refused(tmp_path):
    folder = folder_of(llama(), LoRAConfig(r=2), tmp_path)
    path = folder / "adapter_model.safetensors"
    file = TensorFile(path)
    tensors = {n: file.read(n) for n in file.entries}
    tensors.update({n.replace(".weight", ".other.weight"): a for n, a in tensors.items()})
    write_safetensors(path, tensors)
    with pytest.raises(ValueError, match="several adapters"):
        load_adapter_peft(llama(), folder)


def test_factors_in_16_bits_become_float32(tmp_path):
    folder = folder_of(llama(), LoRAConfig(r=2), tmp_path)
    path = folder / "adapter_model.safetensors"
    file = TensorFile(path)
    write_safetensors(path, {n: file.read(n) for n in file.entries}, dtype="BF16")
    model = llama()
    load_adapter_peft(model, folder)
    assert all(p.dtype == np.float32 for p in adapter_params(model))


def test_mlx_adapters_are_recognised(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        '{"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 8, "scale": 20.0}}'
    )
    write_safetensors(
        tmp_path / "adapters.safetensors",
        {"model.layers.0.self_attn.q_proj.lora_a": np.zeros((8, 8), np.float32)},
    )
    with pytest.raises(ValueError, match="mlx-lm adapter: its factors are transposed"):
        load_adapter_peft(llama(), tmp_path)


def test_a_pickle_is_refused(tmp_path):
    folder = folder_of(llama(), LoRAConfig(r=2), tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        load_adapter_peft(llama(), folder)


def test_a_trained_head_of_a_tied_model_unties_it(tmp_path):
    """PEFT trains a copy of a tied head: the embedding keeps the old values."""
    loose = llama()
    loose.lm_head.weight.data = loose.model.embed_tokens.weight.data.copy()
    folder = folder_of(loose, LoRAConfig(r=2, modules_to_save=("lm_head",)), tmp_path)
    tied = llama(tie_word_embeddings=True)
    load_adapter_peft(tied, folder)
    assert not tied.config.tie_word_embeddings
    assert np.array_equal(logits(tied), logits(loose))
    edit_config(folder, ensure_weight_tying=True)
    with pytest.raises(ValueError, match="ensure_weight_tying"):
        load_adapter_peft(llama(tie_word_embeddings=True), folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"exclude_modules": ["k_proj"]}, {"q_proj", "v_proj", "o_proj"}),
        ({"exclude_modules": r".*\.[vo]_proj"}, {"q_proj", "k_proj"}),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, None),
        ({"layers_to_transform": 1}, None),
    ],
)
def test_pefts_other_rules_for_targets(changes, expected, tmp_path):
    everything = ["q_proj", "k_proj", "v_proj", "o_proj"]
    source = llama()
    names = [
        f"model.layers.{n}.self_attn.{p}"
        for n in ((0, 1) if expected else (1,))
        for p in expected or everything
    ]
    folder = folder_of(source, LoRAConfig(r=2, targets=names), tmp_path)
    edit_config(folder, target_modules=everything, **changes)
    model = llama()
    load_adapter_peft(model, folder)
    assert {n for n, _ in lora_modules(model)} == set(names)
    assert np.array_equal(logits(model), logits(source))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", "8"),
        ("r", 2.5),
        ("lora_alpha", None),
        ("lora_alpha", [16]),
        ("lora_dropout", "0.1"),
        ("use_dora", "yes"),
        ("target_modules", 3),
        ("target_modules", ["q_proj", 3]),
        ("target_modules", "(q_proj"),
        ("exclude_modules", "[a"),
        ("layers_to_transform", "1"),
        ("layers_to_transform", [1.5]),
        ("layers_pattern", 3),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"(": 2}),
        ("rank_pattern", {"q_proj": "2"}),
        ("modules_to_save", "lm_head"),
        ("peft_type", None),
    ],
)
def test_values_of_the_wrong_type_name_file_and_field(field, value, tmp_path):
    folder = folder_of(llama(), LoRAConfig(r=2, alpha=3), tmp_path)
    edit_config(folder, **{field: value})
    model = llama()
    with pytest.raises(ValueError, match=r"adapter_config\.json: ") as error:
        load_adapter_peft(model, folder)
    assert re.search(f"{field}|{field[5:]}|no pattern|rank q_proj", str(error.value))
    assert not lora_modules(model)


def test_folders_that_hold_no_adapter(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        load_adapter_peft(llama(), tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"adapter_config.json: no such file"):
        load_adapter_peft(llama(), tmp_path)
    folder = folder_of(llama(), LoRAConfig(r=2), tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model.safetensors: no such file"):
        load_adapter_peft(llama(), folder)


def test_factors_that_are_not_finite_are_named(tmp_path):
    source = llama()
    apply_lora(source, LoRAConfig(r=2))
    save_adapter_peft(source, tmp_path)
    lora_modules(source)[0][1].a[0].data[1, 2] = np.inf
    with pytest.raises(ValueError, match=r"save_adapter_peft: .*lora_A\.weight' at index 10"):
        save_adapter_peft(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    path = tmp_path / "adapter_model.safetensors"
    file = TensorFile(path)
    tensors = {n: file.read(n) for n in file.entries}
    name = next(n for n in tensors if "layers.0" in n and n.endswith("q_proj.lora_A.weight"))
    tensors[name][1, 2] = np.inf
    write_safetensors(path, tensors, file.metadata)
    model = llama()
    with pytest.raises(ValueError, match=r"layers\.0.*q_proj\.lora_A\.weight' at index 10"):
        load_adapter_peft(model, tmp_path)
    assert not lora_modules(model)


def test_copies_of_the_base_beside_the_factors(tmp_path):
    """PEFT saves the frozen matrix of a head or an embedding that an adapter names."""
    folder = folder_of(llama(), LoRAConfig(r=2, targets=("lm_head",)), tmp_path)
    path = folder / "adapter_model.safetensors"
    file = TensorFile(path)
    factors = {n: file.read(n) for n in file.entries}
    head = llama().lm_head.weight.data
    table = llama().model.embed_tokens.weight.data
    copies = {
        "base_model.model.lm_head.base_layer.weight": head,
        "base_model.model.model.embed_tokens.weight": table,
    }
    write_safetensors(path, factors | copies)
    load_adapter_peft(model := llama(), folder)
    assert [n for n, _ in lora_modules(model)] == ["lm_head"]
    for name, a in copies.items():
        for changed in (a + 1, a[:-1]):
            write_safetensors(path, factors | copies | {name: changed})
            model = llama()
            with pytest.raises(ValueError, match="is another base's"):
                load_adapter_peft(model, folder)
            assert not lora_modules(model)


@pytest.mark.parametrize("value", [None, [], "", ["zz"], "zz.*", ["model.norm"], ["model.layers"]])
def test_targets_that_mean_no_matrix_name_file_and_field(value, tmp_path):
    folder = folder_of(llama(), LoRAConfig(r=2), tmp_path)
    edit_config(folder, target_modules=value)
    model = llama()
    message = rf"{re.escape(str(folder))}/adapter_config\.json: target_modules"
    with pytest.raises(ValueError, match=message) as error:
        load_adapter_peft(model, folder)
    assert "\n" not in str(error.value)
    assert not lora_modules(model)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    model = llama()
    apply_lora(model, LoRAConfig(r=2))
    for save, path in (
        (save_adapter_peft, tmp_path / "file"),
        (save_adapter_peft, tmp_path / "file" / "below"),
        (save_adapter, tmp_path / "file" / "adapter.safetensors"),
    ):
        with pytest.raises(ValueError, match=rf"{save.__name__}: .*file is a file; a folder is ne"):
            save(model, path)
    with pytest.raises(ValueError, match="is a folder; the name of a file is needed"):
        save_adapter(model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError, match=r"load_adapter_peft: .*file is not a folder"):
        load_adapter_peft(llama(), tmp_path / "file")
