"""Stored results of transformers, for every family, where transformers itself is not installed."""

from pathlib import Path

import numpy as np
import pytest

from afinar.transformer import Decoder, load_pretrained

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3", "gpt2"])
def test_logits_loss_and_gradients_are_those_of_transformers(family):
    expected = np.load(GOLDEN / family / "expected.npz")
    model = load_pretrained(GOLDEN / family)
    ids = expected["ids"]
    np.testing.assert_allclose(model(ids).data, expected["logits"], atol=2e-5, rtol=2e-5)
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(float(expected["loss"]), abs=2e-5)
    gradients = {k.removeprefix("grad."): expected[k] for k in expected if k.startswith("grad.")}
    for name, p in model.named_parameters(hf=True):
        want = gradients.pop(name)
        turned = isinstance(model, Decoder) and want.shape != p.grad.shape
        square = isinstance(model, Decoder) and name.endswith("attn.c_proj.weight")
        got = p.grad.T if turned or square else p.grad
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-4, err_msg=name)
    assert not gradients
