"""Test networks that learn streams."""

import numpy as np
import pytest
import torch

from esper.leyline.messages import InputError
from esper.store.checkpoint import flatten, unflatten
from esper_bench.streams.alarm import DEVIATIONS, LEAST, MEMORY, REST, InputShift, heard, silent
from esper_bench.streams.bank import EVERY_PART, HEAD_PART, SEED_PARTS, slot_part
from esper_bench.streams.controllers import OnAlarm
from esper_bench.streams.data import Change, draw_streams
from esper_bench.streams.decisions import KEEP, NEW, Operation, unchanged
from esper_bench.streams.learner import NetworkLearner, Price
from esper_bench.streams.methods import BANK, METHODS, build_learner
from esper_bench.streams.network import Rows, TrunkAndHead
from esper_bench.streams.play import Player, segment_accuracy

CHANGES = [Change.SHARED, Change.NOVEL, Change.DRIFT]


def streams_of(changes=CHANGES, updates=48):
    return draw_streams(range(40, 40 + len(changes)), changes, updates=updates, batch_size=16)


def rows_of(bank=2, keys=(7, 8, 9)):
    return Rows(TrunkAndHead(8, 6, 5, 2, 3), np.array(keys), bank=bank)


def end_of(name, streams, breaks=()):
    """Return the player at the end; at each of `breaks` a new one goes on from the state of the last, as a file keeps it."""
    player = Player(streams, build_learner(name, streams))
    for update in breaks:
        player.play(until=update)
        state = unflatten(*flatten(player.snapshot()))
        player = Player(streams, build_learner(name, streams))
        player.load(state)
    player.play()
    return player


def assert_equal_trees(one, other):
    tensors, plain = flatten(one)
    others, other_plain = flatten(other)
    assert plain == other_plain
    assert all(torch.equal(tensors[name], others[name]) for name in {**tensors, **others})


def test_store_and_activate_return_a_head_bit_for_bit():
    rows = rows_of()
    rows.value[:, rows.trunk :] = torch.randn(rows.value[:, rows.trunk :].shape)
    first, every, none = rows.value.clone(), np.arange(3), np.full(3, KEEP)
    rows.store_and_activate(every, np.ones(3, bool), none, 5)
    rows.new(every, 5)
    assert not rows.value[:, rows.trunk :].any()
    assert (rows.bank.held != 0).sum(1).tolist() == [1, 1, 1]
    rows.store_and_activate(every, np.ones(3, bool), rows.bank.held.argmax(1), 9)
    assert torch.equal(rows.value, first)
    slot = rows.bank.held.argmax(1)
    assert not rows.bank.numbers[every, slot].any()  # the head of zeros went to the slot that was freed


def test_a_full_bank_loses_the_head_that_was_stored_first():
    rows, one, none = rows_of(bank=2, keys=(7,)), np.array([0]), np.array([KEEP])
    for update, value in enumerate((1.0, 2.0, 3.0)):
        rows.value[:, rows.trunk :] = value
        rows.store_and_activate(one, np.array([True]), none, update)
    assert sorted(rows.bank.numbers[0, :, 0].tolist()) == [2.0, 3.0]


def test_stored_heads_predict_as_they_did_when_active():
    rows, x = rows_of(), torch.randn(3, 4, 8)
    rows.value[:, rows.trunk :] = torch.randn(rows.value[:, rows.trunk :].shape)
    features = rows.features(x, slice(0, 3)).detach()
    before = rows.logits(features, slice(0, 3)).detach()
    rows.store_and_activate(np.arange(3), np.ones(3, bool), np.full(3, KEEP), 0)
    rows.new(np.arange(3), 0)
    stored = rows.stored_logits(x, features, np.arange(3))
    torch.testing.assert_close(stored[torch.arange(3), rows.bank.held.argmax(1)], before)


def test_a_reset_draws_blocks_with_zero_output_and_empties_the_bank():
    rows, x = rows_of(), torch.randn(3, 4, 8)
    rows.value[:] = torch.randn(rows.value.shape)
    rows.bank.held[:] = HEAD_PART
    before = rows.value.clone()
    rows.redraw_blocks(np.array([1]), update=3)
    embedded = rows.stack(x, slice(0, 3), part="trunk.0")
    assert torch.equal(rows.features(x, slice(0, 3))[1], embedded[1])
    assert rows.bank.held.any(1).tolist() == [True, False, True]
    assert torch.equal(rows.value[[0, 2]], before[[0, 2]])
    assert torch.equal(rows.value[1, rows.trunk :], before[1, rows.trunk :])


@pytest.mark.parametrize("name", METHODS)
def test_a_stream_resumed_in_the_middle_of_a_segment_is_bitwise_the_same(name):
    streams = streams_of()
    one, other = end_of(name, streams), end_of(name, streams, breaks=(17, 35))
    assert_equal_trees(one.snapshot(), other.snapshot())
    assert np.array_equal(one.result().retention, other.result().retention)


@pytest.mark.parametrize("name", METHODS)
def test_a_stream_is_bitwise_the_same_alone_and_among_others(name):
    among = end_of(name, streams_of()).result()
    for n, change in enumerate(CHANGES):
        streams = draw_streams([40 + n], [change], updates=48, batch_size=16)
        alone = end_of(name, streams).result()
        assert np.array_equal(alone.loss[:, 0], among.loss[:, n])
        assert alone.price[0].tolist() == among.price[n].tolist()


def test_a_batch_is_scored_before_it_is_trained_on():
    streams = streams_of()
    player = Player(streams, build_learner("reset-blocks", streams))
    for update in range(5):
        x, y = streams.batch(update)
        twin = build_learner("reset-blocks", streams)
        twin.load(unflatten(*flatten(player.learner.snapshot())))
        logits = twin.predict(x)  # without the labels
        player.play(until=update + 1)
        right = (logits.argmax(-1) == y).float().mean(-1)
        np.testing.assert_allclose(player.accuracy[update], right.numpy(), rtol=1e-6)
    assert not torch.equal(twin.predict(x), player.learner.predict(x))  # the player has trained on it since


def test_a_segment_has_the_mean_accuracy_of_its_updates():
    streams = streams_of()
    accuracy = np.arange(48 * 3, dtype=np.float32).reshape(48, 3)
    for n, found in enumerate(segment_accuracy(streams, accuracy)):
        lengths = [segment.stop - segment.start for segment in streams.segments[n]]
        assert np.average(found, weights=lengths) == pytest.approx(accuracy[:, n].mean())


def test_prices_add_up_to_the_multiply_adds_of_every_pass():
    streams = streams_of([Change.SHARED] * 3, updates=80)
    learner = build_learner("reactivate", streams)
    player, consulted = Player(streams, learner), np.zeros(3)
    weights = [place.shape.numel() for place in learner.rows.stack.places if place.name.endswith("weight")]
    for update in range(80):
        stored = (learner.rows.bank.held != 0).sum(1)
        player.play(until=update + 1)
        consulted += np.where(player.alarms[update], stored * weights[-1] * 16, 0)
    found = player.result()
    assert found.alarms.any(0).all()
    batch = sum(weights) * 16
    again = found.operations[:, Operation.ACTIVATE] + found.operations[:, Operation.NEW]
    assert np.array_equal(found.price[:, Price.PREDICT], np.full(3, 80 * batch))
    assert np.array_equal(found.price[:, Price.TRAIN], 2 * 80 * batch + again * batch)
    assert np.array_equal(found.price[:, Price.CONSULT], consulted)


def test_reactivation_brings_back_a_head_and_keeps_more_than_a_static_network():
    streams = streams_of([Change.SHARED] * 2, updates=400)
    ours, static = (end_of(name, streams).result() for name in ("reactivate", "reset-blocks"))
    assert (ours.operations[:, Operation.ACTIVATE] > 0).all()
    assert (ours.operations.sum(0)[[Operation.RESET, Operation.SHRINK]] == 0).all()
    assert (ours.retention > static.retention + 0.1).all()


def test_the_rate_of_the_host_is_a_share_and_a_host_of_rate_zero_stays_bit_for_bit():
    class Freezes(OnAlarm):
        def act(self, view):
            return unchanged(len(view.loss))._replace(trunk_rate=np.zeros(len(view.loss)))

    streams = streams_of()
    learner = NetworkLearner(streams, TrunkAndHead(64, 8, 8, 1, 10), Freezes(), lr=0.01)
    before = learner.rows.value.clone()
    Player(streams, learner).play(until=5)
    trunk = slice(0, learner.rows.trunk)
    assert torch.equal(learner.rows.value[:, trunk], before[:, trunk])
    assert not torch.equal(learner.rows.value, before)


def test_no_decision_changes_nothing():
    decision = unchanged(3)
    assert not decision.operations().any()
    new = decision._replace(place=np.array([NEW, KEEP, 0]), store=np.array([True, False, False]))
    assert new.operations()[:, [Operation.STORE, Operation.ACTIVATE, Operation.NEW]].tolist() == [
        [True, False, True],
        [False, False, False],
        [False, True, False],
    ]


def test_an_alarm_is_a_loss_far_above_its_running_mean():
    random = np.random.default_rng(3)
    losses = np.abs(random.normal(1, 0.3, (60, 2))) + 2 * (random.random((60, 2)) < 0.1)
    state, found = silent(2), []
    for loss in losses:
        state, rings = heard(state, loss)
        found.append(rings)
    for n in range(2):
        mean, variance, since = None, 0.0, 0
        for update, loss in enumerate(losses[:, n]):
            above = 0 if mean is None else loss - mean
            rings = since >= REST and above > max(LEAST, DEVIATIONS * variance**0.5)
            assert found[update][n] == rings
            variance = 0.0 if mean is None else MEMORY * (variance + (1 - MEMORY) * above**2)
            mean = loss if mean is None else MEMORY * mean + (1 - MEMORY) * loss
            since += 1
            if rings:
                mean, variance, since = None, 0.0, 0
    assert 0 < np.sum(found) < 20


def test_alarms_find_sudden_changes_and_little_else():
    streams = streams_of([Change.NOVEL, Change.NOVEL], updates=300)
    found = end_of("reset-blocks", streams).result().alarms
    for n in range(2):
        starts = [segment.start for segment in streams.segments[n][1:]]
        assert found[starts, n].mean() >= 0.9
        assert found[:, n].sum() <= len(starts) + 2


def test_the_shift_of_the_inputs_is_one_without_a_change_and_large_with_one():
    generator = torch.Generator().manual_seed(1)
    shift, none = InputShift(2, 200), np.zeros(2, bool)
    assert np.isnan(shift.measure(torch.zeros(2, 32, 200))).all()
    for _ in range(20):
        shift.add(torch.randn(2, 32, 200, generator=generator) + 3, none)
    x = torch.randn(2, 32, 200, generator=generator) + 3
    x[1] += 1
    same, moved = shift.measure(x)
    assert 0.7 < same < 1.4
    assert moved > 20


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [("adam", {}, "did you mean 'adamw'"), ("adamw", {"keep": 1}, "adamw has no setting 'keep'; its settings are lr")],
)
def test_an_unknown_method_or_setting_is_one_sentence(name, settings, said):
    with pytest.raises(InputError, match=said):
        build_learner(name, streams_of(), **settings)


def test_methods_are_of_about_the_same_size():
    streams = streams_of(updates=1)
    for name in METHODS:
        learner = build_learner(name, streams)
        rows = len(learner.rows.keys) // len(streams.keys)
        numbers = rows * learner.rows.stack.size + learner.rows.bank.numbers[0].numel()
        if name.startswith("replay"):
            numbers += learner.addition.x[0].numel() // 4 + learner.addition.y[0].numel() // 4
        if learner.rows.bank.holds & SEED_PARTS:
            numbers += learner.rows.bank.dose[0].numel()
        if name in ("shipped", "ensemble-recognising"):
            inputs = learner.rows.bank.inputs if name == "shipped" else learner.inputs
            numbers += inputs.mean[0].numel()
        assert 8_150 <= numbers <= 8_650, (name, numbers)
    assert learner.rows.bank.numbers.shape[1] in (0, BANK)


def seeded_rows(holds=EVERY_PART, bank=2, keys=(7, 8, 9)):
    rows = Rows(TrunkAndHead(8, 6, 5, 2, 3, norm=True, rank=2), np.array(keys), bank=bank, holds=holds)
    rows.value[:, rows.trunk :] = torch.randn(rows.value[:, rows.trunk :].shape)
    return rows


@pytest.mark.parametrize("holds", [HEAD_PART, SEED_PARTS, EVERY_PART])
def test_seeds_and_heads_go_to_the_bank_and_come_back_bit_for_bit(holds):
    rows, every, x = seeded_rows(holds), np.arange(3), torch.randn(3, 4, 8)
    first = rows.value.clone()
    shown = rows.logits(rows.features(x, slice(0, 3)), slice(0, 3)).detach()
    rows.store_and_activate(every, np.ones(3, bool), np.full(3, KEEP), 5)
    rows.new(every, 5)
    moved = torch.zeros(rows.stack.size, dtype=torch.bool)
    for _, region in rows.bank.regions:
        moved[region] = True
    assert torch.equal(rows.value[:, ~moved], first[:, ~moved])
    assert not (rows.value[:, moved] == first[:, moved]).all(1).any()
    assert torch.equal(rows.stored_logits(x, rows.features(x, slice(0, 3)), every)[:, 0], shown)
    assert not (rows.value[:, moved] == first[:, moved]).all(1).any()  # the trial left the active parts alone
    rows.store_and_activate(every, np.ones(3, bool), np.zeros(3, int), 9)
    assert torch.equal(rows.value, first)


def test_the_seed_of_one_slot_moves_alone():
    rows, every = seeded_rows(), np.arange(3)
    first, second = rows.value.clone(), slot_part(1)
    region = dict(rows.bank.regions)[second]
    rows.store_and_activate(every, np.ones(3, bool), np.full(3, KEEP), 5, np.full(3, second))
    assert rows.bank.held[:, 0].tolist() == [second] * 3
    rows.new(every, 5, np.full(3, second))
    changed = (rows.value != first).any(0)
    assert changed[region].any()
    assert not changed[: region.start].any()
    assert not changed[region.stop :].any()
    rows.store_and_activate(every, np.zeros(3, bool), np.zeros(3, int), 6, np.full(3, second))
    assert torch.equal(rows.value, first)
    assert not rows.bank.held.any()


def test_a_new_seed_changes_nothing_until_it_trains():
    rows, x = seeded_rows(), torch.randn(3, 4, 8)
    rows.new(np.arange(3), 0)
    assert torch.equal(rows.features(x, slice(0, 3)), rows.stack(x, slice(0, 3), part="trunk"))


def test_stored_seeds_act_together_with_the_doses_of_the_context():
    rows, every, x = seeded_rows(), np.arange(3), torch.randn(3, 4, 8)
    kept = rows.value[1].clone()
    rows.store_and_activate(every, np.ones(3, bool), np.full(3, KEEP), 5)
    rows.new(every, 5)
    new = rows.value[1].clone()
    dose = np.full((3, 2), np.nan)
    dose[1, 0] = 0.25
    assert rows.bank.set_doses(dose).tolist() == [False, True, False]
    net = [TrunkAndHead(8, 6, 5, 2, 3, norm=True, rank=2) for _ in range(2)]
    for own, vector in zip(net, (kept, new), strict=True):
        for place, parameter in zip(rows.stack.places, own.parameters(), strict=True):
            parameter.data.copy_(place.of(vector))
    h = net[1].trunk[0](x[1])
    for block, old, seed in zip(net[1].trunk[1:], net[0].seeds, net[1].seeds, strict=False):
        h = block(h)
        h = h + seed(h) + 0.25 * old(h)
    shown = rows.features(x, slice(0, 3))
    torch.testing.assert_close(shown[1], net[1].trunk[-1](h))
    # Another context comes and goes: the doses return with the context that they belong to.
    rows.store_and_activate(every, np.ones(3, bool), np.full(3, KEEP), 6)
    rows.new(every, 6)
    assert not rows.bank.dose[1, -1, :-1].any()
    rows.store_and_activate(every, np.ones(3, bool), np.ones(3, int), 7)
    assert torch.equal(rows.features(x, slice(0, 3)), shown)
    # A seed that was lost no longer acts.
    rows.bank.empty(every)
    assert torch.equal(rows.bank.dose, torch.eye(3).repeat(3, 1, 1))


def test_places_without_a_seed_take_no_dose():
    rows = seeded_rows()
    assert not rows.bank.set_doses(np.ones((3, 2))).any()
    assert not rows.bank.dose[:, -1, :-1].any()
