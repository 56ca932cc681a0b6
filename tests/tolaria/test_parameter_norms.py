"""Check that at level debug a row of gradients has the norm of each parameter, and that nothing else depends on it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from device_reads import counted_reads
from faults.poison import poisoned
from torch.nn.functional import cross_entropy

from esper.kasmina.lifecycle import doses
from esper.leyline.lifecycle.vocabulary import Actions, Stage
from esper.leyline.progress import Progress
from esper.nissa.events import decode, encode
from esper.nissa.hub import Hub
from esper.nissa.rows import GradientsRow, PhasesRow
from esper.runs.folder.resume import Opening
from esper.runs.grow import grow
from esper.tolaria.engine import Observer, VectorizedEngine
from esper.tolaria.journal import Journal
from journals import events
from populations import GROW, Journalled, Memory, Script, blobs, small_config

ONE_UPDATE = {"data": {"batch_size": 12, "batches_per_step": 1}}


class Asking(Observer):
    """Keeps what the journal asked for before each step."""

    def __init__(self, engine):
        self.engine, self.asked = engine, []

    def going(self, view):
        self.asked.append(self.engine.parameter_norms)
        return True


def played(level, *, task=None, raise_steps=0, also=(), **top):
    """Play a run; return its rows of gradients, what was asked for before each step, the engine and the device reads."""
    engine, memory = VectorizedEngine(task or blobs(), small_config(**top)), Memory()
    asking, journal = Asking(engine), Journal(engine, Hub([memory], level, raise_steps=raise_steps))
    with counted_reads() as reads:
        engine.run(Script(GROW), *(each(engine) for each in also), journal, asking)
    phases = [row.device_reads for row in memory.rows if isinstance(row, PhasesRow)]
    return [row for row in memory.rows if isinstance(row, GradientsRow)], asking.asked, engine, (len(reads), phases)


def combined(by_name, envs=3):
    """Combine norms by name: (E,) square root of the sum of squares; 0 where there is nothing."""
    squares = [np.nan_to_num(np.square(values)) for values in (by_name or {}).values()]
    return np.sqrt(np.sum(squares, axis=0)) if squares else np.zeros(envs)


def of_slot(row, slot):
    return {name: v for name, v in (row.seed_parameter_gradients or {}).items() if name.startswith(f"{slot}/")}


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
@pytest.mark.parametrize("stacks", [True, False])
def test_the_norms_of_the_parameters_combine_to_the_norm_of_the_network(incubation, stacks):
    lifecycle = {"incubation": incubation, "max_training_seeds": 2}
    task = blobs(stacks=stacks)
    rows, _, engine, _ = played("debug", task=task, lifecycle=lifecycle, optimizer={"max_grad_norm": 0.1}, **ONE_UPDATE)
    names = {name for name, _ in task.host().named_parameters()}
    seeded = 0
    for row in rows:
        assert set(row.host_parameter_gradients) == names
        np.testing.assert_allclose(combined(row.host_parameter_gradients), row.host_gradients, rtol=1e-4)
        for index, slot in enumerate(engine.space.slots):
            norms = row.seed_gradients[:, index]
            np.testing.assert_allclose(combined(of_slot(row, slot)), np.nan_to_num(norms), rtol=1e-4)
            for values in of_slot(row, slot).values():
                assert (np.isfinite(values) <= np.isfinite(norms)).all()
            seeded += np.isfinite(norms).sum()
    assert seeded > 5
    assert max(row.host_gradients.max() for row in rows) > 0.1, "nothing was clipped"


def slow_norms(engine, env, batches, limit, rate):
    """Compute mean gradient norms by name of one network with one seed in slot 0, trained by itself with plain SGD."""
    state, population = engine.state, engine.population
    host, seed = blobs(dtype=torch.float64).host(), population.body.seed_module(state.seeds, env, 0)
    population.body.host.read(env, host)
    incubates, dose = state.seeds.stage[env, 0] == Stage.TRAINING, float(doses(state.seeds)[env, 0])

    def loss(x, y, dose):
        before = host.segments[0](x)
        h = host.segments[1](before) + dose * seed.delta(before)
        return cross_entropy(host.segments[3](host.segments[2](h)), y)

    sums = {}
    for x, y in batches:
        own = list(seed.delta.parameters())
        loss(x[env], y[env], dose).backward(inputs=[*host.parameters(), *([] if incubates else own)])
        if incubates:
            loss(x[env], y[env], 1.0).backward(inputs=own)
        for prefix, module in (("", host), ("block0/", seed)):
            for name, parameter in module.named_parameters():
                norm = 0.0 if parameter.grad is None else float(parameter.grad.norm())
                sums[prefix + name] = sums.get(prefix + name, 0) + norm / len(batches)
            torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
            torch.optim.SGD(module.parameters(), lr=rate).step()
            module.zero_grad()
    return sums


def test_the_norms_are_those_of_one_network_in_a_plain_loop():
    settings = {"name": "sgd", "momentum": 0.0, "max_grad_norm": 0.2, "lr": 0.1}
    engine = VectorizedEngine(blobs(dtype=torch.float64), small_config(optimizer=settings))
    view, client, stages = engine.reset(), Script(GROW), set()
    for step in range(8):
        engine.begin_step(client.act(view))
        stage = Stage(int(engine.state.seeds.stage[1, 0]))
        expected = {}
        if stage != Stage.GERMINATED:
            feed = engine.population.feed
            begin = feed.batch
            batches = [[part.cpu() for part in next(feed)] for _ in range(3)]
            feed.batch = begin
            expected = slow_norms(engine, 1, batches, 0.2, 0.1)
            stages.add(stage)
        engine.population.train(engine.state.seeds, parameter_norms=True)
        view, _ = engine.finish_step()
        norms = engine.trace.parameter_norms
        found = {**norms.host, **norms.seeds}
        assert {name for name, values in found.items() if "/" not in name or np.isfinite(values[1])} >= set(expected)
        for name, norm in expected.items():
            assert found[name][1] == pytest.approx(norm, rel=1e-9, abs=1e-15), (step, name)
    assert stages == {Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED}


@pytest.mark.parametrize(
    ("level", "every", "steps"),
    [
        ("debug", None, range(8)),
        ("debug", 3, (2, 5)),
        ("step", 3, ()),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("debug", 0, ()), ("step", None, ()), ("run", 1, ()))
        ),
    ],
)
def test_nothing_is_asked_for_off_the_stride_or_below_debug(level, every, steps):
    rows, asked, _, reads = played(level, telemetry={"gradients_every": every})
    assert [step for step, now in enumerate(asked) if now] == list(steps)
    assert [row.step for row in rows if row.host_parameter_gradients is not None] == list(steps)
    lines = [encode(row) for row in rows]
    assert [b"parameter_gradients" in line for line in lines] == [row.step in steps for row in rows]
    assert [decode(line).step for line in lines] == [row.step for row in rows]
    assert reads[0] == played("off")[3][0]
    assert set(reads[1]) <= {1}


def test_a_hub_without_outputs_is_asked_for_nothing():
    engine = VectorizedEngine(blobs(), small_config())
    asking = Asking(engine)
    engine.run(Script(GROW), Journal(engine, Hub([], "debug")), asking)
    assert not any(asking.asked)


def test_a_run_at_debug_has_the_bits_of_a_run_without_rows():
    engines = [played(level, twin=True)[2] for level in ("debug", "off")]
    assert engines[0].parameter_norms is False
    for name in ("value", "first_moment", "second_moment"):
        one, other = (engine.population.body.host.columns[name] for engine in engines)
        assert torch.equal(one, other)
    stacks = [engine.population.body.stacks for engine in engines]
    assert stacks[0]
    for at, stack in stacks[0].items():
        assert torch.equal(stack.columns["value"], stacks[1][at].columns["value"])
    assert np.array_equal(engines[0].state.scores.loss, engines[1].state.scores.loss)


class Fails(Observer):
    """Makes a parameter of the host of environment 1 infinite before step 2."""

    def __init__(self, engine):
        self.engine = engine

    def going(self, view):
        if view.step == 2:
            self.engine.population.body.host.columns["value"][1] = torch.inf
        return True


def test_after_a_restoration_the_steps_of_the_raised_level_have_the_norms():
    rows, asked, _, _ = played("step", raise_steps=3, also=[Fails])
    assert [step for step, now in enumerate(asked) if now] == [3, 4]
    assert [(row.step, row.host_parameter_gradients is not None) for row in rows] == [(2, False), (3, True), (4, True)]


def test_the_row_of_a_restoration_says_which_parameter_had_a_gradient_that_was_not_finite():
    engine = Journalled(blobs(), small_config(), "debug")
    engine.reset()
    with poisoned(engine, 1, "gradient", batch=2):
        engine.step(Actions.wait(3))
    (row,) = [decode(encode(row)) for row in engine.rows_of_events if isinstance(row, GradientsRow)]
    unknown = {
        (name, env) for name, norms in row.host_parameter_gradients.items() for env in range(3) if norms[env] is None
    }
    assert unknown == {("segments.0.weight", 1)}
    assert [norm is None for norm in row.host_gradients] == [False, True, False]


def test_parameters_that_do_not_train_have_no_norms():
    def host():
        made = blobs().host()
        for parameter in made.segments[0].parameters():
            parameter.requires_grad_(False)
        return made

    rows, *_ = played("debug", task=replace(blobs(), host=host))
    names = set(rows[0].host_parameter_gradients)
    assert names == {name for name, p in host().named_parameters() if p.requires_grad}


class Leaving(Progress):
    """Ends the run in its fourth step, as an error would."""

    steps = 0

    def step(self, view, speed, rollbacks):
        self.steps += 1
        if self.steps == 4:
            raise KeyError("left")


def test_a_resumed_run_writes_the_same_norms(tmp_path):
    config = small_config(
        telemetry={"level": "debug", "gradients_every": 2},
        checkpoint={"every_steps": 3, "every_seconds": 0},
        models="none",
    )
    straight, left = tmp_path / "straight", tmp_path / "left"
    grow(blobs(), config, Script(GROW), straight)
    with pytest.raises(KeyError, match="left"):
        grow(blobs(), config, Script(GROW), left, Leaving())
    grow(blobs(), config, Script(GROW), left, opening=Opening(resume=True))
    found = [[row for row in events(folder) if row["kind"] == "gradients"] for folder in (left, straight)]
    assert found[0] == found[1]
    assert ["host_parameter_gradients" in row for row in found[0]] == [True] * 4
    assert any("seed_parameter_gradients" in row for row in found[0])
