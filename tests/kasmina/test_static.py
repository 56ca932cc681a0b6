"""Test static networks derived from a host: identity skips, and widths without bottlenecks."""

import pytest
import torch
from torch import nn

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.host import SegmentedHost, check_host
from esper.kasmina.network.static import Skipped, WidenedHosts, skip_places, widened, without_bottlenecks
from esper.kasmina.stack.layers import Linear, PositionMean
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.messages import InputError


def vectors(*, last=None):
    """Build segments of 4 -> 8, 8 -> 1 -> 8 and 8 -> 2 features."""
    segments = [
        nn.Linear(4, 8),
        nn.Sequential(nn.Linear(8, 1), nn.ReLU(), nn.Linear(1, 8)),
        *([last] if last is not None else []),
        nn.Linear(8, 2),
    ]
    return SegmentedHost(segments, [SlotSpec("middle", after=1, width=8, inner=2)])


def maps():
    segments = [
        nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 2, 1), nn.ReLU(), nn.Conv2d(2, 6, 3, padding=1)),
        nn.Sequential(nn.Flatten(), nn.LayerNorm(6 * 16), nn.Linear(6 * 16, 3)),
    ]
    return SegmentedHost(
        segments, [SlotSpec("a", after=0, width=6, kind=Kind.MAP), SlotSpec("b", after=1, width=6, kind=Kind.MAP)]
    )


class Block(nn.Module):
    """Computes y = x + f(norm(x)), as a pre-norm transformer block does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.f(self.norm(x))


class PostNorm(Block):
    """Computes y = norm(x + f(x)), as a post-norm block does."""

    def forward(self, x):
        return self.norm(x + self.f(x))


class Last(nn.Module):
    """Returns the last state of a GRU as the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0][:, -1]


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_a_skip_is_the_segment_plus_what_it_reads_of_the_same_draws_and_no_parameter_more():
    places = skip_places(vectors, X)
    assert places == (1,)
    with drawn_with(3):
        host = vectors()
    with drawn_with(3):
        skipped = Skipped(vectors, places)()
    h = host.segments[0](X)
    torch.testing.assert_close(skipped(X), host.segments[2](h + host.segments[1](h)))
    assert count(skipped) == count(host)
    check_host(skipped, X, 2)


@pytest.mark.parametrize("block", [Block, PostNorm])
def test_a_segment_that_is_residual_already_gets_no_second_skip(block):
    assert skip_places(lambda: vectors(last=block()), X) == (1,)

    def residual():
        return SegmentedHost([nn.Linear(4, 8), block(), nn.Linear(8, 2)], [SlotSpec("a", after=1, width=8)])

    with pytest.raises(InputError) as absent:
        skip_places(residual, X)
    assert str(absent.value) == "every segment of the host that keeps its shape has a path around its weights already"


def test_a_host_whose_segments_all_change_the_shape_has_no_skips():
    def host():
        return SegmentedHost([nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)], [SlotSpec("a", after=0, width=8)])

    with pytest.raises(InputError, match="no segment of the host returns the shape that it reads"):
        skip_places(host, X)


def test_a_segment_without_parameters_gets_no_skip():
    assert skip_places(lambda: vectors(last=nn.ReLU()), X) == (1,)


@pytest.mark.parametrize(
    ("widths", "raised"),
    [
        ((16, 4, 16, 12, 16, 5, 16), (16,) * 7),
        ((8, 16, 32), (8, 16, 32)),
        ((32, 8, 16), (32, 16, 16)),
        ((8, 32, 8, 4, 8), (8, 32, 8, 8, 8)),
        ((3,), (3,)),
    ],
)
def test_a_width_is_raised_to_the_smaller_of_the_widest_on_either_side(widths, raised):
    assert without_bottlenecks(widths) == raised


@pytest.mark.parametrize(("factory", "x", "outputs"), [(vectors, X, 2), (maps, IMAGES, 3)])
@pytest.mark.parametrize("parameters", [1, 60, 400, 3000])
def test_the_widened_host_has_at_least_the_parameters_and_the_next_narrower_has_not(factory, x, outputs, parameters):
    made = widened(factory, x, parameters)
    assert isinstance(made, WidenedHosts)
    assert count(made()) >= parameters
    check_host(made(), x[:3], outputs)
    if max(made.widths[:-1]) > 1:
        narrower = WidenedHosts(factory, (*(width - 1 for width in made.widths[:-1]), made.widths[-1]))
        assert count(narrower()) < parameters


def test_the_widened_host_has_no_bottleneck():
    made = widened(vectors, X, 400)
    assert len(set(made.widths[:-1])) == 1, "every inner layer is as wide as the others"
    host = made()
    assert [type(part) for part in host.segments] == [nn.Linear, nn.Sequential, nn.Linear]
    assert host.slots[0].width == made.widths[0]


def test_two_factories_of_one_width_are_equal_so_that_their_rows_can_share_a_population():
    assert widened(vectors, X, 400) == widened(vectors, X, 401) != widened(vectors, X, 4000)


def test_layers_that_run_stacked_stay_layers_that_run_stacked():
    def host():
        made = SegmentedHost([Linear(4, 8), Linear(8, 8), Linear(8, 2)], [SlotSpec("a", after=1, width=8)])
        made.stacks = True
        return made

    made = widened(host, X, 500)()
    assert made.stacks
    assert all(type(part) is Linear for part in made.segments)


def test_a_frozen_layer_trains_in_the_widened_host():
    def host():
        return vectors().requires_grad_(False)

    assert all(parameter.requires_grad for parameter in widened(host, X, 100)().parameters())


def test_what_cannot_be_scaled_is_named():
    shared = nn.Linear(8, 8)
    cases = {
        "segment 0 of the host is a Last, whose width cannot be scaled": lambda: SegmentedHost(
            [Last(), nn.Linear(8, 8), nn.Linear(8, 2)], [SlotSpec("a", after=0, width=8)]
        ),
        "segment 1 of the host is a Block, whose width cannot be scaled": lambda: SegmentedHost(
            [nn.Linear(4, 8), Block(), nn.Linear(8, 2)], [SlotSpec("a", after=1, width=8)]
        ),
        "segment 2 of the host shares its weights": lambda: SegmentedHost(
            [nn.Linear(4, 8), shared, shared, nn.Linear(8, 2)], [SlotSpec("a", after=1, width=8)]
        ),
        "a single layer with weights": lambda: SegmentedHost(
            [nn.ReLU(), nn.Linear(4, 2)], [SlotSpec("a", after=0, width=4)]
        ),
        "cannot run at other widths": lambda: SegmentedHost(
            [nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.Linear(8, 2)],
            [SlotSpec("a", after=0, width=8)],
        ),
    }
    for sentence, factory in cases.items():
        with pytest.raises(InputError, match=sentence) as absent:
            widened(factory, X if "Last" not in sentence else torch.randn(4, 5, 3), 10**4)
        assert "\n" not in str(absent.value)


def test_pooling_over_positions_is_no_hindrance():
    def host():
        segments = [nn.Conv2d(1, 6, 3), nn.Conv2d(6, 2, 3), nn.Sequential(PositionMean(), nn.Linear(2, 3))]
        return SegmentedHost(segments, [SlotSpec("a", after=0, width=6, kind=Kind.MAP)])

    made = widened(host, IMAGES, 2000)
    check_host(made(), IMAGES, 3)
