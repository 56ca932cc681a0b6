"""Test populations whose seeds go around several segments: bits, snapshots, sensors and every way to run a pass."""

import json

import numpy as np
import pytest
import torch

from esper.kasmina.host import segment_outputs
from esper.kasmina.stack.body import Body
from esper.leyline.lifecycle.slots import Kind
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.store.tensors import flatten, unflatten
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.sensors import participation_ratio
from esper.tolaria.stacked import compiling
from populations import GROW, Script, small_config
from spans import SpannedHost, spanned_task

STEPS = 7
LIFE = {  # of environment 0: a seed in each slot, both of which are kept
    (0, 0): (Op.GERMINATE, 0, 1, 0, 2, 3),
    (1, 0): (Op.GERMINATE, 1, 2, 1, 1, 3),
    (2, 0): (Op.ADVANCE, 0),
    (3, 0): (Op.ADVANCE, 1),
    (5, 0): (Op.FOSSILIZE, 0),
    (6, 0): (Op.FOSSILIZE, 1),
}
STE = {"lifecycle": {"incubation": "ste", "isolation": "isolated"}, "data": {"batch_size": 7}}


def episode(task, envs=3, **top):
    """Play an episode; return the engine at its end, and all that environment 0 went through."""
    config = small_config({"probe": {"sensors_every": 2}}, envs=envs, steps=STEPS, **top)
    engine, script, seen = VectorizedEngine(task, config), Script(GROW | LIFE), []
    view = engine.reset()
    while view.step < STEPS:
        view, _ = engine.step(script.act(view))
        host, measured = engine.population.body.host, view.measurements
        seen += [column[0].clone().numpy() for name, column in host.columns.items() if name != "gradient"]
        seen += [np.asarray(field[0]) for field in (*measured.contribution, *measured.gain)]
        seen += [np.asarray(field[0]) for field in measured if isinstance(field, np.ndarray)]
        for slot in np.flatnonzero(view.seeds.blueprint[0] >= 0).tolist():
            module = engine.population.body.seed_module(view.seeds, 0, slot)
            seen += [parameter.detach().numpy().copy() for parameter in module.parameters()]
    assert (view.seeds.stage[0] == Stage.FOSSILIZED).all()
    return engine, seen


def assert_bitwise(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


CASES = pytest.mark.parametrize(
    ("kind", "top"),
    [(Kind.VECTOR, {}), (Kind.VECTOR, STE), (Kind.SEQUENCE, {}), (Kind.MAP, {})],
    ids=["vectors-shadow", "vectors-ste-isolated", "sequences", "maps"],
)


@CASES
def test_a_network_has_the_same_bits_alone_beside_a_twin_among_others_and_without_a_tape(kind, top, monkeypatch):
    task = spanned_task(kind)
    expected = episode(task, **top)[1]
    assert_bitwise(episode(task, 1, **top)[1], expected)
    assert_bitwise(episode(task, 1, twin=True, **top)[1], expected)
    monkeypatch.setattr(Body, "tape", lambda body: None)
    assert_bitwise(episode(task, **top)[1], expected)


def test_activations_that_are_computed_again_give_the_same_bits():
    task = spanned_task()
    assert_bitwise(episode(task, activation_checkpointing=True)[1], episode(task)[1])


@pytest.mark.campaign
def test_a_graph_has_the_numbers_of_eager_passes(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "compiled", lambda graph, tensors: graph)
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path))
    engine, seen = episode(spanned_task(), compile="on")
    assert engine.population.passes.counts.plans > 3
    for one, other in zip(seen, episode(spanned_task(), compile="off")[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_networks_that_are_exported_give_the_outputs_of_the_population():
    task = spanned_task()
    engine, _ = episode(task)
    metric, _ = engine.evaluate(task.validation)
    network, topology = engine.export(0)
    right = torch.from_numpy(network.predict(task.validation.x)) == task.validation.y
    assert float(right.float().mean()) == pytest.approx(float(metric[0]), abs=1e-6)
    assert [(seed["after"], seed["around"]) for seed in topology["seeds"]] == [(2, 1), (3, 0)]
    assert engine.population.body.table.taps[0].tolist() == [[6, 5, 6, 6], [7, 6, 6, 7]]


def test_an_engine_goes_on_from_a_snapshot_at_every_step_as_if_it_had_not_stopped():
    config = small_config(steps=STEPS, twin=True, governor={"snapshot_every": 2})
    client, straight, snapshots = Script(GROW | LIFE), VectorizedEngine(spanned_task(), config), []
    view = straight.reset()
    while view.step < STEPS:
        tensors, plain = flatten(straight.snapshot())
        snapshots.append((tensors, json.loads(json.dumps(plain))))
        view, _ = straight.step(client.act(view))
    final = flatten(straight.snapshot())
    for snapshot in snapshots:
        resumed = VectorizedEngine(spanned_task(), config)
        view = resumed.restore(unflatten(*snapshot))
        while view.step < STEPS:
            view, _ = resumed.step(client.act(view))
        again = flatten(resumed.snapshot())
        assert again[1] == final[1]
        assert again[0].keys() == final[0].keys()
        for name, tensor in final[0].items():
            torch.testing.assert_close(again[0][name], tensor, rtol=0, atol=0, equal_nan=True)


def test_two_halves_of_a_population_grow_as_the_whole_does():
    def values(envs, first):
        engine = VectorizedEngine(spanned_task(), small_config(envs=envs, first_instance=first, steps=4))
        view = engine.reset()
        every = {(at[0], env): plan for at, plan in LIFE.items() for env in range(envs)}
        script = Script(every)
        for _ in range(4):
            view, _ = engine.step(script.act(view))
        return engine.population.body.host.columns["value"]

    assert torch.equal(values(4, 0), torch.cat([values(2, 0), values(2, 2)]))


def test_the_sensors_of_a_slot_measure_what_its_bypasses_read():
    engine = VectorizedEngine(spanned_task(), small_config({"probe": {"sensors_every": 1}}, steps=2))
    view = engine.reset()
    column = engine.space.sensors.index("participation_before")
    fit, body = engine.population.data.fit, engine.population.body
    for env in range(3):
        host = body.host.read(env, SpannedHost(names=("wide", "late"))())
        real = slice(None) if fit.real is None else fit.real[env]
        with torch.no_grad():
            streams = segment_outputs(host.segments, fit.x[env][real])
        for slot, start in enumerate((1, 0)):
            expected = participation_ratio(streams[start][None])
            np.testing.assert_allclose(view.measurements.sensors[env, slot, column], expected, rtol=1e-3)
