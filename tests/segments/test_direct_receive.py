"""Results that ranks of the node put straight into."""

import random
import time

import numpy as np
import pytest

from distdl_rma import ExchangeTimeout
from distdl_rma.segments import Channel, direct_receive
from distdl_rma.segments.transport.heap import Landing, own_arena
from tests.segments.exchanges import NAMES, expected, movements, values

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


@pytest.fixture(autouse=True)
def results_of_any_size_land(monkeypatch):
    monkeypatch.setattr(direct_receive, "_SMALLEST_NBYTES", 1)


class Results:
    """Memory for the results of a channel, never used twice."""

    def __init__(self, exchange):
        self.shape, self.made = exchange.need.shape, 0

    def make(self):
        arena, self.made = own_arena(), self.made + 1
        memory = arena.take(max(8, 8 * int(np.prod(self.shape))))
        array = memory.view(np.int64)[: int(np.prod(self.shape))].reshape(self.shape)
        array[...] = -1
        return Landing(array, arena.offset(memory.ctypes.data), array)


def landing_channel(machine, exchange, name):
    results = Results(exchange)
    return Channel(machine.segments, exchange, np.int64, name, results.make), results


def arrive(channel, x, epoch, timeout=None):
    """Result of an epoch: what has landed, and what has to be copied."""
    exchange, y = channel.exchange, channel.take_result(epoch)
    if y is None:
        return channel.gather(x, epoch, np.add)
    for piece in exchange.local:
        y[piece.target.slices(exchange.need)] = x[piece.box.slices(exchange.own)]
    for landed, (piece, view) in zip(channel.landed, channel.receive(epoch, timeout), strict=True):
        if not landed:
            y[piece.box.slices(exchange.need)] = view
    return y


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_result_is_right_and_stays_so(machine, name, transposed):
    exchange = movements(machine)[name]
    exchange = exchange.T if transposed else exchange
    channel, results = landing_channel(machine, exchange, f"{name}{transposed}")
    delays, kept = random.Random(machine.rank), []
    for epoch in range(1, 17):
        if delays.random() < 0.2:
            time.sleep(delays.random() * 3e-3)
        x = values(exchange, machine.rank, epoch)
        kept.append(arrive(channel, x, channel.start(channel.cut(x))))
    for epoch, y in enumerate(kept, 1):
        assert (y == expected(exchange, epoch)).all(), epoch
    assert results.made in (0, len(kept) + 2)
    channel.close()


@pytest.mark.parametrize("name", NAMES)
def test_two_epochs_may_be_in_flight(machine, name):
    exchange = movements(machine)[name]
    channel, _ = landing_channel(machine, exchange, name)
    for epoch in range(1, 8, 2):
        xs = [values(exchange, machine.rank, e) for e in (epoch, epoch + 1)]
        flights = [channel.start(channel.cut(x)) for x in xs]
        for x, flight in zip(xs, flights, strict=True):
            assert (arrive(channel, x, flight) == expected(exchange, flight)).all()
    channel.close()


@pytest.mark.parametrize("name", ["all_gather", "broadcast"])
def test_after_a_void_the_same_memory_serves_again(machine, name):
    exchange = movements(machine)[name]
    channel, _ = landing_channel(machine, exchange, name)
    for epoch in range(1, 13):
        x = values(exchange, machine.rank, epoch)
        if epoch % 3 == 0:
            # Some have started it, and wrote what nobody reads.
            if (machine.rank + epoch) % 2:
                channel.start(channel.cut(x - 99))
            channel.void()
        else:
            assert (arrive(channel, x, channel.start(channel.cut(x))) == expected(exchange, epoch)).all()
    channel.close()


@pytest.mark.mpi(min_size=2)
def test_a_receive_that_gave_up_is_repeated_into_the_same_result(machine, comm):
    if not all(comm.allgather(bool(machine.segments.segment.arenas))):
        pytest.skip("no results land between nodes")
    exchange = movements(machine)["all_gather"]
    channel, _ = landing_channel(machine, exchange, "late")
    channel.connect()
    x = values(exchange, machine.rank, 1)
    if machine.rank == 0:
        comm.Barrier()
        epoch = channel.start(channel.cut(x))
        y = arrive(channel, x, epoch)
    else:
        epoch = channel.start(channel.cut(x))
        first = channel.take_result(epoch)
        with pytest.raises(ExchangeTimeout):
            arrive(channel, x, epoch, timeout=0.01)
        comm.Barrier()
        y = arrive(channel, x, epoch)
        assert y is first
    assert (y == expected(exchange, 1)).all()
    channel.close()


@pytest.mark.mpi(min_size=2)
def test_results_land_only_where_peers_are_near_and_nothing_is_summed(machine):
    # Of two ranks of three, less than half of a result comes from a near one.
    direct = len(machine.segments.segment.arenas) == machine.size - 1
    lands = {
        name: any(landing_channel(machine, exchange, name)[0].landed)
        for name, exchange in movements(machine).items()
    }
    assert lands["all_gather"] == direct
    assert not lands["sum_reduce"]
