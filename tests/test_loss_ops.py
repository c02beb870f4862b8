"""The losses: values and gradients from mathematics, what is ignored, blocks, memory, bad input."""

import math

import numpy as np
import pytest

from afinar.autograd import (
    Tensor,
    buffers,
    checkpoint,
    cross_entropy,
    launch,
    linear,
    linear_cross_entropy,
    no_grad,
)
from afinar.autograd.ops.gemm import gemm
from afinar.autograd.ops.loss import cross_entropy_backward, cross_entropy_forward
from afinar.autograd.precision import compute_in
from afinar.autograd.tape import keep_results
from afinar.autograd.testing import gradcheck, tolerance

rng = np.random.default_rng(0)
INF = np.inf


def exact(logits, targets, ignore_index=-100, reduction="mean"):
    """Loss and gradient in float64, straight from the definition."""
    z = logits.astype(np.float64).reshape(-1, logits.shape[-1])
    t = targets.reshape(-1)
    lse = np.log(np.exp(z - z.max(axis=1, keepdims=True)).sum(axis=1)) + z.max(axis=1)
    counts = np.flatnonzero(t != ignore_index)
    n = max(len(counts), 1) if reduction == "mean" else 1
    d = np.zeros_like(z)
    d[counts] = np.exp(z[counts] - lse[counts, None])
    d[counts, t[counts]] -= 1
    return (lse[counts] - z[counts, t[counts]]).sum() / n, d.reshape(logits.shape) / n


def problem(N, C, V, dtype=np.float64, ignored=0.2):
    x, weight = rng.standard_normal((N, C)).astype(dtype), rng.standard_normal((V, C)).astype(dtype)
    targets = np.where(rng.random(N) < ignored, -100, rng.integers(0, V, N))
    return x, weight, targets, rng.standard_normal(V).astype(dtype)


def fused(x, weight, targets, bias=None, g=None, **options):
    """Loss and gradients of linear_cross_entropy."""
    leaves = [Tensor(a, requires_grad=True) for a in (x, weight, *([] if bias is None else [bias]))]
    loss = linear_cross_entropy(*leaves[:2], targets, *leaves[2:], **options)
    loss.backward(g)
    return loss.item(), [a.grad for a in leaves]


# --- cross_entropy -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "shape", [(7,), (1, 1), (30, 5), (2, 40, 100), (5000, 3), (3, 30_000)], ids=str
)
def test_value_and_gradient(shape, reduction, dtype):
    logits = (rng.standard_normal(shape) * 3).astype(dtype)
    targets = rng.integers(0, shape[-1], shape[:-1])
    if len(shape) > 1:
        targets = np.where(rng.random(shape[:-1]) < 0.2, -100, targets)
    x = Tensor(logits, requires_grad=True)
    loss = cross_entropy(x, targets, reduction=reduction)
    value, gradient = exact(logits, targets, reduction=reduction)
    assert (loss.shape, loss.dtype) == ((), dtype)
    assert abs(loss.item() - value) <= tolerance(dtype) * max(1, value)
    loss.backward()
    assert x.grad.dtype == dtype
    assert np.abs(x.grad - gradient).max() <= tolerance(dtype)


def test_gradient_by_finite_differences():
    logits, targets = rng.standard_normal((9, 11)), rng.integers(0, 11, 9)
    targets[2] = -100
    for reduction in ("mean", "sum"):
        gradcheck(lambda x, r=reduction: cross_entropy(x, targets, reduction=r), logits)


def test_the_loss_of_uniform_logits_is_log_v():
    for V, expected in ((1000, 6.9078), (2030, 7.6158)):
        loss = cross_entropy(Tensor(np.zeros((4, V), np.float32)), np.arange(4))
        assert abs(loss.item() - expected) < 5e-5
        assert loss.item() == np.float32(math.log(V))


def test_a_far_target_is_not_clamped():
    loss = cross_entropy(Tensor(np.array([[0.0, 1e4]], np.float32)), np.array([0]))
    assert loss.item() == 1e4


def test_the_gradient_that_arrives_is_honoured():
    x = Tensor(rng.standard_normal((6, 8)), requires_grad=True)
    targets = rng.integers(0, 8, 6)
    (cross_entropy(x, targets) * 3.0).backward()
    np.testing.assert_allclose(x.grad, 3 * exact(x.data, targets)[1], rtol=1e-12, atol=1e-15)


def test_p11_all_labels_ignored():
    x, weight, _, bias = problem(300, 4, 9)
    nobody = np.full(300, -100)
    for reduction in ("mean", "sum"):
        logits = Tensor(rng.standard_normal((300, 9)), requires_grad=True)
        loss = cross_entropy(logits, nobody, reduction=reduction)
        assert loss.item() == 0
        loss.backward()
        assert (logits.grad == 0).all()
        loss, grads = fused(x, weight, nobody, bias, reduction=reduction)
        assert loss == 0
        for grad, of in zip(grads, (x, weight, bias), strict=True):
            assert grad.shape == of.shape
            assert (grad == 0).all()


def test_p11_an_ignored_row_counts_for_nothing_even_if_it_is_nan():
    logits = rng.standard_normal((5, 7))
    targets = np.array([1, -100, 3, -100, 6])
    clean = exact(logits[::2], targets[::2])
    logits[1::2] = np.nan
    x = Tensor(logits, requires_grad=True)
    loss = cross_entropy(x, targets)
    assert np.isclose(loss.item(), clean[0], rtol=1e-14)
    loss.backward()
    assert (x.grad[1::2] == 0).all()
    np.testing.assert_allclose(x.grad[::2], clean[1], rtol=1e-12)


@pytest.mark.parametrize("ignore_index", [-1, 0, 3, 99])
def test_any_ignore_index(ignore_index):
    logits, targets = rng.standard_normal((40, 5)), rng.integers(0, 5, 40)
    targets[::3] = ignore_index
    loss = cross_entropy(Tensor(logits), targets, ignore_index=ignore_index)
    assert np.isclose(loss.item(), exact(logits, targets, ignore_index)[0], rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint16, np.uint64])
def test_targets_of_any_integer_type(dtype):
    logits, targets = rng.standard_normal((40, 5)), rng.integers(0, 5, 40)
    expected = exact(logits, targets)[0]
    assert np.isclose(
        cross_entropy(Tensor(logits), targets.astype(dtype)).item(), expected, rtol=1e-13
    )


def test_p9_a_logit_of_minus_infinity_gets_exactly_0():
    logits = rng.standard_normal((4, 20))
    logits[:, 5] = -INF
    logits[3] = -INF
    x = Tensor(logits, requires_grad=True)
    targets = np.array([0, 7, 5, 5])
    loss = cross_entropy(x, targets, reduction="sum")
    assert loss.item() == INF  # the classes of rows 2 and 3 are impossible
    loss.backward()
    assert (x.grad[:, 5] == 0).all()
    assert (x.grad[3] == 0).all()
    assert np.isfinite(x.grad).all()
    assert np.isclose(cross_entropy(Tensor(logits[:2]), targets[:2]).item(),
                      exact(np.delete(logits[:2], 5, axis=1), np.array([0, 6]))[0])  # fmt: skip


def test_nan_and_overflow_are_not_hidden():
    logits = np.zeros((3, 20))
    logits[1, 2] = np.nan
    assert np.isnan(cross_entropy(Tensor(logits), np.array([0, 0, 0])).item())
    logits[1, 2] = INF
    assert np.isnan(cross_entropy(Tensor(logits), np.array([0, 0, 0])).item())


BAD = [
    ({"targets": np.array([0, 5])}, ValueError, r"target 5 at index \(1,\) is not in 0 .. 4"),
    ({"targets": np.array([0, -4]), "ignore_index": -1}, ValueError, "-4 at .*ignore_index, -1"),
    ({"targets": np.array([2**64 - 3, 0], np.uint64)}, ValueError, "18446744073709551613 at"),
    ({"targets": np.array([0.0, 1.0])}, TypeError, "integers in an array, given float64"),
    ({"targets": [0, 1]}, TypeError, "targets are integers in an array, given list"),
    ({"targets": np.array([0, 1, 2])}, ValueError, r"targets \(2,\) needed .*, given \(3,\)"),
    ({"targets": np.array([[0, 1]])}, ValueError, r"targets \(2,\) needed .*, given \(1, 2\)"),
    ({"reduction": "none"}, ValueError, "reduction is \"mean\" or \"sum\", given 'none'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_p13_bad_targets_are_named(change, error, message):
    options = {"targets": np.array([0, 1])} | change
    with pytest.raises(error, match="^cross_entropy: .*" + message):
        cross_entropy(Tensor(np.zeros((2, 5))), **options)
    targets = options.pop("targets")
    with pytest.raises(error, match="^linear_cross_entropy: .*" + message):
        linear_cross_entropy(Tensor(np.zeros((2, 3))), Tensor(np.zeros((5, 3))), targets, **options)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match="a bias \\(5,\\) needed, given shape \\(3,\\)"):
        linear_cross_entropy(
            Tensor(np.zeros((2, 3))),
            Tensor(np.zeros((5, 3))),
            np.zeros(2, int),
            Tensor(np.zeros(3)),
        )
    with pytest.raises(ValueError, match="given shapes \\(2, 3\\) and \\(3, 5\\)"):
        linear_cross_entropy(Tensor(np.zeros((2, 3))), Tensor(np.zeros((3, 5))), np.zeros(2, int))
    with pytest.raises(TypeError, match="float32 or float64 needed, given uint16"):
        cross_entropy(Tensor(np.zeros((2, 5), np.uint16)), np.zeros(2, int))
    with pytest.raises(ValueError, match=r"logits .* needed"):
        cross_entropy(Tensor(np.zeros((2, 0))), np.zeros(2, int))


# --- linear_cross_entropy ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("N", "C", "V", "ignored"),
    [
        (1, 1, 1, 0),
        (7, 3, 5, 0),
        (256, 4, 30, 0),
        (257, 8, 33, 0.3),
        (900, 16, 700, 0.9),
        (0, 4, 5, 0),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_the_definition(N, C, V, ignored, with_bias, reduction, dtype):
    x, weight, targets, bias = problem(N, C, V, dtype, ignored)
    bias = bias if with_bias else None
    logits = x.astype(np.float64) @ weight.astype(np.float64).T + (0 if bias is None else bias)
    value, d = exact(logits, targets, reduction=reduction) if N else (0.0, logits)
    loss, grads = fused(x, weight, targets, bias, g=2.5, reduction=reduction)
    assert abs(loss - value) <= tolerance(dtype) * max(1, value)
    for grad, expected in zip(grads, (d @ weight, d.T @ x, d.sum(axis=0)), strict=False):
        expected = 2.5 * expected.astype(np.float64)
        assert grad.dtype == dtype
        size = max(1.0, np.abs(expected).max(initial=0))
        assert np.abs(grad - expected).max(initial=0) <= tolerance(dtype) * size * 4


def test_linear_cross_entropy_by_finite_differences():
    x, weight, targets, bias = problem(300, 3, 7)
    gradcheck(lambda a, b, c: linear_cross_entropy(a, b, targets, c), x, weight, bias)


def test_leading_axes():
    x, weight, targets, _ = problem(24, 3, 7)
    flat, grads = fused(x, weight, targets)
    loss, shaped = fused(x.reshape(2, 3, 4, 3), weight, targets.reshape(2, 3, 4))
    assert loss == flat
    assert shaped[0].shape == (2, 3, 4, 3)
    assert shaped[0].tobytes() == grads[0].tobytes()


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_only_the_gradients_that_are_needed(frozen):
    parts = dict(zip(("x", "weight", "targets", "bias"), problem(300, 4, 9), strict=True))
    targets = parts.pop("targets")
    loss, all_grads = fused(*list(parts.values())[:2], targets, parts["bias"])
    leaves = {n: Tensor(a, requires_grad=n != frozen) for n, a in parts.items()}
    again = linear_cross_entropy(leaves["x"], leaves["weight"], targets, leaves["bias"])
    again.backward()
    assert again.item() == loss
    for (name, leaf), grad in zip(leaves.items(), all_grads, strict=True):
        if name == frozen:
            assert leaf.grad is None
        else:
            assert leaf.grad.tobytes() == grad.tobytes()


def test_without_recording_only_the_loss_is_computed():
    x, weight, targets, bias = problem(600, 4, 9)
    loss, _ = fused(x, weight, targets, bias)
    with no_grad():
        quiet = linear_cross_entropy(
            *(Tensor(a, requires_grad=True) for a in (x, weight)), targets, Tensor(bias)
        )
    assert not quiet.requires_grad
    assert quiet.item() == loss


def rounded(x, mode):
    """x in the numbers of a 16-bit format, as float32."""
    if mode == "fp16":
        return x.astype(np.float16).astype(np.float32)
    even = (x.view(np.uint32) >> 16) & 1
    return ((x.view(np.uint32) + 0x7FFF + even) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_16_bit_modes_round_the_operands_and_nothing_else(mode):
    x, weight, targets, bias = problem(300, 16, 50, np.float32)
    with compute_in(mode):
        loss, (dx, dweight, dbias) = fused(x, weight, targets, bias)
    x16, w16 = rounded(x, mode).astype(np.float64), rounded(weight, mode).astype(np.float64)
    value, d = exact(x16 @ w16.T + bias, targets)
    assert abs(loss - value) <= tolerance(np.float32) * value
    np.testing.assert_allclose(dbias, d.sum(axis=0), rtol=1e-4, atol=1e-6)
    step = 2.0**-8 if mode == "bf16" else 2.0**-11  # of d, once
    for got, expected, size in (
        (dx, d @ w16, abs(d) @ abs(w16)),
        (dweight, d.T @ x16, abs(d).T @ abs(x16)),
    ):
        assert (np.abs(got - expected) <= step * size + 1e-7).all()


def test_float16_does_not_lose_gradients_to_the_count():
    """Over 4096 tokens and 1000 classes d is 2.4e-7: of float16 two bits would be left."""
    N, V = 4096, 1000
    x, weight = np.ones((N, 1), np.float32), np.zeros((V, 1), np.float32)
    targets = np.zeros(N, np.int64)
    with compute_in("fp16"):
        _, (_, dweight) = fused(x, weight, targets)
    np.testing.assert_allclose(dweight[1:], 1 / V, rtol=2.0**-10)


def test_logits_are_not_kept_by_a_checkpoint_that_keeps_products():
    x, weight, targets, _ = problem(300, 8, 40, np.float32)
    loss, grads = fused(x, weight, targets)
    leaves = [Tensor(a, requires_grad=True) for a in (x, weight)]
    with keep_results("gemm"):
        again = checkpoint(lambda a, b: linear_cross_entropy(a * 1.0, b, targets), *leaves)
    again.backward()
    assert again.item() == loss
    assert [a.grad.tobytes() for a in leaves] == [g.tobytes() for g in grads]


def test_a_weight_of_bfloat16_bits():
    x, weight, targets, _ = problem(300, 16, 50, np.float32)
    bits = (weight.view(np.uint32) >> 16).astype(np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    loss, grads = fused(x, wide, targets)
    leaf = Tensor(x, requires_grad=True)
    out = linear_cross_entropy(leaf, Tensor(bits), targets)
    out.backward()
    assert out.item() == loss
    assert leaf.grad.tobytes() == grads[0].tobytes()


def test_the_weight_may_be_used_elsewhere_too():
    """Tied embeddings: two gradients meet in one leaf."""
    x, weight, targets, _ = problem(30, 4, 9)
    _, (_, alone) = fused(x, weight, targets)
    leaf = Tensor(weight, requires_grad=True)
    (linear_cross_entropy(Tensor(x), leaf, targets) + (leaf * 2.0).sum()).backward()
    np.testing.assert_allclose(leaf.grad, alone + 2, rtol=1e-13)


def test_two_backward_passes_accumulate():
    x, weight, targets, _ = problem(30, 4, 9)
    _, (_, once) = fused(x, weight, targets)
    leaf = Tensor(weight, requires_grad=True)
    for _ in range(2):
        linear_cross_entropy(Tensor(x), leaf, targets).backward()
    assert leaf.grad.tobytes() == (once + once).tobytes()


# --- orders and memory ---------------------------------------------------------------------

needs_jit = pytest.mark.skipif(not launch.JIT, reason="orders are promised for compiled bodies")


@needs_jit
@pytest.mark.parametrize("ignored", [0, 0.4])
def test_blocks_of_256_tokens_each_finished_before_it_is_added(ignored):
    """The same bits as its parts, block by block: linear, cross_entropy, matmul, sum."""
    x, weight, targets, bias = problem(700, 24, 90, np.float32, ignored)
    counted = int((targets >= 0).sum())
    loss, (dx, dweight, dbias) = fused(x, weight, targets, bias)
    losses, expected, dbiases = [], None, []
    for start in range(0, 700, 256):
        keep = np.flatnonzero(targets[start : start + 256] >= 0) + start
        logits = linear(Tensor(x[keep]), Tensor(weight), Tensor(bias)).data
        scale = np.float32(1) / np.float32(counted)
        _, stats = cross_entropy_forward(logits, targets[keep], -100)
        d = cross_entropy_backward(scale, logits, targets[keep], stats, -100)
        losses += [cross_entropy_forward(z[None], t[None], -100)[0]
                   for z, t in zip(logits, targets[keep], strict=True)]  # fmt: skip
        assert gemm(d, weight, False, False).tobytes() == dx[keep].tobytes()
        part = gemm(d, x[keep], True, False)
        expected = part if expected is None else expected + part
        dbiases += [d[n : n + 64] for n in range(0, len(keep), 64)]
    assert expected.tobytes() == dweight.tobytes()
    total = None
    for rows in dbiases:
        chain = np.zeros(90, np.float32)
        for row in rows:
            chain += row
        total = chain if total is None else total + chain
    assert total.tobytes() == dbias.tobytes()
    assert loss == np.float32(math.fsum(losses) / counted)


@needs_jit
def test_the_gradient_of_x_has_the_same_bits_alone_and_in_a_batch():
    x, weight, targets, _ = problem(520, 24, 90, np.float32)
    _, (together, _) = fused(x, weight, targets, reduction="sum")
    for part in (slice(0, 60), slice(200, 330), slice(519, 520)):
        _, (alone, _) = fused(x[part], weight, targets[part], reduction="sum")
        assert alone.tobytes() == together[part].tobytes()


@needs_jit
def test_the_loss_is_a_float64_sum_in_blocks_of_4096():
    logits, targets = rng.standard_normal((9000, 2)).astype(np.float32), rng.integers(0, 2, 9000)
    rows = [
        cross_entropy_forward(logits[n : n + 1], targets[n : n + 1], -100)[0] for n in range(9000)
    ]
    total = 0.0
    for start in range(0, 9000, 4096):
        lanes = np.zeros(16)
        for i, value in enumerate(rows[start : start + 4096]):
            lanes[i % 16] += value
        for step in (8, 4, 2, 1):
            lanes[:step] += lanes[step : 2 * step]
        total += lanes[0]
    assert cross_entropy_forward(logits, targets, -100)[0] == total


def test_checkpointing_changes_no_bits():
    x, weight, targets, _ = problem(300, 8, 40, np.float32)
    loss, grads = fused(x, weight, targets)
    leaves = [Tensor(a, requires_grad=True) for a in (x, weight)]
    again = checkpoint(lambda a, b: linear_cross_entropy(a, b, targets), *leaves)
    again.backward()
    assert again.item() == loss
    assert [a.grad.tobytes() for a in leaves] == [g.tobytes() for g in grads]


@needs_jit
def test_tokens_times_vocabulary_is_never_held():
    N, C, V = 2048, 8, 3000
    x, weight, targets, _ = problem(N, C, V, np.float32)
    before = buffers.in_use()
    buffers.reset_peak()
    _, grads = fused(x, weight, targets)
    beyond = buffers.peak() - before - sum(g.nbytes for g in grads)
    # The logits of one block of 256 tokens, of which not all count.
    assert 128 * V * 4 <= beyond <= 256 * V * 4 < N * V * 4


def test_the_vjp_of_a_loss_does_not_keep_what_it_does_not_need():
    x, weight, targets, _ = problem(10, 4, 9)
    leaf = Tensor(x, requires_grad=True)
    loss = linear_cross_entropy(leaf * 1.0, Tensor(weight), targets)
    assert loss.node.saved == ()
