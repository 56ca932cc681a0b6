"""Test the data feed: full batches, every example at most once an epoch, and orders that are keyed."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.data.keys import Purpose, key, permutations
from esper.leyline.data.task import Split
from esper.leyline.messages import InputError, counted
from esper.tolaria.stacked.data import Format, SharedBatchIterator

CPU = torch.device("cpu")


def make(instance, *, examples=23, batch=5, seed=0, episode=0):
    """Make a feed of examples that are their own number, at the beginning of an episode."""
    numbers = torch.arange(examples)
    split = Split(torch.stack([numbers, -numbers], 1).float(), numbers)
    feed = SharedBatchIterator(
        [split], np.zeros(len(instance), np.int64), np.asarray(instance, np.int64), seed, batch, Format((2,), CPU)
    )
    feed.reset(episode)
    return feed


def take(feed, batches):
    """Return the examples (E, batches, B) that each row saw."""
    return torch.stack([next(feed)[1] for _ in range(batches)], 1)


@settings(max_examples=40, deadline=None)
@given(examples=st.integers(1, 40), batch=st.integers(1, 10), envs=st.integers(1, 5), seed=st.integers(0, 2**62))
def test_an_epoch_gives_every_row_full_batches_and_no_example_twice(examples, batch, envs, seed):
    if batch > examples:
        return
    feed = make(range(envs), examples=examples, batch=batch, seed=seed)
    for _ in range(3):
        epoch = take(feed, examples // batch)
        assert epoch.shape == (envs, examples // batch, batch)
        for row in epoch.flatten(1).tolist():
            assert len(set(row)) == len(row)
            assert set(row) <= set(range(examples))


def test_an_epoch_whose_examples_come_out_even_holds_every_one_of_them():
    epoch = take(make(range(3), examples=20, batch=5), 4)
    assert all(sorted(row) == list(range(20)) for row in epoch.flatten(1).tolist())


def test_no_example_is_left_out_of_every_epoch():
    feed = make(range(3), examples=23, batch=5)
    seen = torch.cat([take(feed, 4) for _ in range(20)], 1)
    assert all(set(row) == set(range(23)) for row in seen.flatten(1).tolist())


def test_features_and_labels_belong_together():
    feed = make(range(4))
    for _ in range(9):
        x, y = next(feed)
        assert x.shape == (4, 5, 2)
        assert torch.equal(x[..., 0], y.float())
        assert torch.equal(x[..., 1], -y.float())


def test_targets_with_columns_keep_them():
    y = torch.arange(36).float().view(12, 3)
    feed = SharedBatchIterator(
        [Split(y[:, :1].clone(), y)], np.zeros(2, np.int64), np.arange(2), 0, 4, Format((1,), CPU)
    )
    feed.reset(0)
    x, target = next(feed)
    assert target.shape == (2, 4, 3)
    assert torch.equal(target[..., :1], x)


@settings(max_examples=25, deadline=None)
@given(envs=st.integers(2, 9), seed=st.integers(0, 2**62))
def test_the_order_of_a_row_does_not_depend_on_how_many_there_are(envs, seed):
    together = take(make(range(envs), seed=seed), 10)
    for row in range(envs):
        assert torch.equal(take(make([row], seed=seed), 10)[0], together[row])


def test_rows_of_one_instance_share_an_order_and_other_instances_have_another():
    seen = take(make([0, 1, 0, 2, 1]), 10)
    for a, b in itertools.combinations(range(5), 2):
        assert torch.equal(seen[a], seen[b]) == ((a, b) in {(0, 2), (1, 4)})


def test_every_epoch_and_every_episode_and_every_seed_has_an_order_of_its_own():
    orders = [
        take(make([0], episode=episode, seed=seed), 12)[0, 4 * epoch : 4 * epoch + 4].flatten().tolist()
        for episode in range(2)
        for seed in range(2)
        for epoch in range(3)
    ]
    assert len({tuple(order) for order in orders}) == len(orders)


@pytest.mark.parametrize("examples", [5, 12, 23, 99])
def test_the_order_of_an_epoch_is_the_permutation_of_its_key(examples):
    feed, batches = make([3, 8], examples=examples, seed=7, episode=2), examples // 5
    for epoch in range(5):
        keys = key(7, Purpose.ORDER, np.array([3, 8]), 2, epoch)
        order = permutations(keys, np.full(2, examples), CPU)[:, : 5 * batches]
        assert torch.equal(take(feed, batches).flatten(1), order)


def test_an_episode_begins_again_with_the_same_order():
    feed = make([0, 1])
    first = take(feed, 7)
    feed.reset(1)
    take(feed, 3)
    feed.reset(0)
    assert torch.equal(take(feed, 7), first)


@pytest.mark.parametrize("position", range(10))
def test_setting_the_batch_resumes_exactly(position):
    straight = take(make([0, 1, 1], episode=2), 12)
    feed = make([0, 1, 1], episode=2)
    feed.batch = position
    assert torch.equal(take(feed, 12 - position), straight[:, position:])


def test_a_feed_can_be_set_back():
    feed = make([0, 1])
    straight = take(feed, 9)
    feed.batch = 2
    assert torch.equal(take(feed, 7), straight[:, 2:])


def test_the_position_counts_batches():
    feed = make([0])
    take(feed, 6)
    assert feed.batch == 6


def test_a_split_of_one_batch_gives_it_every_time():
    seen = take(make([0], examples=5, batch=5), 3)
    assert all(sorted(batch) == list(range(5)) for batch in seen[0].tolist())


def test_rows_of_different_data_sets_see_what_each_sees_alone_and_narrower_inputs_end_in_0():
    sizes, widths, row = (23, 9, 40), (2, 4, 3), [1, 0, 2, 1]
    splits = [Split(torch.rand(n, d), torch.arange(n)) for n, d in zip(sizes, widths, strict=True)]

    def feed(splits, row, instance, inputs):
        made = SharedBatchIterator(splits, np.array(row), np.array(instance), 3, 4, Format((inputs,), CPU))
        made.reset(1)
        return made

    together = feed(splits, row, range(4), 4)
    alone = [feed([splits[r]], [0], [instance], widths[r]) for instance, r in enumerate(row)]
    for _ in range(25):
        x, y = next(together)
        for e, one in enumerate(alone):
            own_x, own_y = next(one)
            assert torch.equal(y[e], own_y[0])
            assert torch.equal(x[e, :, : widths[row[e]]], own_x[0])
            assert not x[e, :, widths[row[e]] :].any()


def test_a_feed_of_different_data_sets_can_be_set_to_any_position():
    splits = [Split(torch.arange(n).float()[:, None], torch.arange(n)) for n in (23, 9)]

    def feed():
        made = SharedBatchIterator(splits, np.array([0, 1]), np.array([0, 1]), 0, 4, Format((1,), CPU))
        made.reset(0)
        return made

    straight, resumed = take(feed(), 15), feed()
    for position in (7, 0, 11):
        resumed.batch = position
        assert torch.equal(take(resumed, 15 - position), straight[:, position:])


@pytest.mark.parametrize("examples", [1, 4])
def test_a_split_smaller_than_a_batch_is_refused_in_a_sentence(examples):
    with pytest.raises(InputError) as error:
        make([0], examples=examples, batch=5)
    sentence = str(error.value)
    assert sentence.startswith(f"the train split has {counted(examples, 'example')}, fewer than data.batch_size (5);")
    assert "\n" not in sentence


def test_whole_numbers_are_held_in_32_bits_where_they_fit_and_batches_have_64():
    tokens = torch.arange(40).view(20, 2)
    wide = torch.arange(20) + 2**40

    def feed(x, y):
        split = Split(x, y)
        return SharedBatchIterator([split], np.zeros(2, int), np.arange(2), 0, 5, Format((2,), CPU))

    narrow, other = feed(tokens, torch.arange(20)), feed(tokens, wide)
    assert (narrow.x.dtype, narrow.y.dtype, other.y.dtype) == (torch.int32, torch.int32, torch.int64)
    x, y = next(narrow)
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    assert torch.equal(x[..., 0], 2 * y)
    assert torch.equal(next(other)[1], y + 2**40)
