"""Test training passes that torch compiles: it takes a C++ compiler and some ten seconds for each plan."""

import copy
import shutil

import pytest
import torch

from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked import compiling
from populations import Script, blobs, small_config, trajectory

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path))


def decisions():
    from esper.leyline.lifecycle.vocabulary import Op

    return {(1, 1): (Op.GERMINATE, 0, 1, 0, 2, 3), (3, 1): (Op.ADVANCE, 0), (5, 1): (Op.PRUNE, 0, 0, 0, 0, 0)}


def test_a_grown_episode_has_the_losses_of_eager_passes_and_no_plan_is_compiled_twice(monkeypatch):
    asked, compile_graph = [], compiling.compiled

    def compiled(graph, tensors):
        asked.append(graph)
        return compile_graph(graph, tensors)

    monkeypatch.setattr(compiling, "compiled", compiled)
    (engine, *_, seen), (*_, exact) = (
        trajectory(small_config(compile=mode, steps=7), decisions()) for mode in ("on", "off")
    )
    passes = engine.population.passes
    assert passes.counts.plans == len(asked) >= 3, "a birth and a removal make new plans"
    assert passes.recompiled == 0
    assert (passes.counts.passes, passes.counts.eager) == (7 * 3, 0)
    for one, two in zip(seen, exact, strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_restored_episode_goes_on_bit_for_bit():
    config = small_config(compile="on", steps=6)
    whole = VectorizedEngine(blobs(), config)
    view, client = whole.reset(), Script(decisions())
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
