"""The thread that takes steps while its rank computes."""

import threading
import time

import pytest

from distdl_rma.segments.transport.progress_thread import ProgressEngine


def test_the_thread_takes_turns_until_it_is_stopped():
    enough, turns = threading.Event(), []

    def turn():
        turns.append(threading.current_thread())
        if len(turns) == 5:
            enough.set()
        return len(turns)

    engine = ProgressEngine(turn, crowded=False)
    assert enough.wait(10) and engine.running
    engine.stop()
    engine.stop()
    taken = len(turns)
    time.sleep(0.02)
    assert not engine.running and len(turns) == taken
    assert all(thread.daemon and thread is not threading.current_thread() for thread in turns)


@pytest.mark.parametrize("error", [ValueError("no such step"), KeyboardInterrupt()])
def test_an_error_ends_the_thread_and_is_kept_for_its_rank(error):
    def turn():
        raise error

    engine = ProgressEngine(turn, crowded=True)
    engine._thread.join(10)
    assert not engine.running and engine.error is error
    engine.stop()
