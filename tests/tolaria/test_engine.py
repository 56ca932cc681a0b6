"""Test the engine: a population is one object, and none of its rows knows of the others."""

import gc

import numpy as np
import pytest
import torch

from esper.kasmina.network.export import grown_network
from esper.leyline.config.tree import build_config
from esper.leyline.lifecycle.vocabulary import ADDED, Actions, Op, Refusal, Stage, among
from esper.leyline.messages import InputError
from esper.nissa.rows import EpisodeRow, LifecycleRow, StepRow
from esper.simic.rewards import objective
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.population import check_memory
from populations import GROW, GROW_ZERO, Journalled, Script, assert_same, blobs, small_config, trajectory


@pytest.mark.parametrize("stacks", [True, False])
def test_environment_zero_is_bitwise_the_same_in_any_population(stacks):
    alone = trajectory(small_config(envs=1), GROW_ZERO, blobs(stacks=stacks))[2]
    for envs in (2, 16):
        assert_same(trajectory(small_config(envs=envs), GROW_ZERO, blobs(stacks=stacks))[2], alone)
    assert_same(trajectory(small_config(envs=4, twin=True), GROW_ZERO, blobs(stacks=stacks))[2], alone)


@pytest.mark.parametrize("decisions", [{}, GROW_ZERO])
@pytest.mark.parametrize("incubation", ["shadow", "ste"])
def test_environment_zero_is_bitwise_the_same_when_its_neighbours_grow_and_are_pruned(decisions, incubation):
    config = small_config(envs=5, lifecycle={"incubation": incubation, "max_training_seeds": 2})
    busy = {(step, env + 2): decision for (step, env), decision in GROW.items()}
    busy |= {(step, 1): decision for (step, env), decision in GROW.items() if env == 1}
    assert_same(trajectory(config, decisions | busy)[2], trajectory(config, decisions)[2])


@pytest.mark.parametrize("blend", [0, 1, 2])
def test_a_growing_environment_is_bitwise_the_same_among_neighbours_of_other_blends(blend):
    decisions = {(0, 0): (Op.GERMINATE, 0, 1, blend, 2, 3), (2, 0): (Op.ADVANCE, 0), (5, 0): (Op.FOSSILIZE, 0)}
    others = {
        (0, 1): (Op.GERMINATE, 0, 2, 2, 1, 3),
        (0, 2): (Op.GERMINATE, 0, 1, 1, 1, 3),
        (0, 3): (Op.GERMINATE, 0, 0, 0, 1, 3),
        (2, 1): (Op.ADVANCE, 0),
        (2, 2): (Op.ADVANCE, 0),
        (3, 1): (Op.PRUNE, 0, 0, 0, 2),
    }
    config = small_config(envs=4)
    assert_same(trajectory(config, decisions | others)[2], trajectory(config, decisions)[2])


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-10, 1e-12), (torch.float32, 1e-4, 1e-5)])
def test_every_mapping_grows_the_same_population(dtype, rtol, atol):
    results = {}
    for mapping in ("auto", "vmap", "loop"):
        engine, _, _ = trajectory(small_config(mapping=mapping), task=blobs(dtype=dtype))
        body = engine.population.body
        stacks = [body.host, *body.stacks.values()]
        results[mapping] = [engine.state.scores.loss] + [stack.columns["value"] for stack in stacks]
    for mapping in ("vmap", "loop"):
        for got, expected in zip(results[mapping], results["auto"], strict=True):
            torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected), rtol=rtol, atol=atol)


def test_a_twin_is_its_environment_until_that_decides_something():
    engine, _, _ = trajectory(small_config(twin=True))
    value = engine.population.body.host.columns["value"]
    assert torch.equal(value[0], value[3])
    assert not torch.equal(value[1], value[4])
    assert not torch.equal(value[0], value[1])


def test_a_whole_life_goes_through_the_stages_and_is_told_event_by_event():
    engine = Journalled(blobs(), small_config())
    engine.run(Script(GROW))
    moves = [(r.env, r.step, r.from_stage, r.to_stage) for r in engine.rows_of_events if isinstance(r, LifecycleRow)]
    assert [move[1:] for move in moves if move[0] == 1] == [
        (0, "DORMANT", "GERMINATED"),
        (0, "GERMINATED", "TRAINING"),
        (2, "TRAINING", "BLENDING"),
        (3, "BLENDING", "HOLDING"),
        (5, "HOLDING", "FOSSILIZED"),
    ]
    assert [move[1:] for move in moves if move[0] == 2] == [
        (0, "DORMANT", "GERMINATED"),
        (0, "GERMINATED", "TRAINING"),
        (2, "TRAINING", "BLENDING"),
        (2, "BLENDING", "HOLDING"),
        (4, "HOLDING", "BLENDING"),
        (5, "BLENDING", "PRUNED"),
        (5, "PRUNED", "EMBARGOED"),
        (7, "EMBARGOED", "DORMANT"),
    ]
    assert sum(isinstance(r, StepRow) for r in engine.rows_of_events) == 8
    assert [r.grown for r in engine.rows_of_events if isinstance(r, EpisodeRow)] == [{}, {"block0": "bypass-mlp"}, {}]
    assert [row.seq for row in engine.rows_of_events] == list(range(len(engine.rows_of_events)))


def test_telemetry_changes_nothing_that_is_computed():
    def final(level):
        engine = Journalled(blobs(), small_config(), level)
        engine.run(RandomValid())
        return engine

    loud, quiet = final("step"), final("off")
    assert loud.rows_of_events
    assert not quiet.rows_of_events
    assert torch.equal(loud.population.body.host.columns["value"], quiet.population.body.host.columns["value"])
    assert all(np.array_equal(a, b) for a, b in zip(loud.state.seeds, quiet.state.seeds, strict=True))


def test_the_rows_that_are_optimised_are_those_that_are_trainable_after_every_edit():
    config = small_config(envs=12, steps=30)
    engine, client = VectorizedEngine(blobs(), config), RandomValid()
    view, seen = engine.reset(), set()
    while view.step < config.steps:
        before = {
            key: dict(zip(envs.tolist(), stack.steps.tolist(), strict=False)) for key, stack, envs in rows(engine)
        }
        view, _ = engine.step(client.act(view))
        seeds = engine.state.seeds
        seen |= {Stage(stage) for stage in np.unique(seeds.stage)}
        for key, stack, envs in rows(engine):
            steps = dict(zip(envs.tolist(), stack.steps.tolist(), strict=False))
            for env, count in steps.items():
                stage, age = Stage(seeds.stage[env, key[0]]), int(seeds.life[env, key[0]])
                trained = count - before.get(key, {}).get(env, 0) if age > 1 else count
                # A newborn waits for its first tick; a doomed seed rests; all others take every optimizer step.
                expected = 0 if age <= 1 or seeds.doomed[env, key[0]] else config.data.batches_per_step
                assert trained == expected, (stage, age)
    assert {Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.EMBARGOED} <= seen


def rows(engine):
    body = engine.population.body
    return [(key, body.stacks[key], envs) for key, envs in body.envs.items()]


def test_a_birth_and_a_prune_leave_every_other_row_bit_identical():
    engine, client = VectorizedEngine(blobs(), small_config(envs=6, steps=30)), RandomValid()
    view, edited = engine.reset(), 0
    body = engine.population.body
    original = body.edit

    def numbers():
        return {
            (key, env): {name: column[row].clone() for name, column in stack.columns.items()}
            for key, stack, envs in rows(engine)
            for row, env in enumerate(envs.tolist())
        }

    def watched(changes, seeds, key):
        nonlocal edited
        before, host = numbers(), {name: column.clone() for name, column in body.host.columns.items()}
        original(changes, seeds, key)
        edited += len(changes.born) + len(changes.freed)
        after = numbers()
        touched = {(env, slot) for env, slot in np.concatenate([changes.born, changes.freed]).tolist()}
        for (where, env), values in after.items():
            if (env, where[0]) not in touched:
                assert all(torch.equal(value, before[where, env][name]) for name, value in values.items())
        assert all(torch.equal(column, host[name]) for name, column in body.host.columns.items())

    body.edit = watched
    while view.step < 30:
        view, _ = engine.step(client.act(view))
    assert edited > 10


def test_the_terminal_objective_is_that_of_the_exported_network():
    task, config = blobs(dtype=torch.float64), small_config()
    engine, client, _ = trajectory(
        config, GROW | {(5, 0): (Op.GERMINATE, 1, 0, 0, 2, 3), (7, 0): (Op.ADVANCE, 1)}, task
    )
    last = client.outcomes[-1]
    assert last.terminal
    assert all(outcome.exported is None for outcome in client.outcomes[:-1])
    assert engine.state.seeds.stage[0, 1] == Stage.BLENDING  # unfinished, so that it acts now and is left out
    for env in range(3):
        network, topology = engine.export(env)
        with torch.no_grad():
            output = network(task.probe.x)[None]
        metric = float(task.objective.score(output, task.probe.y[None]).mean())
        loss = float(task.objective.loss(output, task.probe.y[None]).mean())
        added = topology["parameters"] - topology["host_parameters"]
        assert (last.exported.metric[env], last.exported.added_params[env]) == (metric, added)
        np.testing.assert_allclose(last.exported.loss[env], loss, rtol=1e-10)
        assert objective(last.exported.metric, last.exported.added_params, last.host_params, 0.1, 0)[
            env
        ] == pytest.approx(metric - 0.1 * np.log(1 + added / topology["host_parameters"]))
    assert not np.isclose(last.exported.loss[0], last.after.loss[0])


def test_evaluation_on_a_split_equals_the_exported_networks():
    task = blobs(dtype=torch.float64)
    engine, _, _ = trajectory(small_config(twin=True), task=task)
    metric, loss = engine.evaluate(task.test)
    assert metric.shape == (6,)
    for env in range(3):
        with torch.no_grad():
            output = engine.export(env)[0](task.test.x)[None]
        np.testing.assert_allclose(loss[env], float(task.objective.loss(output, task.test.y[None]).mean()), rtol=1e-10)


def test_the_contribution_is_the_metric_less_that_of_a_network_built_without_the_seed():
    task = blobs(dtype=torch.float64)
    engine, _client, _ = trajectory(small_config(steps=4), task=task)
    seeds = engine.state.seeds
    assert seeds.stage[1, 0] == Stage.HOLDING
    with_seed = seeds._replace(stage=np.where(seeds.stage == Stage.HOLDING, np.int8(Stage.FOSSILIZED), seeds.stage))
    outputs = []
    for state in (with_seed, seeds):
        network, _ = grown_network(task.host, engine.population.body, state, 1, task.instance(0).interface)
        with torch.no_grad():
            outputs.append(network(task.probe.x)[None])
    scores = [task.objective.score(output, task.probe.y[None])[0] for output in outputs]
    losses = [task.objective.loss(output, task.probe.y[None])[0] for output in outputs]
    measured = engine.state.measurements
    difference, n = scores[0] - scores[1], len(task.probe.y)
    np.testing.assert_allclose(measured.contribution.mean[1, 0], difference.mean(), atol=1e-12)
    np.testing.assert_allclose(measured.contribution.se[1, 0], difference.std() / n**0.5, atol=1e-12)
    np.testing.assert_allclose(measured.contribution_loss.mean[1, 0], (losses[1] - losses[0]).mean(), atol=1e-12)
    live = among(seeds.stage, ADDED)
    assert np.array_equal(measured.contribution.measured, live)
    assert np.isnan(measured.contribution.mean[~live]).all()


def test_a_seed_that_is_kept_stays_in_the_outcome_with_the_last_contribution_of_its_trial_and_its_age():
    engine, client, _ = trajectory(small_config(steps=10), task=blobs())
    kept = [outcome.seeds.stage == Stage.FOSSILIZED for outcome in client.outcomes]
    first = next(step for step, each in enumerate(kept) if each.any())
    env, slot = np.argwhere(kept[first])[0]
    trial = client.outcomes[first - 1]
    assert (trial.contribution.measured[env, slot], trial.contribution_age[env, slot]) == (True, 0)
    for age, outcome in enumerate(client.outcomes[first:], start=1):
        assert outcome.contribution.mean[env, slot] == trial.contribution.mean[env, slot]
        assert outcome.contribution.se[env, slot] == trial.contribution.se[env, slot]
        assert outcome.contribution_loss.mean[env, slot] == trial.contribution_loss.mean[env, slot]
        assert (outcome.contribution.measured[env, slot], outcome.contribution_age[env, slot]) == (True, age)
    for outcome in client.outcomes:
        empty = ~among(outcome.seeds.stage, ADDED)
        assert (outcome.contribution_age[empty] == -1).all()
        assert np.isnan(outcome.contribution.mean[empty]).all()
    restored = VectorizedEngine(blobs(), small_config(steps=10))
    restored.restore(engine.snapshot())
    np.testing.assert_equal(restored.state.contributions, engine.state.contributions)


def test_the_incubation_gain_is_the_fall_of_the_loss_when_the_seed_is_at_dose_one():
    task = blobs(dtype=torch.float64)
    engine, _, _ = trajectory(small_config(steps=2), task=task)
    seeds, measured = engine.state.seeds, engine.state.measurements
    assert seeds.stage[1, 0] == Stage.TRAINING
    alpha = seeds.alpha.copy()
    alpha[1, 0] = 1
    with_seed = seeds._replace(
        stage=np.where(seeds.stage == Stage.TRAINING, np.int8(Stage.FOSSILIZED), seeds.stage), alpha=alpha
    )
    losses, scores = [], []
    for state in (seeds, with_seed):
        network, _ = grown_network(task.host, engine.population.body, state, 1, task.instance(0).interface)
        with torch.no_grad():
            output = network(task.probe.x)[None]
        losses.append(task.objective.loss(output, task.probe.y[None])[0])
        scores.append(task.objective.score(output, task.probe.y[None])[0])
    gain = losses[0] - losses[1]
    np.testing.assert_allclose(measured.gain_metric.mean[1, 0], (scores[1] - scores[0]).mean(), atol=1e-12)
    np.testing.assert_allclose(measured.gain.mean[1, 0], gain.mean(), atol=1e-12)
    np.testing.assert_allclose(measured.gain.se[1, 0], gain.std() / len(gain) ** 0.5, atol=1e-12)


def test_the_test_split_cannot_be_reached_from_the_engine():
    task = blobs()
    engine = VectorizedEngine(task, small_config())
    engine.run(Script({}))
    forbidden = {task.test.x.untyped_storage().data_ptr(), task.test.y.untyped_storage().data_ptr()}
    todo, seen, tensors = [engine.__dict__], set(), 0
    while todo:
        item = todo.pop()
        if (
            id(item) in seen
            or isinstance(item, type | str | bytes)
            or getattr(item, "__name__", "").startswith("torch")
        ):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            tensors += 1
            assert item.untyped_storage().data_ptr() not in forbidden
        module = getattr(type(item), "__module__", "")
        if (module.startswith(("esper", "builtins", "torch.nn")) and not callable(item)) or isinstance(
            item, torch.nn.Module
        ):
            todo.extend(gc.get_referents(item))
    assert tensors > 20
    assert engine.population.task.test is None


def test_two_populations_of_one_seed_are_equal_and_of_two_seeds_are_not():
    def final(seed):
        engine = VectorizedEngine(blobs(), small_config(seed=seed))
        engine.run(RandomValid())
        return engine.population.body.host.columns["value"], engine.state.scores.loss

    first, again, other = final(3), final(3), final(4)
    assert torch.equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_a_further_episode_starts_from_other_hosts_and_empty_slots():
    engine = VectorizedEngine(blobs(), small_config())
    engine.run(Script(GROW))
    first = engine.population.body.host.columns["value"].clone()
    view = engine.reset()
    assert view.episode == 1
    assert view.step == 0
    assert not view.seeds.stage.any()
    assert not torch.equal(engine.population.body.host.columns["value"], first)
    assert not engine.population.body.host.columns["first_moment"].count_nonzero()
    assert not engine.population.body.host.steps.any()


def test_slots_that_were_not_selected_are_never_legal():
    engine = VectorizedEngine(blobs(), small_config(slots=["block1"]))
    masks = engine.reset().masks
    assert masks.slot[:, Op.GERMINATE].tolist() == [[False, True]] * 3


@pytest.mark.parametrize(
    ("top", "sentence"),
    [
        ({"slots": ["nowhere"]}, "no slot 'nowhere'; it has block0, block1"),
        ({"blueprints": ["bypas-mlp"]}, "unknown blueprint 'bypas-mlp'; did you mean 'bypass-mlp'"),
        ({"data": {"batch_size": 500}}, "fewer than data.batch_size"),
        ({"device": "cuda:99"}, "CUDA"),
        ({"device": "cuda:256"}, "CUDA"),  # torch itself reads it as cuda:0
        ({"device": "cuda:01"}, "'cuda:01' is not a device"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_sentence(top, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        VectorizedEngine(blobs(), small_config(**top))
    assert "\n" not in str(error.value)


def test_a_decision_of_another_number_of_environments_is_refused():
    engine = VectorizedEngine(blobs(), small_config())
    engine.reset()
    with pytest.raises(
        InputError, match=r"returned op of shape \(2,\); give one whole number for each environment, int64 of shape"
    ):
        engine.step(Actions.wait(2))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulated_gradients_equal_one_large_batch(accumulate):
    config = small_config(
        steps=1,
        data={"batch_size": 12, "batches_per_step": 3},
        optimizer={"name": "sgd", "accumulation_steps": accumulate},
    )
    engine = VectorizedEngine(blobs(dtype=torch.float64), config)
    engine.reset()
    host = blobs(dtype=torch.float64).host()
    engine.population.body.host.read(0, host)
    optimizer = torch.optim.SGD(host.parameters(), lr=config.optimizer.lr, momentum=config.optimizer.momentum)
    feed = engine.population.feed
    batches = [next(feed) for _ in range(3)]
    feed.reset(0)
    for start in range(0, 3, accumulate):
        optimizer.zero_grad()
        x = torch.cat([batches[start + k][0][0].cpu() for k in range(accumulate)])
        y = torch.cat([batches[start + k][1][0].cpu() for k in range(accumulate)])
        torch.nn.functional.cross_entropy(host(x), y).backward()
        optimizer.step()
    engine.step(Actions.wait(3))
    got = engine.population.body.host.read(0, blobs(dtype=torch.float64).host())
    for a, b in zip(got.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_several_decisions_can_be_carried_out_in_one_step():
    engine = VectorizedEngine(blobs(), small_config())
    engine.reset()
    first, second = Actions.wait(3), Actions.wait(3)
    for actions, slot in ((first, 0), (second, 1)):
        actions.op[1], actions.slot[1], actions.tempo[1], actions.target[1] = Op.GERMINATE, slot, 2, 3
    assert not engine.carry_out(first).any()
    assert engine.carry_out(first).tolist() == [Refusal.NONE, Refusal.MASKED, Refusal.NONE]
    view, outcome = engine.step(second)
    assert outcome.accepted.all()
    assert view.seeds.stage[1].tolist() == [Stage.TRAINING] * 2


@pytest.mark.parametrize("name", [pytest.param("digits", marks=pytest.mark.slow), "wine", "repair"])
def test_every_environment_of_a_task_of_ours_is_bitwise_the_same_wherever_its_row_stands(name):
    task = get_task(name)
    decisions = {(0, 1): (Op.GERMINATE, 0, 1, 0, 1, 3), (2, 1): (Op.ADVANCE, 0), (0, 2): (Op.GERMINATE, 0, 2, 2, 1, 3)}
    busy = {(0, env): (Op.GERMINATE, 0, env % 3, env % 3, 1, 3) for env in (0, 3, 4)} | {(2, 3): (Op.ADVANCE, 0)}

    def rows(envs, neighbours):
        config = small_config(envs=envs, steps=5, twin=True, data={"batch_size": 14, "batches_per_step": 3})
        engine, client = VectorizedEngine(task, config), Script(decisions | neighbours)
        view = engine.reset()
        while view.step < 5:
            view, _ = engine.step(client.act(view))
        value, body = engine.population.body.host.columns["value"], engine.population.body
        seed = body.seed_module(engine.state.seeds, 1, 0)
        return [value[1], value[2], value[envs + 1], value[envs + 2], *(p.detach() for p in seed.parameters())]

    for got, expected in zip(rows(6, busy), rows(3, {}), strict=True):
        assert torch.equal(got, expected)


def test_a_population_that_does_not_fit_into_memory_is_refused_before_anything_is_made():
    with pytest.raises(InputError, match=r"envs is 1,000,000,000, whose 2,000,000,000 networks take at least .* GiB"):
        VectorizedEngine(get_task("digits-narrow"), build_config({"envs": 10**9}))


def test_memory_is_counted_by_rows_parameters_and_moments():
    task, config = get_task("digits-narrow"), build_config({"envs": 10, "data": {"batch_size": 64}})
    parameters = sum(p.numel() for p in task.largest().parameters())
    # value, gradient, moments; the snapshot of all but gradients
    needed = 20 * (parameters * 4 * (4 + 3) + 64 * 64 * 4)
    needed += sum((len(split.y) * (64 * 4 + 8)) for split in (task.train, task.probe))
    check_memory(task, config, needed)
    with pytest.raises(InputError, match="lower envs"):
        check_memory(task, config, needed - 1)


def test_data_that_do_not_fit_into_memory_are_refused_with_what_reads_them_by_batch():
    task, config = get_task("digits-narrow"), build_config({"envs": 1, "twin": False, "data": {"batch_size": 1}})
    with pytest.raises(
        InputError, match=r"envs is 1, and the data take at least .*; give fewer examples, or a Dataset with"
    ):
        check_memory(task, config, 10**5)
