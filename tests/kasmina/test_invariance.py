"""Check that a module whose numbers for a row depend on its company is named."""

import pytest
import torch
from torch import nn

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint
from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.invariance import blends_that_vary, segments_that_vary
from esper.kasmina.stack.layers import Linear
from esper.leyline.lifecycle.slots import Kind, SlotSpec, Tap
from esper.tasks.hosts import MLP

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


class Centred(nn.Module):
    """Subtracts the mean over the rows of a stack, which a module of one network cannot know."""

    stacks = True

    def __init__(self):
        super().__init__()
        self.map = Linear(4, 4)

    def forward(self, x):
        y = self.map(x)
        return y - y.mean(0) if y.dim() == 3 else y


class Rowwise(nn.Module):
    """Computes forward values that do not depend on other rows, under a gradient that does."""

    stacks = True

    def __init__(self):
        super().__init__()
        self.map = Linear(4, 4)

    def forward(self, x):
        y = self.map(x)
        if y.dim() == 3:
            y.register_hook(lambda gradient: gradient / len(gradient))
        return y


def host(middle):
    def build():
        return SegmentedHost([Linear(4, 4), middle(), nn.Linear(4, 2)], [SlotSpec("a", after=0, width=4)])

    return build


@pytest.mark.parametrize("middle", [Centred, Rowwise])
def test_a_segment_that_mixes_rows_is_named_and_its_neighbours_are_not(middle):
    assert list(segments_that_vary(host(middle), X)) == ["segments.1"]


@pytest.mark.parametrize(
    "middle",
    [
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    ],
    ids=["linear", "layer norm", "dropout", "batch norm"],
)
def test_segments_that_keep_to_their_row_are_not_named(middle):
    assert segments_that_vary(host(middle), X) == {}


# A width of 3 is not promised: whether a row of a product starts on a multiple of 16 bytes matters to some processors.
@pytest.mark.parametrize("width", [1, 12, *(pytest.param(width, marks=pytest.mark.slow) for width in (2, 4, 8, 16))])
def test_no_blueprint_of_ours_depends_on_neighbours_under_any_blend(width):
    vectors = [name for kind, name in BLUEPRINTS if kind == Kind.VECTOR]
    assert [name for name in vectors if blends_that_vary(BLUEPRINTS[Kind.VECTOR, name], width)] == []


def test_no_host_of_ours_depends_on_neighbours_at_any_width():
    for width in (1, 2, 4, 8, 12, 16):
        assert segments_that_vary(MLP(inputs=4, width=width, hidden=(width, 3), outputs=3), X) == {}


def test_a_blueprint_that_mixes_rows_is_named_under_every_blend():
    entry = Blueprint("centred", Kind.VECTOR, Tap.HERE, lambda reads, writes: Centred(), lambda r, w: 20, "")
    assert list(blends_that_vary(entry, 4)) == ["ADD", "GATE", "MULTIPLY"]


def test_looking_leaves_the_random_state_as_it_was():
    before = torch.get_rng_state()
    segments_that_vary(host(lambda: nn.Dropout(0.5)), X)
    blends_that_vary(BLUEPRINTS[Kind.VECTOR, "affine"], 4)
    assert torch.equal(torch.get_rng_state(), before)
