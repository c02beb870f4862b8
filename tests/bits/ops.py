"""A digest per op, of its result and its gradients on fixed random inputs of a realistic size."""

import hashlib
import zlib

import numpy as np

from afinar.autograd import OPS, Tensor
from afinar.autograd.random import make_key

B, T, H, G, D, C, V = 2, 150, 6, 2, 16, 96, 700
KEY = make_key("bits", 0)


def draw(name, *shape):
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def cases():
    """(op, inputs, options): large enough that every loop is blocked, tailed and split."""
    x, y = draw("x", B, T, C), draw("y", B, T, C)
    rng = np.random.default_rng(0)
    for name in OPS:
        if name in ("add", "sub", "mul", "div", "maximum", "swiglu"):
            yield name, (x, y), {}
            if name != "swiglu":
                yield name, (x, y[0, 0]), {}
        elif name in ("sum", "mean", "max", "logsumexp"):
            for axis in (None, -1, 0, (0, 1), 1):
                yield name, (x,), {"axis": axis}
        elif name in ("softmax", "log_softmax", "neg", "exp", "tanh", "sigmoid", "silu", "relu"):
            yield name, (x,), {}
        elif name in ("log", "sqrt"):
            yield name, (np.abs(x) + 0.1,), {}
        elif name == "pow":
            for exponent in (2, 3, -0.5):
                yield name, (np.abs(x) + 0.1,), {"exponent": exponent}
        elif name == "gelu":
            for approximate in ("none", "tanh"):
                yield name, (x,), {"approximate": approximate}
        elif name == "where":
            yield name, (x > 0, x, y), {}
        elif name == "cast":
            yield name, (x,), {"dtype": np.float64}
        elif name == "reshape":
            yield name, (x,), {"shape": (-1,)}
        elif name == "swapaxes":
            yield name, (x,), {"axis1": 0, "axis2": 1}
        elif name == "permute":
            yield name, (x,), {"axes": (2, 0, 1)}
        elif name == "broadcast_to":
            yield name, (x[:1],), {"shape": (3, T, C)}
        elif name == "getitem":
            yield name, (x,), {"index": (slice(None), rng.integers(0, T, 400))}
        elif name in ("concat", "stack"):
            yield name, (x, y), {"axis": 1}
        elif name == "matmul":
            for M, K, N in ((37, 1100, 53), (300, 96, 4), (4, 600, 500), (1, 513, 129)):
                yield name, (draw("a", M, K), draw("b", K, N)), {}
            yield name, (draw("a", 3, 40, 70), draw("b", 3, 70, 50)), {}
        elif name == "linear":
            yield name, (x, draw("w", 200, C), draw("b", 200)), {}
            yield name, (draw("long", 1100, 64), draw("w", 48, 64)), {}
        elif name in ("rms_norm", "layer_norm"):
            yield name, (x, draw("w", C)), {}
        elif name == "rope":
            angle = draw("angle", T, D // 2)
            yield name, (draw("q", B, T, H, D), np.cos(angle), np.sin(angle)), {}
        elif name == "embedding":
            yield name, (draw("w", V, C), rng.integers(0, V, (B, T))), {}
        elif name == "dropout":
            yield name, (x,), {"p": 0.3, "key": KEY}
        elif name == "cross_entropy":
            yield name, (draw("l", B, T, V), rng.integers(0, V, (B, T))), {}
        elif name == "linear_cross_entropy":
            yield name, (x, draw("w", V, C), rng.integers(0, V, (B, T))), {}
        elif name == "attention":
            segments = np.sort(rng.integers(-1, 3, (B, T)), axis=1)
            qkv = (draw("q", B, T, H, D), draw("k", B, T, G, D), draw("v", B, T, G, D))
            for options in (
                {},
                {"causal": False},
                {"window": 70},
                {"segments": segments},
                {"dropout": 0.2, "key": KEY},
            ):
                yield name, qkv, options
        else:
            raise SystemExit(f"no bit sample for op {name}")


for name, arrays, options in cases():
    for dtype in (np.float32, np.float64):
        leaves = [
            Tensor(a.astype(dtype), requires_grad=True) if a.dtype.kind == "f" else a
            for a in arrays
        ]
        out = OPS[name](*leaves, **options)
        sha = hashlib.sha256(out.numpy().tobytes())
        # Fixed cotangents from integers: no libm in what is compared.
        g = (np.arange(out.size) % 17 - 8).reshape(out.shape).astype(out.dtype) / out.dtype.type(8)
        out.backward(g)
        for x in leaves:
            if isinstance(x, Tensor) and x.grad is not None:
                sha.update(x.grad.tobytes())
        print(name, np.dtype(dtype).name, sha.hexdigest())
