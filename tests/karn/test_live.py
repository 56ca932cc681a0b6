"""Check that a window shows what the rows say, in whatever pieces they come, and that its memory stays bounded."""

import math
from collections import Counter

import numpy as np
import pytest

import esper
from esper.karn.run_model import LOGGED, POINTS, Curve, RunModel
from esper.leyline.lifecycle.vocabulary import Stage
from esper.nissa.events import read_events
from esper.nissa.rows import LifecycleRow, MeasurementRow, StepRow


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live") / "iris"
    settings = {"envs": 3, "steps": 14, "models": "none", "baselines": ["twin"]}
    esper.grow("iris", settings, controller="random-valid", run=folder, progress=False)
    return list(read_events(folder / "events.jsonl"))


def shown(model):
    cells = [model.cell(env, slot) for env in range(model.envs) for slot in range(len(model.slots))]
    return repr(
        (
            model.last.status,
            model.done(),
            model.counts,
            {name: (curve.x, curve.y) for name, curve in model.curves.items()},
            cells,
            [model.log(env) for env in range(model.envs)],
        )
    )


@pytest.mark.parametrize("size", [1, 2, 7, 10**6])
def test_rows_in_any_pieces_come_to_the_same(rows, size):
    whole, pieces = RunModel(), RunModel()
    whole.update(rows)
    for start in range(0, len(rows), size):
        pieces.update(rows[start : start + size])
    assert shown(whole) == shown(pieces)


def test_at_every_step_the_cells_are_those_of_the_rows(rows):
    model, checked = RunModel(), 0
    seeds = {}
    for index, row in enumerate(rows):
        model.update([row])
        if isinstance(row, LifecycleRow):
            seeds[row.env, row.slot] = row.blueprint
        following = rows[index + 1] if index + 1 < len(rows) else None
        if not isinstance(row, MeasurementRow) or isinstance(following, LifecycleRow):
            continue
        step = next(r for r in reversed(rows[:index]) if isinstance(r, StepRow))
        for env in range(model.envs):
            for slot, name in enumerate(model.slots):
                stage, alpha, seed, contribution, _ = model.cell(env, slot)
                known = None if row.contribution_means is None else row.contribution_means[env][slot]
                assert stage == step.stages[env][slot]
                assert alpha == step.alphas[env][slot]
                if seed is not None:
                    assert seed == seeds[env, name]
                    assert math.isnan(contribution) if known is None else contribution == known
                    checked += 1
    assert checked > 10


def test_seeds_are_counted_as_the_lifecycle_rows_say(rows):
    model = RunModel()
    model.update(rows)
    counts = Counter(row.to_stage for row in rows if isinstance(row, LifecycleRow))
    names = (Stage.GERMINATED.name, Stage.FOSSILIZED.name, Stage.PRUNED.name)
    assert [model.counts[f"seeds/{fate}"] for fate in ("planted", "kept", "pruned")] == [counts[name] for name in names]
    assert model.last.status == "finished"
    assert model.done() == (14, 14)
    assert math.isnan(model.seconds_left())


def test_curves_are_percentiles_over_environments(rows):
    model = RunModel()
    model.update(rows)
    steps = [row for row in rows if isinstance(row, StepRow)]
    curve = model.curves["metric"]
    assert curve.x == [row.step for row in steps]
    assert np.allclose(curve.y, [np.percentile(row.metrics, (10, 50, 90)) for row in steps])


def test_a_curve_of_a_million_values_keeps_its_ends_and_at_most_twice_its_points():
    curve = Curve()
    for x in range(1_000_000):
        curve.add(x, 2 * x)
    assert len(curve.x) < 2 * POINTS
    assert curve.x[0] == 0
    assert curve.x[-1] > 1_000_000 - 1_000_000 / POINTS * 2
    assert all(y == (2 * x,) for x, y in zip(curve.x, curve.y, strict=True))


def test_the_log_of_an_environment_holds_its_last_events_the_newest_first(rows):
    model = RunModel()
    for _ in range(3):
        model.update(row for row in rows if not isinstance(row, StepRow) or row.step < 14)
    for env in range(3):
        log = model.log(env)
        assert len(log) == LOGGED
        assert log[0].startswith("end of episode 0: grew ")


def test_the_time_left_is_that_of_the_last_steps(rows):
    model = RunModel()
    steps = [row for row in rows if isinstance(row, StepRow)][:4]
    model.update([rows[0]])
    for index, row in enumerate(steps):
        row.time = 100.0 + 3 * index
        model.update([row])
    assert model.seconds_left() == pytest.approx(3 * 10)


def test_a_training_shows_its_rounds(tmp_path):
    settings = {
        "envs": 8,
        "steps": 3,
        "ppo": {"rounds": 2, "imitation_rounds": 1, "validate_envs": 2, "validate_every": 1},
    }
    esper.train("iris", settings, run=tmp_path / "t", progress=False)
    model = RunModel(range(-1, 2))
    model.update(read_events(tmp_path / "t" / "events.jsonl"))
    assert model.done() == (3, 3)
    assert model.envs == 0
    assert model.curves["validation objective"].x
