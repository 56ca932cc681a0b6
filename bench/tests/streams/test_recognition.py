"""Test contexts that are recognised by their inputs, and learning rates that fall."""

import numpy as np
import pytest
import torch

from esper_bench.streams.controllers import OnAlarm
from esper_bench.streams.data import Change, draw_streams
from esper_bench.streams.decisions import KEEP, Operation
from esper_bench.streams.fitted import NUMBERS, Fitted
from esper_bench.streams.learner import NetworkLearner, scored, share_left
from esper_bench.streams.methods import build_learner
from esper_bench.streams.network import HEAD, TRUNK, TrunkAndHead
from esper_bench.streams.play import Player
from esper_bench.streams.recognition import FLOOR, InputMeans

START = {name: number.start for name, number in NUMBERS.items()}


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_shift_is_that_of_the_formula():
    means, batches = InputMeans(2, 3, 4), [normal(seed, 2, 8, 4) for seed in range(3)]
    means.add(batches[0], np.array([1, 0]))
    means.add(batches[1], np.array([1, 2]))
    found = means.shifts(batches[2])
    assert np.isnan(found).tolist() == [[True, False, True], [False, True, False]]
    past, x = torch.cat([batches[0][0], batches[1][0]]).double(), batches[2][0].double()
    slow = ((x.mean(0) - past.mean(0)) ** 2 / ((x.var(0, correction=0) + FLOOR) * (1 / 8 + 1 / 16))).mean()
    assert found[0, 1] == pytest.approx(float(slow))


def test_a_place_is_recognised_if_it_is_near_and_the_active_context_is_far():
    shifts = np.array([[9, 0.8, 9], [9, 0.8, 1.0], [9, 3, 9], [np.nan, np.nan, 9]])
    assert Fitted(4, START).recognise(shifts).tolist() == [1, KEEP, KEEP, KEEP]


def test_a_recognised_head_predicts_the_batch_and_the_other_one_is_stored():
    streams = draw_streams([5], [Change.SHARED], updates=8, batch_size=16)
    answers = iter([KEEP, 1])
    module = TrunkAndHead(streams.inputs, 6, 5, 1, streams.classes)
    learner = NetworkLearner(
        streams, module, OnAlarm(), lr=0.0, bank=2, recognise=lambda shifts: np.array([next(answers)])
    )
    rows = learner.rows
    rows.value[:, rows.trunk :] = 0.1 * normal(0, *rows.value[:, rows.trunk :].shape)
    stored = normal(1, rows.bank.numbers.shape[-1])
    rows.bank.numbers[0, 1], rows.bank.held[0, 1] = stored, 1
    x, y = streams.batch(0)
    before = learner.predict(x)
    active = rows.value[0, rows.trunk :].clone()
    learner.learn(x, y, scored(before, y))
    assert not torch.equal(learner.predict(x), before)
    assert torch.equal(rows.value[0, rows.trunk :], stored)
    assert torch.equal(rows.bank.numbers[0, 1], active)
    assert learner.done[0, [Operation.STORE, Operation.ACTIVATE]].tolist() == [1, 1]
    seen = rows.bank.inputs.seen[0]
    assert seen.tolist() == [0, 16, 0], "the means of the inputs move with the heads"


def test_the_first_batch_of_a_context_that_returns_is_predicted_by_its_head():
    streams = draw_streams([335], [Change.RECURRING], updates=160, batch_size=16)
    returns = [
        (start, n)
        for n, segments in enumerate(streams.segments)
        for index, (start, _, context) in enumerate(segments)
        if context in {each.context for each in segments[:index]}
    ]
    assert len(returns) == 3
    first = []
    for same in (0.0, 1.6):
        player = Player(streams, build_learner("shipped", streams, same=same))
        player.play()
        first.append(np.mean([player.accuracy[at] for at in returns]))
    assert first[1] > first[0] + 0.3


def test_the_share_of_a_rate_halves_down_to_the_least():
    age = np.array([0, 9, 10, 25, 99])
    assert share_left(age, 10.0, 0.2).tolist() == [1, 1, 0.5, 0.25, 0.2]
    assert share_left(age, 0.0, 0.2).tolist() == [1] * 5


def test_rates_of_networks_that_store_nothing_fall_with_the_updates_since_the_last_alarm():
    streams = draw_streams([5], [Change.SHARED], updates=8)
    learner = build_learner("reset-blocks-annealed", streams, halving=10.0, least=0.125, lr=0.01, head_rate=3.0)
    learner.alarm = learner.alarm._replace(since=np.array([20]))
    assert learner.rates()[0, [TRUNK, HEAD]].tolist() == pytest.approx([0.0025, 0.0075])


def test_only_the_member_that_trains_slows_down():
    streams = draw_streams([5], [Change.SHARED], updates=30, batch_size=16)
    learner = build_learner("ensemble-annealed", streams)
    for update in range(30):
        x, y = streams.batch(update)
        learner.learn(x, y, scored(learner.predict(x), y))
    assert learner.rows.age.sum() == 30
    assert (learner.rows.age == 0).any()
