"""config.json of Hugging Face transformers, versions 4 and 5, to our configs and back.

What our models do not do is refused by name; only fields that change no result are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import TransformerConfig, check_rope_scaling
from .decoder import DecoderConfig
from .values import Rule, are_strings, check_fields, is_flag, is_number, is_whole

Config = TransformerConfig | DecoderConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

# Fields that change results, with the values at which they do not. None is always allowed.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_residual": (False,),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({},),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "add_cross_attention": (False,),
}
_LLAMA_NEUTRAL = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
}
_GPT2_NEUTRAL = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
}
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# What the fields that are read must hold, unless they are null, which mostly counts as absent.
_RULES: tuple[Rule, ...] = (
    (
        (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
            *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
            *("n_embd", "n_inner", "n_head", "n_layer", "n_positions", "n_ctx", "sliding_window"),
        ),
        lambda value: is_whole(value) and value > 0,
        "a positive whole number",
    ),
    (("max_window_layers",), lambda value: is_whole(value) and value >= 0, "a whole number"),
    (
        (
            *("rms_norm_eps", "layer_norm_epsilon", "rope_theta"),
            *("embd_pdrop", "attn_pdrop", "resid_pdrop"),
        ),
        is_number,
        "a number",
    ),
    (
        ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"),
        is_flag,
        "true or false",
    ),
    (("model_type", "activation_function"), lambda value: isinstance(value, str), "a string"),
    (("architectures", "layer_types"), are_strings, "a list of strings"),
    (
        ("rope_scaling", "rope_parameters"),
        lambda value: isinstance(value, Mapping),
        "an object",
    ),
)

# What a class of transformers takes where config.json is silent (an absent key is not a null).
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def config_from_hf(hf: Mapping[str, Any]) -> Config:
    """The config that a config.json, as a dict, describes.

    ValueError names an architecture or a field that our models cannot follow.
    """
    check_fields("config.json", hf, _RULES)
    kind = hf.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"config.json: model_type {kind!r} is not supported; "
            f"known: {', '.join(sorted(ARCHITECTURES))}"
        )
    for name in hf.get("architectures") or ():
        if name != ARCHITECTURES[kind]:
            raise ValueError(
                f"config.json: architecture {name!r} is not supported; "
                f"for {kind} it must be {ARCHITECTURES[kind]!r}"
            )
    return _gpt2(hf) if kind == "gpt2" else _llama(hf, kind)


def _llama(hf: Mapping[str, Any], kind: str) -> TransformerConfig:
    _refuse_unless_neutral(hf, _NEUTRAL | _LLAMA_NEUTRAL)
    heads, layers = _need(hf, "num_attention_heads"), _need(hf, "num_hidden_layers")
    positions = hf.get("max_position_embeddings", _DEFAULT_POSITIONS[kind])
    theta, scaling = _rope(hf, positions)
    window, layer_types = _sliding(hf, kind, layers)
    eps = hf.get("rms_norm_eps", 1e-6)
    bias = bool(hf.get("attention_bias", False)) if kind in ("llama", "qwen3") else kind == "qwen2"
    return TransformerConfig(
        hidden_size=_need(hf, "hidden_size"),
        num_attention_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads", _DEFAULT_KV_HEADS.get(kind)),
        intermediate_size=_need(hf, "intermediate_size"),
        num_hidden_layers=layers,
        vocab_size=_need(hf, "vocab_size"),
        max_position_embeddings=positions,
        rms_norm_eps=eps,
        rope_theta=float(theta),
        rope_scaling=scaling,
        head_dim=hf.get("head_dim", 128 if kind == "qwen3" else None),
        attention_bias=bias,
        o_bias=bias and kind != "qwen2",
        mlp_bias=bool(hf.get("mlp_bias", False)) and kind == "llama",
        qk_norm=kind == "qwen3",
        qk_norm_eps=eps,
        sliding_window=window,
        layer_types=layer_types,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        hf_architecture=ARCHITECTURES[kind],
        hf_model_type=kind,
    )


def _gpt2(hf: Mapping[str, Any]) -> DecoderConfig:
    _refuse_unless_neutral(hf, _NEUTRAL | _GPT2_NEUTRAL)
    activation = hf.get("activation_function", "gelu_new")
    if activation not in _GPT2_ACTIVATIONS:
        raise _refusal("activation_function", activation, "one of " + ", ".join(_GPT2_ACTIVATIONS))
    drops = {name: hf.get(name, 0.1) for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if len(set(drops.values())) != 1:
        values = ", ".join(f"{k} {v}" for k, v in drops.items())
        raise ValueError(f"config.json: {values}: one rate of dropout for all three is needed")
    return DecoderConfig(
        vocab=_need(hf, "vocab_size"),
        n_layer=_need(hf, "n_layer", "num_hidden_layers"),
        n_head=_need(hf, "n_head", "num_attention_heads"),
        d_model=_need(hf, "n_embd", "hidden_size"),
        d_ff=hf.get("n_inner"),
        block=_need(hf, "n_positions", "max_position_embeddings", "n_ctx"),
        dropout=float(drops["embd_pdrop"]),
        tie=bool(hf.get("tie_word_embeddings", True)),
        activation=_GPT2_ACTIVATIONS[activation],
        eps=hf.get("layer_norm_epsilon", 1e-5),
    )


def _need(hf: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    raise ValueError(f"config.json: {names[0]} is missing")


def _refuse_unless_neutral(hf: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name, allowed in neutral.items():
        value = hf.get(name)
        if value is not None and value not in allowed:
            raise _refusal(name, value, " or ".join(map(repr, allowed)) or "null")


def _refusal(name: str, value: Any, need: str) -> ValueError:
    return ValueError(f"config.json: {name} is {value!r}, which is not supported; needed: {need}")


def _rope(hf: Mapping[str, Any], positions: int) -> tuple[float, dict[str, Any] | None]:
    """Version 4 has rope_theta and rope_scaling, version 5 has both in rope_parameters."""
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if any(isinstance(v, Mapping) for v in rope.values()):
        raise _refusal("rope_parameters", rope, "one set of settings for all layers")
    given = [rope.pop("rope_theta", None), hf.get("rope_theta"), 10000.0]
    theta = next(t for t in given if t is not None)
    if not (is_number(theta) and theta > 0):
        raise _refusal("rope_theta", theta, "a positive number")
    factor = rope.pop("partial_rotary_factor", None)
    if factor not in (None, 1):
        raise _refusal("partial_rotary_factor", factor, "1")
    if rope.get("rope_type", rope.get("type")) == "llama3":
        rope.setdefault("original_max_position_embeddings", positions)
    return theta, check_rope_scaling(rope)


def _sliding(
    hf: Mapping[str, Any], kind: str, layers: int
) -> tuple[int | None, tuple[str, ...] | None]:
    """The window, and which layers have it if not all do."""
    if kind == "llama":
        return None, None
    window = hf.get("sliding_window", 4096)
    if kind == "mistral":
        types = hf.get("layer_types") or ()
        if any(t != "sliding_attention" for t in types) and window is not None:
            raise _refusal("layer_types", types, "the same for all layers of a Mistral model")
        return window, None
    if not hf.get("use_sliding_window", False) or window is None:
        return None, None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        types = ["sliding_attention" if n >= first else "full_attention" for n in range(layers)]
    return window, tuple(types)


def config_to_hf(config: Config, dtype: str) -> dict[str, Any]:
    """The config.json of a model, readable by transformers 4 and 5.

    ValueError names the field that no architecture of transformers has.
    """
    if isinstance(config, DecoderConfig):
        return _gpt2_to_hf(config) | {"torch_dtype": dtype}
    kind = config.hf_model_type_name
    _check_expressible(config, kind)
    hf: dict[str, Any] = {
        "architectures": [config.hf_architecture_name],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
    }
    if kind in ("llama", "qwen3"):
        hf["attention_bias"] = config.attention_bias
    if kind == "llama":
        hf["mlp_bias"] = config.mlp_bias
    if kind == "mistral":
        hf["sliding_window"] = config.sliding_window
    if kind in ("qwen2", "qwen3"):
        sliding = config.sliding_window is not None
        hf |= {"use_sliding_window": sliding, "sliding_window": config.sliding_window}
        if sliding:
            every = ("sliding_attention",) * config.num_hidden_layers
            hf["layer_types"] = list(config.layer_types or every)
            hf["max_window_layers"] = config.num_hidden_layers
    return hf


def _check_expressible(config: TransformerConfig, kind: str) -> None:
    """Raise if a model of this kind in transformers would compute something else."""
    if kind not in ARCHITECTURES:
        raise ValueError(f"save_pretrained: model_type {kind!r} has no files of this kind")
    bias, window = config.attention_bias, config.sliding_window is not None
    wrong = {
        "attention_bias": bias != (kind == "qwen2") and kind not in ("llama", "qwen3"),
        "o_bias": config.o_bias != (bias and kind in ("llama", "qwen3")),
        "mlp_bias": config.mlp_bias and kind != "llama",
        "qk_norm": config.qk_norm != (kind == "qwen3"),
        "qk_norm_eps": config.qk_norm and config.qk_norm_eps != config.rms_norm_eps,
        "sliding_window": window and kind == "llama",
        "layer_types": config.layer_types is not None and window and kind == "mistral",
        "head_dim": kind == "qwen2"
        and config.head_dim != config.hidden_size // config.num_attention_heads,
    }
    for name, flag in wrong.items():
        if flag:
            raise ValueError(
                f"save_pretrained: a {kind} model of transformers has no "
                f"{name} = {getattr(config, name)}"
            )


def _gpt2_to_hf(config: DecoderConfig) -> dict[str, Any]:
    if config.pos != "learned":
        raise ValueError(f"save_pretrained: GPT-2 has learned positions, not pos = {config.pos!r}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_positions": config.block,
        "n_ctx": config.block,
        "n_embd": config.d_model,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.d_ff,
        "activation_function": {"gelu_tanh": "gelu_new", "gelu": "gelu"}[config.activation],
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "layer_norm_epsilon": config.eps,
        "tie_word_embeddings": config.tie,
    }
