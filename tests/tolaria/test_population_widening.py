"""Test rows of a population that become wider together: what they compute, with seeds and snapshots, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.lifecycle import doses, exported
from esper.kasmina.network.export import load_network, save_network
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.leyline.messages import InputError
from esper.nissa.rows import WideningRow
from esper.tasks.catalog import get_task
from esper.tasks.hosts import CNN, MLP, DamagedMLP, ResidualCNN, ResidualMLP, Transformer
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import VectorizedEngine
from populations import GROW, Journalled, Script, assert_same, blobs, small_config, trajectory
from spans import SpannedHost

WIDE = {"widen": {"at": [3, 6], "factor": 3}}
LIVES = {  # at step 6 environment 0 has a seed that blends in, 1 one that is kept, and 2 one that incubates
    **{at: decision for at, decision in GROW.items() if at[1] == 1},
    (3, 0): (Op.GERMINATE, 1, 0, 2, 4, 3),
    (5, 0): (Op.ADVANCE, 1),
    (4, 2): (Op.GERMINATE, 0, 2, 1, 1, 3),
}


def own_task(host, shape, menu, whole=False):
    """Make a task in float64 for a host; of whole numbers for tokens, each of which has a label."""
    x = torch.randn(90, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, y = ((x.abs() * 3).long().clamp(max=2), (x > 0).long() + (x > 1)) if whole else (x, torch.arange(90) % 3)
    return task_from("own", x, y, host=lambda: host().to(torch.float64), classes=3, menu=menu)


def computed(engine, seeds, x):
    """Return what every row computes for x (B, ...): at its doses, with incubating seeds switched on, and as it is exported."""
    body, found = engine.population.body, []
    body.train(False)
    switched_on = np.where(seeds.stage == Stage.TRAINING, np.float32(1), doses(seeds))
    for dose in (doses(seeds), switched_on, doses(exported(seeds))):
        for part in body.parts:
            with torch.no_grad():
                route = body.route(dose, seeds, part=part)
                found.append(body.run(x.expand(part.stop - part.start, *x.shape), route).output)
    return torch.cat(found)


def widenings_of(task, config, decisions):
    """Play an episode; return the engine and what all rows computed before and after each widening, with the stages there."""
    engine, client, seen = VectorizedEngine(task, config), Script(decisions), []
    x, widen = task.probe.x[:7], engine._widen

    def watched():
        seeds, before = engine.state.seeds, computed(engine, engine.state.seeds, x)
        found = widen()
        seen.append((before, computed(engine, seeds, x), seeds.stage.copy()))
        return found

    engine._widen = watched
    view = engine.reset()
    while view.step < config.steps:
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
    return engine, seen


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
def test_every_row_computes_what_it_did_with_seeds_in_every_stage_and_all_sizes_follow(incubation):
    config = small_config({"lifecycle": {"incubation": incubation}}, WIDE, baselines=["twin"])
    engine, seen = widenings_of(blobs(dtype=torch.float64), config, LIVES)
    assert len(seen) == 2
    for before, after, _ in seen:
        assert torch.allclose(before, after, rtol=0, atol=1e-9)
    stages = seen[1][2]
    assert (stages[0, 1], stages[1, 0], stages[2, 0]) == (Stage.BLENDING, Stage.FOSSILIZED, Stage.TRAINING)
    wide = sum(parameter.numel() for parameter in MLP(6, 72, (27, 45), 3)().parameters())
    assert engine.population.host_params.tolist() == [wide] * 6
    assert (engine.view().space.width == 72).all()
    (bypass,) = set(engine.space.cost[:, 0, 1].tolist())
    assert bypass == 16 * (72 + 1) + 72 * (16 + 1)
    assert engine.state.scores.added_params[1] == bypass


@pytest.mark.parametrize(
    ("host", "shape", "menu"),
    [
        (ResidualMLP(6, 8, (3, 5), 3), (6,), ("bypass-linear", "gated", "affine", "low-rank", "skip-mlp")),
        (CNN((2, 8, 8), (3, 4), 3, hidden=(5, 2)), (2, 8, 8), ("bypass-conv-3x3", "depthwise-separable", "bottleneck")),
        (ResidualCNN((2, 8, 8), (3, 4), 3), (2, 8, 8), ("squeeze-excite", "conv-light", "skip-conv")),
        (Transformer(3, 8, 2, 2, 6), (6,), ("attention", "causal-conv", "mlp-small")),
        (
            lambda: nn.Sequential(
                *(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()),
                *(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)),
            ),
            (2, 8, 8),
            ("conv-light", "mlp-small"),
        ),
        (SpannedHost(names=("wide", "late")), (6,), ("bypass-linear", "bypass-mlp")),
        (SpannedHost(names=("late",)), (6,), ("bypass-linear", "mlp-small")),
    ],
    ids=["residual", "convolutions", "residual convolutions", "transformer", "a module that is cut", "spans", "a span"],
)
def test_hosts_of_every_kind_and_their_seeds_compute_what_they_did(host, shape, menu):
    task = own_task(host, shape, menu, whole=isinstance(host, Transformer))
    config = small_config({"widen": {"at": [3, 5]}}, envs=len(menu), steps=6, lifecycle={"max_seeds": 2})
    decisions = {(step, env): (op, 0, env, env % 2, 1, 3) for env in range(len(menu)) for step, op in
                 ((0, Op.GERMINATE), (2, Op.ADVANCE))}  # fmt: skip
    engine, seen = widenings_of(task, config, decisions)
    for before, after, _ in seen:
        assert torch.allclose(before, after, rtol=0, atol=1e-9)
    assert (seen[1][2][: len(menu), 0] == Stage.HOLDING).any(), "or this test shows nothing"
    assert engine.population.body.finite().isfinite().all()


def test_a_stream_stays_where_a_blueprint_would_compute_something_else_on_more_features():
    task = own_task(CNN((2, 8, 8), (3, 4), 3, hidden=(5, 2)), (2, 8, 8), ("norm", "conv-light"))
    engine = VectorizedEngine(task, small_config({"widen": {"at": [2]}}))
    (widening,) = engine.population.widenings
    assert widening.widths == {"segments.0.0": (5, 10), "segments.1.0": (2, 4)}
    assert not any(widening.slots)
    assert set(widening.left_out) == {"segments.0.3", "segments.1.3"}
    assert "a seed norm at slot 'block0'" in widening.left_out["segments.0.3"]


def test_a_row_does_not_depend_on_the_others_and_new_features_differ_by_row_and_learn():
    three, _, seen = trajectory(small_config(WIDE), env=1)
    decisions = {(step, 0): decision for (step, env), decision in GROW.items() if env == 1}
    alone = trajectory(small_config(WIDE, envs=1, first_instance=1), decisions)[2]
    assert_same(seen, alone)
    weight = three.population.body.host.parameter("segments.1.2.weight").detach()  # 9 units first, then 27
    assert weight[:, :8, 3:].count_nonzero() > 0, "what reads new features begins at 0"
    first = three.population.body.host.parameter("segments.0.weight").detach()[:, 24:]
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_an_engine_goes_on_from_a_snapshot_before_at_and_behind_a_widening(optimizer):
    early = {"enabled": True, "patience": 8}
    config = small_config(WIDE, optimizer={"name": optimizer}, early_stopping=early, governor={"snapshot_every": 4})
    engine, client, after = VectorizedEngine(blobs(), config), Script(LIVES), []
    view = engine.reset()
    trees = []
    while view.step < config.steps:
        trees.append(_copied(engine.snapshot()))
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
        after.append(engine.population.body.host.columns["value"].clone())
    best = engine.finish()
    for start in (2, 3, 4, 6, 7):  # the engine becomes wider behind steps 3 and 6
        other = VectorizedEngine(blobs(), config)
        view = other.restore(trees[start])
        while view.step < config.steps:
            view, _ = other.step(client.act(view))
            assert torch.equal(other.population.body.host.columns["value"], after[view.step - 1]), (start, view.step)
        assert np.array_equal(other.finish().loss, best.loss)


def _copied(tree):
    if isinstance(tree, dict):
        return {name: _copied(each) for name, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_copied, tree)) if not hasattr(tree, "_fields") else type(tree)(*map(_copied, tree))
    return tree.clone() if isinstance(tree, torch.Tensor) else tree.copy() if isinstance(tree, np.ndarray) else tree


def test_a_row_is_restored_to_a_snapshot_from_before_a_widening_as_it_computed_then():
    task, config = blobs(dtype=torch.float64), small_config({"widen": {"at": [7]}}, governor={"enabled": False})
    engine, client = VectorizedEngine(task, config), Script(LIVES)
    keeper, x, every = engine.population.keeper(engine.state.seeds), task.probe.x[:7], np.ones(3, bool)
    view = engine.reset()
    while view.step < config.steps:
        if view.step == 6:
            keeper.take(engine.state.seeds, every, 6)
            seeds = engine.state.seeds
            assert Stage.FOSSILIZED in seeds.stage
            before = computed(engine, seeds, x)[6:]  # as exported
        view, _ = engine.step(client.act(view))
    restored = keeper.put_back(engine.state.seeds, every)
    assert engine.population.widened == 1
    assert torch.allclose(computed(engine, restored, x)[6:], before, rtol=0, atol=1e-9)


def test_a_further_episode_begins_with_the_first_widths():
    engine = VectorizedEngine(blobs(), small_config(WIDE))
    first = trajectory(small_config(WIDE))[2]
    engine.run(Script(GROW), rounds=1)
    engine.state.episode = -1
    engine.run(Script(GROW), rounds=1)
    columns = engine.population.body.host.columns
    assert torch.equal(columns["value"][0], first[-1][0])


def test_copies_of_rows_are_as_wide_as_these():
    engine, client = VectorizedEngine(blobs(), small_config(WIDE)), Script(GROW)
    view = engine.reset()
    while view.step < 5:
        view, _ = engine.step(client.act(view))
    copies, alone = engine.copies(np.array([1])), Script({(5, 0): GROW[5, 1]})
    seen = copies.view()
    while view.step < 8:
        view, _ = engine.step(client.act(view))
        seen, _ = copies.step(alone.act(seen))
    assert engine.population.widened == copies.population.widened == 2
    assert torch.equal(copies.population.body.host.columns["value"][0], engine.population.body.host.columns["value"][1])


@pytest.mark.parametrize("own", [False, True], ids=["named in the file", "given"])
def test_an_exported_network_has_the_new_widths_and_loads(tmp_path, own):
    task = (
        get_task("iris")
        if not own
        else own_task(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), (6,), ("mlp-small",))
    )
    config = small_config(WIDE, envs=2)
    engine = VectorizedEngine(task, config)
    engine.run(Script({(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 3), (2, 0): (Op.ADVANCE, 0), (5, 0): (Op.FOSSILIZE, 0)}))
    assert engine.state.seeds.stage[0, 0] == Stage.FOSSILIZED
    x = task.probe.x[:9]
    outputs = engine.outputs(task.probe)[0, :9]
    network, topology = engine.export(0)
    assert save_network(tmp_path / "network", network, topology, x) is None
    loaded = load_network(tmp_path / "network", task.host)
    assert np.allclose(loaded._outputs(x), outputs, atol=1e-5)
    assert topology["format"] == 5
    assert topology["host_parameters"] == engine.population.host_params[0]
    program = torch.export.load(tmp_path / "network" / "model.pt2").module()
    assert np.allclose(program(x).detach().numpy(), outputs, atol=1e-5)
    large = {**topology, "widened": [{**each, "factor": 10**6} for each in topology["widened"]]}
    save_network(tmp_path / "large", network, large, x)
    with pytest.raises(InputError, match=r"topology\.json asks for"):
        load_network(tmp_path / "large", task.host)
    with pytest.raises(InputError, match="names hidden features that the host does not have"):
        load_network(
            tmp_path / "network",
            lambda: ResidualMLP(4, 4, (3,), 3)() if own else nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)),
        )


def test_one_row_of_the_events_has_the_widths():
    engine = Journalled(blobs(), small_config(WIDE), level="run")
    view = engine.reset()
    while view.step < 8:
        view, _ = engine.step(Script({}).act(view))
    rows = [row for row in engine.rows_of_events if isinstance(row, WideningRow)]
    assert [row.step for row in rows] == [2, 5]
    assert rows[0].widths["segments.1.0"] == [3, 9]
    assert list(rows[1].host_param_counts) == engine.population.host_params.tolist()


@pytest.mark.parametrize(
    ("task", "config", "said"),
    [
        (lambda: get_task("repair"), WIDE, "the hosts of repair differ from instance to instance"),
        (
            lambda: blobs(frozen=True),
            WIDE,
            "nothing in the host can be wider: 'segments.0': segments.0.weight is frozen",
        ),
        (
            lambda: own_task(
                lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)), (6,), ("mlp-small",)
            ),
            WIDE,
            "nothing in the host can be wider: 'segments.0.0': the wider network fails",
        ),
        (
            blobs,
            {"widen": {"at": [1], "factor": 10**6}},
            r"widen.factor is 1,000,000, with which a host grows to .* GiB, but",
        ),
        (blobs, {"widen": {"at": list(range(1, 40))}}, "lower it, or give fewer steps in widen.at"),
    ],
    ids=["hosts that differ", "frozen", "norms", "memory", "memory in the end"],
)
def test_what_cannot_be_wider_is_refused_before_anything_is_trained(task, config, said):
    with pytest.raises(InputError, match=said):
        VectorizedEngine(task(), small_config(config, {"slots": None}))


def test_layers_that_are_frozen_stay_and_the_others_become_wider():
    host = DamagedMLP(6, 8, (3, 5), 3, linear=(False, True), frozen=(True, False))
    engine = VectorizedEngine(own_task(host, (6,), ("mlp-small",)), small_config({"widen": {"at": [2]}}))
    (widening,) = engine.population.widenings
    assert widening.widths == {"segments.2.0": (5, 10), "segments.2.2": (8, 16)}
    assert "frozen" in widening.left_out["segments.0"]
