"""Seeds in random trees of modules: what the network computes stays as it was, in all its bits, until a seed acts."""

import copy
import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.kasmina.blueprints import BLUEPRINTS, drawn_with
from esper.kasmina.graft.grafted import graft, plant, planted_at, sites_of, survey, trim, ungraft, uproot
from esper.kasmina.graft.planted import Mode, Planted
from esper.kasmina.graft.recording import floats
from esper.kasmina.slot import Seed
from esper.leyline.lifecycle.slots import STREAMS, Kind, Site
from esper.leyline.lifecycle.vocabulary import Blend
from trees import SHAPES, trees

WIDTH = 4


class Network(nn.Module):
    """Runs a tree with a head; returns a mapping."""

    def __init__(self, tree, kind):
        super().__init__()
        self.tree, self.head = tree, nn.Conv2d(WIDTH, 2, 1) if kind == "map" else nn.Linear(WIDTH, 2)

    def forward(self, x):
        return {"features": (y := self.tree(nn.functional.gelu(x))), "logits": self.head(y)}


def places(network, kind, x):
    """Find sites at every submodule that runs and returns a stream of the kind."""
    stream, found, handles = STREAMS[Kind(kind)], {}, []
    for path, part in network.named_modules():

        def note(_, __, output, path=path):
            h = next(floats(output), None)
            if path and h is not None and stream.width_of(h):
                found[path] = Site(path, path, path, stream(stream.width_of(h)))

        handles.append(part.register_forward_hook(note))
    copy.deepcopy(network)(x)
    for handle in handles:
        handle.remove()
    return found


def seed(draw, site, reading):
    """Draw a seed of a random blueprint that fits a site, with random weights."""
    kind = site.stream.kind
    fitting = [entry for (of, _), entry in BLUEPRINTS.items() if of == kind and reading.widths[entry.tap]]
    entry, blend = draw(st.sampled_from(fitting)), draw(st.sampled_from(list(Blend)))
    reads = reading.widths[entry.tap]
    with drawn_with(1):
        made = Seed(entry.build(reads, site.stream.width), reads)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    return Planted(made, entry.tap, blend, kind)


def passes(network, x):
    """Return outputs of an evaluation and of a training pass, gradients of parameters by name, and the state behind them."""
    network = copy.deepcopy(network)
    with drawn_with(3):
        evaluated = list(floats(network.eval()(x)))
        trained = list(floats(network.train()(x)))
        sum(each.square().mean() for each in trained).backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    return [*evaluated, *trained], gradients, dict(network.named_buffers())


def own(named):
    return {name: value for name, value in named.items() if ".esper." not in f".{name}"}


def assert_same(network, plain, x):
    """Check that a network computes what a plain one does, bit for bit, and has its keys."""
    assert list(own(network.state_dict())) == list(plain.state_dict())
    (outputs, gradients, buffers), (usual, theirs, kept) = passes(network, x), passes(plain, x)
    assert len(outputs) == len(usual)
    assert all(map(torch.equal, outputs, usual))
    for mine, others in ((own(gradients), theirs), (own(buffers), kept)):
        assert mine.keys() == others.keys()
        for name, value in others.items():
            assert mine[name] is value is None or torch.equal(mine[name], value), name


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(sorted(SHAPES)))
def test_a_random_tree_stays_as_it_was_until_a_seed_acts(data, kind):
    with drawn_with(0):
        plain = Network(data.draw(trees(kind, WIDTH, rich=True)), kind)
        x = torch.randn(3, *SHAPES[kind])
    found = places(plain, kind, x)
    network = copy.deepcopy(plain)
    graft(network, found)
    readings = survey(network, lambda: network(x))
    assert_same(network, plain, x)
    for name, site in sites_of(network).items():
        plant(network, name, seed(data.draw, site, readings[name]))
        planted_at(network, name).mode = data.draw(st.sampled_from([Mode.OFF, Mode.STRAIGHT]))
    assert_same(network, plain, x)

    acting = data.draw(st.sampled_from(list(found)))
    for name in found:
        planted_at(network, name).mode = Mode.ON if name == acting else Mode.OFF
    planted_at(network, acting).alpha.fill_(1)
    grown = passes(network, x)[0]
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert all(map(torch.equal, passes(other, x)[0], grown))
    finished = copy.deepcopy(network)
    for name in found:
        if name != acting:
            uproot(finished, name)
    trim(finished)
    assert all(map(torch.equal, passes(finished, x)[0], grown))

    ungraft(network)
    assert [type(part) for part in network.modules()] == [type(part) for part in plain.modules()]
    assert [vars(part).keys() for part in network.modules()] == [vars(part).keys() for part in plain.modules()]
    assert_same(network, plain, x)
