"""Test a network alone: where it has a ghost, and that it has the bits that it has in any population."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.body import APART, runs_by_row
from esper.leyline.lifecycle.slots import Kind, SlotSpec
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Op, Stage, among
from esper.tamiyo.rules.base import Never
from esper.tasks.hosts import MLP, ResidualMLP, Transformer
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.population import needs_ghost
from pictures import pictures
from populations import GROW, Script, blobs, small_config
from thinning import crossed

LIFE = {  # environment 0: a seed that is kept, and one that is pruned slowly, planted while the first is blended in
    (0, 0): (Op.GERMINATE, 0, 1, 0, 2, 3),
    (2, 0): (Op.ADVANCE, 0),
    (3, 0): (Op.GERMINATE, 1, 2, 2, 1, 3),
    (5, 0): (Op.FOSSILIZE, 0),
    (6, 0): (Op.ADVANCE, 1),
    (7, 0): (Op.PRUNE, 1, 0, 0, 2, 0),
}


@pytest.fixture
def apart(monkeypatch):
    """Let networks of any size run one after another."""
    for kind in APART:
        monkeypatch.setitem(APART, kind, 1)


def text():
    """Make a task of periodic tokens, and a transformer with two slots whose parameters do not fill lines of 64 bytes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.cumsum(torch.randint(1, 4, (160, 1), generator=generator).expand(-1, 8), 1) % 70
    host = Transformer(vocabulary=70, width=10, layers=2, heads=2, length=7)
    return task_from(
        "tokens", x[:, :7], x[:, 1:], host=host, classes=70, menu=("bypass-mlp", "attention", "causal-conv")
    )


def episode(task, envs, **top):
    """Play an episode in which others grow too; return the engine, and all that environment 0 goes through."""
    engine = VectorizedEngine(task, small_config({"probe": {"sensors_every": 3}}, envs=envs, steps=9, **top))
    script, seen = Script({at: decision for at, decision in {**GROW, **LIFE}.items() if at[1] < envs}), []
    view = engine.reset()
    while view.step < 9:
        view, _ = engine.step(script.act(view))
        host, measured = engine.population.body.host, view.measurements
        seen += [column[0].clone().cpu().numpy() for name, column in host.columns.items() if name != "gradient"]
        seen += [np.asarray(field[0]) for field in (*measured.contribution, *measured.gain)]
        seen += [np.asarray(field[0]) for field in measured if isinstance(field, np.ndarray)]
        for slot in np.flatnonzero(among(view.seeds.stage[0], IN_BUDGET)).tolist():
            module = engine.population.body.seed_module(view.seeds, 0, slot)
            seen += [parameter.detach().cpu().numpy().copy() for parameter in module.parameters()]
    assert [stage for stage in view.seeds.stage[0] if stage != Stage.DORMANT], "a seed was kept"
    seen += [figures[:1] for figures in engine.evaluate(engine.population.validation_splits())]
    return engine, seen


def assert_bitwise(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@pytest.mark.parametrize(
    ("make", "top"),
    [(blobs, {}), (text, {"lifecycle": {"incubation": "ste"}, "amp": "fp16"}), (pictures, {})],
    ids=["vectors-shadow", "tokens-ste-fp16", "images-shadow"],
)
def test_a_network_alone_has_no_ghost_and_the_bits_that_it_has_among_others(apart, make, top):
    engine, alone = episode(make(), 1, **top)
    assert len(engine.population.environment) == 1
    assert engine.population.body.by_row
    assert_bitwise(alone, episode(make(), 4, **top)[1])
    assert_bitwise(alone, episode(make(), 1, twin=True, **top)[1])


@pytest.mark.parametrize(
    ("make", "top"),
    [
        (blobs, {}),
        (partial(blobs, hidden=(1, 7)), {"lifecycle": {"incubation": "ste"}, "data": {"batch_size": 7}}),
        (partial(blobs, dtype=torch.float64), {"optimizer": {"name": "sgd"}}),
        (text, {}),
        (blobs, {"mapping": "loop"}),
    ],
    ids=["vectors-shadow", "one-unit-ste", "float64-sgd", "tokens-shadow", "loop"],
)
def test_a_small_network_alone_has_no_ghost_and_the_bits_that_it_has_among_others(make, top):
    engine, alone = episode(make(), 1, **top)
    assert len(engine.population.environment) == 1
    assert not engine.population.body.by_row
    assert_bitwise(alone, episode(make(), 3, **top)[1])


def plain(inputs, width, hidden, classes):
    """Build a host of torch's own modules, as a person writes it."""
    segments = [nn.Linear(inputs, width), nn.Sequential(nn.Tanh(), nn.Linear(width, width)), nn.Linear(width, classes)]
    return SegmentedHost(segments, [SlotSpec("middle", after=1, width=width)])


@pytest.mark.parametrize(
    ("sizes", "make"),
    crossed([(5, 11, (7,), 3), (9, 7, (1, 5), 2), (15, 11, (13,), 5)], [MLP, partial(partial, plain)]),
)
def test_networks_of_any_widths_have_the_same_bits_at_any_index(sizes, make):
    inputs, classes = sizes[0], sizes[-1]
    x = torch.randn(160, inputs, generator=torch.Generator().manual_seed(5))
    host = make(*sizes)
    task = task_from("odd", x, torch.arange(160) % classes, host=host, classes=classes, menu=("bypass-mlp",))

    def trained(envs, first):
        engine = VectorizedEngine(task, small_config(envs=envs, first_instance=first, steps=5))
        view, never = engine.reset(), Never()
        for _ in range(5):
            view, _ = engine.step(never.act(view))
        return engine.population.body.host.columns["value"]

    among_others = trained(6, 0)
    for index in range(1, 6):
        assert torch.equal(trained(1, index)[0], among_others[index])


@pytest.mark.parametrize(
    ("make", "top", "ghost"),
    [
        (blobs, {}, False),
        (text, {}, False),
        (partial(blobs, stacks=False), {}, True),
        (blobs, {"amp": "fp16"}, True),
        (blobs, {"compile": "on"}, True),
        (blobs, {"mapping": "vmap"}, True),
        (blobs, {"mapping": "vmap", "twin": True}, False),
        (blobs, {"mapping": "vmap", "envs": 2}, False),
    ],
)
def test_a_ghost_runs_beside_a_small_network_alone_that_could_round_otherwise(make, top, ghost):
    assert needs_ghost(make(), small_config(**{"envs": 1, "device": "cpu", **top})) == ghost


@pytest.mark.parametrize(("top", "ghost"), [({}, False), ({"mapping": "vmap"}, True), ({"compile": "on"}, True)])
def test_a_large_network_needs_a_ghost_where_it_is_mapped_or_compiled(apart, top, ghost):
    assert needs_ghost(text(), small_config(envs=1, device="cpu", **top)) == ghost


def test_the_kind_of_its_streams_and_its_parameters_say_whether_a_network_is_large():
    small, large = (Transformer(vocabulary=64, width=width, layers=2, heads=2, length=8) for width in (64, 128))
    assert not runs_by_row(small(), torch.device("cpu"), "auto", compiled=False)
    assert runs_by_row(large(), torch.device("cpu"), "auto", compiled=False)
    wide = ResidualMLP(64, 256, (256, 256), 10)
    assert sum(p.numel() for p in wide().parameters()) > APART[Kind.SEQUENCE]
    assert not runs_by_row(wide(), torch.device("cpu"), "auto", compiled=False)
