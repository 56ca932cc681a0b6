"""Check that a seed that is further units of a pair of layers becomes part of them, in an ordinary network of other widths."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft
from esper.kasmina.graft.grown import is_grafted
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError
from populations import Script

SCRIPT = {(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 2), (2, 0): (Op.ADVANCE, 0), (5, 0): (Op.FOSSILIZE, 0)}
GATES = {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}


def host(units=2, between=nn.ReLU, bias=True, extra=None):
    with drawn_with(0):
        first, second = nn.Linear(5, units, bias=bias), nn.Linear(units, 6)
        middle = [between(), *([extra(units)] if extra else [])]
        return nn.Sequential(first, *middle, second, nn.ReLU(), nn.Linear(6, 3))


def data(key):
    with drawn_with(key):
        x = torch.randn(16, 5)
        return x, (x.abs().sum(1) > 4).long() + (x[:, 0] > 0.5).long()


def grown(model, mode="live", freeze="none"):
    """Grow a network with a kept seed around its first two layers, before `finish`, and return it with what trains it."""
    last = next(str(number) for number, part in enumerate(model) if number and isinstance(part, nn.Linear))
    graft(model, {"pair": Site("pair", last, "0", Vector(6))})
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    settings = {"gates": GATES, "blueprints": ["bypass-mlp"]}
    growth = esper.Growth(
        model,
        optimizer,
        ema=average,
        probe=[data(1), data(2)],
        loss=F.cross_entropy,
        every=2,
        budget=9.0,
        controller=Script(SCRIPT),
        settings=settings,
        mode=mode,
        freeze=freeze,
    )
    for step in range(18):
        train(model, optimizer, average, step)
        growth.step()
    return growth, optimizer, average


def train(model, optimizer, average, step):
    x, y = data(100 + step)
    F.cross_entropy(model.train()(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)


def outputs(*networks):
    with torch.no_grad():
        return [copy.deepcopy(network).eval()(data(7)[0]) for network in networks]


@pytest.mark.parametrize("mode", ["live", "reserve"])
def test_a_kept_seed_around_a_pair_becomes_units_of_its_layers_and_the_network_learns_on(mode):
    model = host()
    growth, optimizer, average = grown(model, mode)
    before = outputs(model, average.module)
    network = growth.finish()
    assert (growth.folded, growth.widened) == (["pair"], {"0": (2, 18)})
    assert growth.summary()["widened"] == {"0": [2, 18]}
    assert growth.summary()["beside"] == {}
    assert (
        growth.architecture == growth.summary()["architecture"] == "0: 5 -> 2 became 5 -> 18; 2: 2 -> 6 became 18 -> 6"
    )
    assert repr(growth).endswith(f"): {growth.architecture}")
    assert repr(network) == repr(host(18))
    assert not is_grafted(network)
    for one, other in zip(before, outputs(network, average.module), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    ordinary = host(18)
    ordinary.load_state_dict(network.state_dict())
    assert torch.equal(*outputs(ordinary, network))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in network.parameters()}
    weight = network[0].weight.detach().clone()
    for step in range(3):
        train(network, optimizer, average, step)
    assert ((network[0].weight != weight).any(1)).all()
    assert not torch.equal(outputs(average.module)[0], before[1])


class Read(nn.Module):
    """Reads the features of the first layer once more than the second layer does."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("build", "freeze", "why"),
    [
        (lambda: host(between=nn.Tanhshrink), "none", "a Tanhshrink runs between '0' and '2'"),
        (lambda: host(extra=nn.LayerNorm), "none", "a LayerNorm runs between '0' and '3'"),
        (lambda: host(extra=Read), "none", "a Read runs between '0' and '3'"),
        (lambda: host(bias=False), "none", "'0' has no bias that could take that of the seed"),
        (host, "host", "a weight that it would change is frozen"),
    ],
    ids=["another function", "LayerNorm", "another reader", "no bias", "frozen"],
)
def test_a_pair_that_cannot_be_wider_keeps_its_seed_beside_and_its_bits(build, freeze, why):
    model = build()
    growth, optimizer, average = grown(model, freeze=freeze)
    before, state = outputs(model, average.module), copy.deepcopy(model.state_dict())
    network = growth.finish()
    assert (growth.folded, growth.widened) == ([], {})
    assert growth.summary()["beside"] == growth.beside == {"pair": "bypass-mlp"}
    assert growth.architecture == f"bypass-mlp at 'pair' stays beside: {why}"
    assert all(torch.equal(one, other) for one, other in zip(before, outputs(network, average.module), strict=True))
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    train(network, optimizer, average, 0)


def test_a_network_that_became_wider_is_saved_loaded_and_gathered_into_a_fresh_copy_of_the_host(tmp_path):
    growth, _, _ = grown(host())
    network = growth.finish()
    growth.save(tmp_path / "grown")
    with pytest.raises(InputError, match="the seeds at 'pair' became part of the model"):
        growth.save_adapter(tmp_path / "adapter")
    for fresh in (esper.load_grown(tmp_path / "grown", host()), growth.gather(host())):
        assert repr(fresh) == repr(network)
        assert torch.equal(*outputs(fresh, network))
    wide = esper.load_grown(tmp_path / "grown", host(18))  # built with the widths that it grew to
    assert torch.equal(*outputs(wide, network))


def test_a_network_that_is_widened_after_growth_is_saved_too(tmp_path):
    growth, optimizer, average = grown(host())
    network = growth.finish()
    esper.widen(network, {"0": 20, "2": 9}, example=data(7)[0], optimizer=optimizer, ema=average)
    growth.save(tmp_path / "grown")
    assert torch.equal(*outputs(esper.load_grown(tmp_path / "grown", host()), network))


def test_another_host_than_the_one_that_became_wider_is_refused_and_stays_as_it_was(tmp_path):
    growth, _, _ = grown(host())
    growth.finish()
    growth.save(tmp_path / "grown")
    for other in (host(3), nn.Sequential(*host()[:-1], nn.Linear(6, 4))):
        shown, state = repr(other), copy.deepcopy(other.state_dict())
        with pytest.raises(InputError, match=r"the saved network has '\d\.\w+' as"):
            esper.load_grown(tmp_path / "grown", other)
        with pytest.raises(InputError, match=r"the grown network has '\d\.\w+' as"):
            growth.gather(other)
        assert repr(other) == shown
        assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
