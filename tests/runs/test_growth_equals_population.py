"""Check that a host that grows in a loop of one's own has the decisions, weights and measurements it has in a population."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft
from esper.leyline.data.keys import Purpose, scalar
from esper.leyline.lifecycle.slots import Site
from esper.leyline.lifecycle.vocabulary import Op
from esper.runs.live.growth import Growth
from esper.tamiyo.rules.base import RandomValid
from esper.tolaria.engine import VectorizedEngine
from populations import Script, blobs, small_config
from thinning import crossed

STEPS, BATCHES = 24, 3
LIFE = {
    (0, 0): (Op.GERMINATE, 0, 1, 0, 2, 3),
    (3, 0): (Op.ADVANCE, 0),
    (5, 0): (Op.GERMINATE, 1, 2, 1, 3, 2),
    (8, 0): (Op.FOSSILIZE, 0),
    (9, 0): (Op.ADVANCE, 1),
    (14, 0): (Op.SET_ALPHA, 1, 0, 0, 1, 3),
    (17, 0): (Op.FOSSILIZE, 1),
}
SETTINGS = {
    "lifecycle": {"max_training_seeds": 2, "max_seeds": 2, "proximal": 0.3},
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "probe": {"coalitions_every": 2},
    "governor": {"enabled": False},
}


def relative(one, other):
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize(("client", "incubation"), crossed([lambda: Script(LIFE), RandomValid], ["ste", "shadow"]))
def test_one_host_grows_alike_in_a_loop_and_in_a_population(client, incubation):
    task = blobs(dtype=torch.float64)
    config = small_config(
        SETTINGS,
        {"lifecycle": {"incubation": incubation}},
        envs=1,
        steps=STEPS,
        optimizer={"lr": 0.01},
        probe={"sensors_every": 0},
    )
    engine, player = VectorizedEngine(task, config), client()
    view = engine.reset()

    feed = VectorizedEngine(task, config).population.feed
    feed.reset(0)
    problem = task.instance(0)
    with drawn_with(scalar(config.seed, Purpose.HOST, 0, 0)):
        model = problem.host().to(engine.population.device)
    places = {slot.name: f"segments.{slot.after}" for slot in model.slots}
    graft(
        model, {slot.name: Site(slot.name, places[slot.name], places[slot.name], slot.stream) for slot in model.slots}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    growth = Growth(
        model,
        optimizer,
        controller=client(),
        probe=[(problem.probe.x, problem.probe.y)],
        loss=F.cross_entropy,
        every=BATCHES,
        steps=STEPS * BATCHES,
        budget=100.0,
        budget_passes=None,
        settings={**SETTINGS, "blueprints": list(task.menu), "seed": config.seed},
    )
    for _ in range(STEPS):
        view, outcome = engine.step(player.act(view))
        player.store(outcome)
        for _ in range(BATCHES):
            feed.advance()
            x, y = feed.of(slice(0, 1))
            F.cross_entropy(model(x[0]), y[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            closed = growth.engine.state.pending
            measured = growth.step(*((x[0], y[0]) if incubation == "shadow" else ()))
        if not measured:  # nothing can happen any more, and the network goes on as before
            assert growth.summary()["stopped"] is not None
            continue
        assert closed is not None
        mine, theirs = growth.engine.state, engine.state
        for name in ("op", "slot", "blueprint", "blend", "tempo", "target"):
            assert getattr(closed.actions, name)[0] == getattr(outcome.actions, name)[0], name
        assert mine.scores.loss[0] == pytest.approx(theirs.scores.loss[0], rel=1e-9)
        for name in ("gain", "contribution_loss"):
            for part in ("mean", "se"):
                one, other = (getattr(getattr(each.measurements, name), part)[0] for each in (mine, theirs))
                assert one == pytest.approx(other, rel=1e-7, abs=1e-9, nan_ok=True), name
        assert mine.measurements.participation[0] == pytest.approx(theirs.measurements.participation[0], rel=1e-5)
        assert np.array_equal(mine.scores.added_params, theirs.scores.added_params[:1])
    assert np.array_equal(growth.engine.state.seeds.stage[0], engine.state.seeds.stage[0])

    network, topology = engine.export(0)
    finished = growth.finish().cpu()
    assert len(topology["seeds"]) == len(growth.summary()["keeps"])
    with torch.no_grad():
        assert relative(finished(problem.probe.x), network.double()(problem.probe.x)) < 1e-9
