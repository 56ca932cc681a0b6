"""Test streams as they are drawn."""

import itertools

import numpy as np
import pytest
import torch

from esper.leyline.messages import InputError
from esper_bench.streams.data import LONGEST, RANGES, SHORTEST, TRAINING, Change, digits, draw_streams

EVERY = list(Change)


@pytest.fixture(scope="module")
def streams():
    return draw_streams(range(100, 100 + len(EVERY)), EVERY, updates=400)


def test_segments_follow_each_other_and_change_the_context(streams):
    for own in streams.segments:
        assert own[0].start == 0
        assert own[-1].stop == 400
        for one, other in itertools.pairwise(own):
            assert one.stop == other.start
            assert one.context != other.context
            assert SHORTEST <= one.stop - one.start <= LONGEST


def test_contexts_return_where_the_change_says_so(streams):
    for change, own in zip(EVERY, streams.segments, strict=True):
        contexts = [segment.context for segment in own]
        if change in (Change.RECURRING, Change.SHARED):
            assert set(contexts) <= set(range(6))
        elif change == Change.HALF:
            assert any(context > 3 for context in contexts)
        else:
            assert contexts == list(range(len(own)))


def test_a_stream_does_not_depend_on_the_others(streams):
    for n, change in enumerate(EVERY):
        alone = draw_streams([100 + n], [change], updates=400)
        assert alone.segments[0] == streams.segments[n]
        for update in (0, 57, 399):
            for one, other in zip(alone.batch(update), streams.batch(update), strict=True):
                assert torch.equal(one[0], other[n])


def test_training_validation_and_held_out_keys_are_disjoint():
    assert not any(
        range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in itertools.combinations(RANGES.values(), 2)
    )


def test_a_segment_of_class_arrival_has_its_two_or_three_classes(streams):
    n = EVERY.index(Change.CLASSES)
    for start, stop, _ in streams.segments[n]:
        seen = torch.cat([streams.batch(update)[1][n] for update in range(start, stop)]).unique()
        assert len(seen) in (2, 3)


def test_shared_contexts_are_turned_flipped_or_inverted_digits(streams):
    n = EVERY.index(Change.SHARED)
    x, _ = streams.batch(0)
    context = streams.segments[n][0].context
    order = streams.pixels[n, context].reshape(8, 8)
    assert (order.diff(dim=0).abs().unique().tolist(), order.diff(dim=1).abs().unique().tolist()) in (
        ([8], [1]),
        ([1], [8]),
    )
    restored = torch.zeros(32, 64)
    restored[:, streams.pixels[n, context]] = x[n]
    if streams.inverted[n, context]:
        restored = digits().inverted - restored
    train = digits().x[:TRAINING]
    assert all(torch.isclose(train, example, atol=1e-5).all(1).any() for example in restored)


def test_novel_labels_rename_the_classes_and_leave_the_pixels(streams):
    n = EVERY.index(Change.LABELS)
    assert torch.equal(streams.pixels[n, 3], torch.arange(64))
    assert not torch.equal(streams.labels[n, 0], streams.labels[n, 1])
    assert torch.equal(streams.labels[n, 1].sort().values, torch.arange(10))


def test_drift_fades_from_one_context_into_the_next(streams):
    n = EVERY.index(Change.DRIFT)
    for start, stop, _ in streams.segments[n]:
        assert streams.fade[start, n] == 0
        assert stop == 400 or float(streams.fade[stop - 1, n]) == pytest.approx(np.pi / 2)


def test_tests_are_made_of_digits_that_no_batch_has(streams):
    held = digits().x[TRAINING:]
    n = EVERY.index(Change.LABELS)
    x, _ = streams.test(np.zeros(len(EVERY), np.int64), 50)
    assert all((held == example).all(1).any() for example in x[n])


@pytest.mark.parametrize(
    ("given", "said"), [({"updates": 0}, "has no segments"), ({"batch_size": 0}, "batch_size is 0")]
)
def test_a_stream_without_segments_is_one_sentence(given, said):
    with pytest.raises(InputError, match=said):
        draw_streams([1], [Change.NOVEL], **given)


def test_no_stream_is_one_sentence():
    with pytest.raises(InputError, match="0 keys and 0 changes"):
        draw_streams([], [])
