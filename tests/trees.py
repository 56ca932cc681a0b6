"""Draw random trees of modules, for properties that hold of any network."""

import copy

from hypothesis import strategies as st
from torch import nn

SHAPES = {"vector": (4,), "map": (4, 6, 6), "sequence": (5, 4)}
"""Shapes of one example of width 4, by kind of stream."""


class Cat(nn.Module):
    """Adds two branches side by side."""

    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x):
        return self.left(x) + self.right(x)


class Skip(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Twice(nn.Module):
    """Runs one module twice, under two names."""

    def __init__(self, inner):
        super().__init__()
        self.inner = self.again = inner

    def forward(self, x):
        return self.again(nn.functional.gelu(self.inner(x)))


class Branch(nn.Module):
    """Holds a branch that no pass calls."""

    def __init__(self, inner, idle):
        super().__init__()
        self.idle, self.inner = idle, inner

    def forward(self, x):
        return self.inner(x) if x is not None else self.idle(x)


class Bundle(nn.Module):
    """Returns its stream in a structure of one of several forms, beside the number of its inputs."""

    FORMS = ("tuple", "list", "mapping", "nested")

    def __init__(self, inner, form):
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, x, *, count):
        y = self.inner(x)
        forms = {
            "tuple": (y, count),
            "list": [count, y],
            "mapping": {"n": count, "y": y},
            "nested": {"n": count, "streams": ((y, x), None)},
        }
        return forms[self.form]


class Unbundle(nn.Module):
    def __init__(self, inner, form):
        super().__init__()
        self.bundle = Bundle(inner, form)

    def forward(self, x):
        found = self.bundle(x, count=len(x))
        form = self.bundle.form
        return found[0] if form == "tuple" else found[1] if form == "list" else self._of_mapping(found)

    def _of_mapping(self, found):
        return found["y"] if self.bundle.form == "mapping" else found["streams"][0][0]


def conv(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def norm(kind, width):
    if kind == "sequence":
        return nn.LayerNorm(width)
    return nn.BatchNorm2d(width) if kind == "map" else nn.BatchNorm1d(width)


@st.composite
def trees(draw, kind, width, depth=0, *, rich=False):
    """Draw a module that keeps the shape of a stream of a width. rich: also modules that are shared, idle or return structures,
    dropout, and normalisation over the batch.
    """
    layer = conv if kind == "map" else nn.Linear
    what = draw(st.sampled_from(_choices(depth, rich)))
    if what == "layer":
        return layer(width, width)
    if what == "norm":
        return nn.GroupNorm(1, width) if kind == "map" else nn.LayerNorm(width)
    if what == "batch norm":
        return nn.Sequential(norm(kind, width), nn.Dropout(0.25, inplace=draw(st.booleans())))
    if what == "relu":
        return nn.Sequential(nn.GELU(), nn.ReLU(inplace=draw(st.booleans())))  # GELU: its output may be overwritten
    if what == "bottleneck":
        inner = draw(st.sampled_from([2, 7]))
        return nn.Sequential(layer(width, inner), nn.Tanh(), layer(inner, width))

    def tree():
        return draw(trees(kind, width, depth + 1, rich=rich))

    if what == "repeat":
        return nn.Sequential(*(copy.deepcopy(tree()) for _ in range(2)))
    if what == "skip":
        return Skip(nn.Sequential(nn.GELU(), tree()))
    if what == "branch":
        return Cat(nn.Sequential(nn.GELU(), tree()), nn.Sequential(nn.GELU(), tree()))
    if what == "twice":
        return Twice(nn.Sequential(nn.GELU(), tree()))
    if what == "idle":
        return Branch(tree(), tree())
    if what == "bundle":
        return Unbundle(nn.Sequential(nn.GELU(), tree()), draw(st.sampled_from(Bundle.FORMS)))
    return nn.Sequential(*(tree() for _ in range(draw(st.integers(1, 3)))))


def _choices(depth, rich):
    leaves = ["layer", "norm", "relu", "bottleneck", *(["batch norm"] * rich)]
    inner = ["chain", "chain", "skip", "repeat", "branch", *(["twice", "idle", "bundle"] * rich)]
    return leaves if depth == 3 else [*leaves, *inner]
