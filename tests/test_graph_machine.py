"""Random graphs, built here and in a naive graph that knows nothing of the engine."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from afinar.autograd import Tensor, concat, where


class Naive:
    """A value, and how it came from others. Its gradient is a sum over all paths, by recursion."""

    def __init__(self, value, parents=()):
        self.value, self.parents = value, parents  # parents: (Naive, function of g)

    def gradients(self, g, into):
        if not self.parents:
            into[id(self)] = into.get(id(self), 0) + g
        for parent, pull in self.parents:
            parent.gradients(pull(g), into)


SHAPE = (2, 3)


class Graphs(RuleBasedStateMachine):
    pairs = Bundle("pairs")

    @initialize()
    def start(self):
        self.leaves, self.count, self.depth = [], 0, {}

    def _add(self, tensor, naive, depth):
        assert np.allclose(tensor.data, naive.value, rtol=1e-12, atol=1e-12)
        self.depth[id(naive)] = depth
        return tensor, naive

    def _depth(self, *pairs):
        return 1 + max(self.depth[id(p[1])] for p in pairs)

    def _shallow(self, *pairs):  # the naive graph walks every path: keep it small
        return self._depth(*pairs) < 9

    @rule(target=pairs, seed=st.integers(0, 100))
    def new_leaf(self, seed):
        value = np.random.default_rng(seed).uniform(-1, 1, SHAPE)
        tensor, naive = Tensor(value, requires_grad=True), Naive(value)
        self.leaves.append((tensor, naive))
        return self._add(tensor, naive, 0)

    @rule(target=pairs, a=pairs, b=pairs, kind=st.sampled_from(["add", "sub", "mul"]))
    def binary(self, a, b, kind):
        if not self._shallow(a, b):
            return a
        (x, nx), (y, ny) = a, b
        if kind == "add":
            made = x + y, Naive(nx.value + ny.value, ((nx, lambda g: g), (ny, lambda g: g)))
        elif kind == "sub":
            made = x - y, Naive(nx.value - ny.value, ((nx, lambda g: g), (ny, lambda g: -g)))
        else:
            xv, yv = nx.value, ny.value
            made = x * y, Naive(xv * yv, ((nx, lambda g: g * yv), (ny, lambda g: g * xv)))
        return self._add(*made, self._depth(a, b))

    @rule(
        target=pairs,
        a=pairs,
        kind=st.sampled_from(["tanh", "neg", "scale", "row", "turn", "gather"]),
    )
    def unary(self, a, kind):
        if not self._shallow(a):
            return a
        x, n = a
        v = n.value
        if kind == "tanh":
            t = np.tanh(v)
            made = x.tanh(), Naive(t, ((n, lambda g: g * (1 - t * t)),))
        elif kind == "neg":
            made = -x, Naive(-v, ((n, lambda g: -g),))
        elif kind == "scale":
            made = 0.5 * x, Naive(0.5 * v, ((n, lambda g: 0.5 * g),))
        elif kind == "row":  # a reduction, broadcast back
            made = (
                x * 0 + x.sum(axis=0),
                Naive(
                    v * 0 + v.sum(0),
                    ((n, lambda g: np.broadcast_to(g.sum(0), SHAPE)), (n, lambda g: g * 0)),
                ),
            )
        elif kind == "turn":
            made = x.T.reshape(2, 3), Naive(v.T.reshape(2, 3), ((n, lambda g: g.reshape(3, 2).T),))
        else:
            index = np.array([1, 1])

            def pull(g):
                out = np.zeros(SHAPE)
                np.add.at(out, index, g)
                return out

            made = x[index], Naive(v[index], ((n, pull),))
        return self._add(*made, self._depth(a))

    @rule(target=pairs, a=pairs, b=pairs)
    def mixed(self, a, b):
        if not self._shallow(a, b):
            return b
        (x, nx), (y, ny) = a, b
        condition = np.array([[True, False, True], [False, True, False]])
        both = concat(x[:1], y[1:], axis=0)
        value = np.concatenate([nx.value[:1], ny.value[1:]])
        top = np.array([[1.0], [0.0]])
        out = where(condition, both, x)
        return self._add(
            out,
            Naive(
                np.where(condition, value, nx.value),
                (
                    (nx, lambda g: np.where(condition, g, 0) * top + np.where(condition, 0, g)),
                    (ny, lambda g: np.where(condition, g, 0) * (1 - top)),
                ),
            ),
            self._depth(a, b),
        )

    @rule(a=pairs)
    def gradients_agree(self, a):
        tensor, naive = self._rebuilt(a)
        if tensor is None:
            return
        g = np.cos(np.arange(6.0)).reshape(SHAPE)
        before = {id(t): None if t.grad is None else t.grad.copy() for t, _ in self.leaves}
        tensor.backward(g)
        expected = {}
        naive.gradients(g, expected)
        for t, n in self.leaves:
            old = before[id(t)]
            want = (0 if old is None else old) + expected.get(id(n), 0)
            got = np.zeros(SHAPE) if t.grad is None else t.grad
            assert np.allclose(got, want, rtol=1e-10, atol=1e-10)

    def _rebuilt(self, a):
        """A graph is used up by its backward pass: walk each one once, and skip used ones."""
        tensor, naive = a
        nodes, queue = set(), [tensor.node]
        while queue:
            node = queue.pop()
            if node in nodes:
                continue
            nodes.add(node)
            if node.leaf is None and node.vjp is None:
                return None, None
            queue += [p for p in node.parents if p is not None]
        return tensor, naive


TestGraphs = Graphs.TestCase
