"""Test training passes as graphs. They run here as they are; tests/third_party/test_compiled.py lets torch compile them."""

import copy
import json

import numpy as np
import pytest
import torch

from esper.leyline.config.tree import build_config
from esper.leyline.messages import InputError
from esper.store.files import cache_root
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked import compiling
from esper.tolaria.stacked.compiling import check_compiler
from populations import EARLY, GROW, Script, blobs, small_config, trajectory


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch, tmp_path):
    """Run graphs as they were traced, because compiling one takes ten seconds."""
    monkeypatch.setattr(compiling, "compiled", lambda graph, tensors: graph)
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path))


def assert_close(config, decisions=GROW, **other):
    (engine, *_, seen), (_, *_, exact) = (
        trajectory(small_config(**config, compile="on"), decisions),
        trajectory(small_config(**config, **other), decisions),
    )
    for step, (one, two) in enumerate(zip(seen, exact, strict=True)):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, step=step: f"{step}: {m}"
            )
    return engine.population.passes


@pytest.mark.parametrize(
    ("mapping", "incubation"), [("auto", "shadow"), pytest.param("vmap", "ste", marks=pytest.mark.slow)]
)
def test_an_episode_of_births_and_prunes_has_the_numbers_of_eager_passes(mapping, incubation):
    passes = assert_close({"mapping": mapping, "lifecycle": {"incubation": incubation}, "steps": 6})
    assert passes.counts.plans > 3, "births and prunes change the plan"
    assert passes.counts.passes == 6 * 3, "every pass is compiled"
    assert passes.counts.eager == passes.counts.looped == 0


@pytest.mark.campaign
def test_isolated_seeds_accumulated_gradients_and_bfloat16_are_part_of_the_graph(monkeypatch):
    config = {"lifecycle": {"isolation": "isolated"}, "optimizer": {"accumulation_steps": 3}, "steps": 5}
    assert_close(config, EARLY)
    from esper.tolaria import runtime

    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda device: True)
    (short, *_), (eager, *_) = (
        trajectory(small_config(amp="bf16", compile=mode, steps=2), EARLY) for mode in ("on", "off")
    )
    np.testing.assert_allclose(short.state.scores.loss, eager.state.scores.loss, rtol=0.05)


def test_the_scales_of_float16_are_inputs_of_the_graph():
    (short, *_), (eager, *_) = (
        trajectory(small_config(amp="fp16", compile=mode, steps=2), {}) for mode in ("on", "off")
    )
    np.testing.assert_allclose(short.state.scores.loss, eager.state.scores.loss, rtol=0.05)
    assert torch.equal(short.population.scaler.scale, eager.population.scaler.scale)
    assert not (short.population.scaler.scale == 2.0**16).all()


def test_every_plan_is_compiled_once():
    config = small_config(compile="on", steps=12)
    engine, *_ = trajectory(config, {})
    assert engine.population.passes.counts.plans == 1
    assert engine.population.compiled == {
        "plans": 1, "passes": 36, "eager": 0, "looped": 0, "short": 0, "slower": 0, "recompiled": 0,
        "seconds": engine.population.compiled["seconds"],
    }  # fmt: skip


def test_modules_in_a_loop_run_eagerly_and_are_counted():
    engine, *_ = trajectory(small_config(compile="on", mapping="loop"), {})
    counts = engine.population.passes.counts
    assert (counts.plans, counts.passes, counts.looped) == (0, 0, 1)
    assert counts.eager == 24


def test_off_counts_nothing():
    engine, *_ = trajectory(small_config(), {})
    assert engine.population.compiled is None


def test_auto_leaves_a_short_episode_uncompiled():
    engine, *_ = trajectory(small_config(compile="auto"), {})
    counts = engine.population.passes.counts
    assert (counts.plans, counts.short, counts.eager) == (0, 1, 24)
    assert not (cache_root() / "compiled-2").exists()


def auto(monkeypatch, known=None):
    """Play an episode in which compiling may be worth it; `known` is what an earlier run measured."""
    monkeypatch.setattr(compiling, "WORTH", 0.0)
    if known is not None:
        monkeypatch.setattr(compiling, "known_timing", lambda path: known)
    engine, *_ = trajectory(small_config(compile="auto"), {})
    return engine.population.passes.counts


def test_auto_measures_a_plan_once_for_a_machine_and_stores_what_it_found(monkeypatch):
    counts = auto(monkeypatch)
    assert counts.plans == 1
    (file,) = (cache_root() / "compiled-2").iterdir()
    seconds = json.loads(file.read_text("utf-8"))
    assert set(seconds) == {"eager", "compiled", "compiling"}
    assert (counts.slower == 0) == (seconds["compiled"] < seconds["eager"]) == (counts.passes > 0)


@pytest.mark.parametrize(
    ("known", "plans", "slower"),
    [
        ({"eager": 2.0, "compiled": 1.0, "compiling": 5.0}, 1, 0),
        ({"eager": 2.0, "compiled": 1.0, "compiling": 50.0}, 0, 1),
        ({"eager": 1.0, "compiled": 2.0, "compiling": 0.0}, 0, 1),
    ],
)
def test_auto_compiles_what_gains_more_than_compiling_takes(monkeypatch, known, plans, slower):
    counts = auto(monkeypatch, known)
    assert (counts.plans, counts.slower) == (plans, slower)


def test_a_damaged_measurement_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "WORTH", 0.0)
    trajectory(small_config(compile="auto"), {})
    (file,) = (tmp_path / "compiled-2").iterdir()
    file.write_text('{"eager": 1}')
    with pytest.raises(InputError, match="is damaged; delete it"):
        trajectory(small_config(compile="auto"), {})


def test_a_state_that_is_restored_goes_on_bit_for_bit():
    config = small_config(compile="on", steps=5)
    whole = VectorizedEngine(blobs(), config)
    view, client = whole.reset(), Script(EARLY)
    while view.step < 3:
        view, _ = whole.step(client.act(view))
    kept = copy.deepcopy(whole.snapshot())
    resumed = VectorizedEngine(blobs(), config)
    there = resumed.restore(kept)
    for engine, at in ((whole, view), (resumed, there)):
        while at.step < config.steps:
            at, _ = engine.step(client.act(at))
    first, second = (engine.population.body.host.columns["value"] for engine in (whole, resumed))
    assert torch.equal(first, second)


def test_a_machine_without_a_compiler_is_named_before_anything_is_done(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match="compile is on, which needs a C\\+\\+ compiler"):
        check_compiler("on", torch.device("cpu"))
    check_compiler("off", torch.device("cpu"))


def test_yaml_reads_on_and_off_as_truth_values_and_the_config_knows_it():
    assert build_config({"compile": True}).compile == "on"
    assert build_config({"compile": False}).compile == "off"
    with pytest.raises(InputError, match="compile"):
        build_config({"compile": "sometimes"})
