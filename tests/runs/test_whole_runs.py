"""Test whole runs: what the demo claims, and what must hold before and after one."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.kasmina.network.export import PROGRAM
from esper.tasks.own.custom import task_from
from populations import Script, blobs, small_config

SMALL = {"envs": 2, "steps": 2, "baselines": ["twin"], "data": {"batch_size": 12, "batches_per_step": 2}}


def test_the_heuristic_fossilizes_seeds_on_digits_that_raise_test_accuracy_by_more_than_two_standard_errors():
    summary = esper.grow(esper.get_task("digits-narrow"), {"envs": 8, "baselines": "twin"})
    host, grown = (np.array(summary["test_accuracy"][name]) for name in ("host", "grown"))
    difference = grown - host
    assert summary["seeds"]["fossilized"] >= 4
    assert difference.mean() > 2 * difference.std(ddof=1) / np.sqrt(8)


def test_a_schedule_that_does_not_fit_the_task_leaves_an_older_run_as_it_was(tmp_path):
    folder, task = tmp_path / "run", blobs()
    esper.grow(task, SMALL, controller="never", run=folder)
    before = sorted((path.relative_to(folder), path.stat().st_mtime_ns) for path in folder.rglob("*"))
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text("- {at: 0, op: germinate, slot: nope, blueprint: bypass-mlp}\n")
    with pytest.raises(esper.InputError, match="nope"):
        esper.grow(task, SMALL, controller=str(schedule), run=folder, overwrite=True)
    assert sorted((path.relative_to(folder), path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_the_config_names_the_controller_unless_one_is_given():
    task = blobs()
    assert esper.grow(task, small_config(controller="never", steps=2))["controller"] == "never"
    summary = esper.grow(task, small_config(controller="never", steps=2), controller=Script({}))
    assert (summary["controller"], summary["task"]) == ("Script", "blobs")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((3,), "the task is 3; give the name of one of `esper tasks`, or make one with esper.task"),
        ((blobs(), [1]), r"^config is \[1\]; give a mapping of keys to values"),
        (
            (blobs(), SMALL, 3),
            "controller is an int without act and store and update; give an object",
        ),
        ((blobs(), SMALL, Script), "controller is the class Script; give an object with the methods act"),
    ],
)
def test_what_is_no_task_config_or_controller_is_refused_in_one_sentence(arguments, sentence):
    task, config, controller = (*arguments, None, None)[:3]
    with pytest.raises(esper.InputError, match=sentence):
        esper.grow(task, config, controller=controller)


class Branching(nn.Linear):
    """Asks the data which way to go, which torch.export cannot trace."""

    def forward(self, x):
        return super().forward(x) if x.sum() > -1e9 else x


def test_a_network_that_cannot_be_traced_keeps_its_weights(tmp_path):
    x = torch.randn(120, 4)

    def host():
        return esper.SegmentedHost([Branching(4, 6), nn.Linear(6, 2)], [esper.SlotSpec("only", 0, 6)])

    task = task_from("branching", x, (x[:, 0] > 0).long(), host=host)
    summary = esper.grow(task, SMALL | {"controller": "never"}, run=tmp_path / "run")
    assert summary["untraced"] == [0, 1]
    folder = tmp_path / "run" / "models" / "env-000"
    assert not (folder / PROGRAM).exists()
    assert esper.load(folder, host=host)(x).shape == (120, 2)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def user_task(segments, slots, **options):
    """Make a task on a host of anybody's modules."""
    x = torch.randn(160, 8)
    return task_from(
        "mine", x, (x[:, 0] * x[:, 1] > 0).long(), host=lambda: esper.SegmentedHost(segments(), slots), **options
    )


def shared_block():
    block = nn.Linear(8, 8)
    return [nn.Linear(8, 8), nn.Sequential(block, nn.ReLU()), nn.Sequential(block, nn.Tanh()), nn.Linear(8, 2)]


def shared_weight():
    made = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)]
    made[2].weight = made[1].weight
    return made


@pytest.mark.parametrize("segments", [shared_block, shared_weight])
@pytest.mark.parametrize("mapping", ["auto", "vmap", "loop"])
def test_weights_that_segments_share_train_and_are_exported_as_they_trained(segments, mapping):
    task = user_task(segments, [esper.SlotSpec("a", 1, 8), esper.SlotSpec("b", 2, 8)])
    engine = esper.VectorizedEngine(task, small_config(mapping=mapping, steps=4))
    engine.run(Script({(0, 0): (esper.Op.GERMINATE, 1, 1, 0, 2, 3)}))
    loss = engine.evaluate(task.test)[1]
    for env in range(3):
        network, _ = engine.export(env)
        with torch.no_grad():
            output = network(task.test.x)
        expected = nn.functional.cross_entropy(output, task.test.y)
        torch.testing.assert_close(torch.tensor(loss[env]), expected.double(), rtol=1e-5, atol=1e-6)
    first = task.host().segments[1]
    assert len(list(first.parameters())) == 2


@pytest.mark.parametrize("mapping", ["auto", "loop"])
def test_an_incubating_seed_leaves_the_buffers_of_its_host_and_of_its_neighbours_bit_identical(mapping):
    def segments():
        return [nn.Linear(8, 8), nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 2)]

    task = user_task(segments, [esper.SlotSpec("a", 1, 8)])

    def buffers(decisions):
        engine = esper.VectorizedEngine(task, small_config(mapping=mapping, steps=4))
        engine.run(Script(decisions))
        return {
            name: column.clone() for name, column in engine.population.body.host.columns.items() if "buffer" in name
        }

    alone = buffers({})
    assert len(alone) == 3
    one = buffers({(0, 1): (esper.Op.GERMINATE, 0, 1, 0, 2, 3)})
    every = buffers({(0, env): (esper.Op.GERMINATE, 0, 1, 0, 2, 3) for env in range(3)})
    for name, column in alone.items():
        assert torch.equal(column, one[name])
        assert torch.equal(column, every[name])


def test_dropout_in_hosts_and_seeds_is_keyed_and_differs_from_segment_to_segment():
    def segments():
        block = [nn.Linear(8, 8), nn.Dropout(0.5)]
        return [nn.Sequential(*block), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Linear(8, 2)]

    task = user_task(segments, [esper.SlotSpec("a", 0, 8)])

    def final():
        engine = esper.VectorizedEngine(task, small_config(steps=4))
        engine.run(Script({(0, 0): (esper.Op.GERMINATE, 0, 1, 0, 2, 3), (2, 0): (esper.Op.ADVANCE, 0)}))
        return engine

    first, again = final(), final()
    assert torch.equal(first.population.body.host.columns["value"], again.population.body.host.columns["value"])
    body = first.population.body
    body.train(True)
    keys = np.arange(3)
    from esper.kasmina.stack.body import place_keys

    ones = torch.ones(3, 5, 8, device=body.host.device)
    masks = [body.host(ones, slice(0, 3), part=f"segments.{k}", keys=place_keys(keys, k)) == 0 for k in (0, 1)]
    assert not torch.equal(*masks)


class DrawsUnseen(nn.Module):
    """Drops numbers out without saying so by a module: vmap finds out in the first call of training."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.dropout(self.linear(x), 0.5, self.training)


def test_dropout_by_a_function_is_keyed_from_the_first_batch_on():
    task = user_task(lambda: [DrawsUnseen(), nn.Linear(8, 2)], [esper.SlotSpec("a", 0, 8)])
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        engine = esper.VectorizedEngine(task, small_config(steps=1))
        engine.run(Script({}))
        losses.append(engine.state.measurements.train_loss.tolist())
    assert losses[0] == losses[1]


def test_a_host_that_is_frozen_whole_can_bear_seeds():
    def segments():
        made = [nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 2)]
        for segment in made:
            segment.requires_grad_(False)
        return made

    task = user_task(segments, [esper.SlotSpec("a", 1, 2)], menu=["bypass-linear"])
    engine = esper.VectorizedEngine(task, small_config(steps=5))
    engine.reset()
    before = engine.population.body.host.columns["value"].clone()
    engine.run(Script({(1, 0): (esper.Op.GERMINATE, 0, 0, 0, 2, 3), (3, 0): (esper.Op.ADVANCE, 0)}))
    value = engine.population.body.host.columns["value"]
    assert before.shape == value.shape
    assert engine.population.body.seed_module(engine.state.seeds, 0, 0).delta.out.weight.count_nonzero()


def test_what_vmap_cannot_map_runs_in_a_loop():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRU(4, 4, batch_first=True)

        def forward(self, x):
            return self.cell(x.view(-1, 2, 4))[0].flatten(1)

    task = user_task(lambda: [nn.Linear(8, 8), Recurrent(), nn.Linear(8, 2)], [esper.SlotSpec("a", 1, 8)])
    summary = esper.grow(task, SMALL | {"controller": "never", "baselines": "none"})
    assert summary["status"] == "finished"


@pytest.mark.parametrize(
    ("segments", "slots", "sentence"),
    [
        (lambda: [nn.Linear(8, 8), nn.Linear(8, 2)], [], "no slots"),
        (lambda: [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)], [("a", 0, 8)], "in place"),
        (
            lambda: [nn.Linear(8, 8), nn.Linear(7, 2)],
            [("a", 0, 8)],
            "segment 0 of the host returns 8 features, but segment 1 of the host takes 7; make the two",
        ),
        (lambda: [nn.Linear(8, 8), nn.Linear(8, 2)], [("a", 0, 9)], "declares width 9"),
    ],
)
def test_a_host_that_cannot_be_grown_is_refused_in_one_sentence(segments, slots, sentence):
    with pytest.raises(esper.InputError, match=sentence) as error:
        user_task(segments, [esper.SlotSpec(*slot) for slot in slots])
    assert "\n" not in str(error.value)


def test_a_client_cannot_write_into_the_state_of_the_engine():
    view = esper.VectorizedEngine(blobs(), small_config()).reset()
    with pytest.raises(ValueError, match="read-only"):
        view.masks.op[:] = True
    with pytest.raises(ValueError, match="read-only"):
        view.seeds.stage[:] = 5


def test_a_decision_out_of_range_is_refused_and_told():
    engine = esper.VectorizedEngine(blobs(), small_config())
    engine.reset()
    actions = esper.Actions.wait(3)
    actions.op[:] = (77, esper.Op.GERMINATE, 0)
    actions.slot[1] = 99
    _, outcome = engine.step(actions)
    assert outcome.accepted.tolist() == [False, False, True]


def test_a_heuristic_that_plants_what_nothing_is_named_is_refused(tmp_path):
    with pytest.raises(esper.InputError, match="unknown blueprint 'bypas-mlp'; did you mean 'bypass-mlp'"):
        esper.grow(blobs(), SMALL | {"heuristic": {"weak_blueprints": ["bypas-mlp"]}}, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
