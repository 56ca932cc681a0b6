"""Check that the default controller plants behind a network's narrow place, and no more where nothing else is missing."""

import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper.kasmina.blueprints import drawn_with
from esper.leyline.lifecycle.view import MISSING, sensor
from esper.leyline.lifecycle.vocabulary import Stage


def grown(**options):
    with drawn_with(0):
        x, teacher = torch.randn(900, 12), nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
        y = teacher(x).argmax(1)
        model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2), nn.ReLU(), nn.Linear(2, 24), nn.ReLU())
        model.append(nn.Linear(24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    growth = esper.Growth(
        model, optimizer, probe=[(x[600:], y[600:])], loss=F.cross_entropy, budget=2.0, every=10, **options
    )
    for step in range(300):
        batch = slice(step * 60 % 600, step * 60 % 600 + 60)
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(x[batch], y[batch])
    return growth


def test_the_first_seed_goes_past_the_narrow_place_and_its_reason_says_what_is_missing():
    growth = grown()
    first = growth.summary()["plantings"][0]
    assert growth.model.sites[first["site"]].around != first["site"]
    assert "of the gradient is what the layer in front cannot follow" in first["reason"]


def test_the_outlook_says_how_fast_the_loss_falls_and_what_the_free_place_that_lacks_most_would_add(monkeypatch):
    growth = grown()
    seconds = {**growth.seconds, "rest": 300 * 0.5}
    monkeypatch.setattr(esper.Growth, "seconds", seconds)
    view = growth.engine.view()
    lacks = sensor(view, MISSING)[0]
    free = {
        name: lacks[slot] for slot, name in enumerate(view.space.slots) if view.seeds.stage[0, slot] == Stage.DORMANT
    }
    most = max(free, key=free.get)
    (since, first), *_, (until, last) = growth._losses
    falls = 1 - last / first
    pace = 1 - (1 - falls) ** (60 / (0.5 * (until - since)))
    adds = pace * free[most] / (1 - free[most])
    said = f"the loss on the probe still falls by {pace:.1%} a minute ({falls:.1%} in steps {since} to {until}), and "
    place = f"{most!r} would add most, about {adds:.1%}, as its layers cannot follow {free[most]:.1%} of the gradient"
    assert growth.outlook.removeprefix("train on: ") == said + ("no place would add 0.1%" if adds < 1e-3 else place)
    assert growth.stopped is None or growth.stopped.endswith(f"; {growth.outlook}")
    assert growth.summary()["outlook"] == growth.outlook


def test_where_growth_has_stopped_it_says_train_on_as_long_as_the_loss_falls():
    spent = grown(settings={"lifecycle": {"max_seeds": 1}, "heuristic": {"keep_above": -1e9}})
    assert "; train on: the loss on the probe still falls by " in spent.stopped
    assert spent.finish() is spent.model
    assert spent.summary()["outlook"].startswith("train on: ")


def test_where_no_seed_was_kept_the_verdict_says_whether_to_train_on():
    growth = grown(settings={"heuristic": {"keep_above": 1e9}})
    growth.finish()
    summary = growth.summary()
    assert summary["keeps"] == []
    assert summary["verdict"].endswith(f"as the loop trained it; {summary['outlook']}.")
    assert summary["outlook"].endswith("did not fall in steps 120 to 200, and nothing is missing at any free place")


def test_without_the_measurement_no_reason_speaks_of_what_is_missing():
    blind = grown(settings={"probe": {"sensors_every": 0}})
    assert blind.population.space.sensors == ()
    plantings = blind.summary()["plantings"]
    assert plantings
    assert not any("of the gradient" in each["reason"] for each in plantings)
    assert blind.outlook.endswith(f" in steps 0 to {blind.engine.state.step * 10})")
    assert "of the gradient" not in blind.outlook
