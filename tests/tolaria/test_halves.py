"""Test a step in two halves, for populations that are trained from outside in between."""

import copy

import numpy as np
import pytest
import torch

from esper.leyline.records import as_tree
from esper.store.tensors import flatten
from esper.tamiyo.rules.base import RandomValid
from esper.tolaria.engine import VectorizedEngine
from populations import blobs, small_config


def same(one, other) -> bool:
    """Return whether two trees hold the same, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    one, other = (np.asarray(each.cpu() if isinstance(each, torch.Tensor) else each) for each in (one, other))
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@pytest.fixture(scope="module")
def played():
    """Run an engine for whole steps, and return it with the outcome of each."""
    engine, client = VectorizedEngine(blobs(), small_config()), RandomValid()
    view, outcomes = engine.reset(), []
    for _ in range(6):
        view, outcome = engine.step(client.act(view))
        outcomes.append(as_tree(outcome))
    assert any(outcome["actions"]["op"].any() for outcome in outcomes)
    return engine, outcomes


def test_two_halves_with_training_in_between_are_a_step(played):
    engine, client = VectorizedEngine(blobs(), small_config()), RandomValid()
    view = engine.reset()
    for expected in played[1]:
        engine.begin_step(client.act(view))
        engine.population.train(engine.state.seeds)
        view, outcome = engine.finish_step()
        assert same(as_tree(outcome), expected)
    assert same(flatten(engine.snapshot()), flatten(played[0].snapshot()))


def test_an_engine_goes_on_from_between_the_halves(played):
    engine, client = VectorizedEngine(blobs(), small_config()), RandomValid()
    view = engine.reset()
    for expected in played[1]:
        engine.begin_step(client.act(view))
        between = copy.deepcopy(engine.snapshot())
        engine = VectorizedEngine(blobs(), small_config())
        engine.restore(between)
        engine.population.train(engine.state.seeds)
        view, outcome = engine.finish_step()
        assert same(as_tree(outcome), expected)
    assert same(flatten(engine.snapshot()), flatten(played[0].snapshot()))


def test_a_step_is_closed_before_the_next_begins():
    engine, client = VectorizedEngine(blobs(), small_config()), RandomValid()
    view = engine.reset()
    with pytest.raises(AssertionError, match="begin_step"):
        engine.finish_step()
    engine.begin_step(client.act(view))
    with pytest.raises(AssertionError, match="finish_step"):
        engine.begin_step(client.act(view))
