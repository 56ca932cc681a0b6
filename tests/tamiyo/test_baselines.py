import numpy as np
import pytest

from esper.leyline.actions import RELEVANT, Actions, Head, Op
from esper.leyline.stages import Stage
from esper.leyline.view import Masks, take
from esper.tamiyo.baselines import Never, RandomValid, choices, complete, defaults


def test_never_waits(random_view):
    assert (Never().act(random_view(5, 0)).op == Op.WAIT).all()


def test_random_valid_chooses_what_the_masks_allow(random_view, allowed):
    for seed in range(60):
        view = random_view(16, seed)
        assert allowed(view.masks, RandomValid().act(view))


def test_random_valid_leaves_heads_that_do_not_matter_at_zero(random_view):
    actions = np.stack(RandomValid().act(random_view(64, 1)), axis=1)
    assert (actions[~RELEVANT[actions[:, Head.OP]]] == 0).all()


@pytest.mark.parametrize("envs", [1, 4])
def test_random_valid_draws_for_an_environment_alone_as_in_a_population(random_view, envs):
    view = random_view(16, 5)
    whole = RandomValid().act(view)
    few = view._replace(masks=take(view.masks, slice(envs)), space=take_space(view, envs))
    assert np.array_equal(np.stack(RandomValid().act(few)), np.stack(take(whole, slice(envs))))


def take_space(view, envs):
    return view.space._replace(instance=view.space.instance[:envs])


@pytest.mark.parametrize("change", [{"step": 6}, {"episode": 1}])
def test_random_valid_draws_anew_at_another_step_or_episode(random_view, change):
    view = random_view(64, 5)
    assert not np.array_equal(RandomValid().act(view).op, RandomValid().act(view._replace(**change)).op)


def test_random_valid_depends_on_the_run_seed(random_view):
    view = random_view(64, 5)
    other = view._replace(space=view.space._replace(seed=4))
    assert not np.array_equal(RandomValid().act(view).op, RandomValid().act(other).op)


def test_random_valid_draws_operations_uniformly(view):
    envs = 6000
    stages = np.full((envs, 3), Stage.HOLDING)
    wide = view(stages, {Op.SET_ALPHA: True, Op.PRUNE: True})
    share = np.bincount(RandomValid().act(wide).op, minlength=len(Op)) / envs
    expected = np.zeros(len(Op))
    expected[[Op.WAIT, Op.SET_ALPHA, Op.PRUNE]] = 1 / 3
    np.testing.assert_allclose(share, expected, atol=0.03)


def test_random_valid_draws_slots_independently_of_operations(view):
    envs = 6000
    actions = RandomValid().act(view(np.full((envs, 2), Stage.HOLDING), {Op.SET_ALPHA: True, Op.PRUNE: True}))
    for op in (Op.SET_ALPHA, Op.PRUNE):
        assert abs(actions.slot[actions.op == op].mean() - 0.5) < 0.05


def test_random_valid_reaches_every_choice_of_every_head(view):
    actions = RandomValid().act(view(np.full((2000, 3), Stage.DORMANT), {Op.GERMINATE: True}))
    planted = actions.op == Op.GERMINATE
    reached = [np.unique(field[planted]).tolist() for field in actions[1:]]
    assert reached == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2, 3, 4], [0, 1, 2, 3]]


def test_choices_of_a_head_that_does_not_matter_are_all_open(view):
    masks = view(may={Op.ADVANCE: True}).masks
    op, slot = np.array([Op.ADVANCE]), np.array([0])
    assert choices(masks, Head.TEMPO, op, slot).all()


def test_choices_may_be_asked_for_several_decisions_an_environment(random_view):
    view = random_view(4, 2)
    op, slot = np.full((4, 2), Op.PRUNE), np.array([[0, 3]] * 4)
    both = choices(view.masks, Head.TEMPO, op, slot)
    for i in range(2):
        assert np.array_equal(both[:, i], choices(view.masks, Head.TEMPO, op[:, i], slot[:, i]))


def test_a_wanted_choice_that_is_refused_gives_way_to_the_first_allowed(view):
    doomed = view([[Stage.BLENDING] * 3], {Op.PRUNE: True}, doomed=True)
    masks: Masks = doomed.masks
    actions = complete(masks, np.array([Op.PRUNE]), np.array([1]), {**defaults(doomed.space), Head.TEMPO: 3})
    assert actions.tempo == [0]


def test_a_completed_wait_is_all_zero(view):
    v = view(may={Op.GERMINATE: True})
    actions = complete(v.masks, np.array([Op.WAIT]), np.array([2]), defaults(v.space))
    assert np.array_equal(np.stack(actions), np.stack(Actions.wait(1)))


def test_a_decision_that_names_no_ramp_takes_two_steps_to_the_full_dose(view):
    space = view().space
    chosen = defaults(space)
    assert (space.tempos[chosen[Head.TEMPO]], space.targets[chosen[Head.TARGET]]) == (2, 1.0)


def test_without_a_ramp_of_two_the_first_positive_one_is_taken_and_the_largest_dose(view):
    space = view(tempos=(0, 4, 1), targets=(0.5, 0.75, 0.25)).space
    chosen = defaults(space)
    assert (space.tempos[chosen[Head.TEMPO]], space.targets[chosen[Head.TARGET]]) == (4, 0.75)
