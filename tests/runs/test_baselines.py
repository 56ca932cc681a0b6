"""Test static networks beside grown ones: what each is, that it changes nothing of the growth, and what an interrupt leaves."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from crashes import Left
from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.host import SegmentedHost
from esper.kasmina.network.static import Skipped, WidenedHosts
from esper.leyline.config.tree import BASELINES, EarlyStoppingConfig, build_config
from esper.leyline.data.keys import Purpose, scalar
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.progress import Progress
from esper.leyline.protocols import Controller
from esper.runs.baselines import Absent, grown_of, train_baseline
from esper.runs.folder.resume import Opening
from esper.runs.grow import grow
from esper.tamiyo.catalog import get_controller
from esper.tasks.catalog import get_task
from esper.tasks.hosts import MLP
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.data import Format, SharedBatchIterator
from populations import GROW, Script, blobs, small_config

STEPS = 6
TIMES = ("seconds", "env_steps_per_second", "phase_seconds")


def config_of(*layers, **over):
    """Make a config of short runs in which random decisions keep some seeds."""
    base = {
        "steps": STEPS,
        "models": "none",
        "controller": "random-valid",
        "baselines": list(BASELINES),
        "seed": 3,
        "lifecycle": {"min_prune_age": 0, "embargo": 0, "auto_advance": True, "tempos": [0, 1]},
        "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0},
    }
    return small_config(base, *layers, over)


def run(task, config, folder=None, watch=None, **how):
    return grow(task, config, get_controller(config.controller, config), folder, watch, **how)


def timeless(value):
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in TIMES}
    return value


@pytest.fixture(scope="module")
def task():
    return blobs()


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, run(task, config_of(), folder)


@pytest.fixture(scope="module")
def population(task):
    """Grow a population of which environment 1 has kept a gated seed at slot 0 and the others none; return it and its config."""
    config = config_of(seed=0, steps=8, lifecycle={"auto_advance": False, "tempos": [0, 1, 2], "min_prune_age": 1})
    config = config.model_copy(update={"gates": small_config().gates})
    engine = VectorizedEngine(task.sealed(), config)
    decided = {**GROW, (0, 1): (*GROW[0, 1][:3], int(Blend.GATE), *GROW[0, 1][4:5], 1)}
    client = Script(decided)
    view = engine.reset()
    while view.step < config.steps:
        view, _ = engine.step(client.act(view))
    grown = grown_of(engine)
    assert (grown.kept.blueprint >= 0).tolist() == [[False, False], [True, False], [False, False]]
    return engine, config, grown


# What each of them is.


def test_same_size_equals_a_plain_loop_over_the_grown_topology_from_step_0(task, population):
    engine, config, grown = population
    trained = train_baseline("same-size", task, config, grown, steps=4)
    key, seed = int(grown.instance[1]), config.seed
    with drawn_with(scalar(seed, Purpose.HOST, key, 0)):
        host = task.host()
    blueprint = int(grown.kept.blueprint[1, 0])
    with drawn_with(scalar(seed, Purpose.BIRTH, key, 0, 0, 0)):
        delta = engine.population.body.layout.menu[blueprint].build(8, 8)
        gate = nn.Linear(8, 1)
        nn.init.zeros_(gate.weight), nn.init.zeros_(gate.bias)
    alpha = float(grown.kept.alpha[1, 0])
    assert 0 < alpha < 1, "or this test shows less than it could"
    assert engine.population.body.layout.menu[blueprint].tap == "before"

    def network(x):
        before = host.segments[0](x)
        h = host.segments[1](before) + alpha * torch.sigmoid(gate(before)) * delta(before)
        return host.segments[3](host.segments[2](h))

    parameters = [parameter for part in (host, delta, gate) for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.lr, weight_decay=0)
    feed = SharedBatchIterator(
        [task.train],
        np.zeros(1, np.int64),
        np.array([key]),
        seed,
        config.data.batch_size,
        Format(task.inputs, torch.device("cpu")),
    )
    feed.reset(0)
    for _ in range(4 * config.data.batches_per_step):
        x, y = next(feed)
        loss = nn.functional.cross_entropy(network(x[0]), y[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = nn.functional.cross_entropy(network(task.test.x), task.test.y).item()
    assert trained.loss[1] == pytest.approx(expected, rel=1e-4)
    assert trained.params[1] == sum(parameter.numel() for parameter in parameters) == grown.params[1]


def test_same_size_of_an_environment_that_kept_nothing_is_its_twin(task, population):
    _, config, grown = population
    alone = train_baseline("same-size", task, config, grown, steps=4)
    twins = train_baseline("same-size", task, config, grown._replace(kept=_nothing(grown)), steps=4)
    reused = train_baseline("same-size", task, config, grown, steps=4, twin=twins)
    np.testing.assert_array_equal(reused.loss, alone.loss)
    assert (alone.loss == twins.loss).tolist() == [True, False, True]
    assert reused.note == "2 of 3 environments kept no seed; there it is the twin"
    assert reused.params.tolist() == grown.params.tolist()


def _nothing(grown):
    return grown.kept._replace(stage=np.zeros_like(grown.kept.stage))


def test_plain_is_the_smallest_width_of_at_least_the_grown_size_of_every_environment(task, population):
    _, config, grown = population
    trained = train_baseline("plain", task, config, grown, steps=1)
    for size, wanted in zip(trained.params, grown.params, strict=True):
        assert size >= wanted
        width = next(w for w in range(1, 100) if count(WidenedHosts(task.host, (w,) * 5 + (3,))()) >= wanted)
        assert size == count(WidenedHosts(task.host, (width,) * 5 + (3,))())
    assert len(set(trained.params.tolist())) == 2, "the environment that grew has a wider one"


def test_a_task_brings_a_plain_network_of_its_own(task, population):

    _, config, grown = population
    mine = replace(task, plain=lambda parameters: WidenedHosts(task.host, (40,) * 5 + (3,)))
    assert (
        train_baseline("plain", mine, config, grown, steps=1).params.tolist()
        == [count(WidenedHosts(task.host, (40,) * 5 + (3,))())] * 3
    )
    small = replace(task, plain=lambda parameters: task.host)
    assert "fewer than the grown network has" in train_baseline("plain", small, config, grown, steps=1).reason


def test_a_task_of_ones_own_takes_a_plain_network():
    factory = MLP(inputs=3, width=4, hidden=(2,), outputs=2)
    mine = task_from("mine", torch.randn(90, 3), torch.arange(90) % 2, host=lambda: factory(), plain=factory.plain)
    record = run(mine, config_of(envs=1, steps=1, controller="never", baselines=["plain"]))["baselines"]["plain"]
    assert record["params"] == [count(factory.plain(count(factory()))())]


def test_skips_is_a_task_of_that_host_that_never_grows(task, finished):

    _, summary = finished
    other = run(replace(task, host=Skipped(task.host, (1, 2))), config_of(controller="never", baselines=[]))
    assert summary["baselines"]["skips"]["test_accuracy"] == other["test_accuracy"]["grown"]
    assert summary["baselines"]["skips"]["params"] == [summary["host_params"]] * 3


def test_the_twin_is_what_stands_as_host(finished):
    _, summary = finished
    assert summary["baselines"]["twin"] == {
        "test_accuracy": summary["test_accuracy"]["host"],
        "params": [summary["host_params"]] * 3,
        "seconds": None,
    }


# The summary.


def test_the_summary_names_every_baseline_in_order_with_figures_sizes_and_seconds(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail) == summary
    assert list(summary["baselines"]) == list(BASELINES)
    for name, record in summary["baselines"].items():
        assert set(record) - {"note"} == {"test_accuracy", "params", "seconds"}
        assert len(record["test_accuracy"]) == len(record["params"]) == 3
        assert (record["seconds"] is None) == (name == "twin")
    assert summary["seeds"]["fossilized"] > 0, "or this shows nothing"
    assert summary["baselines"]["same-size"]["params"] == summary["grown_params"]
    assert all(a >= b for a, b in zip(summary["baselines"]["plain"]["params"], summary["grown_params"], strict=True))


def test_baselines_change_nothing_of_the_grown_networks_and_of_the_events(task, finished, tmp_path):
    folder, summary = finished
    alone = run(task, config_of(baselines=[]), tmp_path / "run")
    assert alone["baselines"] == {}
    for name in ("test_loss", "validation_loss", "test_accuracy"):
        assert alone[name]["grown"] == summary[name]["grown"]
    assert alone["grown"] == summary["grown"]
    rows = [
        [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        for path in (folder, tmp_path / "run")
    ]
    ours, theirs = (
        [{**row, "time": 0, "twin_metrics": 0, "phase_seconds": 0, "seconds": 0, "bytes": 0} for row in part]
        for part in rows
    )
    assert ours == theirs


def test_regression_has_its_own_metric_in_the_record():
    x = torch.randn(120, 3)
    task = task_from("line", x, x[:, :1] * 2, host=_line, menu=["bypass-linear"])
    record = run(task, config_of(envs=1, steps=1, controller="never"))["baselines"]
    assert [[key for key in entry if key.startswith("test_")] for entry in record.values()] == [["test_r2"]] * 4


def _line():
    return SegmentedHost([nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)], [SlotSpec("a", after=1, width=4)])


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 6, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0][:, -1]


def test_a_host_without_a_plain_network_says_why_and_keeps_the_others():
    x, y = torch.randn(120, 5, 2), torch.arange(120) % 2

    def host():
        block = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6))
        return SegmentedHost([Last(), block, nn.Linear(6, 2)], [SlotSpec("a", after=1, width=6)])

    task = task_from("sequences", x, y, host=host, menu=["bypass-linear"])
    record = run(task, config_of(envs=2, steps=2, controller="never"))["baselines"]
    assert set(record["plain"]) == {"absent"}
    assert record["plain"]["absent"].startswith("segment 0 of the host is a Last, whose width cannot be scaled; pass ")
    assert "esper.task(..., plain=f)" in record["plain"]["absent"]
    assert len(record["skips"]["test_accuracy"]) == 2


def test_a_baseline_for_which_memory_runs_out_is_absent_and_the_run_ends_well(task, population, monkeypatch):
    _, config, grown = population
    monkeypatch.setattr("esper.tolaria.stacked.population.available_memory", lambda device: 0)
    assert "GiB of memory are available" in train_baseline("plain", task, config, grown, steps=1).reason


def test_baselines_are_evaluated_at_their_best_step_where_the_run_stops_early(task, population):
    _, config, grown = population
    at_best, at_last = (
        config.model_copy(update={"early_stopping": EarlyStoppingConfig(enabled=best), "steps": 12})
        for best in (True, False)
    )
    at_best, at_last = (
        each.model_copy(update={"optimizer": each.optimizer.model_copy(update={"lr": 0.1})})
        for each in (at_best, at_last)
    )
    engine = VectorizedEngine(replace(task, host=Skipped(task.host, (1, 2))).sealed(), at_best)
    engine.run(get_controller("never", config))
    engine.finish()
    best, last = (train_baseline("skips", task, each, grown, steps=12).loss for each in (at_best, at_last))
    np.testing.assert_array_equal(best, engine.evaluate(task.test)[1][:3])
    assert (best != last).any(), "or this test shows nothing"


# Interrupts and resumed runs.


class At(Progress):
    """Does something when a baseline begins."""

    def __init__(self, name, action):
        self.name, self.action = name, action

    def note(self, text):
        if text.startswith(f"training the baseline {self.name} "):
            self.action()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_twice():
    interrupt()
    interrupt()


def leave():
    raise Left


@pytest.mark.campaign
@pytest.mark.parametrize("action", [interrupt, interrupt_twice])
def test_an_interrupt_while_baselines_train_keeps_what_is_there_and_resume_adds_the_rest(
    task, finished, tmp_path, action
):
    _, whole = finished
    config = config_of(models="best")
    summary = run(task, config, tmp_path / "run", At("plain", action))
    assert (summary["status"], summary["steps_done"]) == ("interrupted", STEPS)
    assert timeless(summary["baselines"]["same-size"]) == timeless(whole["baselines"]["same-size"])
    for name in ("plain", "skips"):
        assert summary["baselines"][name]["absent"].startswith("the run was interrupted before it was trained")
    assert len(list((tmp_path / "run" / "models").glob("env-*"))) == 1
    resumed = run(task, config, tmp_path / "run", opening=Opening(resume=True))
    assert timeless(resumed["baselines"]) == timeless(whole["baselines"])
    assert timeless(resumed["test_loss"]) == timeless(whole["test_loss"])
    assert resumed["status"] == "finished"


def test_a_run_killed_while_baselines_train_has_the_same_summary_once_resumed(task, finished, tmp_path):
    _, whole = finished
    with pytest.raises(Left):
        run(task, config_of(), tmp_path / "run", At("skips", leave))
    assert not (tmp_path / "run" / "summary.json").exists()
    assert timeless(run(task, config_of(), tmp_path / "run", opening=Opening(resume=True))) == timeless(whole)


class Interrupts(Controller):
    """Sends Ctrl-C while the controller decides at some step."""

    def __init__(self, client, step):
        self.client, self.step = client, step

    def act(self, view):
        if view.step == self.step:
            interrupt()
        return self.client.act(view)

    def store(self, outcome):
        self.client.store(outcome)

    def update(self):
        return self.client.update()


def test_after_an_interrupted_growth_baselines_train_for_as_many_steps_as_were_done(task):
    config = config_of(models="none")
    summary = grow(task, config, Interrupts(get_controller("random-valid", config), 2))
    short = run(task, config_of(steps=3, baselines=["skips"]))
    assert (summary["status"], summary["steps_done"]) == ("interrupted", 3)
    assert timeless(summary["baselines"]["skips"]) == timeless(short["baselines"]["skips"])


def test_a_second_interrupt_after_an_interrupted_growth_leaves_the_baselines_out(task, tmp_path):
    config = config_of(models="best")
    client = Interrupts(get_controller("random-valid", config), 2)
    summary = grow(task, config, client, tmp_path / "run", At("plain", interrupt))
    assert summary["status"] == "interrupted"
    assert [name for name, record in summary["baselines"].items() if "absent" in record] == ["plain", "skips"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert len(list((tmp_path / "run" / "models").glob("env-*"))) == 1


class AtExport(Progress):
    """Sends Ctrl-C as networks are written, and keeps what is answered."""

    def __init__(self, times=1):
        self.times, self.answers = times, []

    def note(self, text):
        for _ in range(self.times if text.startswith("exporting") else 0):
            interrupt()

    def answer(self, text):
        self.answers.append(text)


def test_a_second_interrupt_while_networks_are_written_leaves_the_baselines_out_and_a_summary(task, tmp_path):
    config, watch = config_of(models="best"), AtExport()
    client = Interrupts(get_controller("random-valid", config), 2)
    summary = grow(task, config, client, tmp_path / "run", watch)
    assert summary["status"] == "interrupted"
    assert all("absent" in summary["baselines"][name] for name in ("same-size", "plain", "skips"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert watch.answers == [
        f"interrupted after 3 of {STEPS} steps: the networks are evaluated and exported as they are, then the static networks "
        "(same-size, plain, skips) train for 3 steps too; another Ctrl-C leaves those out",
        "interrupted: the static networks same-size, plain, skips are left out",
    ]


def test_a_first_interrupt_while_the_networks_of_a_whole_growth_are_written_leaves_the_baselines_out(task, tmp_path):
    config = config_of(models="best")
    summary = run(task, config, tmp_path / "run", AtExport())
    assert (summary["status"], summary["steps_done"]) == ("interrupted", STEPS)
    assert all("absent" in summary["baselines"][name] for name in ("same-size", "plain", "skips"))


def test_where_nothing_is_left_out_another_interrupt_ends_the_run_at_once_as_was_said(task, tmp_path):
    config, watch = config_of(models="best", baselines=["twin"]), AtExport()
    client = Interrupts(get_controller("random-valid", config), 2)
    with pytest.raises(KeyboardInterrupt):
        grow(task, config, client, tmp_path / "run", watch)
    assert not (tmp_path / "run" / "summary.json").exists()
    first, second = watch.answers
    assert first.endswith("another Ctrl-C ends the run at once, without a summary")
    assert second == "interrupted again: the run ends at once, without a summary"


def test_absent_is_a_sentence_and_no_figure(task, population):
    _, config, grown = population
    assert isinstance(train_baseline("plain", task, config, grown, steps=3, stop=lambda: True), Absent)


# The hosts of Esper.


def test_rows_of_a_mixture_have_plain_networks_and_skips_of_their_own():
    task = get_task("repair")
    config = build_config(
        task.defaults, {"envs": 3, "steps": 2, "instances": "heldout", "data": {"batches_per_step": 2}}
    )
    engine = VectorizedEngine(task.sealed(), config)
    engine.reset()
    grown = grown_of(engine)
    wanted = grown._replace(params=grown.params + np.array([0, 500, 900]))
    plain = train_baseline("plain", task, config, wanted, steps=2)
    skips = train_baseline("skips", task, config, grown, steps=2)
    assert skips.params.tolist() == engine.population.body.table.host_params[:3].tolist()
    for env, key in enumerate(grown.instance.tolist()):
        host = task.instance(key).host.plain(int(wanted.params[env]))
        assert plain.params[env] == count(host()) >= wanted.params[env]
        narrower = host.width - 1
        assert count(replace(host, width=narrower, hidden=(narrower,) * 4)()) < wanted.params[env]
        alone = grown_of(engine)._replace(**{name: _row(getattr(wanted, name), env) for name in wanted._fields})
        assert train_baseline("plain", task, config, alone, steps=2).loss[0] == pytest.approx(plain.loss[env], rel=1e-5)


def _row(values, env):
    return type(values)._make(own[[env]] for own in values) if isinstance(values, tuple) else values[[env]]


def test_convolutional_hosts_have_a_plain_network_of_every_size_and_no_skips():
    task = get_task("digits-image-narrow")
    config = build_config(task.defaults, {"envs": 2, "steps": 1, "data": {"batches_per_step": 1}})
    engine = VectorizedEngine(task.sealed(), config)
    engine.reset()
    grown = grown_of(engine)
    wanted = grown._replace(params=grown.params + np.array([0, 2000]))
    plain = train_baseline("plain", task, config, wanted, steps=1)
    assert plain.params.tolist() == [count(task.host.plain(int(size))()) for size in wanted.params]
    assert (plain.params >= wanted.params).all()
    assert "so that no identity skip fits" in train_baseline("skips", task, config, grown, steps=1).reason


def test_a_host_that_is_plain_and_residual_already_is_its_own_plain_network_and_has_no_skips():
    task = get_task("iris")
    config = build_config(task.defaults, {"envs": 2, "steps": 1, "data": {"batches_per_step": 1}})
    record = run(task, config.model_copy(update={"controller": "never"}))["baselines"]
    assert record["plain"]["test_accuracy"] == record["twin"]["test_accuracy"]
    assert (
        record["plain"]["note"]
        == "the host of 2 of 2 environments is plain and of that size already; there it is the twin"
    )
    assert "has a path around its weights already" in record["skips"]["absent"]


def test_wider_hosts_read_the_examples_of_one_dataset_together():
    """Check that the hosts of `plain` read the same batches, though they differ where environments kept other seeds."""
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    examples = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    task = task_from("shared", examples, host=MLP(6, 8, (3, 5), 3), classes=3, stream=True)
    found = [run(task, config_of(baselines=["plain"], envs=4, data={"read_ahead": ahead})) for ahead in (0, 2)]
    ahead, needed = (each["baselines"]["plain"] for each in found)
    assert len(set(ahead["params"])) > 1
    assert timeless(ahead) == timeless(needed)
