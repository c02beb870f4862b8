"""What a `Transformer` is made of, and the sizes that have names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .values import are_strings, is_number, plain

# What the fields of an APR file cannot say; they get keys of their own there.
APR_EXTRA = (
    "rope_scaling",
    "attention_bias",
    "o_bias",
    "mlp_bias",
    "qk_norm",
    "qk_norm_eps",
    "sliding_window",
    "layer_types",
    "tie_word_embeddings",
)
_ARCHITECTURES = ("decoder", "encoder")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    `num_kv_heads` (or `num_key_value_heads`) is `num_attention_heads` if not given, `head_dim`
    hidden_size // num_attention_heads. `attention_bias` is about q, k and v; `o_bias` and
    `mlp_bias` about the other projections. A key is seen by a query iff it lies less than
    `sliding_window` positions before it; with `layer_types`, only in the layers called
    "sliding_attention". `rope_scaling` is a dict with `rope_type` "linear" or "llama3" and the
    fields that Hugging Face gives these. Only an encoder has no rotary positions, `rope_theta` 0.

    ValueError names the field that is wrong, its value and what is needed.
    """

    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int | None = None
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    tie_word_embeddings: bool = False
    architecture: str = "decoder"
    hf_architecture: str | None = None
    hf_model_type: str | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_attention_heads)
        for name in ("hidden_size", "num_attention_heads", "num_kv_heads", "intermediate_size"):
            _positive(name, getattr(self, name))
        for name in ("num_hidden_layers", "vocab_size", "max_position_embeddings"):
            _positive(name, getattr(self, name))
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                need = (
                    f"a multiple of num_attention_heads, {self.num_attention_heads}, or a head_dim"
                )
                _refuse("hidden_size", self.hidden_size, need)
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _positive("head_dim", self.head_dim)
        if self.num_attention_heads % self.kv_heads:
            need = f"a multiple of num_kv_heads, {self.num_kv_heads}"
            _refuse("num_attention_heads", self.num_attention_heads, need)
        for name in ("rms_norm_eps", "qk_norm_eps"):
            eps = getattr(self, name)
            if not (is_number(eps) and 0 < eps < 1):
                _refuse(name, eps, "a number between 0 and 1")
        if not isinstance(self.architecture, str) or self.architecture not in _ARCHITECTURES:
            _refuse("architecture", self.architecture, '"decoder" or "encoder"')
        none = self.architecture == "encoder" and self.rope_theta == 0
        if not none and not (is_number(self.rope_theta) and self.rope_theta > 0):
            _refuse("rope_theta", self.rope_theta, "a positive number")
        if self.rope_theta and self.head_size % 2:
            _refuse("head_dim", self.head_dim, "an even number, for rotary positions")
        for name in ("attention_bias", "o_bias", "mlp_bias", "qk_norm", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, repr(getattr(self, name)), "true or false")
        if self.sliding_window is not None:
            _positive("sliding_window", self.sliding_window)
        for name in ("hf_architecture", "hf_model_type"):
            if not isinstance(getattr(self, name), str | None):
                _refuse(name, repr(getattr(self, name)), "a string")
        if self.layer_types is not None:
            if not are_strings(self.layer_types):
                _refuse("layer_types", repr(self.layer_types), "a list of strings")
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
            self._check_layer_types()
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", check_rope_scaling(self.rope_scaling))
        for name in ("rms_norm_eps", "qk_norm_eps", "rope_theta"):
            object.__setattr__(self, name, plain(getattr(self, name)))

    def _check_layer_types(self) -> None:
        types = self.layer_types or ()
        if len(types) != self.num_hidden_layers:
            _refuse(
                "layer_types", f"{len(types)} entries", f"one per layer, {self.num_hidden_layers}"
            )
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                _refuse("layer_types", repr(kind), '"full_attention" or "sliding_attention"')
        if "sliding_attention" in types and self.sliding_window is None:
            _refuse("sliding_window", None, 'a width, for the layers called "sliding_attention"')

    # --- derived sizes ---

    @property
    def num_key_value_heads(self) -> int:
        """`num_kv_heads` under the name that Hugging Face gives it."""
        return self.kv_heads

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads, as an int."""
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def head_size(self) -> int:
        """The width of a head, as an int."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def q_dim(self) -> int:
        """The width of all query heads."""
        return self.num_attention_heads * self.head_size

    @property
    def kv_dim(self) -> int:
        """The width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_size

    def window(self, layer: int) -> int | None:
        """How far layer `layer` looks back, itself included; None is everything."""
        if self.layer_types is not None and self.layer_types[layer] == "full_attention":
            return None
        return self.sliding_window

    # --- names at Hugging Face ---

    @property
    def hf_architecture_name(self) -> str:
        """The `architectures` entry of a config.json: as read, or the one this structure has."""
        if self.hf_architecture is not None:
            return self.hf_architecture
        if self.architecture == "encoder":
            return "BertModel"
        if self.qk_norm:
            return "Qwen3ForCausalLM"
        if self.attention_bias and not self.o_bias:
            return "Qwen2ForCausalLM"
        if self.sliding_window is not None:
            return "MistralForCausalLM"
        return "LlamaForCausalLM"

    @property
    def hf_model_type_name(self) -> str:
        """The `model_type` of a config.json: as read, or the one this structure has."""
        if self.hf_model_type is not None:
            return self.hf_model_type
        if self.architecture == "encoder":
            return "roberta"
        return self.hf_architecture_name.removesuffix("ForCausalLM").lower()

    # --- making one ---

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TransformerConfig:
        """From field names and values, as `to_dict` gives them; unknown names are refused."""
        if not isinstance(values, Mapping):
            raise TypeError(f"TransformerConfig: a dict is needed, given a {type(values).__name__}")
        known = [f.name for f in fields(cls)] + ["num_key_value_heads"]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(
                f"TransformerConfig: unknown {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Field names and values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_size_str(cls, size: str) -> TransformerConfig:
        """The preset that a size such as "0.5B" stands for."""
        preset = _SIZES.get(str(size).lower())
        if preset is None:
            raise ValueError(
                f"Unknown model size '{size}'. Known sizes: codebert, 0.5B, 4B, 7B, 9B"
            )
        return cls._preset(preset)

    @classmethod
    def from_apr_metadata(cls, metadata: Mapping[str, Any]) -> TransformerConfig | None:
        """From the metadata of an APR file; None if a size is missing from it."""
        if not isinstance(metadata, Mapping):
            raise TypeError(
                f"from_apr_metadata: a dict is needed, given a {type(metadata).__name__}"
            )
        need = ("hidden_size", "num_heads", "num_layers", "vocab_size", "intermediate_size")
        if any(metadata.get(name) is None for name in need):
            return None
        hidden, heads, layers, vocab, inter = (metadata[name] for name in need)
        name = str(metadata.get("architecture") or "").lower()
        qwen3 = name.startswith("qwen3")
        more: dict[str, Any] = {
            "rms_norm_eps": metadata.get("rms_norm_eps"),
            "rope_theta": metadata.get("rope_theta"),
            "head_dim": metadata.get("head_dim") or (128 if qwen3 else None),
            "attention_bias": name.startswith("qwen2"),
            "qk_norm": qwen3,
            "architecture": "encoder" if "bert" in name else "decoder",  # roberta too
        }
        more |= {field: metadata[field] for field in APR_EXTRA if field in metadata}
        return cls(
            hidden_size=hidden,
            num_attention_heads=heads,
            num_kv_heads=metadata.get("num_kv_heads") or heads,
            intermediate_size=inter,
            num_hidden_layers=layers,
            vocab_size=vocab,
            max_position_embeddings=metadata.get("max_position_embeddings") or 32768,
            **{field: value for field, value in more.items() if value is not None},
        )

    @classmethod
    def _preset(cls, name: str) -> TransformerConfig:
        heads, kv, *sizes = _PRESETS[name][0]
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        names += ("max_position_embeddings",)
        return cls(
            num_attention_heads=heads,
            num_kv_heads=kv,
            **dict(zip(names, sizes, strict=True)),
            **_PRESETS[name][1],
        )

    @classmethod
    def tiny(cls) -> TransformerConfig:
        """195,392 parameters, for tests."""
        return cls._preset("tiny")

    @classmethod
    def llama2_7b(cls) -> TransformerConfig:
        """Llama 2, 7 B."""
        return cls._preset("llama2_7b")

    @classmethod
    def llama2_13b(cls) -> TransformerConfig:
        """Llama 2, 13 B."""
        return cls._preset("llama2_13b")

    @classmethod
    def mistral_7b(cls) -> TransformerConfig:
        """Mistral, 7 B, version 0.1."""
        return cls._preset("mistral_7b")

    @classmethod
    def qwen2_0_5b(cls) -> TransformerConfig:
        """Qwen 2, 0.5 B."""
        return cls._preset("qwen2_0_5b")

    @classmethod
    def qwen2_1_5b(cls) -> TransformerConfig:
        """Qwen 2, 1.5 B."""
        return cls._preset("qwen2_1_5b")

    @classmethod
    def qwen2_7b(cls) -> TransformerConfig:
        """Qwen 2, 7 B."""
        return cls._preset("qwen2_7b")

    @classmethod
    def qwen3_4b(cls) -> TransformerConfig:
        """Qwen 3, 4 B."""
        return cls._preset("qwen3_4b")

    @classmethod
    def qwen3_5_9b(cls) -> TransformerConfig:
        """Qwen 3.5, 9 B: a hybrid, the sizes only; `Transformer` refuses it."""
        return cls._preset("qwen3_5_9b")

    @classmethod
    def codebert(cls) -> TransformerConfig:
        """CodeBERT: an encoder, the sizes only; `Transformer` refuses it."""
        return cls._preset("codebert")


def _with_alias(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor, with `num_key_value_heads` accepted for `num_kv_heads`."""

    @functools.wraps(init)
    def __init__(self: TransformerConfig, **values: Any) -> None:  # noqa: N807
        if "num_key_value_heads" in values:
            alias = values.pop("num_key_value_heads")
            if values.setdefault("num_kv_heads", alias) != alias:
                need = f"num_key_value_heads, which is {alias}"
                _refuse("num_kv_heads", values["num_kv_heads"], need)
        init(self, **values)

    return __init__


TransformerConfig.__init__ = _with_alias(TransformerConfig.__init__)

_QWEN2 = {"rope_theta": 1e6, "attention_bias": True}
_QWEN3 = {"rope_theta": 1e6, "qk_norm": True}

# heads, kv heads, hidden, intermediate, layers, vocabulary, positions; then what is not default
_PRESETS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "tiny": ((2, 2, 64, 256, 2, 1000, 512), {"tie_word_embeddings": True}),
    "llama2_7b": ((32, 32, 4096, 11008, 32, 32000, 4096), {"rms_norm_eps": 1e-5}),
    "llama2_13b": ((40, 40, 5120, 13824, 40, 32000, 4096), {"rms_norm_eps": 1e-5}),
    "mistral_7b": (
        (32, 8, 4096, 14336, 32, 32000, 32768),
        {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "qwen2_0_5b": ((14, 2, 896, 4864, 24, 151936, 32768), _QWEN2 | {"tie_word_embeddings": True}),
    "qwen2_1_5b": ((12, 2, 1536, 8960, 28, 151936, 32768), _QWEN2 | {"tie_word_embeddings": True}),
    "qwen2_7b": ((28, 4, 3584, 18944, 28, 152064, 32768), _QWEN2),
    "qwen3_4b": (
        (32, 8, 2560, 9728, 36, 151936, 40960),
        _QWEN3 | {"head_dim": 128, "tie_word_embeddings": True},
    ),
    "qwen3_5_9b": (
        (16, 4, 4096, 12288, 32, 248320, 262144),
        {
            "rope_theta": 1e6,
            "head_dim": 256,
            "hf_architecture": "Qwen3_5ForCausalLM",
            "hf_model_type": "qwen3_5",
        },
    ),
    "codebert": (
        (12, 12, 768, 3072, 12, 50265, 514),
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 0.0,
            "attention_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "architecture": "encoder",
        },
    ),
}

_SIZES = {
    "codebert": "codebert",
    "0.5b": "qwen2_0_5b",
    "4b": "qwen3_4b",
    "7b": "llama2_7b",
    "9b": "qwen3_5_9b",
}


def check_rope_scaling(scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary scaling in one form (`rope_type` first); None if it changes nothing."""
    if not isinstance(scaling, Mapping):
        _refuse("rope_scaling", repr(scaling), "a dict with rope_type")
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    need = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }.get(kind)
    if need is None:
        need = _refuse("rope_scaling", f"type {kind!r}", f"one of {', '.join(ROPE_TYPES)}")
    given = {k: v for k, v in scaling.items() if k not in ("rope_type", "type", "rope_theta")}
    unknown = [name for name in given if name not in need]
    if unknown and kind != "default":
        _refuse("rope_scaling", f"{kind} with {', '.join(unknown)}", f"only {', '.join(need)}")
    for name in need:
        if not (is_number(value := given.get(name)) and value > 0):
            _refuse("rope_scaling", f"{kind} with {name} {value!r}", "a positive number there")
    if kind == "llama3" and not given["high_freq_factor"] > given["low_freq_factor"]:
        _refuse("rope_scaling", dict(scaling), "high_freq_factor above low_freq_factor")
    return None if kind == "default" else {"rope_type": kind, **{k: plain(given[k]) for k in need}}


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(name, value, "a positive integer")


def _refuse(name: str, value: Any, need: str) -> Any:
    raise ValueError(f"TransformerConfig: {name} is {value}; needed: {need}")
