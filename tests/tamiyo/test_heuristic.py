import numpy as np
import pytest

from esper.leyline.actions import Op
from esper.leyline.config import GatesConfig, HeuristicConfig
from esper.leyline.stages import Stage
from esper.leyline.view import Seeds, take
from esper.tamiyo.heuristic import Heuristic

DORMANT, TRAINING, HOLDING = Stage.DORMANT, Stage.TRAINING, Stage.HOLDING
PLANTABLE = {Op.GERMINATE: True}
GATES = GatesConfig(min_training=2, min_holding=2, min_contribution=0.0, z=1.0)


def rule(**config):
    return Heuristic(
        HeuristicConfig(**{"start": 0, "slack": 0, "threshold": 0.9, "min_rank": 0.5, "tie": 1.0, **config}), GATES
    )


def decide(view, **config):
    """(op, slot) of the first environment."""
    actions = rule(**config).act(view)
    return Op(actions.op[0]), int(actions.slot[0])


def test_it_plants_at_the_slot_of_lowest_participation(view):
    assert decide(view(may=PLANTABLE, participation=[[0.3, 0.1, 0.2]])) == (Op.GERMINATE, 1)


def test_of_slots_that_are_about_as_thin_it_plants_at_the_first(view):
    thin = view(may=PLANTABLE, participation=[[0.3, 0.13, 0.1]])
    assert [decide(thin, tie=tie) for tie in (1.2, 1.4, 4.0)] == [
        (Op.GERMINATE, 2),
        (Op.GERMINATE, 1),
        (Op.GERMINATE, 0),
    ]


def test_a_slot_that_may_not_be_planted_is_not_one_of_the_equals(view):
    may = {Op.GERMINATE: [False, True, True]}
    assert decide(view(may=may, participation=[[0.05, 0.3, 0.2]]), tie=1.6) == (Op.GERMINATE, 1)


def test_it_plants_only_at_slots_that_may_be_planted(view):
    may = {Op.GERMINATE: [[True, False, True]]}
    assert decide(view(may=may, participation=[[0.3, 0.1, 0.2]])) == (Op.GERMINATE, 2)


def test_beyond_the_budget_it_waits(view):
    assert decide(view(may={})) == (Op.WAIT, 0)


@pytest.mark.parametrize("metric", [0.9, 0.95, np.nan])
def test_it_does_not_plant_where_the_metric_is_not_under_the_threshold(view, metric):
    assert decide(view(may=PLANTABLE, metric=metric)) == (Op.WAIT, 0)


def test_it_does_not_plant_where_the_stream_is_wide(view):
    assert decide(view(may=PLANTABLE, participation=0.5)) == (Op.WAIT, 0)


def test_it_does_not_plant_where_participation_is_unknown(view):
    assert decide(view(may=PLANTABLE, participation=[[np.nan, 0.4, np.nan]])) == (Op.GERMINATE, 1)
    assert decide(view(may=PLANTABLE, participation=np.nan)) == (Op.WAIT, 0)


def test_it_does_not_plant_before_the_start(view):
    assert decide(view(may=PLANTABLE, step=3), start=4) == (Op.WAIT, 0)
    assert decide(view(may=PLANTABLE, step=4), start=4) == (Op.GERMINATE, 0)


def test_it_does_not_plant_what_cannot_be_fossilized_in_time(view):
    # planted at t: ADVANCE at t + 1 + 2, two steps of ramp, two of trial, FOSSILIZE at t + 7, at most step 23
    assert decide(view(may=PLANTABLE, step=16, steps=24)) == (Op.GERMINATE, 0)
    assert decide(view(may=PLANTABLE, step=17, steps=24)) == (Op.WAIT, 0)


def test_slack_ends_planting_earlier(view):
    assert decide(view(may=PLANTABLE, step=12, steps=24), slack=4) == (Op.GERMINATE, 0)
    assert decide(view(may=PLANTABLE, step=13, steps=24), slack=4) == (Op.WAIT, 0)


def test_it_plants_the_blueprint_that_it_was_told(view):
    actions = rule(blueprint="mlp-small").act(view(may=PLANTABLE))
    assert actions.blueprint == [2]


def test_it_plants_the_first_of_the_menu_where_the_task_lacks_the_blueprint(view):
    assert rule(blueprint="attention").act(view(may=PLANTABLE)).blueprint == [0]


def test_it_does_not_plant_at_a_slot_that_the_blueprint_does_not_fit(view):
    fits = np.ones((3, 3), bool)
    fits[0, 1] = False
    assert decide(view(may=PLANTABLE, participation=[[0.1, 0.3, 0.2]], fits=fits)) == (Op.GERMINATE, 2)


def test_its_decisions_are_valid(view, allowed):
    v = view([[HOLDING, TRAINING, DORMANT]] * 2, {Op.GERMINATE: [[False] * 3, [False, False, True]]}, participation=0.1)
    actions = rule().act(v)
    assert allowed(v.masks, actions)
    assert actions.op.tolist() == [Op.WAIT, Op.GERMINATE]


def test_it_plants_beside_seeds_that_are_under_way(view):
    stages = [[Stage.HOLDING, Stage.BLENDING, DORMANT]]
    assert decide(view(stages, {Op.GERMINATE: [False, False, True]})) == (Op.GERMINATE, 2)


def test_it_fossilizes_the_holding_seed_of_the_largest_contribution(view):
    v = view([[HOLDING] * 3], {Op.FOSSILIZE: [True, True, False]}, contribution=[[0.02, 0.04, 0.06]])
    assert decide(v) == (Op.FOSSILIZE, 1)


def test_it_does_not_fossilize_on_a_number_that_does_not_stand_out(view):
    v = view([[HOLDING] * 3], {Op.FOSSILIZE: True}, contribution=0.02, contribution_se=0.03)
    assert decide(v) == (Op.WAIT, 0)


def test_it_does_not_fossilize_what_was_not_measured(view):
    assert decide(view([[HOLDING] * 3], {Op.FOSSILIZE: True})) == (Op.WAIT, 0)


def test_it_advances_the_trained_seed_of_the_largest_gain(view):
    v = view([[TRAINING] * 3], {Op.ADVANCE: [False, True, True]}, gain=[[0.5, 0.1, 0.2]])
    assert decide(v) == (Op.ADVANCE, 2)


def test_it_does_not_advance_what_cannot_be_fossilized_in_time(view):
    # advanced at t: two steps of ramp, two of trial, FOSSILIZE at t + 4
    may = {Op.ADVANCE: [True, False, False]}
    assert decide(view([[TRAINING, DORMANT, DORMANT]], may, step=19, steps=24, gain=0.1)) == (Op.ADVANCE, 0)
    assert decide(view([[TRAINING, DORMANT, DORMANT]], may, step=20, steps=24, gain=0.1)) == (Op.WAIT, 0)


def test_it_prunes_the_holding_seed_that_harms_most(view):
    v = view([[HOLDING] * 3], {Op.PRUNE: True}, contribution=[[-0.02, -0.05, 0.03]])
    assert decide(v) == (Op.PRUNE, 1)


def test_it_gives_a_seed_whose_harm_does_not_stand_out_the_benefit_of_the_doubt(view):
    v = view([[HOLDING] * 3], {Op.PRUNE: True}, contribution=-0.02, contribution_se=0.03)
    assert decide(v) == (Op.WAIT, 0)


def test_it_does_not_call_a_blending_seed_harmful(view):
    assert decide(view([[Stage.BLENDING] * 3], {Op.PRUNE: True}, contribution=-0.5)) == (Op.WAIT, 0)


@pytest.mark.parametrize("stage", [TRAINING, HOLDING])
def test_it_prunes_a_seed_that_its_gate_has_refused_for_as_long_as_patience_lasts(view, stage):
    # the dwell is 2 steps for both, so the decision at age 2 is the first refusal and that at age 4 the third
    for age, expected in ((3, Op.WAIT), (4, Op.PRUNE)):
        assert (
            decide(view([[stage, DORMANT, DORMANT]], {Op.PRUNE: [True, False, False]}, age=age), patience=3)[0]
            == expected
        )


@pytest.mark.parametrize(("stage", "onward"), [(TRAINING, Op.ADVANCE), (HOLDING, Op.FOSSILIZE)])
def test_it_does_not_prune_a_seed_that_passes_its_gate_at_last(view, stage, onward):
    may = {Op.PRUNE: [True, False, False], onward: [True, False, False]}
    v = view([[stage, DORMANT, DORMANT]], may, age=20, gain=0.1, contribution=0.1)
    assert decide(v, patience=1) == (onward, 0)


def test_it_prunes_only_what_the_masks_allow(view):
    assert decide(view([[HOLDING] * 3], {}, contribution=-0.5)) == (Op.WAIT, 0)


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
        order.append(decide(view(stages, may, gain=0.1, contribution=[[0.1, np.nan, -0.1, np.nan]])))
        del may[op]
    assert order == [(Op.FOSSILIZE, 0), (Op.ADVANCE, 1), (Op.PRUNE, 2), (Op.GERMINATE, 3)]


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
    whole_view = view(stages, may, step=8, **fields)
    whole = rule().act(whole_view)
    assert set(whole.op) == {Op.WAIT, Op.GERMINATE, Op.ADVANCE, Op.PRUNE, Op.FOSSILIZE}
    for e in range(envs):
        row = slice(e, e + 1)
        alone = whole_view._replace(
            seeds=Seeds(*take(whole_view.seeds, row)),
            masks=take(whole_view.masks, row),
            measurements=take(whole_view.measurements, row),
        )
        assert np.array_equal(np.stack(rule().act(alone)), np.stack(take(whole, row)))
