"""Check that rows that break are put back, and only they; edits that had better not be made are refused."""

import numpy as np
import pytest
import torch
from device_reads import counted_reads
from faults.poison import FAULTS, fingerprints, poisoned

from esper.leyline.config.tree import build_config
from esper.leyline.lifecycle.vocabulary import Actions, Op, Refusal, Stage, Vital
from esper.leyline.messages import DataFault
from esper.nissa.rows import DecisionRow, EpisodeRow, RollbackRow
from esper.store.tensors import flatten
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.rules.schedule import load_schedule
from esper.tasks.catalog import get_task
from esper.tasks.hosts import MLP
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.optimizer import Updates
from populations import GROW, MENU, Journalled, Script, blobs, small_config

BAD = 1  # the row that is broken: it grows, as `GROW` says


def an_engine(*layers, task=None, **top):
    engine = Journalled(task or blobs(), small_config(*layers, **top))
    return engine, engine.rows_of_events


def played(engine, client, upto, trace=None):
    view = engine.reset() if engine.state.episode < 0 else engine.view()
    while view.step < upto:
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
        if trace is not None:
            trace.append(fingerprints(engine))
    return view


def broken_at(step, kind="loss", row=BAD, batch=1, client=None, **config):
    """Play an engine of which a row is poisoned in one step; return it, its client, its rows of events, and fingerprints."""
    engine, rows = an_engine(**config)
    client, trace = client or Script(GROW), []
    played(engine, client, step, trace)
    with poisoned(engine, row, kind, batch):
        played(engine, client, step + 1, trace)
    return engine, client, rows, trace


def uneven(config, host, row, times):
    """Make updates under which the host of one row has another learning rate than all else."""
    other = config.model_copy(update={"lr": config.lr * times})

    def begin(stack, rows):
        if stack is not host:
            return Updates(stack, rows, config)
        parts = slice(rows.start, row), slice(row, row + 1), slice(row + 1, rows.stop)
        return Parts(
            [
                Updates(stack, part, other if index == 1 else config)
                for index, part in enumerate(parts)
                if part.stop > part.start
            ]
        )

    return begin


class Parts:
    """Updates rows that stand beside each other."""

    def __init__(self, updates):
        self.updates = updates

    def step(self, parts=None):
        assert parts is None, "these runs write no norms of parameters"
        return torch.cat([each.step() for each in self.updates])


def learn_at(engine, times, row=BAD):
    """Multiply the learning rate of a row's host from here on."""
    population = engine.population
    population.optimizer = uneven(engine.config.optimizer, population.body.host, row, times)


@pytest.mark.parametrize(
    ("kind", "step", "twin"),
    [
        pytest.param(
            kind, step, twin, marks=() if (place + number) % 3 == 0 and twin == place % 2 else pytest.mark.slow
        )
        for place, kind in enumerate(FAULTS)
        for number, step in enumerate((1, 3, 7))
        for twin in (False, True)
    ],
)
def test_a_row_that_breaks_is_put_back_in_that_step_and_no_other_row_is_touched(kind, step, twin):
    engine, client, _, trace = broken_at(step, kind, twin=twin)
    played(engine, client, 8, trace)
    whole, whole_trace = an_engine(twin=twin)[0], []
    played(whole, Script(GROW), 8, whole_trace)
    for got, expected in zip(trace, whole_trace, strict=True):
        assert [g == e for row, (g, e) in enumerate(zip(got, expected, strict=True)) if row != BAD] == [True] * (
            engine.rows - 1
        )
    found = np.array([outcome.vital for outcome in client.outcomes])
    assert np.argwhere(found).tolist() == [[step, BAD]]
    assert engine.governor.record.rollbacks[BAD] == 1
    assert engine.governor.record.found.sum() == 1


def test_the_twin_of_an_environment_is_put_back_likewise():
    _, client, rows, trace = broken_at(3, row=BAD + 3, twin=True)
    whole, whole_trace = an_engine(twin=True)[0], []
    played(whole, Script(GROW), 4, whole_trace)
    assert [a == b for a, b in zip(trace[-1], whole_trace[-1], strict=True)] == [True] * 4 + [False] + [True]
    (row,) = [row for row in rows if isinstance(row, RollbackRow)]
    assert (row.env, row.twin) == (BAD, True)
    assert not client.outcomes[-1].rolled_back.any()
    assert np.isfinite(client.outcomes[-1].twin[1].metric).all()


def host_of(engine, row):
    stack = engine.population.body.host
    return {name: column[row].clone().cpu() for name, column in stack.columns.items()} | {
        "steps": stack.steps[row].copy()
    }


def fossil_of(engine, row, slot):
    body = engine.population.body
    for (at, form), envs in body.envs.items():
        found = np.flatnonzero(envs == row)
        if at == slot and len(found):
            stack = body.stacks[at, form]
            return {name: column[found[0]].clone().cpu() for name, column in stack.columns.items()} | {
                "steps": stack.steps[found[0]].copy()
            }
    return None


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert np.array_equal(np.asarray(value), np.asarray(other[name])), name


def test_host_fossil_moments_and_lifecycle_are_those_of_the_step_before_bit_for_bit():
    client = Script(GROW)
    engine, _ = an_engine()
    played(engine, client, 7)
    assert engine.state.seeds.stage[BAD, 0] == Stage.FOSSILIZED
    host, fossil, seeds = host_of(engine, BAD), fossil_of(engine, BAD, 0), engine.state.seeds
    with poisoned(engine, BAD, "gradient", 0):
        played(engine, client, 8)
    assert_same(host_of(engine, BAD), host)
    assert_same(fossil_of(engine, BAD, 0), fossil)
    for before, after in zip(seeds, engine.state.seeds, strict=True):
        np.testing.assert_array_equal(after[BAD], before[BAD])


def test_what_was_kept_in_the_step_that_failed_was_live_before_and_goes():
    engine, client, _, _ = broken_at(5)
    assert client.outcomes[-1].accepted[BAD]
    assert client.outcomes[-1].actions.op[BAD] == Op.FOSSILIZE
    assert engine.state.seeds.stage[BAD].tolist() == [Stage.EMBARGOED, Stage.DORMANT]
    assert engine.state.seeds.age[BAD, 0] == 0
    assert fossil_of(engine, BAD, 0) is None


def test_what_was_planted_in_the_step_that_failed_was_not_there_before():
    engine, _, _, _ = broken_at(0)
    assert engine.state.seeds.stage[BAD].tolist() == [Stage.DORMANT] * 2
    assert fossil_of(engine, BAD, 0) is None


def test_a_slot_that_was_emptied_since_the_snapshot_holds_its_fossil_again():
    """Check that a row may be put back across the birth and the end of other seeds, though a fossil cannot be removed."""
    script = {**GROW, (6, 1): (Op.GERMINATE, 1, 0, 0, 2, 3), (7, 1): (Op.PRUNE, 1, 0, 0, 0, 0)}
    engine, client = an_engine(governor={"snapshot_every": 6})[0], Script(script)
    played(engine, client, 6)
    host, fossil = host_of(engine, BAD), fossil_of(engine, BAD, 0)
    played(engine, client, 7)
    with poisoned(engine, BAD, "parameter"):
        played(engine, client, 8)
    assert_same(host_of(engine, BAD), host)
    assert_same(fossil_of(engine, BAD, 0), fossil)
    assert engine.state.seeds.stage[BAD].tolist() == [Stage.FOSSILIZED, Stage.DORMANT]


def test_ages_of_resting_slots_are_those_of_the_snapshot():
    script = {(0, 1): (Op.GERMINATE, 0, 1, 0, 2, 3), (1, 1): (Op.PRUNE, 0, 0, 0, 0, 0)}
    engine, client, _, _ = broken_at(3, client=Script(script), lifecycle={"embargo": 4, "max_training_seeds": 2})
    assert engine.state.seeds.stage[BAD, 0] == Stage.EMBARGOED
    assert engine.state.seeds.age[BAD, 0] == client.views[3].seeds.age[BAD, 0] == 1


def test_the_same_batches_are_not_served_again():
    engine, _, _, _ = broken_at(3)
    whole = an_engine()[0]
    played(whole, Script(GROW), 4)
    assert engine.population.feed.batch == whole.population.feed.batch == 4 * 3


def test_what_is_seen_next_is_measured_of_the_network_that_was_restored():
    engine, client, _, _ = broken_at(6)
    view = engine.view()
    assert np.isfinite(view.measurements.metric).all()
    assert np.isfinite(view.measurements.loss).all()
    assert not view.measurements.contribution.measured[BAD].any()
    assert np.isnan(view.measurements.train_loss[BAD])
    outcome = client.outcomes[-1]
    np.testing.assert_array_equal(outcome.after.metric, view.measurements.metric)
    # fossilized at step 5, so the network is the one that was measured after it
    assert outcome.after.metric[BAD] == outcome.before.metric[BAD]
    assert outcome.after.added_params[BAD] == outcome.before.added_params[BAD]


def test_a_row_that_breaks_in_the_last_step_is_exported_as_it_was_restored():
    _, client, rows, _ = broken_at(7)
    outcome = client.outcomes[-1]
    assert outcome.terminal
    assert outcome.exported.metric[BAD] == outcome.before.metric[BAD]
    episodes = [row for row in rows if isinstance(row, EpisodeRow)]
    assert [row.rollbacks for row in episodes] == [0, 1, 0]
    assert episodes[BAD].fossilized == 1


def test_a_rollback_is_one_row_of_events_with_its_reason():
    _, _, rows, _ = broken_at(2)
    (row,) = [row for row in rows if isinstance(row, RollbackRow)]
    assert (row.episode, row.step, row.env, row.twin, row.reason) == (0, 2, BAD, False, "loss")
    assert row.pruned == ["block0"]
    assert row.slot_stages == [Stage.EMBARGOED, Stage.DORMANT]


def test_a_row_may_break_again_and_again():
    engine, client = an_engine()[0], Script(GROW)
    for step in range(8):
        played(engine, client, step)
        with poisoned(engine, BAD, "gradient"):
            played(engine, client, step + 1)
    assert engine.governor.record.rollbacks.tolist()[:3] == [0, 8, 0]
    assert np.isfinite(engine.state.scores.loss).all()


def test_a_step_with_a_rollback_reads_the_device_twice():
    engine, client = an_engine(probe={"sensors_every": 1})[0], Script(GROW)
    view = played(engine, client, 3)
    with poisoned(engine, BAD, "loss"), counted_reads() as reads:
        engine.step(client.act(view))
    assert [site for _, site in reads] == ["runtime.py:read_packet"] * 2


@pytest.mark.parametrize("sensors", [0, 1])
def test_growth_sensors_of_a_broken_row_disturb_no_other(sensors):
    _, _, _, trace = broken_at(3, "parameter", probe={"sensors_every": sensors})
    whole, whole_trace = an_engine(probe={"sensors_every": sensors})[0], []
    played(whole, Script(GROW), 4, whole_trace)
    assert [a == b for a, b in zip(trace[-1], whole_trace[-1], strict=True)] == [True, False, True]


def test_without_a_governor_a_broken_row_stays_broken():
    engine, client, _, _ = broken_at(3, governor={"enabled": False})
    played(engine, client, 8)
    assert np.isnan(engine.state.scores.loss[BAD])
    assert not engine.governor.record.found.any()


def test_a_new_episode_begins_with_no_rollbacks():
    engine, client, _, _ = broken_at(3)
    played(engine, client, 8)
    engine.reset()
    assert not engine.governor.record.rollbacks.any()
    assert engine.governor.record.found.sum() == 1


# Finite signs, of real networks.


def test_a_row_whose_training_blows_up_is_put_back_after_the_patience():
    engine, client = an_engine(steps=20, governor={"confirm_steps": 2})[0], Script({})
    played(engine, client, 10)
    before = client.outcomes[-1].after.loss[BAD]
    learn_at(engine, 2000.0)
    played(engine, client, 16)
    found = [int(outcome.vital[BAD]) for outcome in client.outcomes]
    first = next(step for step, vital in enumerate(found) if vital)
    assert found[first] == Vital.RISE
    assert first == 11
    assert client.outcomes[first].after.loss[BAD] == pytest.approx(before)


def test_a_network_that_gives_all_examples_one_output_is_put_back():
    engine, client = an_engine(steps=20)[0], Script({})
    played(engine, client, 10)
    engine.population.body.host.columns["value"][BAD] = (
        0.0  # no unit is active, so nothing learns again but the last bias
    )
    played(engine, client, 14)
    found = [int(outcome.vital[BAD]) for outcome in client.outcomes]
    assert [vital for vital in found if vital] == [Vital.COLLAPSE]


def test_a_metric_that_falls_far_below_its_best_is_put_back():
    digits = get_task("digits-narrow")
    settings = {
        "envs": 2,
        "steps": 12,
        "twin": False,
        "governor": {"loss_rise_z": 1e9, "min_output_spread": 0.0, "confirm_steps": 2},
    }
    engine, client = VectorizedEngine(digits, build_config(digits.defaults, settings)), Script({})
    played(engine, client, 6)
    host = engine.population.body.host
    host.columns["value"][1] += torch.randn_like(host.columns["value"][1])
    learn_at(engine, 1e-6, row=1)  # it does not learn it again in time
    played(engine, client, 9)
    assert [int(outcome.vital[1]) for outcome in client.outcomes][6:] == [Vital.GOOD, Vital.FALL, Vital.GOOD]


@pytest.mark.parametrize(
    ("name", "controller"),
    [
        ("iris", "heuristic"),
        ("breast-cancer", "never"),
        *(
            pytest.param(name, controller, marks=pytest.mark.slow)
            for name in ("repair", "digits", "spirals", "wine")
            for controller in ("never", "heuristic")
        ),
    ],
)
def test_the_governor_is_silent_over_a_training_that_goes_well(name, controller):
    task = get_task(name)
    config = build_config(task.defaults, {"envs": 6, "telemetry": {"level": "off"}, "controller": controller})
    engine, client = VectorizedEngine(task.sealed(), config), get_controller(controller, config)
    engine.run(client)
    assert not engine.governor.record.found.any()


# Resuming.


@pytest.mark.parametrize("cut", [2, 4])
def test_a_row_that_was_not_well_at_a_checkpoint_is_put_back_as_it_would_have_been(cut):
    """Check a row whose snapshot is older than the checkpoint, and must be in it."""
    settings = {"governor": {"confirm_steps": 3, "snapshot_every": 1}, "steps": 20}

    def sickly():
        engine, client = an_engine(**settings)[0], Script(GROW)
        played(engine, client, 10)
        learn_at(engine, 3000.0)
        return engine, client

    straight, client = sickly()
    played(straight, client, 20)
    assert any(outcome.vital[BAD] for outcome in client.outcomes)
    engine, client = sickly()
    played(engine, client, 10 + cut)
    again = an_engine(**settings)[0]
    learn_at(again, 3000.0)
    again.restore(engine.snapshot())
    played(again, Script(GROW), 20)
    assert fingerprints(again) == fingerprints(straight)
    assert again.governor.record.counts() == straight.governor.record.counts()


def test_parameters_that_never_train_are_fixed_in_a_row_that_is_put_back_behind_a_checkpoint():
    """Check rows without a snapshot as fresh as the checkpoint, so that all that is known of what is fixed stands in it."""

    def half_frozen():
        host = MLP(inputs=6, width=8, hidden=(3, 5), outputs=3)()
        next(host.parameters()).requires_grad_(False)
        return host

    whole = blobs()
    task = task_from("half frozen", whole.train.x, whole.train.y, host=half_frozen, classes=3, menu=MENU)
    engine, _ = an_engine(task=task, governor={"snapshot_every": 4})
    played(engine, Script({}), 2)
    again, _ = an_engine(task=task, governor={"snapshot_every": 4})
    again.restore(engine.snapshot())
    with poisoned(again, BAD, "gradient"):
        played(again, Script({}), 3)
    fixed = again.population.body.host.columns["fixed"]
    assert fixed[BAD].any()
    assert torch.equal(fixed[BAD], fixed[0])


def test_a_snapshot_of_healthy_rows_is_not_written_twice():
    engine, client = an_engine()[0], Script(GROW)
    played(engine, client, 5)
    tree = engine.snapshot()["governor"]["snapshot"]
    assert not len(tree["stale"])
    assert all(not len(column) for column in flatten(tree["host"]["columns"])[0].values())


# Preflight.


def planting(envs, slot=0, blueprint=0):
    actions = Actions.wait(envs)
    actions.op[:], actions.slot[:], actions.blueprint[:] = Op.GERMINATE, slot, blueprint
    actions.tempo[:], actions.target[:] = 2, 3
    return actions


def test_a_seed_above_the_cap_is_refused_for_that():
    engine, rows = an_engine(lifecycle={"max_seeds": 1, "max_training_seeds": 2})
    engine.reset()
    assert engine.step(planting(3))[1].refused.tolist() == [Refusal.NONE] * 3
    assert engine.step(planting(3, slot=1))[1].refused.tolist() == [Refusal.SEED_CAP] * 3
    assert [row.refusal for row in rows if isinstance(row, DecisionRow) and row.step == 1] == ["seed_cap"] * 3
    assert engine.governor.record.counts()["refused"] == {"seed_cap": 3}


def test_what_the_masks_forbid_is_refused_for_that():
    engine, _ = an_engine()
    engine.reset()
    engine.step(planting(3))
    assert engine.step(planting(3))[1].refused.tolist() == [Refusal.MASKED] * 3


def test_a_seed_above_the_parameter_budget_is_refused_before_anything_is_built():
    engine, _ = an_engine()
    engine.reset()
    price = engine.space.cost[0, :, 1] / engine.population.body.table.host_params[0]
    budget = float(price[0] + 0.5 * price[1])  # room for one of the two
    engine, _ = an_engine(governor={"param_limit": budget})
    engine.reset()
    assert not engine.step(planting(3, slot=0, blueprint=1))[1].refused.any()
    view, outcome = engine.step(planting(3, slot=1, blueprint=1))
    assert outcome.refused.tolist() == [Refusal.PARAM_BUDGET] * 3
    assert (view.seeds.stage[:, 1] == Stage.DORMANT).all()
    assert (view.seeds.stage[:, 0] == Stage.TRAINING).all()


def test_an_incubating_seed_counts_in_the_budget():
    engine, _ = an_engine(governor={"param_limit": 0.0})
    engine.reset()
    assert engine.step(planting(3))[1].refused.tolist() == [Refusal.PARAM_BUDGET] * 3


def test_seeds_that_would_not_fit_into_memory_are_refused():
    engine, _ = an_engine(governor={"memory_share": 1e-12})
    engine.reset()
    assert engine.step(planting(3))[1].refused.tolist() == [Refusal.MEMORY] * 3
    assert not engine.population.body.stacks


def test_room_is_weighed_only_where_stacks_grow():
    engine, _ = an_engine()
    engine.reset()
    body = engine.population.body
    slot, blueprint = np.zeros(3, np.int64), np.zeros(3, np.int64)
    assert body.growth(slot, blueprint) == 3 * 4 * 4 * sum(p.numel() for p in body.layout.forms[0, 0].parameters())
    engine.step(planting(3))
    stack = next(iter(body.stacks.values()))
    assert body.growth(slot[: stack.capacity - 3], blueprint[: stack.capacity - 3]) == 0


# Data that go bad in memory.


def tainted(nonfinite):
    """Make an engine of a mixture, whose rows have data of their own, with examples of one row that turn into NaN."""
    task = get_task("repair")
    settings = {"envs": 3, "steps": 6, "twin": False, "data": {"nonfinite": nonfinite}, "instances": "training"}
    engine = VectorizedEngine(task.sealed(), build_config(task.defaults, settings))
    engine.reset()
    first, second = (engine.population.feed._set[row] for row in (0, BAD))
    assert first != second
    length = len(engine.population.feed.x) // engine.population.feed._sets
    engine.population.feed.x[second * length + 4] = torch.nan
    return engine


def test_examples_that_went_bad_in_memory_are_named_where_the_run_is_to_stop():
    engine, client = tainted("stop"), get_controller("never", build_config())
    named = r"the train split of instance \d+ of repair was finite .* in example 4 of what environment 1 trained on"
    with pytest.raises(DataFault, match=named):
        played(engine, client, 6)


def test_steps_on_examples_that_went_bad_are_taken_back_where_the_run_is_to_go_on():
    engine, client = tainted("skip"), get_controller("never", build_config())
    view, found = engine.view(), []
    for _ in range(6):
        view, outcome = engine.step(client.act(view))
        found.append(outcome.vital)
    assert set(np.array(found)[:, BAD].tolist()) <= {Vital.GOOD, Vital.BATCH}
    assert Vital.BATCH in np.array(found)[:, BAD]
    assert not np.array(found)[:, [0, 2]].any()
    assert np.isfinite(view.measurements.loss).all()


def test_an_entry_of_a_schedule_that_was_refused_is_tried_again(tmp_path):
    path = tmp_path / "schedule.yaml"
    path.write_text(
        "- {at: 0, op: germinate, slot: block0, blueprint: bypass-mlp}\n"
        "- {at: 1, op: germinate, slot: block1, blueprint: bypass-mlp}\n"
        "- {at: 3, op: prune, slot: block0, tempo: 0}\n"
    )
    engine, _ = an_engine()
    engine.reset()
    price = engine.space.cost[0, :, 1] / engine.population.body.table.host_params[0]
    engine, _ = an_engine(governor={"param_limit": float(price.sum() - 1e-9)})
    schedule, view, refused = load_schedule(path), engine.reset(), []
    for _ in range(6):
        view, outcome = engine.step(schedule.act(view))
        schedule.store(outcome)
        refused.append(outcome.refused[0])
    over = Refusal.PARAM_BUDGET  # each second time, so that the prune behind it has its turn and makes room
    assert refused == [Refusal.NONE, over, Refusal.NONE, over, Refusal.NONE, Refusal.NONE]
    assert view.seeds.stage[0, 1] == Stage.TRAINING
