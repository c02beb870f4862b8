"""Generation: the cache, ragged batches, sampling, stopping."""

import dataclasses
import inspect
import os
import re

import numpy as np
import pytest

from afinar.autograd import no_grad
from afinar.transformer import (
    Decoder,
    DecoderConfig,
    Transformer,
    TransformerConfig,
    generate,
    load_pretrained,
    stream,
)
from afinar.transformer.generate import KVCache, Options, _Picker

SMALL = dataclasses.replace(
    TransformerConfig.tiny(),
    vocab_size=100,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=16,
    attention_bias=True,
    qk_norm=True,
    max_position_embeddings=160,
)


def lively(model):
    """Weights large enough that every token changes what follows."""
    rng = np.random.default_rng(0)
    for p in model.parameters():
        p.data[...] += rng.normal(0, 0.2, p.shape)
    return model


@pytest.fixture(scope="module", params=["llama", "window", "gpt", "gpt-rope"])
def model(request):
    if request.param.startswith("gpt"):
        pos = "rope" if request.param == "gpt-rope" else "learned"
        config = DecoderConfig(100, 2, 4, 32, block=160, pos=pos, dropout=0.1)
        return lively(Decoder(config, seed=1))
    window = 70 if request.param == "window" else None
    return lively(Transformer(dataclasses.replace(SMALL, sliding_window=window), seed=1))


def rows(*lengths):
    rng = np.random.default_rng(5)
    return [rng.integers(0, 100, n).tolist() for n in lengths]


def test_logits_with_a_cache_have_the_bits_of_the_full_pass(model):
    (row,) = rows(140)
    model.eval()
    with no_grad():
        full = model([row]).numpy()
        for parts in ([140], [1] * 3 + [137], [129, 1, 1, 1, 8], [64, 1, 63, 12]):
            cache, at = KVCache(model, 1, 140), 0
            for n in parts:
                logits = model([row[at : at + n]], cache=cache).numpy()
                np.testing.assert_array_equal(logits, full[:, at : at + n])
                at += n


def test_a_ragged_batch_gets_what_each_row_gets_alone(model):
    batch = rows(3, 90, 1, 66)
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2}
    for more in ({}, options):
        together = generate(model, batch, max_new_tokens=12, **more)
        assert together == [generate(model, [row], max_new_tokens=12, **more)[0] for row in batch]
        assert [len(new) for new in together] == [12] * 4


def test_greedy_is_the_argmax_of_the_full_pass(model):
    (row,) = rows(20)
    new = generate(model, row, max_new_tokens=15)
    model.eval()
    with no_grad():
        logits = model([row + new]).numpy()[0]
    assert logits[19:-1].argmax(axis=-1).tolist() == new
    assert generate(model, np.array(row), max_new_tokens=15) == new


def test_sampling_depends_on_the_seed_and_on_nothing_else(model):
    batch = rows(5, 9)
    draws = [
        generate(model, batch, max_new_tokens=20, temperature=1.0, seed=seed) for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    twice = generate(model, [batch[0]] * 2, max_new_tokens=20, temperature=1.0, seed=1)
    assert twice[0] == draws[0][0]
    assert twice[1] != twice[0]


def test_training_goes_on_as_before(model):
    model.train()
    generate(model, rows(4), max_new_tokens=2)
    assert all(m.training for _, m in model.named_modules())
    steps = stream(model, rows(4), max_new_tokens=5)
    next(steps)
    steps.close()
    assert model.training


def test_stop_ids_and_runs_end_a_sequence_and_are_kept(model):
    batch = rows(7, 12)
    free = generate(model, batch, max_new_tokens=30)
    first, run = free[0][4], free[1][3:5]
    stopped = generate(model, batch, max_new_tokens=30, stop=[[first], run])
    for new, whole in zip(stopped, free, strict=True):
        ends = [
            n for n in range(1, 31) if whole[n - 1] == first or (n > 1 and whole[n - 2 : n] == run)
        ]
        assert new == whole[: min(ends)]
    assert (
        generate(model, batch, max_new_tokens=30, stop=[first])[0]
        == free[0][: free[0].index(first) + 1]
    )
    assert generate(model, batch, max_new_tokens=0) == [[], []]


def test_streaming_yields_what_generate_returns(model):
    batch = rows(7, 12)
    free = generate(model, batch, max_new_tokens=10)
    stop = [free[0][2]]
    new = [[], []]
    for step in stream(model, batch, max_new_tokens=10, stop=stop):
        for row, token in zip(new, step, strict=True):
            if token is not None:
                row.append(token)
    assert new == generate(model, batch, max_new_tokens=10, stop=stop)


# --- the choice of a token -----------------------------------------------------------------


def pick(logits, prompt=(0,), temperature=1.0, penalty=1.0, **more):
    options = Options(max_new_tokens=1, temperature=temperature, repetition_penalty=penalty, **more)
    picker = _Picker([list(prompt)], options)
    return picker(0, np.asarray(logits, np.float32))


def test_draws_have_the_probabilities_of_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    counts = np.bincount([pick(logits, seed=s) for s in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.03)
    hot = np.bincount([pick(logits, temperature=0.5, seed=s) for s in range(4000)], minlength=4)
    square = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(hot / 4000, square / square.sum(), atol=0.03)


def test_top_k_and_top_p_cut():
    logits = np.log(np.array([0.05, 0.5, 0.15, 0.3]))

    def seen(**options):
        return {pick(logits, seed=s, **options) for s in range(300)}

    assert seen(top_k=1) == {1}
    assert seen(top_k=3) == {1, 2, 3}
    assert seen(top_k=99) == {0, 1, 2, 3}
    assert seen(top_p=0.45) == {1}
    assert seen(top_p=0.79) == {1, 3}
    assert seen(top_p=0.81) == {1, 2, 3}
    assert seen(top_p=1.0) == {0, 1, 2, 3}
    assert {pick([1, 1, 1, 0], top_k=2, seed=s) for s in range(100)} == {0, 1}


def test_repetition_penalty_divides_and_multiplies():
    assert pick([2.0, 1.5, -1.0], prompt=[0], temperature=0, penalty=1.5) == 1
    assert pick([-1.0, -1.5, -9.0], prompt=[0, 0], temperature=0, penalty=1.6) == 1
    assert pick([2.0, 1.5, -1.0], prompt=[2], temperature=0, penalty=9.0) == 0


def test_extreme_logits_stay_finite():
    assert pick([1e30, -1e30, 0.0], temperature=1e-3) == 0
    assert pick([-np.inf, 0.0, -np.inf]) == 1
    assert pick([1.0, 2.0, -1.0], temperature=1e-60) == 1
    assert pick([1.0, 2.0, -1.0], prompt=[1], temperature=0, penalty=1e30) == 0


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        ([], {}, ValueError, "at least one sequence"),
        ([[1], []], {}, ValueError, "an id in each"),
        ("text", {}, TypeError, "ids is a str"),
        (None, {}, TypeError, "ids is a NoneType"),
        ([[1, 2.5]], {}, TypeError, "ids are whole numbers, given 2.5"),
        ([[True]], {}, TypeError, "ids are whole numbers, given True"),
        ([[1, 100]], {}, ValueError, "id 100 is outside the vocabulary, 0 .. 99"),
        ([[-1]], {}, ValueError, "id -1 is outside the vocabulary"),
        ([[1] * 150], {"max_new_tokens": 11}, ValueError, "161 positions, the model has 160"),
        ([[1]], {"topk": 3}, TypeError, "topk"),
        *(
            ([[1]], {name: value}, ValueError, f"generate: {name} is {re.escape(repr(value))}")
            for name, values in {
                "max_new_tokens": (-1, 2.5, None, True, "3"),
                "temperature": (-0.5, np.nan, np.inf, 1e31, "hot", None),
                "top_k": (0, -3, 2.5, "5", True),
                "top_p": (0.0, 1.5, -0.1, np.nan, "0.5"),
                "repetition_penalty": (0.0, -1, np.nan, np.inf, 1e-40, None),
                "stop": ([[]], 5, "end", ["end"], [2.5], [[1, 2.5]], [None], {1: 2}),
                "seed": (1.5, None, "0"),
            }.items()
            for value in values
        ),
    ],
)
def test_wrong_arguments_are_named(model, ids, options, error, message):
    with pytest.raises(error, match=message):
        generate(model, ids, **({"max_new_tokens": 2} | options))


def test_numbers_of_numpy_are_numbers(model):
    options = {"temperature": np.float32(0.5), "top_k": np.int64(4), "top_p": np.float64(0.5)}
    plain = {"temperature": 0.5, "top_k": 4, "top_p": 0.5}
    stop = [np.int32(1), np.array([2, 3])]
    given = generate(
        model, [[1]], max_new_tokens=np.int64(6), seed=np.uint8(1), stop=stop, **options
    )
    assert given == generate(model, [[1]], max_new_tokens=6, seed=1, stop=[1, [2, 3]], **plain)


@pytest.mark.parametrize("function", [generate, stream])
def test_the_signature_shows_the_options(function):
    parameters = inspect.signature(function).parameters
    assert list(parameters)[:2] == ["model", "ids"]
    options = {name: p.default for name, p in list(parameters.items())[2:]}
    assert options == {
        "max_new_tokens": inspect.Parameter.empty,
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "repetition_penalty": 1.0,
        "stop": None,
        "seed": 0,
    }
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[2:])


# --- a real model --------------------------------------------------------------------------

FOLDER = os.environ.get("AFINAR_SMOLLM2")


@pytest.mark.real
@pytest.mark.skipif(FOLDER is None, reason="AFINAR_SMOLLM2 names no folder")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_capital_of_france(dtype):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(f"{FOLDER}/tokenizer.json")
    ids = tokenizer.encode("The capital of France is", add_special_tokens=False).ids
    new = generate(load_pretrained(FOLDER, dtype), ids, max_new_tokens=3)
    assert tokenizer.decode(new).startswith(" Paris.")


@pytest.mark.parametrize("run", [generate, stream])
def test_what_is_no_model_or_no_ids_is_named(run):
    with pytest.raises(TypeError, match="generate: a model is needed, given a str"):
        run("x", [1], max_new_tokens=1)
    model = Transformer(TransformerConfig.tiny())
    for ids, shown in (([[1], 2], "2"), ([[1], None], "None"), ([[1], "12"], "'12'")):
        with pytest.raises(TypeError, match=f"ids mix lists and {shown}; a list of lists is need"):
            run(model, ids, max_new_tokens=1)
    for ids in (["ab"], [1, [2]], [{1: 2}], [None]):
        with pytest.raises(TypeError, match="ids are whole numbers, given"):
            run(model, ids, max_new_tokens=1)
    for ids in ("ab", 5, None, {1: 2}):
        with pytest.raises(TypeError, match="a list of lists is needed"):
            run(model, ids, max_new_tokens=1)
