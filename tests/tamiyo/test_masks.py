import numpy as np
import pytest

from esper.leyline.lifecycle.masks import (
    OPEN,
    allowed,
    allowed_of,
    barred,
    choices,
    chosen_in_turn,
    complete,
    defaults,
    draw_uniform,
    every_decision,
    offered,
    without_blueprints,
)
from esper.leyline.lifecycle.view import Masks
from esper.leyline.lifecycle.vocabulary import RELEVANT, Actions, Blend, Head, Op, Stage


@pytest.fixture
def table(view):
    """Return every decision of the views that `random_view` draws."""
    space = view(np.zeros((1, 4))).space
    return every_decision(space._replace(blends=np.ones(len(Blend), bool)))


@pytest.mark.parametrize("seed", range(4))
def test_a_decision_of_a_table_is_allowed_where_every_head_that_matters_is(random_view, table, seed):
    masks = random_view(3, seed).masks
    found = allowed_of(masks, table)
    for env in range(3):
        for decision, yes in zip(table[:: seed + 5], found[env, :: seed + 5], strict=True):
            op, slot = decision[:2]
            valid = (
                masks.op[env, op],
                masks.slot[env, op, slot],
                masks.blueprint[env, slot, decision[Head.BLUEPRINT]],
                masks.blend[env, slot, decision[Head.BLEND]],
                masks.tempo[env, op, slot, decision[Head.TEMPO]],
                masks.target[env, op, slot, decision[Head.TARGET]],
            )
            assert yes == all(valid[head] for head in Head if RELEVANT[op, head])


def test_a_table_is_answered_as_its_decisions_are_one_by_one(random_view, table):
    masks = random_view(16, 3).masks
    found = allowed_of(masks, table)
    for i in range(0, len(table), 97):
        assert np.array_equal(found[:, i], allowed(masks, Actions(*np.tile(table[i], (16, 1)).T)))


def test_the_decisions_that_are_allowed_are_those_that_can_be_chosen_head_after_head(random_view, table):
    masks = random_view(1, 5).masks

    def count(actions, heads):
        if not heads:
            return 1
        head, *rest = heads
        valid = choices(masks, head, actions.op, actions.slot)[0]
        if head != Head.OP and not RELEVANT[actions.op[0], head]:
            valid = np.array([True])
        name = head.name.lower()
        return sum(count(actions._replace(**{name: np.array([c])}), rest) for c in np.flatnonzero(valid))

    masks.tempo[:, Op.GERMINATE, :, 0] = False  # no state allows to plant at once, so the table leaves it out
    assert allowed_of(masks, table).sum() == count(Actions.wait(1), list(Head))


@pytest.mark.parametrize("draw", [0.0, 0.5, np.nextafter(1, 0), None])
def test_any_draws_give_an_allowed_decision(random_view, draw):
    for seed in range(20):
        masks, random = random_view(16, seed).masks, np.random.default_rng(seed)
        draws = random.random((len(Head), 16)) if draw is None else np.full((len(Head), 16), draw)
        assert allowed(masks, draw_uniform(masks, draws)).all()


@pytest.mark.parametrize("stray", [-1, 99])
@pytest.mark.parametrize("head", Head)
def test_a_choice_out_of_range_is_not_allowed(view, head, stray):
    masks = view(may={Op.GERMINATE: True}).masks
    planting = Actions(*(np.array([choice]) for choice in (Op.GERMINATE, 0, 0, 0, 1, 0)))
    assert allowed(masks, planting).all()
    assert not allowed(masks, planting._replace(**{head.name.lower(): np.array([stray])})).any()


def test_a_free_head_allows_a_decision_where_any_choice_of_it_is_valid(random_view, table):
    masks = random_view(8, 2).masks
    free = np.zeros(table.shape, bool)
    free[:, OPEN] = True
    found = allowed_of(masks, table, free)
    one_of = np.zeros_like(found)
    exact = allowed_of(masks, table)
    for op in Op:
        for slot in range(4):
            alike = (table[:, Head.OP] == op) & (table[:, Head.SLOT] == slot)
            one_of[:, alike] = masks.op[:, [op]] & (masks.slot[:, op, slot, None] | (op == Op.WAIT))
    assert np.array_equal(found, one_of)
    assert (found >= exact).all()


def test_what_was_offered_is_what_each_head_could_choose_from(random_view):
    masks = random_view(32, 7).masks
    seen = []

    def first(head, valid, actions):
        seen.append(valid)
        return valid.argmax(1)

    actions = chosen_in_turn(masks, first)
    for head, valid in zip(Head, offered(masks, actions), strict=True):
        assert np.array_equal(valid, seen[head])


def test_a_barred_operation_is_forbidden_in_its_rows_alone(random_view, table):
    masks = random_view(6, 1).masks
    rows = np.arange(6) % 2 == 0
    expected = allowed_of(masks, table) & ~(rows[:, None] & (table[:, Head.OP] == Op.PRUNE))
    assert np.array_equal(allowed_of(barred(masks, Op.PRUNE, rows), table), expected)


def test_a_forbidden_blueprint_cannot_be_planted_and_nothing_else_is_forbidden(random_view, table):
    masks = random_view(6, 1).masks
    forbidden = np.zeros(masks.blueprint.shape, bool)
    forbidden[::2, :, 0], forbidden[1, 0] = True, True
    plants = table[:, Head.OP] == Op.GERMINATE
    expected = allowed_of(masks, table) & ~(plants & forbidden[:, table[:, Head.SLOT], table[:, Head.BLUEPRINT]])
    assert np.array_equal(allowed_of(without_blueprints(masks, forbidden), table), expected)


def test_nothing_can_be_planted_where_every_blueprint_is_forbidden(random_view):
    masks = random_view(6, 1).masks
    rows = np.arange(6) % 2 == 0
    left = without_blueprints(masks, np.broadcast_to(rows[:, None, None], masks.blueprint.shape))
    assert masks.op[rows, Op.GERMINATE].any()
    assert np.array_equal(left.op[:, Op.GERMINATE], masks.op[:, Op.GERMINATE] & ~rows)


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
