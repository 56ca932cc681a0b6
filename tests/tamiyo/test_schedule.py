import numpy as np
import pytest

from esper.leyline.lifecycle.vocabulary import Blend, Op, Stage
from esper.leyline.messages import InputError
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry, load_schedule

PRUNABLE = {Op.PRUNE: True}


def taken(actions):
    """Return (op, slot) of every environment."""
    return [(Op(op), int(slot)) for op, slot in zip(actions.op, actions.slot, strict=True)]


def prunes(*slots, at=0):
    return Schedule([ScheduleEntry(at=at, op="prune", slot=slot) for slot in slots])


def test_an_entry_waits_for_its_step(view):
    schedule = prunes("s1", at=2)
    ops = [schedule.act(view(may=PRUNABLE, step=step)).op[0] for step in range(4)]
    assert ops == [Op.WAIT, Op.WAIT, Op.PRUNE, Op.WAIT]


def test_an_entry_waits_until_the_masks_allow_it(view):
    schedule = prunes("s1")
    assert schedule.act(view(step=0)).op == [Op.WAIT]
    assert taken(schedule.act(view(may=PRUNABLE, step=1))) == [(Op.PRUNE, 1)]


def test_entries_that_are_due_at_once_are_carried_out_in_list_order_one_a_step(view):
    schedule = prunes("s2", "s0", "s1")
    assert [schedule.act(view(may=PRUNABLE, step=step)).slot[0] for step in range(3)] == [2, 0, 1]


def test_an_entry_that_is_not_yet_valid_does_not_hold_up_those_behind_it(view):
    schedule = prunes("s0", "s1")
    assert taken(schedule.act(view(may={Op.PRUNE: [False, True, True]}, step=0))) == [(Op.PRUNE, 1)]
    assert taken(schedule.act(view(may=PRUNABLE, step=1))) == [(Op.PRUNE, 0)]


def test_an_entry_is_carried_out_once(view):
    schedule = prunes("s0")
    ops = [schedule.act(view(may=PRUNABLE, step=step)).op[0] for step in range(3)]
    assert ops == [Op.PRUNE, Op.WAIT, Op.WAIT]


def test_an_entry_may_be_a_wait(view):
    schedule = Schedule([ScheduleEntry(at=0, op="WAIT"), ScheduleEntry(at=0, op="PRUNE", slot="s0")])
    assert [schedule.act(view(may=PRUNABLE, step=step)).op[0] for step in range(2)] == [Op.WAIT, Op.PRUNE]


def test_an_empty_schedule_waits(view):
    assert Schedule([]).act(view(may=PRUNABLE)).op == [Op.WAIT]


def test_environments_keep_their_own_place_in_the_list(view):
    schedule = prunes("s0", "s1")
    stages = [[Stage.TRAINING] * 3] * 2
    first = view(stages, {Op.PRUNE: [[True] * 3, [False, True, True]]}, step=0)
    assert taken(schedule.act(first)) == [(Op.PRUNE, 0), (Op.PRUNE, 1)]
    assert taken(schedule.act(view(stages, PRUNABLE, step=1))) == [(Op.PRUNE, 1), (Op.PRUNE, 0)]


def test_a_new_episode_starts_the_list_again(view):
    schedule = prunes("s0")
    assert schedule.act(view(may=PRUNABLE, step=0)).op == [Op.PRUNE]
    assert schedule.act(view(may=PRUNABLE, step=1)).op == [Op.WAIT]
    assert schedule.act(view(may=PRUNABLE, step=0, episode=1)).op == [Op.PRUNE]


def test_the_heads_of_an_entry_become_indices(view):
    entry = ScheduleEntry(at=0, op="GERMINATE", slot="s2", blueprint="mlp-small", blend="gate", tempo=4, target=0.5)
    actions = Schedule([entry]).act(view(may={Op.GERMINATE: True}, step=0))
    assert [field[0] for field in actions] == [Op.GERMINATE, 2, 2, Blend.GATE, 3, 1]


def test_heads_left_out_are_an_added_full_dose_in_two_steps(view):
    entry = ScheduleEntry(at=0, op="germinate", slot="s0", blueprint="bypass-mlp")
    actions = Schedule([entry]).act(view(may={Op.GERMINATE: True}, step=0))
    assert [field[0] for field in actions] == [Op.GERMINATE, 0, 1, Blend.ADD, 2, 3]


def test_an_entry_waits_until_the_choice_that_it_names_is_valid(view):
    schedule = Schedule([ScheduleEntry(at=0, op="prune", slot="s0", tempo=4)])
    assert schedule.act(view([[Stage.BLENDING] * 3], PRUNABLE, doomed=True, step=0)).op == [Op.WAIT]
    assert schedule.act(view([[Stage.HOLDING] * 3], PRUNABLE, step=1)).op == [Op.PRUNE]


def test_an_entry_that_leaves_the_tempo_open_takes_one_that_is_valid(view):
    actions = prunes("s0").act(view([[Stage.BLENDING] * 3], PRUNABLE, doomed=True, step=0))
    assert (actions.op, actions.tempo) == ([Op.PRUNE], [0])


def kept(*slots, keep=True):
    return [ScheduleEntry(at=0, op="germinate", slot=slot, blueprint="bypass-mlp", keep=keep) for slot in slots]


def test_keep_advances_and_fossilizes_as_soon_as_the_masks_allow(view):
    schedule = Schedule(kept("s1"))
    steps = [{Op.GERMINATE: True}, {}, {Op.ADVANCE: [False, True, False]}, {}, {Op.FOSSILIZE: [False, True, False]}, {}]
    decisions = [taken(schedule.act(view(may=may, step=step)))[0] for step, may in enumerate(steps)]
    wait = (Op.WAIT, 0)
    assert decisions == [(Op.GERMINATE, 1), wait, (Op.ADVANCE, 1), wait, (Op.FOSSILIZE, 1), wait]


def test_without_keep_nothing_follows_a_germinate(view):
    schedule = Schedule(kept("s1", keep=False))
    schedule.act(view(may={Op.GERMINATE: True}, step=0))
    assert schedule.act(view(may={Op.ADVANCE: True, Op.FOSSILIZE: True}, step=1)).op == [Op.WAIT]


def test_keep_does_nothing_before_its_own_germinate(view):
    schedule = Schedule([*kept("s0"), *kept("s1")])
    schedule.act(view(may={Op.GERMINATE: [True, False, False]}, step=0))
    assert schedule.act(view(may={Op.ADVANCE: [False, True, False]}, step=1)).op == [Op.WAIT]


def test_keep_fossilizes_a_seed_that_advanced_by_itself(view):
    schedule = Schedule(kept("s1"))
    schedule.act(view(may={Op.GERMINATE: True}, step=0))
    assert taken(schedule.act(view(may={Op.FOSSILIZE: True}, step=1))) == [(Op.FOSSILIZE, 1)]


def test_keep_of_an_earlier_seed_ends_when_its_slot_is_planted_anew(view):
    schedule = Schedule([*kept("s0"), *kept("s0", keep=False)])
    for step in range(2):
        assert schedule.act(view(may={Op.GERMINATE: True}, step=step)).op == [Op.GERMINATE]
    assert schedule.act(view(may={Op.ADVANCE: True}, step=2)).op == [Op.WAIT]


def test_keep_comes_before_later_entries(view):
    schedule = Schedule([*kept("s0"), *kept("s1")])
    schedule.act(view(may={Op.GERMINATE: True}, step=0))
    may = {Op.ADVANCE: [True, False, False], Op.GERMINATE: [False, True, True]}
    assert [taken(schedule.act(view(may=may, step=step)))[0] for step in (1, 2)] == [(Op.ADVANCE, 0), (Op.GERMINATE, 1)]


def test_a_file_is_a_list_of_entries(tmp_path, view):
    path = tmp_path / "plan.yaml"
    path.write_text("- {at: 1, op: GERMINATE, slot: s1, blueprint: mlp-small, target: 1}\n- {at: 2, op: wait}\n")
    schedule = load_schedule(path)
    assert schedule.act(view(may={Op.GERMINATE: True}, step=0)).op == [Op.WAIT]
    assert taken(schedule.act(view(may={Op.GERMINATE: True}, step=1))) == [(Op.GERMINATE, 1)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{at: 1}", "is not a list of entries; write one entry a line, as - {at: 4, op: WAIT}"),
        ("", "is not a list of entries; write one entry a line, as - {at: 4, op: WAIT}"),
        ("- [", "is not valid YAML; write one entry a line, as - {at: 4, op: WAIT}"),
        ("- wait", ", entry 1 is 'wait', not a mapping; write it as {at: 4, op: WAIT}"),
        (
            "- {at: 0, op: wait}\n- {at: 1, op: wait, slots: a}",
            "entry 2: unknown key 'slots'; the keys are at, op, slot, blueprint, blend, tempo, target, keep",
        ),
        ("- {op: wait}", ", entry 1: at is missing; give a step, a whole number from 0 on"),
        ("- {at: -1, op: wait}", ", entry 1: at is -1; give a step, a whole number from 0 on"),
        ("- {at: true, op: wait}", ", entry 1: at is True; give a step, a whole number from 0 on"),
        (
            "- {at: 0, op: plant}",
            ", entry 1: op is 'plant'; give one of WAIT, GERMINATE, ADVANCE, SET_ALPHA, PRUNE, FOSSILIZE",
        ),
        ("- {at: 0, op: 4, slot: a}", "entry 1: op is 4; give one of WAIT, GERMINATE"),
        (
            "- {at: 0, op: germinate, slot: a, blueprint: b, blend: mix}",
            ", entry 1: blend is 'mix'; give one of ADD, GATE, MULTIPLY",
        ),
        ("- {at: 0, op: set_alpha, slot: a, target: 2}", ", entry 1: target is 2; give an alpha above 0 and up to 1"),
        (
            "- {at: 0, op: prune, slot: a, tempo: 1.5}",
            ", entry 1: tempo is 1.5; give a ramp length, a whole number of steps from 0 on",
        ),
        ("- {at: 0, op: prune}", ", entry 1: PRUNE needs a slot; add the name of one"),
        ("- {at: 0, op: germinate, slot: a}", ", entry 1: GERMINATE needs a blueprint; add the name of one"),
        ("- {at: 0, op: advance, slot: a, tempo: 2}", ", entry 1: ADVANCE takes no tempo; leave it out"),
        ("- {at: 0, op: wait, slot: a}", ", entry 1: WAIT takes no slot; leave it out"),
        (
            "- {at: 0, op: prune, slot: a, keep: true}",
            "entry 1: keep goes with GERMINATE, not with PRUNE; leave it out",
        ),
        (
            "- {at: 0, op: germinate, slot: a, blueprint: b, tempo: 0}",
            ", entry 1: GERMINATE cannot take tempo 0; give a ramp of at least one step",
        ),
    ],
)
def test_a_bad_file_gets_a_sentence(tmp_path, text, sentence):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_schedule(path)
    assert str(caught.value).startswith(str(path))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_gets_a_sentence(tmp_path):
    with pytest.raises(InputError, match=r"none.yaml: No such file or directory; a schedule is a readable YAML file"):
        load_schedule(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (ScheduleEntry(at=0, op="prune", slot="up"), "there is no slot 'up' here; choose one of s0, s1, s2"),
        (
            ScheduleEntry(at=0, op="germinate", slot="s0", blueprint="skip"),
            "there is no blueprint 'skip' here; choose one of bypass-linear, bypass-mlp, mlp-small",
        ),
        (ScheduleEntry(at=0, op="prune", slot="s0", tempo=3), "there is no tempo 3 here; choose one of 0, 1, 2, 4, 8"),
        (
            ScheduleEntry(at=0, op="set_alpha", slot="s0", target=0.3),
            "there is no target 0.3 here; choose one of 0.25, 0.5, 0.75, 1.0",
        ),
    ],
)
def test_a_name_that_the_space_lacks_gets_a_sentence_at_the_first_act(view, entry, sentence):
    schedule = Schedule([ScheduleEntry(at=0, op="wait"), entry], source="plan.yaml")
    with pytest.raises(InputError) as caught:
        schedule.act(view())
    assert str(caught.value) == f"plan.yaml, entry 2: {sentence}"


def test_a_blueprint_that_does_not_fit_its_slot_gets_a_sentence_at_the_first_act(view):
    fits = np.ones((3, 3), bool)
    fits[1, 1] = False
    with pytest.raises(InputError, match="entry 1: bypass-mlp does not fit slot s1; choose bypass-linear, mlp-small"):
        Schedule(kept("s1")).act(view(fits=fits))
