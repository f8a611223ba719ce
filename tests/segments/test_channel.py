"""The two-slot protocol, under delays, ranks that run ahead, and misuse."""

import random
import time

import numpy as np
import pytest

from distdl_rma import ClosedError, MismatchError, ProtocolError, ShapeError
from distdl_rma.geometry import Box, Decomposition, Exchange
from distdl_rma.segments import Channel, direct_receive
from tests.segments.exchanges import NAMES, arrive, channel_of, expected, halo, movements, opened, values

pytestmark = pytest.mark.mpi


@pytest.fixture(params=[False, True], ids=["slots", "results"])
def lands(request, monkeypatch):
    """Whether peers put into results, of any size, where these are near."""
    monkeypatch.setattr(direct_receive, "_SMALLEST_NBYTES", 1)
    return request.param


@pytest.mark.in_turn(1, 3, 4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transposed", [False, True])
def test_movement_is_right_for_hundreds_of_epochs_with_random_delays(machine, name, transposed, lands):
    exchange = movements(machine)[name]
    exchange = exchange.T if transposed else exchange
    channel = channel_of(machine, exchange, f"{name}{transposed}", lands)
    delays, kept = random.Random(machine.rank), []
    for epoch in range(1, 201):
        if delays.random() < 0.03:
            time.sleep(delays.random() * 3e-3)
        x = values(exchange, machine.rank, epoch)
        y = arrive(channel, x, channel.start(channel.cut(x)))
        assert (y == expected(exchange, epoch)).all(), epoch
        kept.append(y)
    # No peer puts into what was taken.
    assert all((y == expected(exchange, epoch)).all() for epoch, y in enumerate(kept[:20], 1))
    assert len({y.ctypes.data for y in kept}) == len(kept)
    channel.close()


@pytest.mark.mpi(min_size=2)
def test_results_land_only_where_peers_are_near_and_nothing_is_summed(machine, lands):
    # Of two ranks of three, less than half of a result comes from a near one.
    direct = lands and len(machine.segments.segment.arenas) == machine.size - 1
    landed = {
        name: any(channel_of(machine, exchange, name, lands).landed)
        for name, exchange in movements(machine).items()
    }
    assert landed["all_gather"] == direct and not landed["sum_reduce"]


@pytest.mark.parametrize("name", NAMES)
def test_two_epochs_may_be_in_flight(machine, name, lands):
    exchange = movements(machine)[name]
    channel = channel_of(machine, exchange, name, lands)
    for epoch in range(1, 8, 2):
        xs = [values(exchange, machine.rank, e) for e in (epoch, epoch + 1)]
        flights = [channel.start(channel.cut(x)) for x in xs]
        for x, flight in zip(xs, flights, strict=True):
            assert (arrive(channel, x, flight) == expected(exchange, flight)).all()
    channel.close()


def test_epochs_are_received_in_order(machine):
    exchange = halo(machine)
    channel = Channel(machine.segments, exchange, np.int64, "third")
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
    channel.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["broadcast", "sum_reduce"])
@pytest.mark.parametrize("other", [np.int32, ">f4"])
def test_another_dtype_is_refused_by_those_who_send_and_by_those_who_receive(machine, name, other):
    dtype = np.dtype(other if machine.rank == 0 else np.float32)
    channel = Channel(machine.segments, movements(machine)[name], dtype, "bits")
    found = rf"'bits'.*dtype is {dtype} on rank {machine.rank} and \S+ on rank"
    with pytest.raises(MismatchError, match=found):
        channel.connect()
    channel.close()


@pytest.mark.mpi(min_size=2)
def test_different_plans_raise_on_both_sides_naming_both_layers(machine, comm):
    if machine.rank < 2:
        pair = machine.partition().create_partition_inclusive([0, 1])
        own = Decomposition.balanced(pair, (4,))
        exchange = Exchange(machine.rank, own, Decomposition.replicated(pair, (4,)))
        channel = Channel(machine.segments, exchange, np.float64, f"layer{machine.rank}")
        with pytest.raises(MismatchError, match=r"layer[01].*layer[01]"):
            channel.connect()


def test_wrong_shape_and_dtype_are_refused_before_data_moves(machine):
    channel = Channel(machine.segments, halo(machine), np.float32, "picky")
    with pytest.raises(ShapeError, match="local shape is"):
        channel.cut(np.zeros(99, np.float32))
    if not channel.idle:
        with pytest.raises(TypeError):
            channel.start(channel.cut(np.zeros(channel.exchange.own.shape, np.float64)))
    assert channel._started == 0
    channel.close()


def test_fewer_arrays_than_sends_are_refused_and_the_start_can_be_repeated(machine):
    channel, exchange = opened(machine, "all_gather", "short")
    for epoch in range(1, 4):
        parts = channel.cut(x := values(exchange, machine.rank, epoch))
        match = rf"'short': .* {len(parts)} on rank {machine.rank}, and got fewer"
        for few in ([], parts[:-1], iter(parts[:-1])) if parts else ():
            with pytest.raises(ShapeError, match=match):
                channel.start(few)
        assert (channel.gather(x, channel.start(parts), np.add) == expected(exchange, epoch)).all()
    channel.close()


def test_closed_channel_says_so_and_gives_its_memory_back(machine, comm):
    channel = Channel(machine.segments, halo(machine), np.int64, "closing")
    assert "closing" in machine.segments.stats().owners
    channel.move(values(channel.exchange, machine.rank, 0))
    channel.close()
    channel.close()
    with pytest.raises(ClosedError, match="'closing': already closed"):
        channel.start([])
    comm.Barrier()
    deadline = time.monotonic() + 60
    while "closing" in machine.segments.stats().owners and time.monotonic() < deadline:
        machine.segments.progress()
    assert "closing" not in machine.segments.stats().owners


def test_segment_holds_two_slots_of_what_is_received(machine):
    exchange = movements(machine)["all_gather"]
    channel = Channel(machine.segments, exchange, np.float64, "memory")
    received = sum(piece.box.volume for piece in exchange.receives) * 8
    lines = 2 * 64 * (len(exchange.receives) + len(exchange.sends))
    remote = sum(
        piece.box.volume * 8
        for piece in exchange.sends
        if machine.segments.segment.link(piece.peer).memory is None
    )
    assert channel.nbytes <= 2 * (received + remote) + lines
    channel.close()


@pytest.mark.sizes(2, 3)
def test_large_message_is_read_while_it_is_written(machine, comm):
    # From the first rank to all, in several steps; a slow writer and slow readers.
    whole = (5, 3, 100_000)
    everywhere = Box.of_shape(whole)
    root = machine.partition().create_partition_inclusive([0])
    exchange = Exchange(
        machine.rank,
        Decomposition.replicated(root, whole),
        Decomposition.replicated(machine.partition(), whole),
    )
    channel = Channel(machine.segments, exchange, np.int32, "large")
    assert len(channel.sends) == 4 * len(exchange.sends)
    assert channel.count(len(exchange.receives)) == len(channel.receives)
    delays = random.Random(machine.rank)

    def slowly(parts):
        for part in parts:
            time.sleep(delays.random() * 2e-3)
            yield part

    last = 4
    for epoch in range(1, last + 1):
        x = (np.arange(100_000, dtype=np.int32) * np.full(whole, epoch, np.int32))[
            exchange.own.slices(everywhere)
        ]
        flight = channel.start(slowly(channel.cut(x)))
        y = channel.gather(x, flight, np.add)
        assert (y == np.arange(100_000) * epoch).all()
    channel.start(channel.cut(x))
    channel.void()
    y = channel.move(x)
    assert (y == np.arange(100_000) * last).all()
    channel.close()
