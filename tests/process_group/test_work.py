"""Works and futures: what they say while something is under way, after it, and when it went wrong."""

import time
from datetime import timedelta

import pytest
import torch

from distdl_rma.errors import ClosedError, ExchangeTimeout
from distdl_rma.process_group.operations import Lines, Operation
from distdl_rma.process_group.work import GroupWork, _driver
from distdl_rma.segments.waiting.header import RankState, WaitReason

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]


@pytest.fixture
def begin(machine):
    lines = Lines(machine.segments, "works")

    def begin(ready, timeout=None, source=-1):
        def script():
            while not ready:
                yield
            if isinstance(ready[0], BaseException):
                raise ready[0]

        reason = WaitReason((), "for a test")
        return GroupWork(
            lines, lines.append(Operation(script, lambda: reason, None)), ["it"], timeout, source
        )

    return begin


def test_what_is_under_way_is_over_when_it_is(begin):
    ready = []
    work = begin(ready, source=[3])
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    with pytest.raises(ExchangeTimeout, match=r"waited 0\.01 s for the other ranks for a test"):
        work.wait(timedelta(seconds=0.01))
    future = work.get_future()
    assert work.get_future() is future and not future.done()
    ready.append("now")
    assert work.wait() and future.wait() == ["it"]
    assert work.is_success() and work.result() == ["it"] and work.source_rank() == 3
    # Of what is over the future is settled from the beginning.
    assert begin(["now"]).get_future().done()


def test_what_went_wrong_is_raised_by_the_wait_and_by_the_future(begin):
    ready = []
    work = begin(ready)
    future = work.get_future()
    ready.append(ClosedError("gone"))
    with pytest.raises(ClosedError, match="gone"):
        future.wait()
    with pytest.raises(ClosedError, match="gone"):
        work.wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), ClosedError)


@pytest.mark.parametrize("together", [False, True])
def test_callbacks_may_wait_for_other_futures(begin, together):
    first = []
    second = first if together else []
    outer, inner = begin(first).get_future(), begin(second).get_future()
    chained = outer.then(lambda done: [*done.value(), *inner.wait()])
    first.append("now")
    if not together:
        time.sleep(0.01)
        second.append("now")
    assert chained.wait() == ["it", "it"]
    assert torch.futures.wait_all([outer, inner]) == [["it"], ["it"]]


def test_others_are_told_of_a_long_wait_for_a_future_and_of_its_end(begin, machine):
    header, ready = machine.segments.watch._header, []
    said, write = [], header.write

    def noted(state, *text):
        said.append(state)
        write(state, *text)

    header.write = noted
    try:
        future = begin(ready).get_future()
        while RankState.WAITING not in said:
            time.sleep(0.01)
        ready.append("now")
        future.wait()
    finally:
        del header.write
    assert said[-1] is RankState.RUNNING


def test_a_process_does_not_end_while_torch_is_at_a_future(begin):
    ready, seen = [], []

    def act(done):
        # Whoever waits for the operation goes on meanwhile.
        time.sleep(0.2)
        seen.append(done.value())

    work = begin(ready)
    work.get_future().then(act)
    ready.append("now")
    work.wait()
    while not (seen or _driver._settling):
        time.sleep(1e-3)
    _driver.rest()
    assert seen == [["it"]]
