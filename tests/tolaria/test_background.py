import gc
import threading
import weakref

import pytest

from esper.tolaria.background import Background


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


def test_closed_it_ends_behind_its_last_job_and_a_later_one_has_another_thread():
    background, go, threads = Background(), threading.Event(), []
    background.submit(lambda: threads.append(threading.current_thread()))
    last = background.submit(lambda: go.wait(60))
    background.close()
    assert not last.done()
    go.set()
    last.result(60)
    threads[0].join(60)
    assert not threads[0].is_alive()
    background.submit(lambda: threads.append(threading.current_thread())).result(60)
    assert threads[1] is not threads[0]


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
