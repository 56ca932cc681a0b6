"""Test early stopping: which state is kept of a row, when a row and a run stop, and that nothing else changes by it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from device_reads import counted_reads
from sklearn.datasets import load_diabetes

import esper
from esper.leyline.data.objective import selection_score
from esper.leyline.lifecycle.view import Scores
from esper.leyline.lifecycle.vocabulary import Actions, Op, Stage
from esper.leyline.messages import InputError
from esper.runs.baselines import grown_of, train_baseline
from esper.runs.evaluation.contenders import named
from esper.runs.evaluation.evaluation import run_evaluation
from esper.tasks.hosts import MLP
from esper.tolaria.early_stopping import EarlyStopping
from esper.tolaria.engine import VectorizedEngine
from populations import Script, blobs, small_config

NARROW = {"blueprints": ["bypass-mlp"], "lifecycle": {"tempos": (0, 1)}}
GROW = {(1, 0): (Op.GERMINATE, 0, 0, 0, 1, 3), (4, 0): (Op.ADVANCE,), (7, 0): (Op.FOSSILIZE,)}
"""Plants a seed in environment 0 and keeps it, as soon as the permissive gates let it."""


def stopping(patience=4, **top):
    return small_config(NARROW, {"early_stopping": {"enabled": True, "patience": patience}}, **top)


def play(engine, client, steps):
    view = engine.reset() if engine.state.episode < 0 else engine.view()
    for _ in range(steps):
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
    return view


def weights(engine, env):
    return {name: value.clone() for name, value in engine.export(env)[0].state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_exported_network_is_bit_for_bit_that_of_the_best_step():
    engine, kept = VectorizedEngine(blobs().sealed(), stopping(steps=10)), {}
    engine.reset()
    for step in range(11):
        kept[step] = [weights(engine, env) for env in range(3)]
        if step < 10:
            engine.step(Script(GROW).act(engine.view()))
    engine.finish()
    for env, best in enumerate(engine.stopping.best_step[:3].tolist()):
        assert same(weights(engine, env), kept[best][env])
    score = engine.evaluate(engine.population.validation_splits())[0]
    np.testing.assert_array_equal(score, engine.stopping.score[:3])


def test_a_best_step_before_a_seed_was_kept_exports_the_topology_of_that_step():
    engine = VectorizedEngine(blobs().sealed(), stopping(steps=10))
    play(engine, Script(GROW), 9)
    assert engine.state.seeds.stage[0, 0] == Stage.FOSSILIZED
    engine.reset()
    engine.stopping.begin(engine.state.seeds, np.full(3, 2.0))  # nothing is better
    play(engine, Script(GROW), 9)
    engine.finish()
    assert engine.stopping.best_step.tolist() == [0, 0, 0]
    assert engine.export(0)[1]["seeds"] == []


def test_a_row_is_the_same_alone_as_beside_others_with_early_stopping():
    task = blobs().sealed()
    many = VectorizedEngine(task, stopping(patience=2, steps=12))
    while not many.over:
        play(many, Script(GROW), 1)
    alone = VectorizedEngine(task, stopping(patience=2, steps=12, envs=1))
    while not alone.over:
        play(alone, Script(GROW), 1)
    assert many.stopping.best_step[0] == alone.stopping.best_step[0]
    many.finish()
    alone.finish()
    assert same(weights(many, 0), weights(alone, 0))


def test_the_best_state_is_that_of_the_metric_or_of_j_as_select_says():
    scores = Scores(np.array([0.7, 0.8]), np.array([1.0, 2.0]), np.array([0, 100]))
    host_params = np.array([100, 100])
    assert selection_score(scores, host_params, small_config()).tolist() == [0.7, 0.8]
    dear = small_config(select="objective", reward={"rent": 1.0, "rent_size": 0})
    np.testing.assert_allclose(selection_score(scores, host_params, dear), [0.7, 0.8 - np.log(2)])


def test_early_stopping_changes_no_number_of_the_training():
    task = blobs().sealed()
    plain, watched = (
        VectorizedEngine(task, config) for config in (small_config(NARROW, steps=8), stopping(patience=8, steps=8))
    )
    for engine in (plain, watched):
        play(engine, Script(GROW), 8)
    assert torch.equal(plain.population.body.host.columns["value"], watched.population.body.host.columns["value"])
    np.testing.assert_array_equal(plain.state.scores.metric, watched.state.scores.metric)


def test_a_step_with_early_stopping_reads_the_device_once():
    engine = VectorizedEngine(blobs().sealed(), stopping())
    play(engine, Script(GROW), 2)
    with counted_reads() as reads:
        engine.step(Actions.wait(3))
    assert [site for _, site in reads] == ["runtime.py:read_packet"]


class Curve:
    """Stops three rows early by scores that are given, without a body."""

    def __init__(self, patience):
        engine = VectorizedEngine(blobs().sealed(), stopping(patience=patience, steps=50))
        engine.reset()
        self.seeds = engine.state.seeds
        self.stopping: EarlyStopping = engine.stopping
        self.stopping.begin(self.seeds, np.zeros(3))
        self.step = 0

    def observe(self, scores, stage=Stage.DORMANT, healthy=(True, True, True)):
        self.step += 1
        seeds = self.seeds._replace(stage=np.full_like(self.seeds.stage, stage))
        if stage != Stage.DORMANT:  # a state of the seeds without modules: snapshots are not looked at
            seeds = seeds._replace(blueprint=np.zeros_like(seeds.blueprint))
        self.stopping.observe(seeds, np.array(scores, float), np.array(healthy), self.step)


def test_a_row_stops_after_patience_steps_without_a_better_score_and_is_then_left_alone():
    curve = Curve(patience=2)
    for scores in ([1, 1, 1], [0, 1, 2], [0, 1, 3], [9, 9, 4]):
        curve.observe(scores)
    assert curve.stopping.stopped.tolist() == [3, 3, -1]
    assert curve.stopping.best_step.tolist() == [1, 1, 4]
    assert curve.stopping.score.tolist() == [1, 1, 4]
    assert not curve.stopping.over


def test_a_row_does_not_stop_while_a_seed_is_under_way():
    curve = Curve(patience=2)
    for _ in range(5):
        curve.observe([-1, -1, -1], stage=Stage.TRAINING)
    assert not curve.stopping.over
    curve.observe([-1, -1, -1])
    assert curve.stopping.over


def test_a_seed_that_is_fossilized_begins_the_patience_anew():
    curve = Curve(patience=3)
    for age in range(4):
        curve.seeds = curve.seeds._replace(age=np.full_like(curve.seeds.age, age - 1))
        curve.observe([-1, -1, -1], stage=Stage.FOSSILIZED if age > 1 else Stage.TRAINING)
    assert curve.stopping.latest.tolist() == [3, 3, 3]
    assert not curve.stopping.over


def test_a_score_that_is_not_finite_or_of_a_row_that_was_rolled_back_is_no_best():
    curve = Curve(patience=9)
    curve.observe([np.nan, 5, 5], healthy=(True, False, True))
    assert curve.stopping.best_step.tolist() == [0, 0, 1]


def test_a_run_stops_early_says_why_and_evaluates_the_best_networks(tmp_path):
    task = blobs()
    config = {
        "envs": 2,
        "steps": 200,
        "data": {"batch_size": 12, "batches_per_step": 3},
        "models": "all",
        "baselines": ["twin"],
    }
    summary = esper.grow(task, config | {"early_stopping": {"patience": 3}}, controller="never", run=tmp_path / "r")
    assert summary["status"] == "finished"
    assert summary["stopped_early"]
    assert summary["steps_done"] < 200
    assert "early_stopping.patience" in summary["stopped_because"]
    assert summary["steps_done"] == max(summary["best_step"]["host"] + summary["best_step"]["grown"]) + 3
    network = esper.load(tmp_path / "r/models/env-000", host=task.host)
    right = network(task.validation.x).argmax(1) == task.validation.y
    assert float(right.float().mean()) == pytest.approx(summary["validation_accuracy"]["grown"][0])
    rows = [json.loads(line) for line in (tmp_path / "r/events.jsonl").read_text().splitlines()]
    assert [row["env"] for row in rows if row["kind"] == "episode"] == [0, 1]


def test_own_tasks_stop_early_by_default_and_shipped_ones_do_not():
    small = {"envs": 1, "steps": 2, "baselines": [], "data": {"batch_size": 12, "batches_per_step": 1}}
    assert esper.grow(blobs(), small, controller="never")["best_step"]["host"] is None
    assert esper.grow(esper.get_task("iris"), small, controller="never")["best_step"] is None


def test_the_twin_has_its_own_best_step():
    engine = VectorizedEngine(blobs().sealed(), stopping(twin=True, steps=10))
    play(engine, Script(GROW), 10)
    engine.finish()
    score = engine.evaluate(engine.population.validation_splits() * 2)[0]
    np.testing.assert_array_equal(score, engine.stopping.score[:6])


def test_an_engine_that_is_restored_has_the_best_state_that_it_would_have_had():
    task, config = blobs().sealed(), stopping(patience=3, steps=12, twin=True)
    straight, stopped = VectorizedEngine(task, config), VectorizedEngine(task, config)
    play(straight, Script(GROW), 12)
    play(stopped, Script(GROW), 9)
    resumed = VectorizedEngine(task, config)
    resumed.restore(stopped.snapshot())
    play(resumed, Script(GROW), 3)
    for name in ("score", "latest", "stopped", "best_step"):
        np.testing.assert_array_equal(getattr(resumed.stopping, name), getattr(straight.stopping, name))
    for engine in (straight, resumed):
        engine.finish()
    assert all(same(weights(straight, env), weights(resumed, env)) for env in range(3))


def test_a_run_folder_goes_on_to_the_best_state_that_it_would_have_had(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = blobs()
    settings = {
        "envs": 2,
        "data": {"batch_size": 12, "batches_per_step": 3},
        "early_stopping": {"patience": 30},
        "baselines": ["twin"],
    }
    straight = esper.grow(task, settings | {"steps": 9}, controller="random-valid", run="a")
    esper.grow(task, settings | {"steps": 5}, controller="random-valid", run="b")
    resumed = esper.resume("b", task=task, settings={"steps": 9})
    for name in ("best_step", "test_accuracy", "validation_accuracy", "grown", "seeds"):
        assert resumed[name] == straight[name], name
    for env in ("env-000", "env-001"):
        one, other = (Path(run, "models", env, "model.safetensors").read_bytes() for run in "ab")
        assert one == other


def test_more_patience_lets_a_stopped_run_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = blobs()
    settings = {"envs": 1, "steps": 60, "baselines": [], "data": {"batch_size": 12, "batches_per_step": 3}}
    first = esper.grow(task, settings | {"early_stopping": {"patience": 2}}, controller="never", run="r")
    assert first["stopped_early"]
    more = esper.resume("r", task=task, settings={"early_stopping.patience": 6})
    assert more["steps_done"] >= first["steps_done"] + 4
    with pytest.raises(InputError, match=r"early_stopping\.enabled"):
        esper.resume("r", task=task, settings={"early_stopping.enabled": False})
    with pytest.raises(InputError, match="changing select would make this another run"):
        esper.resume("r", task=task, settings={"select": "objective"})


def test_a_training_plays_whole_episodes():
    settings = {"envs": 2, "steps": 3, "reward": {"group_size": 2}, "ppo": {"rounds": 1, "validate_envs": 1}}
    with pytest.raises(InputError, match="learns from whole episodes"):
        esper.train(blobs(), settings | {"early_stopping": {"enabled": True}})


def test_an_evaluation_scores_the_best_networks_of_an_own_task_among_all_steps():
    task = blobs()
    record = run_evaluation(
        [named("never")],
        [task],
        instances=2,
        seeds=1,
        baselines=(),
        settings=[{"steps": 20, "data": {"batch_size": 12, "batches_per_step": 2}, "early_stopping": {"patience": 2}}],
    )
    config = {
        "envs": 2,
        "steps": 20,
        "baselines": [],
        "data": {"batch_size": 12, "batches_per_step": 2},
        "instances": "heldout",
    }
    summary = esper.grow(task, config | {"early_stopping": {"patience": 20}}, controller="never")
    runs = np.ravel(record["tasks"][0]["runs"]["never"]["metric"])
    np.testing.assert_allclose(runs, summary["test_accuracy"]["grown"], rtol=1e-12)


@pytest.mark.slow
def test_diabetes_at_four_times_the_default_length_is_no_worse_than_at_the_default():
    x, y = load_diabetes(return_X_y=True)
    y = (y - y.mean()) / y.std()
    host = MLP(inputs=10, width=16, hidden=(16, 16), outputs=1)
    task = esper.task("diabetes", x, y, host=host, standardize=True)
    assert len(task.train.y) == 265
    holdout = {}
    for steps in (24, 96):
        summary = esper.grow(task, {"envs": 2, "steps": steps, "baselines": []}, progress=False)
        holdout[steps] = np.mean(summary["test_r2"]["grown"])
    assert holdout[24] > 0.3
    assert holdout[96] >= holdout[24] - 0.03


def overfit():
    """Make few noisy examples and a wide host: what is learnt long is learnt by heart."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 10, generator=generator)
    y = x[:, 0] + 2 * torch.randn(400, generator=generator)
    return esper.task("noise", x, y, host=MLP(inputs=10, width=32, hidden=(32,), outputs=1), seed=3)


@pytest.mark.campaign
def test_a_long_run_on_few_noisy_examples_ends_no_worse_than_a_short_one():
    settings = {
        "envs": 4,
        "baselines": [],
        "data": {"batch_size": 32, "batches_per_step": 8},
        "lifecycle": {"max_seeds": 0},
    }
    runs = {
        (steps, enabled): np.mean(
            esper.grow(
                overfit(),
                settings | {"steps": steps, "early_stopping": {"enabled": enabled}},
                controller="never",
            )["test_r2"]["grown"]
        )
        for steps, enabled in ((6, True), (40, True), (40, False))
    }
    assert runs[40, True] >= runs[6, True] - 0.02
    assert runs[40, False] < runs[40, True] - 0.1


def test_a_twin_chooses_among_the_same_steps_as_its_environment_and_equals_it_where_nothing_grew():
    engine = VectorizedEngine(overfit().sealed(), stopping(patience=2, steps=20, twin=True))
    incubating = Script({(0, env): (Op.GERMINATE, 0, 0, 0, 1, 3) for env in (0, 2)} | {(11, 0): (Op.PRUNE, 0)})
    engine.reset()
    while not engine.over:
        play(engine, incubating, 1)
    grown, twins = np.split(engine.stopping.stopped, 2)
    assert grown.tolist() == twins.tolist()
    assert grown[0] >= 12 > grown[1]
    np.testing.assert_array_equal(*np.split(engine.stopping.score, 2))
    np.testing.assert_array_equal(*np.split(engine.stopping.best_step, 2))
    engine.finish()
    np.testing.assert_array_equal(*np.split(engine.evaluate(overfit().test)[0], 2))


def test_static_networks_choose_among_the_steps_that_the_grown_network_took():
    task, config = overfit(), stopping(patience=2, steps=30)
    engine = VectorizedEngine(task.sealed(), config)
    play(engine, Script({}), 1)
    none = grown_of(engine)
    steps = {count: train_baseline("same-size", task, config, none, 9, until=np.full(3, count)) for count in (0, 9)}
    whole = {"early_stopping": {"enabled": True, "patience": 9}}
    patient = train_baseline("same-size", task, small_config(NARROW, whole, steps=30), none, 9)
    np.testing.assert_array_equal(steps[9].loss, patient.loss)
    assert (steps[0].loss != patient.loss).any()
