"""Test every mode of training at its smallest, with a row that breaks, and after hundreds of births and prunes."""

import gc

import numpy as np
import pytest
import torch
from faults.poison import poisoned

from esper.leyline.lifecycle.vocabulary import Actions, Op, Vital
from esper.tolaria import runtime
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked import compiling
from populations import EARLY, Script, blobs, small_config, trajectory

MODES = {
    "loop": ({"mapping": "loop"}, 1e-5),
    "vmap": ({"mapping": "vmap"}, 1e-5),
    "compiled": ({"compile": "on"}, 1e-4),
    "pieces": ({"data": {"microbatch": 5}}, 1e-5),
    "activations again": ({"activation_checkpointing": True}, 0.0),
    "bf16": ({"amp": "bf16"}, 0.05),
    "fp16": ({"amp": "fp16"}, 0.05),
}
"""Settings, and how far losses may be from those of training without them."""


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Run graphs as they were traced, and multiply in bfloat16 on any processor."""
    monkeypatch.setattr(compiling, "compiled", lambda graph, tensors: graph)
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda device: True)


@pytest.mark.parametrize("mode", MODES)
def test_one_environment_with_one_slot_and_one_step_has_the_losses_of_any_mode(mode):
    settings, tolerance = MODES[mode]
    (engine, *_), (exact, *_) = (
        trajectory(small_config(layer, envs=1, steps=1), {(0, 0): (Op.GERMINATE, 0, 1, 0, 2, 3)}, blobs(hidden=(3,)))
        for layer in (settings, {})
    )
    assert len(engine.space.slots) == engine.config.envs == engine.config.steps == 1
    for name in ("loss", "train_loss"):
        own, other = (getattr(each.state.measurements, name)[:1] for each in (engine, exact))  # without a ghost
        assert np.isfinite(own).all()
        np.testing.assert_allclose(own, other, rtol=tolerance)


@pytest.mark.campaign
def test_a_row_that_is_put_back_goes_on_in_compiled_passes_as_in_eager_ones():
    found = []
    for mode in ("on", "off"):
        engine, client, vitals = VectorizedEngine(blobs(), small_config(compile=mode)), Script(EARLY), []
        view = engine.reset()
        while view.step < 5:
            actions = client.act(view)
            if view.step == 3:
                with poisoned(engine, 1, "gradient", 1):
                    view, outcome = engine.step(actions)
            else:
                view, outcome = engine.step(actions)
            vitals.append(outcome.vital.tolist())
        found.append((vitals, view.measurements.loss, engine.population.body.host.columns["value"].clone()))
    (vitals, loss, value), (eager_vitals, eager_loss, eager_value) = found
    assert vitals == eager_vitals
    assert [np.flatnonzero(np.array(step) != Vital.GOOD).tolist() for step in vitals] == [[], [], [], [1], []]
    np.testing.assert_allclose(loss, eager_loss, rtol=1e-4)
    torch.testing.assert_close(value, eager_value, rtol=1e-4, atol=1e-5)


def tensors_held():
    """Count the bytes of all tensors of this process."""
    gc.collect()
    found = [
        each
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout is torch.strided
    ]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}.values())


@pytest.mark.campaign
def test_hundreds_of_births_and_prunes_leave_no_memory_behind():
    envs, held = 20, []
    config = small_config(envs=envs, steps=10**6, twin=False, data={"batches_per_step": 1})
    engine = VectorizedEngine(blobs(), config)
    engine.reset()
    for cycle in range(10):
        for op in (Op.GERMINATE, Op.PRUNE):
            actions = Actions.wait(envs)
            actions.op[:], actions.slot[:], actions.blueprint[:], actions.target[:] = op, cycle % 2, 1, 3
            actions.tempo[:] = 2 if op == Op.GERMINATE else 0
            assert engine.step(actions)[1].accepted.all()
        if cycle in (2, 3, 8, 9):
            held.append(tensors_held())
    assert held[2] <= held[0]
    assert held[3] <= held[1]
