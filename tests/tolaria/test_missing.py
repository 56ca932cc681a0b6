"""Test what is missing at a site: the part of the gradient that its layer cannot follow and a bypass can."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import esper
from esper.kasmina.blueprints import drawn_with
from esper.leyline.lifecycle.slots import Vector
from esper.tolaria.live.missing import Read, missing, read_sites


def drawn(*shape, key=0):
    with drawn_with(key):
        return torch.randn(*shape)


def network(*widths):
    """Build linear layers with a ReLU between, grafted at the sites found, and a batch of random classes of the input."""
    with drawn_with(1):
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())][:-1]
        model, x = nn.Sequential(*layers), torch.randn(400, widths[0])
        y = (x @ torch.randn(widths[0], widths[-1])).argmax(1)
    return esper.graft(model, example=x[:8]), [(x, y)]


def test_what_the_layer_follows_is_not_missing_and_what_only_the_bypass_reads_is():
    u, b, noise = drawn(2000, 6), drawn(2000, 3, key=1), drawn(2000, 4, key=2)
    on_inputs, on_source = b @ drawn(3, 4, key=3), u @ drawn(6, 4, key=4)
    assert float(missing(Read(u, b, on_inputs, 1))) < 1e-4
    assert float(missing(Read(u, b, on_source, 1))) == pytest.approx(1, abs=0.01)
    assert float(missing(Read(u, b, noise, 1))) < 0.02
    energies = [float(part.square().sum()) for part in (on_source, on_inputs)]
    share = float(missing(Read(u, b, on_source + on_inputs, 1)))
    assert share == pytest.approx(energies[0] / sum(energies), abs=0.03)


def test_a_bypass_that_reads_what_the_layer_reads_can_bring_nothing():
    b = drawn(500, 6)
    assert float(missing(Read(b, b, drawn(500, 4, key=1), 1))) < 1e-6


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_site_behind_the_narrow_layer_of_a_deep_network_lacks_most(depth):
    widths = [24, 24, 24, 24, 24, 6]
    widths[depth + 1] = 2
    model, batches = network(*widths)
    found = {
        name: float(missing(read))
        for name, read in read_sites(model, list(model.sites), batches, F.cross_entropy).items()
    }
    assert max(found, key=found.get) == str(2 * depth + 2)
    assert found[str(2 * depth + 2)] > 10 * max(value for name, value in found.items() if name != str(2 * depth + 2))


def test_reading_changes_neither_gradients_nor_what_learns_and_reads_frozen_layers_alike():
    model, batches = network(8, 2, 8, 3)
    F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    read = read_sites(model, list(model.sites), batches, F.cross_entropy)
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(model.parameters(), before, strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(False)
    again = read_sites(model, list(model.sites), batches, F.cross_entropy)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name, each in read.items():
        assert all(torch.equal(one, other) for one, other in zip(each[:3], again[name][:3], strict=True))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 2), nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.second(self.first(x))
        return self.third(checkpoint(torch.relu, h, use_reentrant=True))


def test_a_gradient_behind_a_reentrant_checkpoint_is_read():
    with drawn_with(0):
        model, x = Checkpointed(), torch.randn(50, 6)
    esper.graft(model, {"second": esper.Site("second", "second", "first", Vector(6))})
    read = read_sites(model, ["second"], [(x, torch.arange(50) % 3)], F.cross_entropy)
    assert read["second"].gradient.shape == (50, 6)
    assert read["second"].gradient.any()


def test_rows_of_maps_and_sequences_are_positions_and_gradients_are_those_of_each_example():
    with drawn_with(0):
        model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 5, 1), nn.Flatten(), nn.Linear(80, 2))
        x, y = torch.randn(10, 3, 4, 4), torch.arange(10) % 2
    esper.graft(model, example=x)
    read = read_sites(model, ["2"], [(x, y)], F.cross_entropy)["2"]
    assert (read.source.shape, read.inputs.shape, read.gradient.shape, read.positions) == (
        (160, 3),
        (160, 2),
        (160, 5),
        16,
    )
    one = read_sites(model, ["2"], [(x[3:4], y[3:4])], F.cross_entropy)["2"]
    torch.testing.assert_close(one.gradient, read.gradient[48:64])


def test_channels_in_front_of_positions_are_read_as_features():
    with drawn_with(2):
        convolutions = nn.Sequential(nn.Conv1d(4, 2, 1), nn.ReLU(), nn.Conv1d(2, 6, 1), nn.ReLU(), nn.Conv1d(6, 3, 1))
        linear = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
        x, y = torch.randn(32, 7, 4), torch.randint(3, (32, 7))
    for one, other in zip(linear[::2], convolutions[::2], strict=True):
        one.load_state_dict({"weight": other.weight.detach()[..., 0], "bias": other.bias.detach()})
    found = []
    for model, own, classes in ((convolutions, x.mT, 1), (linear, x, 2)):
        esper.graft(model, example=own[:4])
        read = read_sites(
            model, list(model.sites), [(own, y)], lambda out, y, at=classes: F.cross_entropy(out.movedim(at, 1), y)
        )
        found.append(read)
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 1
    for name, each in found[0].items():
        for one, other in zip(each[:3], found[1][name][:3], strict=True):
            torch.testing.assert_close(one, other)
        assert each.positions == found[1][name].positions
