"""What the buffers of a rank share: its end of the segments, and the wait for what was put."""

import threading
from types import SimpleNamespace

import pytest

from distdl_rma.errors import ClosedError, ConfigurationError
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.memory.context import SegmentContext


class Link:
    """Has so many things left to deliver once it was closed."""

    def __init__(self, left):
        self.left, self.closed = left, 0

    def close_delivery(self):
        self.closed += 1

    def advance(self):
        self.left = max(0, self.left - 1)
        return not self.left


def context(links, until):
    segment = SimpleNamespace(nbytes=1 << 12, link=links.__getitem__, lock=threading.RLock())
    comm = SimpleNamespace(rank=1)
    return SegmentContext(comm, (4, 7, 9), segment, SimpleNamespace(until=until, counters=Counters()))


def test_a_flush_closes_all_deliveries_before_it_waits_for_any_and_names_those_that_are_late():
    links = {4: Link(2), 7: Link(0), 9: Link(3)}
    seen = []

    def until(ready, reason, timeout):
        assert all(link.closed == 1 for link in links.values()) and timeout == 5
        while not ready():
            seen.append(reason().ranks)

    one = context(links, until)
    one.flush((4, 7, 9), 5)
    assert seen[0] == (9,) and one.rank == 7
    assert not any(link.left for link in links.values())


def test_nothing_is_flushed_after_the_close_or_with_a_timeout_that_is_none():
    one = context({}, None)
    with pytest.raises(ConfigurationError, match="a timeout is"):
        one.flush((), -1)
    one.closed = True
    with pytest.raises(ClosedError, match="already closed"):
        one.flush((), None)


def test_numbers_of_notifications_begin_far_from_each_other():
    one, another = (context({}, None) for _ in range(2))
    assert next(one.sequence) == next(another.sequence)
    another.ranks, other = (
        (7,),
        SegmentContext(
            SimpleNamespace(rank=0), (5,), SimpleNamespace(nbytes=64), SimpleNamespace(counters=Counters())
        ),
    )
    assert abs(next(other.sequence) - next(one.sequence)) > 1000
