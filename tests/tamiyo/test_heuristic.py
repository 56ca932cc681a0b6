import numpy as np
import pytest

from esper.leyline.config.tree import Config, GatesConfig, HeuristicConfig
from esper.leyline.lifecycle.view import BlueprintInfo, Estimate, Seeds, take
from esper.leyline.lifecycle.vocabulary import Actions, Op, Stage
from esper.tamiyo.rules.heuristic import Heuristic, progress_of, relative_metric

DORMANT, TRAINING, HOLDING = Stage.DORMANT, Stage.TRAINING, Stage.HOLDING
PLANTABLE = {Op.GERMINATE: True}
GATES = GatesConfig(min_training_steps=2, min_holding_steps=2, min_contribution=0.0, contribution_z=1.0)
LINEAR, MLP, SMALL = range(3)  # of the menu of `view`
EVEN = [[0.3, 0.3, 0.3]]


def rule(**config):
    settings = {"plant_below": 0.9, "weak_below": 0.7, "narrow_from": 0.5, "tie_ratio": 1.0, "spare_steps": 0, **config}
    return Heuristic(HeuristicConfig(**settings), GATES)


def decide(view, **config):
    """Return (op, slot) of the first environment."""
    actions = rule(**config).act(view)
    return Op(actions.op[0]), int(actions.slot[0])


# Where it plants.


def test_it_plants_a_linear_bypass_where_the_inner_units_are_all_in_use(view):
    narrow = view(may=PLANTABLE, inner=[[0.2, 0.6, 0.3]], participation=[[0.1, 0.2, 0.3]])
    assert decide(narrow) == (Op.GERMINATE, 1)
    assert rule().act(narrow).blueprint == [LINEAR]


def test_a_segment_whose_inner_features_are_all_dead_counts_as_narrow(view):
    assert decide(view(may=PLANTABLE, inner=[[0.3, 0.3, 0.0]], metric=0.8)) == (Op.GERMINATE, 2)


def test_of_several_narrow_segments_it_takes_that_of_the_lowest_participation_of_the_stream(view):
    both = view(may=PLANTABLE, inner=[[0.9, 0.2, 0.9, 0.2, 0.2]], participation=[[0.3, 0.1, 0.2, 0.1, 0.1]],
                stages=((DORMANT,) * 5,))  # fmt: skip
    assert decide(both) == (Op.GERMINATE, 2)


def test_it_ranks_within_the_host_so_that_hosts_of_few_features_grow_too(view):
    # one direction of two is a participation of .5, which no bound below 1 / width could ever find
    assert decide(view(may=PLANTABLE, participation=[[0.7, 0.5, 0.9]], width=np.full((1, 3), 2))) == (Op.GERMINATE, 1)


def test_it_plants_a_hidden_layer_at_the_thinnest_slot_of_a_weak_host_without_a_narrow_segment(view):
    even = view(may=PLANTABLE, inner=EVEN, participation=[[0.3, 0.1, 0.2]])
    assert decide(even) == (Op.GERMINATE, 1)
    assert rule().act(even).blueprint == [MLP]


@pytest.mark.parametrize("stage", [Stage.BLENDING, HOLDING, Stage.FOSSILIZED])
def test_a_host_that_stays_weak_behind_a_seed_gets_a_hidden_layer_too_once_that_seed_is_blended_in(view, stage):
    for first, expected in ((TRAINING, (Op.WAIT, 0)), (stage, (Op.GERMINATE, 1))):
        grown = view([[first, DORMANT, DORMANT]], {Op.GERMINATE: [False, True, True]}, inner=[[0.9, 0.3, 0.3]])
        assert decide(grown) == expected
    assert rule().act(grown).blueprint == [MLP]


def test_behind_a_narrow_segment_it_plants_while_another_seed_incubates(view):
    grown = view([[TRAINING, DORMANT, DORMANT]], {Op.GERMINATE: [False, True, True]}, inner=[[0.9, 0.3, 0.9]])
    assert decide(grown) == (Op.GERMINATE, 2)


def test_where_no_segment_is_narrow_it_plants_at_a_lower_metric_only(view):
    seen = [decide(view(may=PLANTABLE, inner=EVEN, metric=metric))[0] for metric in (0.69, 0.71)]
    assert seen == [Op.GERMINATE, Op.WAIT]


def test_without_inner_features_it_goes_by_the_stream_alone(view):
    for blind in ({"inner": np.nan}, {}):
        seen = view(may=PLANTABLE, metric=0.8, participation=[[0.3, 0.1, 0.2]], **blind)
        assert decide(seen) == (Op.GERMINATE, 1)


def test_without_inner_features_the_first_of_slots_that_are_about_as_thin_wins(view):
    thin = view(may=PLANTABLE, participation=[[0.3, 0.13, 0.1]])
    assert [decide(thin, tie_ratio=tie) for tie in (1.2, 1.4, 4.0)] == [
        (Op.GERMINATE, 2),
        (Op.GERMINATE, 1),
        (Op.GERMINATE, 0),
    ]


def test_a_slot_that_was_not_measured_is_planted_after_those_that_were(view):
    assert decide(view(may=PLANTABLE, participation=[[np.nan, 0.4, np.nan]])) == (Op.GERMINATE, 1)
    assert decide(view(may=PLANTABLE, participation=np.nan)) == (Op.GERMINATE, 0)


def test_it_plants_only_at_slots_that_may_be_planted(view):
    may = {Op.GERMINATE: [[True, False, True]]}
    assert decide(view(may=may, participation=[[0.3, 0.1, 0.2]])) == (Op.GERMINATE, 2)
    assert decide(view(may={})) == (Op.WAIT, 0)


def test_it_plants_from_the_first_decision_on(view):
    assert decide(view(may=PLANTABLE, step=0)) == (Op.GERMINATE, 0)


# What it plants.


def test_it_plants_the_blueprints_that_it_was_told_in_their_order(view):
    narrow = view(may=PLANTABLE, inner=[[0.9, 0.2, 0.2]])
    assert rule(narrow_blueprints=("attention", "mlp-small")).act(narrow).blueprint == [SMALL]
    assert rule(weak_blueprints=("bypass-linear",)).act(view(may=PLANTABLE, inner=EVEN)).blueprint == [LINEAR]


def test_it_chooses_a_blueprint_that_fits_the_slot(view):
    fits = np.array([[False, False, True]] * 3)
    assert rule().act(view(may=PLANTABLE, fits=fits)).blueprint == [SMALL]


def test_it_plants_where_the_budget_pays_for_its_blueprint_and_not_where_it_was_refused_before(view):
    cost = np.broadcast_to([[[10, 80, 5], [10, 20, 5], [10, 20, 5]]], (1, 3, 3))
    thin = view(may=PLANTABLE, inner=EVEN, participation=[[0.1, 0.2, 0.3]], cost=cost)
    thin = thin._replace(host_params=np.array([100]))
    for limit, expected in ((None, (Op.GERMINATE, 0)), (0.5, (Op.GERMINATE, 1)), (0.15, (Op.WAIT, 0))):
        settings = {"plant_below": 0.9, "weak_below": 0.7, "tie_ratio": 1.0}
        actions = Heuristic(HeuristicConfig(**settings), GATES, limit).act(thin)
        assert (Op(actions.op[0]), int(actions.slot[0])) == expected


def test_where_no_named_blueprint_fits_it_takes_the_cheapest_bypass(view):
    menu = tuple(BlueprintInfo(name, tap) for name, tap in (("a", "here"), ("b", "before"), ("c", "before")))
    cost = np.tile([10, 300, 200], (3, 1))
    assert rule().act(view(may=PLANTABLE, blueprints=menu, cost=cost)).blueprint == [2]
    only_depth = np.array([[True, False, False]] * 3)
    assert rule().act(view(may=PLANTABLE, blueprints=menu, cost=cost, fits=only_depth)).blueprint == [0]


# What can be gained.


@pytest.mark.parametrize(("floor", "metric", "op"), [(0.97, 0.97, Op.GERMINATE), (0.5, 0.97, Op.WAIT)])
def test_the_limit_is_relative_to_what_can_be_gained(view, floor, metric, op):
    seen = view(may=PLANTABLE, metric=metric, floor=np.array([floor]))
    assert decide(seen)[0] == op


def test_the_share_that_a_metric_has_reached_is_0_at_the_floor_and_1_at_the_ceiling():
    metric, floor = np.array([0.97, 0.985, 1.0, -3.0, np.nan]), np.array([0.97, 0.97, 0.97, 0.0, 0.0])
    np.testing.assert_allclose(relative_metric(metric, floor, np.ones(5)), [0, 0.5, 1, -3, np.nan])
    assert relative_metric(np.ones(1), np.ones(1), np.ones(1)) == 1  # nothing can be gained
    assert relative_metric(np.ones(1), np.full(1, np.nan), np.ones(1)) == -np.inf  # nobody knows


def test_a_metric_whose_range_is_not_known_is_no_obstacle(view):
    assert decide(view(may=PLANTABLE, metric=123.0, floor=np.full(1, np.nan)))[0] == Op.GERMINATE


def test_it_does_not_plant_where_the_metric_is_not_a_number(view):
    assert decide(view(may=PLANTABLE, metric=np.nan)) == (Op.WAIT, 0)


# Time.


def test_it_does_not_plant_what_cannot_be_fossilized_in_time(view):
    # planted at t: ADVANCE at t + 1 + 2, two steps of ramp, two of trial, FOSSILIZE at t + 7, at most step 23
    assert decide(view(may=PLANTABLE, step=16, steps=24)) == (Op.GERMINATE, 0)
    assert decide(view(may=PLANTABLE, step=17, steps=24)) == (Op.WAIT, 0)


def test_spare_steps_end_planting_earlier(view):
    assert decide(view(may=PLANTABLE, step=12, steps=24), spare_steps=4) == (Op.GERMINATE, 0)
    assert decide(view(may=PLANTABLE, step=13, steps=24), spare_steps=4) == (Op.WAIT, 0)


def test_it_does_not_advance_what_cannot_be_fossilized_in_time(view):
    # advanced at t: two steps of ramp, two of trial, FOSSILIZE at t + 4
    may = {Op.ADVANCE: [True, False, False]}
    assert decide(view([[TRAINING, DORMANT, DORMANT]], may, step=19, steps=24, gain=0.1)) == (Op.ADVANCE, 0)
    assert decide(view([[TRAINING, DORMANT, DORMANT]], may, step=20, steps=24, gain=0.1)) == (Op.WAIT, 0)


# Where it is measured what is missing.


def nominating(view, missing, **fields):
    """Make a view with what is missing at the slots."""
    made = view(may={Op.GERMINATE: True, Op.PRUNE: True}, sensors=("missing",), **fields)
    sensors = np.array([missing], np.float64)[..., None]
    return made._replace(measurements=made.measurements._replace(sensors=sensors))


def test_it_plants_where_most_is_missing_by_a_measurement_of_this_decision(view):
    lacking = nominating(view, [0.1, 0.3, 0.0])
    assert decide(lacking) == (Op.GERMINATE, 1)
    old = lacking.measurements._replace(sensor_age=1)
    assert decide(lacking._replace(measurements=old)) == (Op.WAIT, 0)


@pytest.mark.parametrize(
    ("missing", "step", "allowed", "ramp"),
    [(0.3, 0, True, 0), (0.3, 4, True, 2), (0.04, 0, True, 2), (0.3, 0, False, 2)],
)
def test_what_is_plainly_missing_before_the_first_step_acts_at_once_where_the_masks_allow_it(
    view, missing, step, allowed, ramp
):
    lacking = nominating(view, [0.0, missing, 0.0], step=step)
    lacking.masks.tempo[:, Op.GERMINATE, :, 0] = allowed
    rule_ = rule()
    actions = rule_.act(lacking)
    assert (int(actions.slot[0]), lacking.space.tempos[actions.tempo[0]]) == (1, ramp)
    assert ("acts at once" in rule_.reasons()[0]) == (ramp == 0)


# What it keeps.


def test_it_fossilizes_the_holding_seed_of_the_largest_contribution(view):
    v = view([[HOLDING] * 3], {Op.FOSSILIZE: [True, True, False]}, contribution=[[0.02, 0.04, 0.06]])
    assert decide(v) == (Op.FOSSILIZE, 1)


def test_it_does_not_fossilize_what_was_not_measured(view):
    assert decide(view([[HOLDING] * 3], {Op.FOSSILIZE: True})) == (Op.WAIT, 0)


@pytest.mark.parametrize(("rent_size", "op"), [(0, Op.PRUNE), (100_000, Op.FOSSILIZE)])
def test_it_keeps_what_brings_in_more_than_a_share_of_its_rent(view, rent_size, op):
    # the seed doubles a host of 100: at rent .1 that costs .0693, of which half is asked for
    may = {Op.FOSSILIZE: [True, False, False], Op.PRUNE: True}
    v = view([[HOLDING, DORMANT, DORMANT]], may, age=2, contribution=0.03, rent=0.1, rent_size=rent_size)
    v = v._replace(host_params=np.array([100]), added_params=np.array([100]))
    assert decide(v, keep_above=0.5) == (op, 0)
    assert decide(v, keep_above=0.4) == (Op.FOSSILIZE, 0)


def test_where_the_objective_is_the_loss_it_keeps_by_the_contribution_to_the_loss(view):
    v = view([[HOLDING] * 3], {Op.FOSSILIZE: True, Op.PRUNE: True}, age=2, contribution=-0.1, objective="log_loss")
    gains = np.full((1, 3), 0.2)
    v = v._replace(measurements=v.measurements._replace(contribution_loss=Estimate(gains, gains / 9, gains > 0)))
    assert decide(v) == (Op.FOSSILIZE, 0)


def test_it_prunes_the_seed_that_brings_in_least_of_those_that_do_not_pay(view):
    v = view([[HOLDING] * 3], {Op.PRUNE: True}, age=2, contribution=[[-0.02, -0.05, 0.03]])
    assert decide(v) == (Op.PRUNE, 1)


def test_a_seed_is_on_trial_for_the_steps_that_its_gate_asks_for(view):
    seen = [decide(view([[HOLDING] * 3], {Op.PRUNE: True}, age=age, contribution=-0.5))[0] for age in (1, 2)]
    assert seen == [Op.WAIT, Op.PRUNE]


@pytest.mark.parametrize(("other", "op"), [(TRAINING, Op.WAIT), (Stage.BLENDING, Op.WAIT), (HOLDING, Op.PRUNE)])
def test_what_does_not_pay_is_kept_on_trial_until_no_other_seed_is_on_its_way_in(view, other, op):
    v = view([[HOLDING, other, DORMANT]], {Op.PRUNE: True}, age=2, contribution=[[-0.5, 0.5, np.nan]])
    assert decide(v) == (op, 0)


def test_a_seed_on_its_way_out_delays_no_judgement(view):
    v = view([[HOLDING, Stage.BLENDING, DORMANT]], {Op.PRUNE: [True, False, False]}, age=2, contribution=-0.5,
             doomed=[[False, True, False]])  # fmt: skip
    assert decide(v) == (Op.PRUNE, 0)


def test_it_does_not_judge_a_blending_seed(view):
    assert decide(view([[Stage.BLENDING] * 3], {Op.PRUNE: True}, age=9, contribution=-0.5)) == (Op.WAIT, 0)


@pytest.mark.parametrize("stage", [TRAINING, HOLDING])
def test_it_prunes_a_seed_that_its_gate_has_refused_for_as_long_as_patience_lasts(view, stage):
    # the dwell is 2 steps for both, so the decision at age 2 is the first refusal and that at age 4 the third
    for age, expected in ((3, Op.WAIT), (4, Op.PRUNE)):
        v = view([[stage, DORMANT, DORMANT]], {Op.PRUNE: [True, False, False]}, age=age, contribution=0.5)
        assert decide(v, holding_patience=3, training_patience=3)[0] == expected


@pytest.mark.parametrize(("stage", "onward"), [(TRAINING, Op.ADVANCE), (HOLDING, Op.FOSSILIZE)])
def test_it_does_not_prune_a_seed_that_passes_its_gate_at_last(view, stage, onward):
    may = {Op.PRUNE: [True, False, False], onward: [True, False, False]}
    v = view([[stage, DORMANT, DORMANT]], may, age=20, gain=0.1, contribution=0.1)
    assert decide(v, holding_patience=1, training_patience=1) == (onward, 0)


def test_it_prunes_only_what_the_masks_allow(view):
    assert decide(view([[HOLDING] * 3], {}, age=9, contribution=-0.5)) == (Op.WAIT, 0)


def test_it_advances_the_trained_seed_of_the_largest_gain(view):
    v = view([[TRAINING] * 3], {Op.ADVANCE: [False, True, True]}, gain=[[0.5, 0.1, 0.2]])
    assert decide(v) == (Op.ADVANCE, 2)


def test_it_keeps_before_it_advances_before_it_prunes_before_it_plants(view):
    stages = [[HOLDING, TRAINING, HOLDING, DORMANT]]
    may = {
        Op.FOSSILIZE: [True, False, False, False],
        Op.ADVANCE: [False, True, False, False],
        Op.PRUNE: [True, True, True, False],
        Op.GERMINATE: [False, False, False, True],
    }
    order = []
    for op in (Op.FOSSILIZE, Op.ADVANCE, Op.PRUNE, Op.GERMINATE):
        order.append(decide(view(stages, may, age=4, gain=0.1, contribution=[[0.1, np.nan, -0.1, np.nan]])))
        del may[op]
    assert order == [(Op.FOSSILIZE, 0), (Op.ADVANCE, 1), (Op.PRUNE, 2), (Op.GERMINATE, 3)]


# What it says.


def explained(*views, accepted=True, **config):
    controller = rule(**config)
    for seen in views:
        actions = controller.act(seen)
        controller.store(_Outcome(actions, np.full(len(actions.op), accepted)))
    return controller


class _Outcome:
    """Holds the two fields of an outcome that the rule reads."""

    def __init__(self, actions: Actions, accepted: np.ndarray) -> None:
        self.actions, self.accepted = actions, accepted


def test_it_says_that_the_metric_was_too_good_and_which_key_decides(view):
    (sentence,) = explained(view(may=PLANTABLE, step=0, metric=[0.95, 0.97], stages=((DORMANT,) * 3,) * 2)).explain()
    assert "2 of 2 environments" in sentence
    assert "95% to 97%" in sentence
    assert "heuristic.plant_below" in sentence


def test_it_says_that_no_segment_is_narrow_and_which_keys_decide(view):
    (sentence,) = explained(view(may=PLANTABLE, step=0, metric=0.8, inner=EVEN)).explain()
    assert "no segment is narrow" in sentence
    assert "heuristic.narrow_from" in sentence
    assert "heuristic.weak_below" in sentence


def test_it_says_that_the_run_is_too_short_and_that_steps_are_to_be_raised(view):
    (sentence,) = explained(*(view(may=PLANTABLE, step=step, steps=4) for step in range(4))).explain()
    assert "raise steps" in sentence
    assert "has 4" in sentence


def test_that_too_few_steps_are_left_at_the_end_does_not_hide_what_stood_against_it_before(view):
    (sentence,) = explained(*(view(may=PLANTABLE, step=step, metric=0.99) for step in range(24))).explain()
    assert "plant_below" in sentence


def test_what_it_planted_needs_no_explanation_and_what_was_refused_is_not_planted(view):
    seen = view(may=PLANTABLE, step=0), view(may=PLANTABLE, step=1, metric=0.99)
    assert explained(*seen).explain() == []
    assert len(explained(*seen, accepted=False).explain()) == 1


def test_where_the_masks_forbid_planting_it_has_nothing_to_say(view):
    assert explained(view(may={}, step=0)).explain() == []


def test_its_explanations_go_on_where_its_state_was_taken_up(view):
    seen = [view(may=PLANTABLE, step=step, metric=0.8 if step < 3 else 0.99, inner=EVEN) for step in range(24)]
    whole, first, second = explained(*seen), explained(*seen[:9]), rule()
    second.load_state(first.state())
    for each in seen[9:]:
        second.store(_Outcome(second.act(each), np.ones(1, bool)))
    assert second.explain() == whole.explain() != []


def test_the_reason_of_a_prune_names_the_contribution_the_rent_and_the_key(view):
    v = view([[HOLDING, DORMANT, DORMANT]], {Op.PRUNE: True}, age=2, contribution=-0.02)
    (reason,) = explained(v).reasons()
    assert "contribution -0.0200 ± 0.0100" in reason
    assert "heuristic.keep_above" in reason


def test_a_decision_that_plants_removes_and_keeps_nothing_has_no_reason(view):
    assert explained(view(may={})).reasons() == [None]


def planted(seen, **config):
    (reason,) = explained(seen, **config).reasons()
    return reason


def test_the_reason_of_a_planting_behind_a_narrow_segment_names_the_slot_the_share_and_both_keys(view):
    reason = planted(view(may=PLANTABLE, inner=[[0.2, 0.61, 0.3]]))
    assert "in front of s1 is narrow: 61% of its inner units are in use, at least 50% (heuristic.narrow_from)" in reason
    assert "bypass-linear is the first of heuristic.narrow_blueprints that fits" in reason


def test_the_reason_of_a_planting_behind_dead_units_says_so(view):
    reason = planted(view(may=PLANTABLE, inner=[[0.3, 0.3, 0.0]]))
    assert "0% of its inner units are in use, under 2%" in reason
    assert "narrow_from" not in reason


def test_the_reason_of_a_planting_in_a_weak_host_names_the_limit_of_the_metric(view):
    reason = planted(view(may=PLANTABLE, inner=EVEN, metric=0.43))
    assert "no segment is narrow (heuristic.narrow_from)" in reason
    assert "covered 43% of the way to a perfect one, under 70% (heuristic.weak_below)" in reason
    assert "bypass-mlp is the first of heuristic.weak_blueprints that fits" in reason


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (
            -13.67,
            "the metric is below that of the best constant prediction, so it has covered none of the way to a perfect one",
        ),
        (0.0, "the metric has covered 0% of the way to a perfect one"),
        (1.3, "the metric has covered 100% of the way to a perfect one"),
        (-np.inf, "how far the metric is on the way to a perfect one is not known"),
    ],
)
def test_how_far_a_metric_has_come_is_never_less_than_nothing_and_never_more_than_all_of_the_way(share, said):
    assert progress_of(share) == said


def test_a_metric_below_that_of_a_constant_prediction_is_named_as_such_in_a_reason(view):
    reason = planted(view(may=PLANTABLE, inner=EVEN, metric=-13.67))
    assert "the metric is below that of the best constant prediction" in reason
    assert "under 70% (heuristic.weak_below)" in reason


def test_the_reason_of_a_planting_without_inner_features_names_the_limits_that_hold_then(view):
    reason = planted(view(may=PLANTABLE, metric=0.8))
    assert "inner features are not measured" in reason
    assert "heuristic.tie_ratio" in reason
    assert "under 90% (heuristic.plant_below)" in reason


def test_the_reason_of_a_planting_is_silent_on_a_metric_whose_range_is_not_known(view):
    assert "the metric" not in planted(view(may=PLANTABLE, inner=EVEN, metric=9.0, floor=np.full(1, np.nan)))


def test_the_reason_of_a_planting_says_that_no_named_blueprint_fits(view):
    reason = planted(view(may=PLANTABLE, inner=EVEN, fits=np.array([[False, False, True]] * 3)))
    assert "fits, and none of heuristic.weak_blueprints does" in reason


# Properties.


def test_its_decisions_are_valid(view, allowed):
    v = view([[HOLDING, TRAINING, DORMANT]] * 2, {Op.GERMINATE: [[False] * 3, [False, False, True]]})
    actions = rule().act(v)
    assert allowed(v.masks, actions)
    assert actions.op.tolist() == [Op.WAIT, Op.GERMINATE]


def test_each_environment_alone_decides_as_in_the_population(view):
    rng = np.random.default_rng(0)
    envs, shape = 60, (60, 3)
    stages = rng.choice([DORMANT, TRAINING, Stage.BLENDING, HOLDING], shape)
    rank, mean = rng.random(shape), np.where(stages == HOLDING, rng.normal(size=shape), np.nan)
    may = {
        Op.GERMINATE: (stages == DORMANT) & (rng.random(shape) < 0.7),
        Op.ADVANCE: (stages == TRAINING) & (rng.random(shape) < 0.5),
        Op.PRUNE: stages != DORMANT,
        Op.FOSSILIZE: (stages == HOLDING) & (rng.random(shape) < 0.5),
    }
    fields = {"age": rng.integers(12, size=shape), "metric": rng.random(envs), "participation": rank}
    fields |= {"contribution": mean, "contribution_se": rng.random(shape), "gain": rng.normal(size=shape)}
    inner = np.where(rng.random(shape) < 0.3, np.nan, rng.random(shape))
    floor = rng.random(envs) / 2
    whole_view = view(stages, may, step=8, inner=inner, floor=floor, rent=0.1, **fields)
    whole = rule().act(whole_view)
    assert set(whole.op) == {Op.WAIT, Op.GERMINATE, Op.ADVANCE, Op.PRUNE, Op.FOSSILIZE}
    for e in range(envs):
        row = slice(e, e + 1)
        space = whole_view.space
        alone = whole_view._replace(
            space=space._replace(floor=floor[row], ceiling=space.ceiling[row]),
            seeds=Seeds(*take(whole_view.seeds, row)),
            masks=take(whole_view.masks, row),
            measurements=take(whole_view.measurements, row),
            host_params=whole_view.host_params[row],
            added_params=whole_view.added_params[row],
        )
        assert np.array_equal(np.stack(rule().act(alone)), np.stack(take(whole, row)))


# Keys.


def test_the_rule_asks_for_the_growth_sensors():
    assert Heuristic(Config().heuristic, Config().gates).sensors_every > 0
