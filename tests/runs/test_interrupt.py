import signal
import threading

import pytest

from esper.leyline.progress import Progress
from esper.runs.folder.interrupt import Interrupt
from esper.runs.grow import grow
from esper.tamiyo.rules.base import Never
from populations import blobs, small_config


def test_the_first_signal_asks_and_the_second_interrupts():
    with Interrupt() as interrupt:
        assert not interrupt.asked
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_another_one_lets_one_more_signal_ask_and_the_next_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with Interrupt(hangup=False) as another:
            assert (interrupt.asked, another.asked) == (True, False)
            signal.raise_signal(signal.SIGINT)
            assert another.asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_that_the_run_does_not_answer_gets_a_word(monkeypatch):
    monkeypatch.setattr("esper.runs.folder.interrupt.WORD_AFTER", 0.01)
    said, came = [], threading.Event()
    with Interrupt(lambda line: (said.append(line), came.set())) as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert came.wait(60)
        assert interrupt.asked
    assert said == ["interrupted: the run ends after the step that is under way; another Ctrl-C ends it at once"]


def test_ctrl_c_within_a_long_step_gets_a_word_before_the_step_ends(monkeypatch):
    monkeypatch.setattr("esper.runs.folder.interrupt.WORD_AFTER", 0.01)
    said, came = [], threading.Event()

    class Heard(Progress):
        def answer(self, text):
            said.append(text)
            came.set()

    class Long(Never):
        def act(self, view):
            if view.step == 1:
                signal.raise_signal(signal.SIGINT)
                assert came.wait(60)
            return super().act(view)

    summary = grow(blobs(), small_config({"steps": 4, "models": "none", "baselines": ["twin"]}), Long(), watch=Heard())
    assert (summary["status"], summary["steps_done"]) == ("interrupted", 2)
    assert said[0].startswith("interrupted: the run ends after the step that is under way; another Ctrl-C")
    assert said[1].startswith("interrupted after 2 of 4 steps")


def test_a_signal_that_the_run_answers_gets_no_other_word(monkeypatch):
    said = []
    with Interrupt(said.append) as interrupt:
        signal.raise_signal(signal.SIGINT)
        interrupt.answered()
        (waiting,) = [thread for thread in threading.enumerate() if thread.name == "interrupt"]
        waiting.join(60)
    assert not waiting.is_alive()
    assert said == []


def test_a_run_without_a_signal_leaves_no_thread():
    with Interrupt(pytest.fail):
        (waiting,) = [thread for thread in threading.enumerate() if thread.name == "interrupt"]
    waiting.join(60)
    assert not waiting.is_alive()


def test_the_second_hangup_of_a_closed_terminal_asks_for_nothing_more():
    with Interrupt():
        signal.raise_signal(signal.SIGHUP)
        with Interrupt(hangup=False) as another:
            signal.raise_signal(signal.SIGHUP)
            assert not another.asked


def test_afterwards_the_signal_does_what_it_did():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_where_the_signal_was_ignored_the_second_interrupts_all_the_same():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert interrupt.asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_it_does_nothing():
    asked: list[bool] = []

    def work() -> None:
        with Interrupt() as interrupt:
            asked.append(interrupt.asked)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]
    assert signal.getsignal(signal.SIGINT) == before


def test_a_terminal_that_is_closed_asks_however_often_the_signal_comes():
    with Interrupt() as interrupt:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert interrupt.asked
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_under_nohup_the_end_of_a_terminal_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.asked
    finally:
        signal.signal(signal.SIGHUP, before)
