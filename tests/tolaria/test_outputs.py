"""Test outputs of any shape, in whole populations: labels and targets of several positions, and hosts of their own dtype."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.host import SegmentedHost, check_host
from esper.leyline.data.task import Instance, Lengths, Mixture, Room, Split, Task
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError
from esper.tasks.objectives import Classification, Regression
from esper.tasks.splits import Splits
from esper.tolaria.engine import VectorizedEngine
from populations import MENU, Script, blobs, small_config

GROWING = {}
for env in range(2):
    GROWING[0, env] = (Op.GERMINATE, env, 1 + env, env, 2, 3)
    GROWING[1, env] = (Op.GERMINATE, 1 - env, 2 - env, env + 1, 2, 3)
    GROWING[3, env] = (Op.ADVANCE, env)
    GROWING[6, env] = (Op.FOSSILIZE, env)


class Repeated(nn.Module):
    """Repeats every output as often as asked, (B, C) -> (B, times, C)."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.times, x.shape[-1]).contiguous()


def host_of(head, times, stacks=False):
    """Build a slim host with two slots whose last segment ends with a head."""

    def host():
        made = blobs(classes=3).host()
        segments = list(made.segments)
        segments[-1] = nn.Sequential(segments[-1], head(times))
        return SegmentedHost(segments, made.slots)

    return host


def task_of(labels, host, objective, **options):
    """Make a task of the blobs with other labels or targets and another host."""
    task = blobs(stacks=False)
    parts = {
        name: Split(part.x, labels(part))
        for name in ("train", "probe", "validation", "test")
        for part in [getattr(task, name)]
    }
    named = {"name": "several", "summary": "", "defaults": task.defaults, **options}
    return Task(host=host, **parts, objective=objective, menu=MENU, **named)


def grown(task):
    engine, client = VectorizedEngine(task, small_config(envs=2)), Script(GROWING)
    view = engine.reset()
    measured = []
    for _ in range(8):
        view, outcome = engine.step(client.act(view))
        measured.append((outcome.after.loss.copy(), outcome.after.metric.copy()))
    return engine, np.array(measured)


def test_labels_of_several_positions_are_learned_like_one_label_repeated():
    (one, measured), (many, expected) = (
        grown(task_of(lambda part: part.y, host_of(lambda _: nn.Identity(), 1), Classification(3))),
        grown(task_of(lambda part: part.y[:, None].expand(-1, 2), host_of(Repeated, 2), Classification(3))),
    )
    np.testing.assert_allclose(measured, expected, rtol=1e-5)
    np.testing.assert_allclose(one.population.data.bounds, many.population.data.bounds)
    network, topology = many.export(0)
    task = many.population.task
    assert topology["target"] == [2]
    assert network(task.probe.x).shape == (len(task.probe.y), 2, 3)
    assert np.array_equal(network.predict(task.probe.x), network(task.probe.x).argmax(-1).numpy())
    assert network.predict_proba(task.probe.x).shape == (len(task.probe.y), 2, 3)
    right = (torch.from_numpy(network.predict(task.probe.x)) == task.probe.y).float().mean()
    metric, _ = many.evaluate(task.probe)
    assert metric[0] == pytest.approx(float(right))


@pytest.mark.parametrize(("times", "shape"), [(1, (2,)), (2, ())])
def test_an_example_of_several_predictions_is_certified_by_bets_and_one_of_a_single_prediction_by_signs(times, shape):
    task = task_of(
        lambda part: part.y if times == 1 else part.y[:, None].expand(-1, times),
        host_of(Repeated if times > 1 else lambda _: nn.Identity(), times),
        Classification(3),
    )
    gates = {"certify": 0.9, "min_contribution": -1.0, "contribution_z": 0.0}
    engine, client = VectorizedEngine(task, small_config({"gates": gates}, envs=2)), Script(GROWING)
    view, seen, probe = engine.reset(), [], engine.population.probe
    engine.population.probe = lambda seeds, asked: seen.append(probe(seeds, asked)) or seen[-1]
    while not engine.over:
        view, _ = engine.step(client.act(view))
    looks = [figures.compared for figures in seen if figures.compared is not None]
    assert looks
    assert {found.shape[1:] for found in looks} == {shape}


def test_targets_of_any_shape_are_learned():
    def targets(part):
        wanted = torch.stack([part.x[:, :3], part.x[:, 3:]], 1)
        return wanted - wanted.mean(0)

    engine, measured = grown(task_of(targets, host_of(Repeated, 2), Regression(3)))
    assert measured[-1, 1].min() > measured[0, 1].min()
    assert np.allclose(engine.population.data.bounds, [0, 1], atol=1e-5)
    network, topology = engine.export(0)
    assert topology["target"] == [2, 3]
    found = network.predict(engine.population.task.probe.x)
    assert found.shape == (len(found), 2, 3)


def test_one_number_per_example_may_come_without_an_axis_of_its_own():
    class Only(nn.Module):
        def forward(self, x):
            return x[..., 0]

    measured = [
        grown(task_of(lambda part: part.x[:, 0] * part.x[:, 1], host_of(head, 1), Regression(1)))[1]
        for head in (lambda _: Only(), lambda _: nn.Linear(3, 1))
    ]
    assert measured[0].shape == measured[1].shape
    assert np.isfinite(measured[0]).all()


def test_an_output_that_a_row_of_a_mixture_does_not_have_is_minus_infinity_at_every_position():
    def problem(key):
        classes = (3, 2)[key]
        task = blobs(classes=classes, stacks=False)

        def host():
            made = task.host()
            segments = [*list(made.segments)[:-1], nn.Sequential(made.segments[-1], Repeated(2))]
            return SegmentedHost(segments, made.slots)

        parts = [Split(part.x, part.y[:, None].expand(-1, 2)) for part in (task.train, task.probe, task.validation)]
        return Instance(host, *parts, classes)

    lengths = Lengths(probe=24, held=16)
    ranges = {"training": range(2), "validation": range(2, 2), "heldout": range(2, 2)}
    room = Room(problem(0).host, (6,), lengths)
    mixture = Mixture(
        name="two",
        summary="",
        room=room,
        sample=problem,
        test=None,
        ranges=ranges,
        objective=Classification(3),
        menu=MENU,
    )
    engine, measured = grown(mixture)
    assert np.isfinite(measured).all()
    population = engine.population
    body, x = population.body, population.data.probe.read(slice(None))
    output = body.run(x, body.route(np.zeros((2, 2), np.float32), engine.state.seeds)).output
    assert output.shape[2:] == (2, 3)
    assert output[0].isfinite().all()
    assert (output[1, ..., 2] == -torch.inf).all()
    assert output[1, ..., :2].isfinite().all()


@pytest.mark.parametrize(
    ("times", "labels", "sentence"),
    [
        (
            2,
            lambda y: y,
            "which the loss of the objective does not take with a target of shape \\(\\) and 3 outputs; give the host",
        ),
        (
            2,
            lambda y: y[:, None].expand(-1, 4),
            "which the loss of the objective does not take with a target of shape \\(4,\\)",
        ),
    ],
)
def test_outputs_that_the_objective_does_not_take_are_refused(times, labels, sentence):
    task = task_of(lambda part: labels(part.y), host_of(Repeated, times), Classification(3))
    with pytest.raises(InputError, match=f"^the host returns an output of shape \\(2, 3\\) per example, {sentence}"):
        VectorizedEngine(task, small_config())


def test_an_objective_that_returns_another_shape_is_refused():
    class Whole(Classification):
        def score(self, output, target):
            return super().score(output, target).mean(1)

    task = task_of(lambda part: part.y[:, None].expand(-1, 2), host_of(Repeated, 2), Whole(3))
    with pytest.raises(
        InputError, match=r"the score of the objective .*returns shape \(1,\) instead of \(1, 2\); give the host"
    ):
        check_host(task.host(), task.train.x[:2], 3, objective=task.objective, y=task.train.y[:2])


@pytest.mark.parametrize(("of_data", "of_host"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_parameters_keep_the_dtype_of_the_host_whatever_that_of_the_data(of_data, of_host):
    task = blobs(dtype=of_data)
    made = task.host
    task = replace(task, host=lambda: made().to(of_host), room=None)
    engine, measured = grown(task)
    assert engine.population.body.dtype == of_host
    assert np.isfinite(measured).all()
    network, topology = engine.export(0)
    assert topology["dtype"] == str(of_host).removeprefix("torch.")
    assert network(task.probe.x.to(of_host)).dtype == of_host


class Ids(SegmentedHost):
    """Reads whole numbers, (B, L) ids, as a host."""

    def __init__(self, ids=9, length=4):
        head = nn.Linear(8, 3)
        super().__init__(
            [
                nn.Sequential(nn.Embedding(ids, 2), nn.Flatten(), nn.Linear(2 * length, 8)),
                nn.Sequential(nn.ReLU(), nn.Linear(8, 8)),
                head,
            ],
            [SlotSpec("first", 0, 8), SlotSpec("second", 1, 8)],
        )


def test_whole_numbers_stay_whole_and_no_seed_reads_them():
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(4):
        x = torch.randint(9, (120, 4), generator=generator)
        parts.append(Split(x, (x[:, 0] + x[:, 1]) % 3))
    menu = (*MENU, "skip-mlp")
    task = Task(name="ids", summary="", host=Ids, **Splits(*parts)._asdict(), objective=Classification(3), menu=menu)
    engine, measured = grown(task)
    fits = {name: engine.population.body.layout.fits[:, k] for k, name in enumerate(task.menu)}
    assert engine.population.body.dtype == torch.float32
    assert fits["bypass-linear"].tolist() == [False, True]
    assert not fits["skip-mlp"].any()
    assert np.isfinite(measured).all()
    network, topology = engine.export(0)
    assert topology["input"] == [4]
    assert network.predict(task.probe.x.tolist()).shape == (120,)
    with pytest.raises(InputError, match=r"^x has dtype torch.float32, but the network takes whole numbers there"):
        network.predict(task.probe.x.float())
