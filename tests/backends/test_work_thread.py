"""Promise: work for the device is done in the order in which it was given, by the thread, or by the
caller if the thread has none."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from gpuscore.backends.torch.work_thread import WorkThread

PATIENCE = 30  # seconds


@contextmanager
def work_thread():
    thread = WorkThread(ThreadPoolExecutor(max_workers=1))
    try:
        yield thread
    finally:
        thread.close()


def test_the_caller_works_itself_only_while_the_thread_has_nothing_to_do():
    here = threading.get_ident()
    with work_thread() as thread:
        assert thread.do(threading.get_ident).result() == here
        assert thread.submit(threading.get_ident).result(PATIENCE) != here
        for _ in range(100):  # at once after the thread's last work
            thread.submit(threading.get_ident).result(PATIENCE)
            assert thread.do(threading.get_ident).result() == here


def test_quick_work_does_not_overtake():
    go, order = threading.Event(), []
    with work_thread() as thread:
        first = thread.submit(lambda: (go.wait(PATIENCE), order.append("first")))
        second = thread.submit(lambda: order.append("second"))
        third = thread.do(lambda: order.append("third"))
        assert order == []
        assert not third.done()
        go.set()
        for task in (third, second, first):
            task.result(PATIENCE)
    assert order == ["first", "second", "third"]


def test_the_thread_does_not_overtake_the_caller():
    """A capture that another thread asks for waits until the caller's launch is done."""
    begun, order = threading.Event(), []
    with work_thread() as thread:

        def capture():
            begun.wait(PATIENCE)
            asked.append(thread.submit(lambda: order.append("capture")))

        def launch():
            begun.set()
            other.join(0.05)  # time for the capture, if it does not wait
            order.append("launch")

        asked = []
        other = threading.Thread(target=capture)
        other.start()
        thread.do(launch).result()
        other.join(PATIENCE)
        asked[0].result(PATIENCE)
    assert order == ["launch", "capture"]


@pytest.mark.parametrize("how", ["do", "submit"])
def test_an_error_is_raised_by_the_result_and_stops_nothing(how):
    with work_thread() as thread:
        pending = getattr(thread, how)(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pending.result()
        assert thread.do(threading.get_ident).result() == threading.get_ident()
        assert thread.submit(lambda: 3).result(PATIENCE) == 3
