"""What is under way when something else happens: a late rank, an interruption, the end of the group."""

import gc
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from distdl_rma.errors import ClosedError, ExchangeTimeout, MismatchError, ProtocolError, UnsupportedError
from distdl_rma.segments.waiting.header import HEADER_BYTES, RankState, WaitReason, parse
from distdl_rma.torch_backend.group import RmaProcessGroup
from distdl_rma.torch_backend.node_slots import NodeSlots
from distdl_rma.torch_backend.operations import OperationQueue, PendingCall
from distdl_rma.torch_backend.work import GroupWork, _driver

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]


def test_messages_let_go_of_their_tensors_when_they_are_over(group):
    me, size = group.rank(), group.size()
    array, received = np.ones(3, np.float32), torch.zeros(3)
    sent, memory = torch.from_numpy(array), weakref.ref(array)
    del array
    for _ in range(2):
        works = [group.send([sent], (me + 1) % size, 0), group.recv([received], (me - 1) % size, 0)]
        for work in works:
            work.wait()
        sent = torch.ones(3)
        del works, work
    gc.collect()
    assert memory() is None and received.tolist() == [1, 1, 1]
    assert not group._points._last


@pytest.mark.parametrize("timeout", [20, float("inf")])
def test_nobody_waits_any_more_when_a_future_is_there(machine, comm, timeout):
    segments = machine.segments
    group = RmaProcessGroup(segments, machine.ranks, "there", timeout)
    comm.Barrier()
    if comm.rank:
        time.sleep(0.4)
    future = group.allreduce([torch.ones(3)]).get_future()
    assert future.wait()[0].tolist() == [comm.size] * 3
    assert parse(segments.segment.memory[:HEADER_BYTES].tobytes()).state is RankState.RUNNING
    group.shutdown()


def test_a_wait_that_came_further_says_how_long_it_was_in_all(machine, comm):
    if comm.size == 1:
        return
    group = RmaProcessGroup(machine.segments, machine.ranks, "further", 1.5)
    x = torch.ones(3)
    comm.Barrier()
    if comm.rank == 0:
        _, work = group.allreduce([x]), group.barrier()
        with pytest.raises(ExchangeTimeout, match=r"rank 0 waited 1\.5 s for rank.* in barrier"):
            work.wait()
    else:
        time.sleep(0.3)
        group.allreduce([x]).wait(timedelta(seconds=60))
    comm.Barrier()
    if comm.rank:
        work = group.barrier()
    work.wait(timedelta(seconds=60))
    assert x.tolist() == [comm.size] * 3
    group.shutdown()


def test_what_is_under_way_keeps_its_memory_when_the_group_ends(machine, comm):
    group = RmaProcessGroup(machine.segments, machine.ranks, "ends in flight", None)
    x, y, on_node = torch.ones(3), torch.ones(4), isinstance(group._callers, NodeSlots)
    if comm.rank == 0:
        work = group.allreduce([x])
        group.shutdown()
    comm.Barrier()
    if comm.rank:
        work = group.allreduce([x])
        if on_node:
            work.wait()
    comm.Barrier()
    if comm.rank == 0 and comm.size > 1 and on_node:
        # The others are through with it, this rank is not.
        assert "process group ends in flight" in machine.segments.stats().owners
        assert not work.operations[0].done
    # In the same memory and on the same communicator, if these were free.
    after = RmaProcessGroup(machine.segments, machine.ranks, "after it", None)
    after.allreduce([y]).wait(timedelta(seconds=60))
    work.wait(timedelta(seconds=60))
    assert x.tolist() == [comm.size] * 3 and y.tolist() == [comm.size] * 4
    comm.Barrier()
    for one in (group, after):
        one.shutdown()


def test_tensors_whose_elements_lie_elsewhere_are_unwrapped_or_refused(group, comm):
    # Known by now, so that the next ones need not be looked at.
    for _ in range(2):
        group.allreduce([torch.ones(4)]).wait()
    x = torch.ones(4)
    group.allreduce([AsyncCollectiveTensor(x)]).wait()
    assert x.tolist() == [comm.size] * 4
    with pytest.raises(UnsupportedError, match=r"got a TwoTensor of torch\.float32"):
        group.allreduce([TwoTensor(torch.ones(4), torch.ones(4))])
    group.allreduce([x]).wait()
    assert x.tolist() == [comm.size**2] * 4


def test_an_interruption_is_raised_where_it_came_and_ends_the_group(group, machine, comm):
    interrupted = []

    def script():
        while not interrupted:
            yield
        raise KeyboardInterrupt

    operation = group._queue.append(PendingCall(script, lambda: WaitReason((), "for nobody")))
    # As by a signal, which never comes to another thread.
    with machine.segments.segment.lock:
        interrupted.append(True)
        with pytest.raises(KeyboardInterrupt):
            machine.segments.progress()
    assert isinstance(operation.error, KeyboardInterrupt)
    with pytest.raises(ProtocolError, match="was interrupted by KeyboardInterrupt"):
        group.barrier()


def test_a_message_that_an_error_elsewhere_ends_leaves_collectives_alone(machine):
    queue, ready, error = OperationQueue(machine.segments, "apart"), [], MismatchError("elsewhere")

    def script():
        while not ready:
            yield

    calls = [PendingCall(script, lambda: WaitReason((), "for a test")) for _ in range(2)]
    message, collective = queue.add(calls[0]), queue.append(calls[1])
    queue.fail(message, error)
    assert message.error is error and not collective.done
    ready.append("now")
    queue.wait(collective, 10)
    assert queue.advance_apart() and queue.idle


def test_memory_of_a_group_that_a_difference_ended_is_freed_when_all_have_destroyed_it(machine, comm):
    group = RmaProcessGroup(machine.segments, machine.ranks, "in vain", None)
    if comm.size > 1:
        with pytest.raises(MismatchError):
            group.allreduce([torch.ones(3 + comm.rank)]).wait()
    comm.Barrier()
    if group._ways.rounds is not None:
        assert "process group in vain" in machine.segments.stats().owners
    group.shutdown()
    comm.Barrier()
    assert "process group in vain" not in machine.segments.stats().owners


@pytest.fixture
def begin(machine):
    queue = OperationQueue(machine.segments, "works")

    def begin(ready, timeout=None, source=()):
        def script():
            while not ready:
                yield
            if isinstance(ready[0], BaseException):
                raise ready[0]

        reason = WaitReason((), "for a test")
        operation = queue.append(PendingCall(script, lambda: reason))
        return GroupWork(queue, [operation], ["it"], timeout, source)

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
