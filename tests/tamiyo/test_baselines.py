import numpy as np
import pytest

from esper.leyline.lifecycle.view import take
from esper.leyline.lifecycle.vocabulary import RELEVANT, Head, Op, Stage
from esper.tamiyo.rules.base import Never, RandomValid


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
    return view.space._replace(number=view.space.number[:envs], instance=view.space.instance[:envs])


def test_random_valid_draws_by_the_number_of_an_environment_wherever_it_stands(random_view):
    view, order = random_view(16, 5), np.random.default_rng(0).permutation(16)
    whole = RandomValid().act(view)
    moved = view._replace(masks=take(view.masks, order), space=view.space._replace(number=order))
    assert np.array_equal(np.stack(RandomValid().act(moved)), np.stack(take(whole, order)))


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
