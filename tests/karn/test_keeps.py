"""Check that the keeps and prunes of a page, gathered in bounded memory, are those of the whole list."""

from hypothesis import given, settings
from hypothesis import strategies as st

from esper.karn.run_model import DRAWN_DECISIONS, LISTED, DecisionLog
from esper.nissa.rows import LifecycleRow


def row(step, contribution, kept, training):
    stage = {"from_stage": "HOLDING", "to_stage": "FOSSILIZED" if kept else "PRUNED", "blueprint": "b", "slot": "s"}
    place = {"cohort": "training", "round": 0} if training else {}
    measured = {"alpha": 1.0, "why": "why", "contribution_mean": contribution}
    return LifecycleRow(seq=step, time=0.0, episode=0, env=0, step=step, **measured, **stage, **place)


rows = st.lists(st.tuples(st.sampled_from([None, 0.0, *(k / 8 for k in range(-90, 90))]), st.booleans()), max_size=1500)


@settings(deadline=None, max_examples=30)
@given(rows, st.booleans())
def test_what_is_held_is_what_the_whole_list_would_show(drawn, training):
    log = DecisionLog()
    for step, (contribution, kept) in enumerate(drawn):
        log.write(row(step, contribution, kept, training))
    decided = log
    measured = [(-value, step) for step, (value, _) in enumerate(drawn) if value is not None]
    shown = [step for _, step in sorted(measured)]
    if len(shown) > DRAWN_DECISIONS:
        shown = shown[: DRAWN_DECISIONS // 2] + shown[-DRAWN_DECISIONS // 2 :]
    assert [each.step for each in decided.ends] == shown
    assert [each.step for each in decided.first] == list(range(min(len(drawn), LISTED)))
    assert (decided.total, decided.measured) == (len(drawn), len(measured))
    assert all(each.contribution_mean == drawn[each.step][0] for each in decided.first)


def test_a_training_however_long_holds_as_much_as_a_page_shows():
    log = DecisionLog()
    for step in range(10_000):
        log.write(row(step, step / 7 % 1, kept=step % 2 == 0, training=True))
    assert sum(len(value) for value in vars(log).values() if isinstance(value, list)) <= LISTED + 9 * DRAWN_DECISIONS
