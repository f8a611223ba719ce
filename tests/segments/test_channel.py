"""The two-slot protocol, under delays, ranks that run ahead, and misuse."""

import random
import time

import numpy as np
import pytest

from distdl_rma import ClosedError, MismatchError, ProtocolError, ShapeError
from distdl_rma.geometry import Box, Decomposition, Exchange
from distdl_rma.segments import Channel
from tests.segments.exchanges import NAMES, arrive, expected, gives_back, movements, values

pytestmark = pytest.mark.mpi


@pytest.mark.in_turn(1, 3, 4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transposed", [False, True])
def test_movement_is_right_for_hundreds_of_epochs_with_random_delays(
    machine, opened, name, transposed, lands
):
    channel, exchange = opened(name, f"{name}{transposed}", lands, transposed)
    chance, flights, kept = random.Random(machine.rank), [], []
    for epoch in range(1, 201):
        if chance.random() < 0.03:
            time.sleep(chance.random() * 3e-3)
        x = values(exchange, machine.rank, epoch)
        flights.append((x, channel.start(channel.cut(x))))
        # Two epochs may be in flight.
        if len(flights) == 1 and epoch < 200 and (epoch < 8 or chance.random() < 0.2):
            continue
        for x, flight in flights:
            kept.append(arrive(channel, x, flight))
            assert flight == len(kept) and (kept[-1] == expected(exchange, flight)).all(), flight
        flights.clear()
    # No peer puts into what was taken.
    assert all((y == expected(exchange, epoch)).all() for epoch, y in enumerate(kept[:20], 1))
    assert len({y.ctypes.data for y in kept}) == len(kept) == 200


@pytest.mark.mpi(min_size=2)
def test_results_land_only_where_peers_are_near_and_nothing_is_summed(machine, opened, lands):
    # Of two ranks of three, less than half of a result comes from a near one.
    direct = lands and len(machine.segments.segment.arenas) == machine.size - 1
    landed = {name: any(opened(name, name, lands)[0].landed) for name in NAMES}
    assert landed["all_gather"] == direct and not landed["sum_reduce"]


def test_epochs_are_received_in_order(machine, opened):
    channel, exchange = opened("halo", "third")
    x = values(exchange, machine.rank, 0)
    flights = [channel.start(channel.cut(x)) for _ in range(2)]
    with pytest.raises(ProtocolError, match="'third': third start without a receive"):
        channel.start(channel.cut(x))
    with pytest.raises(ProtocolError, match="epoch 2 cannot be received"):
        list(channel.receive(flights[1]))
    for flight in flights:
        channel.gather(x, flight, np.add)
    with pytest.raises(ProtocolError, match="epoch 2 cannot be received"):
        list(channel.receive(2))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["broadcast", "sum_reduce"])
@pytest.mark.parametrize("other", [np.int32, ">f4"])
def test_another_dtype_is_refused_by_those_who_send_and_by_those_who_receive(machine, closing, name, other):
    dtype = np.dtype(other if machine.rank == 0 else np.float32)
    channel = closing(Channel(machine.segments, movements(machine)[name], dtype, "bits"))
    found = rf"'bits'.*dtype is {dtype} on rank {machine.rank} and \S+ on rank"
    with pytest.raises(MismatchError, match=found):
        channel.connect()


@pytest.mark.mpi(min_size=2)
def test_different_plans_raise_on_both_sides_naming_both_layers(machine, comm):
    if machine.rank < 2:
        pair = machine.partition().create_partition_inclusive([0, 1])
        own = Decomposition.balanced(pair, (4,))
        exchange = Exchange(machine.rank, own, Decomposition.replicated(pair, (4,)))
        channel = Channel(machine.segments, exchange, np.float64, f"layer{machine.rank}")
        with pytest.raises(MismatchError, match=r"layer[01].*layer[01]"):
            channel.connect()


def test_wrong_shape_and_dtype_are_refused_before_data_moves(opened):
    channel, exchange = opened("halo", "picky")
    with pytest.raises(ShapeError, match="local shape is"):
        channel.cut(np.zeros(99, np.int64))
    if not channel.idle:
        with pytest.raises(TypeError):
            channel.start(channel.cut(np.zeros(exchange.own.shape, np.float64)))
    assert channel._started == 0


def test_fewer_arrays_than_sends_are_refused_and_the_start_can_be_repeated(machine, opened):
    channel, exchange = opened("all_gather", "short")
    for epoch in range(1, 4):
        parts = channel.cut(x := values(exchange, machine.rank, epoch))
        match = rf"'short': .* {len(parts)} on rank {machine.rank}, and got fewer"
        for few in ([], parts[:-1], iter(parts[:-1])) if parts else ():
            with pytest.raises(ShapeError, match=match):
                channel.start(few)
        assert (channel.gather(x, channel.start(parts), np.add) == expected(exchange, epoch)).all()


def test_closed_channel_says_so_and_gives_its_memory_back(machine, opened, comm):
    channel, exchange = opened("halo", "closed")
    assert "closed" in machine.segments.stats().owners
    channel.move(values(exchange, machine.rank, 0))
    channel.close()
    channel.close()
    with pytest.raises(ClosedError, match="'closed': already closed"):
        channel.start([])
    comm.Barrier()
    assert gives_back(machine.segments, "closed")


def test_segment_holds_two_slots_of_what_is_received(machine, opened):
    channel, exchange = opened("all_gather", "memory")
    far = [each for each in exchange.sends if machine.segments.segment.link(each.peer).memory is None]
    slots = sum(piece.box.volume * 8 for piece in (*exchange.receives, *far))
    assert channel.nbytes <= 2 * slots + 2 * 64 * (len(exchange.receives) + len(exchange.sends))


@pytest.mark.sizes(2, 3)
def test_large_message_is_read_while_it_is_written(machine, closing):
    # From the first rank to all, in several steps; a slow writer and slow readers.
    P, whole = machine.partition(), (5, 3, 100_000)
    ends = (Decomposition.replicated(each, whole) for each in (P.create_partition_inclusive([0]), P))
    exchange = Exchange(machine.rank, *ends)
    channel = closing(Channel(machine.segments, exchange, np.int32, "large"))
    assert len(channel.sends) == 4 * len(exchange.sends)
    assert channel.count(len(exchange.receives)) == len(channel.receives)
    delays = random.Random(machine.rank)

    def slowly(parts):
        for part in parts:
            time.sleep(delays.random() * 2e-3)
            yield part

    last = 4
    for epoch in range(1, last + 1):
        x = np.full(whole, epoch, np.int32) * np.arange(100_000, dtype=np.int32)
        x = x[exchange.own.slices(Box.of_shape(whole))]
        flight = channel.start(slowly(channel.cut(x)))
        assert (channel.gather(x, flight, np.add) == np.arange(100_000) * epoch).all()
    channel.start(channel.cut(x))
    channel.void()
    assert (channel.move(x) == np.arange(100_000) * last).all()
