"""What exists once is shared by copies, or refuses to be copied."""

import copy
import threading
from types import SimpleNamespace

import pytest

from distdl_rma import Machine, UnsupportedError
from distdl_rma.errors import ClosedError, ConfigurationError
from distdl_rma.segments.memory.context import SegmentContext
from distdl_rma.trace import Counters


@pytest.mark.mpi
def test_a_machine_and_its_groups_are_shared_by_copies(P_world):
    machine = Machine.of(P_world)
    assert copy.deepcopy(machine) is copy.copy(machine) is machine
    assert copy.deepcopy(P_world) == P_world
    assert copy.deepcopy(P_world).home is machine
    group = machine.group(name="mine")
    assert copy.deepcopy([group])[0] is group
    group.close()


@pytest.mark.mpi
def test_what_lies_in_the_segment_is_not_copied(P_world):
    with pytest.raises(UnsupportedError, match="what lies in the segment neither"):
        copy.deepcopy(Machine.of(P_world).segments.get_segment_buffer(8))


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
