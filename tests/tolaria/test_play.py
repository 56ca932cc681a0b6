"""Test the loop that plays: what observers see, where it ends, and what an error leaves."""

import numpy as np
import pytest

from esper.leyline.lifecycle.vocabulary import Actions
from esper.leyline.messages import InputError
from esper.tamiyo.rules.base import Never, RandomValid
from esper.tolaria.engine import Observer, Until, VectorizedEngine, decide, planted, play
from populations import blobs, small_config


class Seen(Observer):
    """Keeps what it is told."""

    def __init__(self):
        self.steps, self.asked, self.failures = [], 0, 0

    def going(self, view):
        self.asked += 1
        return True

    def stepped(self, step):
        self.steps.append(step)

    def failed(self, view):
        self.failures += 1


def engine(**settings):
    made = VectorizedEngine(blobs(), small_config(**settings))
    made.reset()
    return made


def test_an_observer_sees_every_step_of_an_episode_in_order():
    seen, playing = Seen(), engine(steps=6)
    last = play(playing, RandomValid(), seen)
    assert [step.outcome.step for step in seen.steps] == list(range(6))
    assert seen.steps[-1].outcome is last
    assert last.terminal
    for before, after in zip(seen.steps, seen.steps[1:], strict=False):
        assert after.view is before.after
    assert all(0 < step.deciding < step.seconds for step in seen.steps)
    assert sum(planted(step) for step in seen.steps) > 0


def test_playing_ends_where_an_observer_asks_for_it_and_goes_on_later():
    seen, whole, parts = Seen(), engine(steps=6), engine(steps=6)
    play(whole, Never())
    until = Until(lambda: len(seen.steps) == 2)
    play(parts, Never(), until, seen)
    assert until.stopped
    assert (len(seen.steps), seen.asked) == (2, 2)
    play(parts, Never())
    np.testing.assert_array_equal(parts.state.scores.metric, whole.state.scores.metric)


def test_an_episode_that_is_over_is_not_played():
    playing, seen = engine(steps=2), Seen()
    play(playing, Never())
    assert play(playing, Never(), seen) is None
    assert seen.asked == 0


def test_a_first_decision_is_carried_out_without_asking_again():
    class Once(Never):
        asked = 0

        def act(self, view):
            self.asked += 1
            return super().act(view)

    playing, client = engine(steps=3), Once()
    first = decide(client, playing.view())
    play(playing, client, first=first)
    assert client.asked == 3


def test_a_controller_that_fails_is_told_to_the_observers_and_leaves_the_engine_as_it_was():
    class Wrong(Never):
        def act(self, view):
            return Actions.wait(1) if view.step == 2 else super().act(view)

    playing, seen = engine(steps=4), Seen()
    with pytest.raises(InputError):
        play(playing, Wrong(), seen)
    assert (len(seen.steps), seen.failures, playing.state.step) == (2, 1, 2)
