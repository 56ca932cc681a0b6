"""Test float16: the scale of each row beside torch's own scaler, rows that overflow, and what the others keep."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from faults.poison import fingerprints, poisoned
from torch import nn

import esper
from esper.karn.terminal.console import trouble_lines
from esper.kasmina.stack.rows import Stack
from esper.leyline.config.tree import OptimizerConfig
from esper.leyline.lifecycle.vocabulary import Vital
from esper.leyline.messages import InputError
from esper.store.tensors import flatten, unflatten
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import check_modules
from esper.tolaria.stacked.optimizer import MOMENTS, GradScaler, Updates
from populations import GROW, GROW_ZERO, Script, assert_same, blobs, small_config, trajectory


def fp16(**overrides):
    return small_config(amp="fp16", **overrides)


def played(engine, steps, view=None, client=None):
    client = client or Script(GROW)
    view = engine.reset() if view is None else view
    for _ in range(steps):
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
    return view, client


def test_each_row_has_the_scale_of_a_scaler_of_torch(monkeypatch):
    monkeypatch.setattr(GradScaler, "growth_interval", 3)
    own = GradScaler(Stack(nn.Linear(2, 1), 4))
    own.begin()
    theirs = [torch.amp.GradScaler("cpu", growth_interval=3) for _ in range(4)]
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        overflowed = torch.rand(4, generator=generator) < torch.tensor([0.0, 0.1, 0.4, 1.0])
        own.update(overflowed)
        for scaler, bad in zip(theirs, overflowed.tolist(), strict=True):
            scaler.scale(parameter.sum()).backward()
            parameter.grad.fill_(torch.inf if bad else 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert own.scale.tolist() == [scaler.get_scale() for scaler in theirs]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_rows_that_skip_an_update_keep_their_bits_and_the_others_move_as_without_them(name):
    optimizer = partial(Updates, config=OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.5))
    stacks = [Stack(nn.Linear(3, 2), 3, moments=MOMENTS[name]) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    stacks[0].columns["value"].copy_(torch.randn(3, 8, generator=generator))
    stacks[1].columns["value"].copy_(stacks[0].columns["value"])
    updates = optimizer(stacks[0], slice(0, 3))
    skipping = [{1}, {0, 1}, set()]  # row 1 makes its first update in the third round
    for skipped in skipping:
        gradient = torch.randn(3, 8, generator=generator)
        taken = torch.tensor([row not in skipped for row in range(3)])
        before = {at: column.clone() for at, column in stacks[0].columns.items()}
        stacks[0].columns["gradient"].copy_(gradient.where(taken[:, None], torch.nan) * 4)
        updates.step(norm=updates.norm(torch.full((3,), 4.0)), taken=taken)
        for row in range(3):
            if row in skipped:
                assert all(
                    torch.equal(column[row], before[at][row])
                    for at, column in stacks[0].columns.items()
                    if at != "gradient"
                )
            else:
                stacks[1].columns["gradient"][row] = gradient[row]
                optimizer(stacks[1], slice(row, row + 1)).step()
    for at, column in stacks[0].columns.items():
        assert torch.equal(column, stacks[1].columns[at]), at


@pytest.mark.parametrize(("mapping", "incubation"), [("auto", "shadow"), ("vmap", "ste"), ("loop", "shadow")])
def test_training_in_float16_follows_float32_and_keeps_its_parameters_in_float32(mapping, incubation):
    config = {"mapping": mapping, "lifecycle": {"incubation": incubation}}
    (short, *_), (wide, *_) = trajectory(fp16(**config)), trajectory(small_config(**config))
    value, exact = (engine.population.body.host.columns["value"] for engine in (short, wide))
    assert value.dtype is torch.float32
    assert not torch.equal(value, exact), "float16 rounds"
    np.testing.assert_allclose(short.state.scores.loss, wide.state.scores.loss, rtol=0.05)
    assert short.governor.record.counts()["rollbacks"] == {}


def test_an_environment_in_float16_is_bitwise_the_same_in_any_population():
    alone = trajectory(fp16(envs=1), GROW_ZERO)[2]
    for envs in (2, 5):
        assert_same(trajectory(fp16(envs=envs), GROW_ZERO)[2], alone)


@pytest.mark.parametrize("kind", ["gradient", "seed gradient"])
def test_a_row_that_overflows_skips_one_update_with_its_seeds_and_no_other_row_changes(kind):
    good, bad = (VectorizedEngine(blobs(), fp16()) for _ in range(2))
    for engine in (good, bad):
        _, client = played(engine, 3)
        view = engine.view()
        stacks = {at: stack.steps.copy() for at, stack in engine.population.body.stacks.items()}
        before = engine.population.skipped.copy(), engine.population.body.host.steps.copy()
        if engine is bad:
            with poisoned(engine, 1, kind, 1):
                _, outcome = engine.step(client.act(view))
        else:
            _, outcome = engine.step(client.act(view))
        assert (outcome.vital == Vital.GOOD).all()
    first, second = fingerprints(good), fingerprints(bad)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, True]
    assert (bad.population.skipped - before[0]).tolist() == [0, 1, 0]
    assert (bad.population.body.host.steps - before[1]).tolist() == [3, 2, 3]
    for at, envs in bad.population.body.envs.items():
        for row, env in enumerate(envs.tolist()):
            trained = bad.population.body.stacks[at].steps[row] - stacks[at][row]
            assert trained in (0, 2 if env == 1 else 3)
    assert bad.population.scaler.scale[1] == good.population.scaler.scale[1] / 2
    assert np.isfinite(bad.view().measurements.gradient_norm).all()


def test_a_step_that_skips_every_update_changes_nothing_and_is_no_failure_unless_the_scale_is_at_most_1():
    engine = VectorizedEngine(blobs(), fp16(baselines=[]))
    view, client = played(engine, 2)
    before = engine.population.body.host.columns["value"].clone()
    engine.population.scaler.scale[0] = 2.0**60
    view, outcome = engine.step(client.act(view))
    assert outcome.vital.tolist() == [Vital.GOOD] * 3
    assert np.isnan(view.measurements.gradient_norm[0])
    assert torch.equal(engine.population.body.host.columns["value"][0], before[0])
    engine.population.scaler.scale[0] = 1.0
    with poisoned(engine, 0, "gradient", 1):
        view, outcome = engine.step(client.act(view))
    assert outcome.vital.tolist() == [Vital.GRADIENT, Vital.GOOD, Vital.GOOD]
    assert engine.population.scaler.scale[0] == 2.0**57, "of the snapshot"


@pytest.mark.parametrize("kind", ["loss", "parameter"])
def test_a_row_that_fails_in_float32_is_put_back_with_the_scale_of_its_snapshot(kind):
    engine = VectorizedEngine(blobs(), fp16())
    view, client = played(engine, 3)
    scale = engine.population.scaler.scale.clone()
    with poisoned(engine, 1, kind, 1):
        view, outcome = engine.step(client.act(view))
    assert outcome.vital.tolist() == [Vital.GOOD, Vital.LOSS, Vital.GOOD]
    assert torch.equal(engine.population.scaler.scale, scale)


def test_an_episode_in_float16_goes_on_from_a_snapshot_to_the_same_bits():
    whole = VectorizedEngine(blobs(), fp16())
    view, client = played(whole, 3)
    kept = unflatten(*copy.deepcopy(flatten(whole.snapshot())))
    resumed = VectorizedEngine(blobs(), fp16())
    there = resumed.restore(kept)
    for engine, at in ((whole, view), (resumed, there)):
        played(engine, 5, at, client)
    assert fingerprints(whole) == fingerprints(resumed)
    assert whole.population.skipped.tolist() == resumed.population.skipped.tolist()
    assert whole.population.skipped.any()


def test_a_summary_counts_the_updates_that_were_skipped_and_a_line_says_so(monkeypatch):
    monkeypatch.setattr(GradScaler, "init_scale", 2.0**45)
    settings = {
        "envs": 2,
        "steps": 2,
        "amp": "fp16",
        "data.batches_per_step": 4,
        "baselines": "twin",
        "governor.enabled": False,
    }
    summary = esper.grow("spirals", settings, controller="never", progress=False)
    assert summary["skipped_updates"] == {"updates": 8, "host": [8, 8], "grown": [8, 8]}
    (line,) = [line for line in trouble_lines(summary) if line.startswith("skipped")]
    assert line == (
        "skipped: 16 of 16 updates, whose gradients overflowed in float16; "
        "environment 0 skipped 8 of 8, so set amp to bf16 or off"
    )


def test_an_lstm_in_float16_is_refused_on_a_cpu():
    modules = [nn.Sequential(nn.LSTM(2, 2))]
    with pytest.raises(InputError, match="no LSTM in float16"):
        check_modules(torch.float16, torch.device("cpu"), modules)
    check_modules(torch.bfloat16, torch.device("cpu"), modules)
