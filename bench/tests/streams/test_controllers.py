"""Test rules that decide at alarms."""

import numpy as np

from esper_bench.streams.controllers import Adaptive, OnAlarm, StoreAndReactivate
from esper_bench.streams.decisions import KEEP, NEW
from stream_views import NONE, done, view_of


def test_without_an_alarm_no_rule_changes_a_head_or_a_block():
    for rule in (OnAlarm(new_head=True, reset=True, keep=0.5), StoreAndReactivate(), Adaptive(1)):
        assert done(rule.act(view_of(alarm=False))) == set()


def test_the_stored_head_of_least_loss_returns_if_it_fits():
    rule = StoreAndReactivate()
    assert rule.act(view_of((0.9, 0.4))).place.tolist() == [1]
    assert rule.act(view_of((1.7, NONE))).place.tolist() == [NEW]
    assert rule.act(view_of((0.95, NONE), loss=1.0)).place.tolist() == [NEW]
    assert done(rule.act(view_of((0.9, 0.4)))) == {"STORE", "ACTIVATE"}


def test_the_trunk_slows_down_once_it_has_settled():
    rule = StoreAndReactivate(trunk_rate=0.2, settle=60)
    assert np.isnan(rule.act(view_of(alarm=False, age=59)).trunk_rate[0])
    assert rule.act(view_of(alarm=False, age=60)).trunk_rate.tolist() == [0.2]


def test_the_adaptive_rule_resets_after_as_many_misses_as_it_has_patience():
    rule = Adaptive(1, patience=3)
    assert [done(rule.act(view_of())) for _ in range(4)] == [
        {"STORE", "NEW"},
        {"STORE", "NEW"},
        {"NEW", "RESET"},
        {"NEW", "RESET"},
    ]
    assert np.isnan(
        rule.act(view_of(alarm=False, age=60)).trunk_rate[0]
    )  # a trunk that is drawn again learns at the full rate


def test_the_adaptive_rule_goes_on_reactivating_where_heads_return():
    rule = Adaptive(1, patience=3)
    for _ in range(5):
        assert done(rule.act(view_of())) == {"STORE", "NEW"}
        assert done(rule.act(view_of((0.2, NONE)))) == {"STORE", "ACTIVATE"}


def test_the_adaptive_rule_keeps_the_trunk_where_only_labels_change():
    rule = Adaptive(1, patience=2)
    assert all(done(rule.act(view_of(shift=1.0))) == {"STORE", "NEW"} for _ in range(9))


def test_the_adaptive_rule_takes_a_slow_rise_of_the_loss_for_a_drift():
    rule = Adaptive(1, patience=4)
    assert [done(rule.act(view_of(loss=1.0))) for _ in range(2)] == [{"STORE", "NEW"}, {"NEW", "RESET"}]


def test_the_adaptive_rule_resets_at_once_where_batches_have_few_classes():
    assert done(Adaptive(1).act(view_of(classes=3))) == {"NEW", "RESET"}


def test_the_adaptive_rule_goes_on_from_its_memory():
    one, other = Adaptive(1, patience=3), Adaptive(1, patience=3)
    one.act(view_of())
    one.act(view_of())
    other.load(one.snapshot())
    assert done(other.act(view_of())) == done(one.act(view_of())) == {"NEW", "RESET"}
    assert one.act(view_of(alarm=False)).place.tolist() == [KEEP]
