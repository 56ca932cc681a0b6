import gc
import sys
import threading
import time
import weakref

import pytest

from esper.store.background import Background, Backlog


def test_jobs_are_done_one_after_another_by_one_thread():
    background, done, threads = Background(), [], set()

    def job(number):
        threads.add(threading.current_thread())
        done.append(number)

    futures = [background.submit(lambda number=number: job(number)) for number in range(20)]
    for future in futures:
        future.result(60)
    assert done == list(range(20))
    (thread,) = threads
    assert thread.daemon
    assert thread is not threading.main_thread()


def test_what_a_job_raises_is_kept_for_who_asks_and_the_next_job_is_done():
    background = Background()
    failed, done = background.submit(lambda: [][0]), background.submit(lambda: None)
    with pytest.raises(IndexError):
        failed.result(60)
    assert done.result(60) is None


def test_closed_it_ends_behind_its_jobs_and_the_last_is_called_behind_them():
    background, go, called = Background(), threading.Event(), []
    background.submit(lambda: called.append(threading.current_thread())).result(60)
    background.submit(lambda: go.wait(60) and None)
    background.close(lambda: called.append("last"))
    (thread,) = called
    assert thread.is_alive()
    go.set()
    thread.join(60)
    assert not thread.is_alive()
    assert called == [thread, "last"]


@pytest.mark.parametrize("jobs", [0, 1])
def test_where_all_is_done_the_last_is_called_at_once(jobs):
    background, called = Background(), []
    for _ in range(jobs):
        background.submit(lambda: None).result(60)
    background.close(lambda: called.append(threading.current_thread()))
    assert called == [threading.main_thread()]


def submitted(background, job, line):
    """Return whether a job is submitted before a KeyboardInterrupt comes, at some line of what runs there."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != sys.modules[Background.__module__].__file__:
            return None
        count += event == "line"
        if count > line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        background.submit(job)
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True


def test_a_ctrl_c_at_any_line_of_submit_leaves_the_last_behind_the_jobs_and_no_thread():
    orders, line, done = [], 0, False
    while not done:
        background, order, called = Background(), [], threading.Event()

        def job(order=order):
            time.sleep(0.02)
            order.append("job")

        def last(order=order, called=called):
            order.append("last")
            called.set()

        done = submitted(background, job, line)
        background.close(last)
        assert called.wait(60)
        if background._thread.ident is not None:
            background._thread.join(60)
            assert not background._thread.is_alive()
        orders.append(order)
        line += 1
    assert ["last"] in orders
    assert all(order in (["last"], ["job", "last"]) for order in orders)
    assert orders[-1] == ["job", "last"]


def test_what_a_job_held_is_let_go_when_it_is_done():
    class Large:
        def read(self):
            return self

    background, large = Background(), Large()
    there = weakref.ref(large)
    future = background.submit(lambda held=large: held.read() and None)
    del large
    future.result(60)
    background.submit(lambda: None).result(60)
    gc.collect()
    assert there() is None


def test_a_backlog_holds_a_caller_while_its_jobs_are_too_large_in_sum():
    backlog, go, done = Backlog(5), threading.Event(), []
    backlog.submit(lambda: go.wait(60) and None, 3)
    backlog.submit(lambda: done.append("second"), 2)
    backlog.wait_for_room()
    assert (backlog.size, backlog.waits, backlog.waited) == (5, 0, 0.0)
    backlog.submit(lambda: done.append("third"), 2)

    def go_when_it_waits():
        while not backlog.waits:
            time.sleep(0.001)
        go.set()

    thread = threading.Thread(target=go_when_it_waits)
    thread.start()
    backlog.wait_for_room()
    thread.join()
    assert backlog.size <= 5
    assert (backlog.waits, backlog.waited > 0) == (1, True)
    backlog.finish()
    backlog.close()
    assert (done, backlog.size) == (["second", "third"], 0)


def test_a_backlog_raises_the_error_of_a_job_where_it_is_waited_for():
    backlog = Backlog(5)
    backlog.submit(lambda: [][0])
    with pytest.raises(IndexError):
        backlog.finish()
    backlog.finish()
    backlog.close()


def test_a_backlog_that_is_not_done_in_time_says_so():
    backlog, go = Backlog(5), threading.Event()
    backlog.submit(lambda: go.wait(60) and None)
    with pytest.raises(TimeoutError):
        backlog.finish(0.01)
    go.set()
    backlog.finish()
    backlog.close()
