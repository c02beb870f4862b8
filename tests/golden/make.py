"""Makes the golden files beside it: tiny models of transformers, and what they compute.

    python tests/golden/make.py       # needs torch and transformers; written with 2.13 and 5.24

Each folder is a checkpoint with random values everywhere, and `expected.npz`: ids, logits, the loss
of the ids shifted by one, and the gradient of every parameter under its name in the file.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
MODELS = {
    "llama3": ("LlamaForCausalLM", SIZES | {"rope_scaling": LLAMA3, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", SIZES | {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"head_dim": 6}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
}


def main() -> None:
    ids = np.random.default_rng(0).integers(1, 31, (2, 12))
    for name, (cls, sizes) in MODELS.items():
        torch.manual_seed(7)
        model_class = getattr(transformers, cls)
        model = model_class(model_class.config_class(**sizes)).eval()
        with torch.no_grad():
            for key, p in model.named_parameters():
                p.normal_(1.0 if p.ndim == 1 and not key.endswith("bias") else 0.0, 0.2)
        logits = model(torch.tensor(ids)).logits
        flat, targets = logits[:, :-1].reshape(-1, 31), torch.tensor(ids[:, 1:]).reshape(-1)
        loss = torch.nn.functional.cross_entropy(flat, targets)
        loss.backward()
        folder = Path(__file__).parent / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        gradients = {f"grad.{key}": p.grad.numpy() for key, p in model.named_parameters()}
        np.savez_compressed(
            folder / "expected.npz",
            ids=ids,
            logits=logits.detach().numpy(),
            loss=loss.detach().numpy(),
            **gradients,
        )


if __name__ == "__main__":
    main()
