"""Check that rows of different hosts in one population are each the same network alone, padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.kasmina.network.export import grown_network
from esper.leyline.data.task import Instance, Lengths, Mixture, Room, Split, Task
from esper.leyline.lifecycle.view import take
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.leyline.messages import InputError
from esper.store.tensors import flatten, unflatten
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.hosts import DamagedMLP
from esper.tasks.objectives import Classification
from esper.tolaria.engine import VectorizedEngine
from populations import MENU, Script, blobs, small_config

HOSTS = (
    DamagedMLP(6, 8, (3, 5), 4, (False, False), (False, False)),
    DamagedMLP(2, 5, (2, 1), 2, (True, False), (False, False)),
    DamagedMLP(4, 8, (4, 2), 3, (False, False), (True, False)),
    DamagedMLP(6, 3, (5, 5), 4, (False, True), (False, True)),
)
SIZES = ((60, 30, 20), (41, 25, 20), (60, 30, 20), (97, 18, 20))
LARGEST = DamagedMLP(6, 8, (5, 5), 7, (False, False), (False, False))  # no instance has all seven classes


def problem(key):
    """Make instance `key`: clusters of its own number, width and size."""
    host, sizes = HOSTS[key], SIZES[key]
    generator = torch.Generator().manual_seed(key)
    centres = torch.randn(host.outputs, host.inputs, generator=generator, dtype=torch.float64)

    def split(n):
        y = torch.arange(n) % host.outputs
        return Split(centres[y] + 0.7 * torch.randn(n, host.inputs, generator=generator, dtype=torch.float64), y)

    train, probe, validation = (split(n) for n in sizes)
    return Instance(lambda: host().double(), train, probe, validation, host.outputs)


def mixture():
    return Mixture(
        name="four",
        summary="",
        room=Room(lambda: LARGEST().double(), (6,), Lengths(probe=30, held=20)),
        sample=problem,
        test=None,
        ranges={"training": range(4), "validation": range(4, 4), "heldout": range(4, 4)},
        objective=Classification(7),
        menu=MENU,
    )


def alone(key):
    own = problem(key)
    parts = {"train": own.train, "probe": own.probe, "validation": own.validation, "test": None}
    return Task(name="one", summary="", host=own.host, **parts, objective=Classification(own.outputs), menu=MENU)


DECISIONS = {}
for env in range(4):
    DECISIONS[0, env] = (Op.GERMINATE, env % 2, (env + 1) % 3, env % 3, 2, 3)
    DECISIONS[1, env] = (Op.GERMINATE, 1 - env % 2, (env + 2) % 3, (env + 1) % 3, 2, 3)
    DECISIONS[3, env] = (Op.ADVANCE, env % 2)
    DECISIONS[6, env] = (Op.FOSSILIZE, env % 2)


def grown(task, config, decisions):
    engine, client, views = VectorizedEngine(task, config), Script(decisions), []
    view = engine.reset()
    while view.step < config.steps:
        views.append(view)
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
    return engine, client, [*views, view]


@pytest.mark.parametrize(
    ("incubation", "optimizer"),
    [("shadow", {"weight_decay": 0.02}), ("ste", {"name": "sgd", "weight_decay": 0.02, "lr": 0.02})],
)
def test_a_padded_row_is_the_same_network_alone_through_a_whole_episode(incubation, optimizer):
    top = {"optimizer": optimizer, "lifecycle": {"incubation": incubation, "max_training_seeds": 2}}
    whole, _, views = grown(mixture(), small_config(envs=4, **top), DECISIONS)
    for env in range(4):
        own = {(step, 0): decision for (step, row), decision in DECISIONS.items() if row == env}
        single, _, alone_views = grown(alone(env), small_config(envs=1, first_instance=env, **top), own)
        for got, expected in zip(views, alone_views, strict=True):
            for name in ("metric", "loss", "train_loss", "gradient_norm", "participation", "seed_gradient_norm"):
                a = getattr(take(got.measurements, slice(env, env + 1)), name)
                np.testing.assert_allclose(a, getattr(expected.measurements, name), rtol=1e-8, atol=1e-9, err_msg=name)
            for name in ("contribution", "contribution_loss", "gain"):
                a, b = getattr(got.measurements, name), getattr(expected.measurements, name)
                np.testing.assert_allclose(a.mean[env], b.mean[0], rtol=1e-7, atol=1e-9)
                np.testing.assert_allclose(a.se[env], b.se[0], rtol=1e-7, atol=1e-9)
            assert np.array_equal(got.seeds.stage[env], expected.seeds.stage[0])
            assert got.added_params[env] == expected.added_params[0]
        assert np.array_equal(whole.space.cost[env], single.space.cost[0])
        a, b = whole.export(env), single.export(0)
        for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
        assert a[1] | {"host": None} == b[1] | {"host": None}


def test_what_is_padded_stays_exactly_zero():
    engine, _, _ = grown(mixture(), small_config(envs=4, optimizer={"weight_decay": 0.02}), DECISIONS)
    body = engine.population.body
    for env, host in enumerate(HOSTS):
        module = host().double()
        for name, parameter in module.named_parameters():
            for column in ("value", "gradient", "first_moment", "second_moment"):
                stored = body.host.parameter(name, column)[env].clone()
                stored[tuple(slice(0, k) for k in parameter.shape)] = 0
                assert not stored.count_nonzero(), (env, name, column)


def test_the_space_says_which_hosts_are_frozen_after_a_restart_too():
    def sample(key):
        made = problem(key)
        return replace(made, host=lambda: made.host().requires_grad_(key != 1))

    config = small_config(envs=4, twin=True)
    engine, again = (VectorizedEngine(replace(mixture(), sample=sample), config) for _ in range(2))
    assert engine.reset().space.frozen.tolist() == [False, True, False, False]
    assert again.restore(unflatten(*flatten(engine.snapshot()))).space.frozen.tolist() == [False, True, False, False]
    whole = VectorizedEngine(blobs(frozen=True), small_config(envs=2))
    assert whole.reset().space.frozen.all()
    assert not VectorizedEngine(blobs(), small_config(envs=2)).reset().space.frozen.any()


def test_a_frozen_segment_never_moves_and_a_free_one_does():
    config = small_config(envs=4, optimizer={"weight_decay": 0.02})
    engine = VectorizedEngine(mixture(), config)
    engine.reset()
    value = engine.population.body.host.columns["value"]
    before = value.clone()
    client, view = Script({}), engine.view()
    for _ in range(3):
        view, _ = engine.step(client.act(view))
    fixed = engine.population.body.host.columns["fixed"]
    assert fixed[2:].any(1).all()
    assert not fixed[:2].any()
    assert torch.equal(value[fixed], before[fixed])
    assert not torch.equal(value[2][~fixed[2]], before[2][~fixed[2]])


def test_parameters_are_counted_unpadded():
    engine = VectorizedEngine(mixture(), small_config(envs=4))
    view = engine.reset()
    assert view.host_params.tolist() == [sum(p.numel() for p in host().parameters()) for host in HOSTS]
    linear = MENU.index("bypass-linear")
    assert view.space.cost[:, 0, linear].tolist() == [host.width * (host.width + 1) for host in HOSTS]


def test_instances_that_share_features_keep_their_own_hosts_and_labels():
    shared, hosts = problem(0), HOSTS[:1] + (DamagedMLP(6, 8, (1, 2), 4, (False, False), (False, False)),)

    def sample(key):
        host, probe = hosts[key], shared.probe
        return replace(shared, host=lambda: host().double(), probe=probe._replace(y=(probe.y + key) % 4))

    engine = VectorizedEngine(replace(mixture(), sample=sample), small_config(envs=2))
    view = engine.reset()
    assert view.host_params.tolist() == [sum(p.numel() for p in host().parameters()) for host in hosts]
    assert torch.equal(engine.population.data.probe.y[1], (engine.population.data.probe.y[0] + 1) % 4)


def test_the_instances_of_an_episode_can_be_chosen():
    engine = VectorizedEngine(mixture(), small_config(envs=2))
    engine.reset()
    view = engine.reset(np.array([3, 1]))
    assert view.space.instance.tolist() == [3, 1]
    assert view.host_params.tolist() == [sum(p.numel() for p in HOSTS[k]().parameters()) for k in (3, 1)]


def test_an_instance_out_of_range_is_refused():
    with pytest.raises(InputError, match="asks for instance 4 of the training instances of four, which has 4"):
        VectorizedEngine(mixture(), small_config(envs=3, first_instance=2))


def test_the_exported_network_of_a_padded_row_has_its_true_widths():
    engine, _, _ = grown(mixture(), small_config(envs=4), DECISIONS)
    network, topology = grown_network(
        problem(1).host, engine.population.body, engine.state.seeds, 1, problem(1).interface
    )
    assert engine.state.seeds.stage[1].tolist().count(Stage.FOSSILIZED) == len(topology["seeds"]) == 1
    assert topology["seeds"][0]["writes"] == 5
    assert network(problem(1).probe.x).shape == (25, 2)


def test_rows_of_different_hosts_go_on_from_a_snapshot_as_if_they_had_not_stopped():
    config = small_config(envs=4, steps=8, lifecycle={"min_prune_age": 0})
    straight, client = VectorizedEngine(mixture(), config), RandomValid()
    view, snapshots = straight.reset(np.array([3, 1, 1, 0])), []
    while view.step < 8:
        snapshots.append(flatten(straight.snapshot()))
        view, _ = straight.step(client.act(view))
    final, plain = flatten(straight.snapshot())
    for tensors, rest in snapshots[1::4]:
        resumed = VectorizedEngine(mixture(), config)
        view = resumed.restore(unflatten(tensors, rest))
        while view.step < 8:
            view, _ = resumed.step(client.act(view))
        found, found_plain = flatten(resumed.snapshot())
        assert found_plain == plain
        assert all(found[name].numpy().tobytes() == final[name].numpy().tobytes() for name in final)
