"""Epochs of a channel that are given up: by a wait that times out, an iterator that is left, or all ranks."""

import time

import numpy as np
import pytest

from distdl_rma import ExchangeTimeout, ProtocolError
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer
from distdl_rma.segments.transport.links import RmaPeer
from tests.segments.exchanges import arrive, expected, gives_back, values

pytestmark = pytest.mark.mpi


def test_voided_epoch_leaves_no_trace(machine, opened, comm, lands):
    channel, exchange = opened("all_gather" if lands else "halo", "void", lands)
    for epoch in range(1, 60):
        if epoch % 3 == 0:
            # Some ranks had started already, others had not.
            if (machine.rank + epoch) % 2:
                channel.start(channel.cut(values(exchange, machine.rank, -1)))
            comm.Barrier()
            channel.void()
        x = values(exchange, machine.rank, epoch)
        assert (arrive(channel, x, channel.start(channel.cut(x))) == expected(exchange, epoch)).all(), epoch


@pytest.mark.mpi(min_size=2)
def test_memory_of_a_voided_epoch_is_kept_until_no_late_put_can_come(machine, opened, comm):
    # Who voids first does not know whether the others had started.
    channel, exchange = opened("sum_reduce", "voided late")
    channel.move(values(exchange, machine.rank, 1))
    if machine.rank == 0:
        channel.void()
        channel.close()
        kept = "voided late" in machine.segments.stats().owners
        comm.Barrier()
        assert kept and gives_back(machine.segments, "voided late")
    else:
        comm.Barrier()
        if machine.rank % 2:
            channel.start(channel.cut(values(exchange, machine.rank, 2)))
        channel.void()
        channel.close()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_channel_that_was_voided_before_it_had_addresses_gives_its_memory_back(machine, opened, comm):
    channel, _ = opened("sum_reduce", "never connected")
    channel.void()
    channel.close()
    machine.segments.progress()
    assert "never connected" not in machine.segments.stats().owners
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_puts_of_a_voided_epoch_are_over_when_it_is_voided(machine, opened, monkeypatch):
    # What they come from is written again after the acknowledgement, which came unread.
    if machine.segments.transport != "remote":
        pytest.skip("on one node a put is over when it returns")
    channel, exchange = opened("all_gather", "void under way")
    x = values(exchange, machine.rank, 1)
    channel.move(x)
    asked, arrived = [], RmaPeer.arrived

    def slowly(wire, begun):
        asked.append(begun)
        return len(asked) > 50 and arrived(wire, begun)

    with monkeypatch.context() as patched:
        patched.setattr(RmaPeer, "arrived", slowly)
        channel.start(channel.cut(x))
        channel.void()
        over = len(asked) > 50
    assert over
    assert (channel.move(x) == expected(exchange, 1)).all()


@pytest.mark.mpi(min_size=2)
def test_timeout_names_layer_peer_and_epochs_and_the_wait_can_be_repeated(machine, opened, comm, lands):
    channel, exchange = opened("broadcast", "slow layer", lands)
    channel.connect()
    x = values(exchange, machine.rank, 1)
    if machine.rank == 0:
        comm.Barrier()
        channel.move(x)
    else:
        epoch = channel.start([])
        first = channel.take_result(epoch)
        late = r"waited .* s for rank 0 to send in 'slow layer' \(epoch 1, last seen 0\)"
        with pytest.raises(ExchangeTimeout, match=late):
            list(channel.receive(epoch, timeout=0.02))
        comm.Barrier()
        y = arrive(channel, x, epoch)
        assert (y == expected(exchange, 1)).all() and (y is first or not any(channel.landed))


def give_up_starting(machine, monkeypatch, channel, x):
    """Try to start once more than the readers' acknowledgements allow."""
    with monkeypatch.context() as patched:
        patched.setattr(machine.segments.waiter, "timeout", 0.1)
        with pytest.raises(ExchangeTimeout, match=r"for rank \d to acknowledge"):
            channel.start(channel.cut(x))


@pytest.mark.mpi(min_size=3)
def test_a_receive_that_timed_out_hands_out_everything_again(machine, opened, comm, monkeypatch):
    # Its first sender is there, and would go on to the slots of the epochs behind; its last one is late.
    channel, exchange = opened("sum_reduce", "late")
    channel.connect()
    late = machine.size - 1
    x = [values(exchange, machine.rank, epoch) for epoch in range(4)]
    if machine.rank == late:
        comm.Barrier()
        comm.Barrier()
        for epoch in (1, 2, 3):
            channel.move(x[epoch])
    elif machine.rank > 0:
        for epoch in (1, 2):
            channel.move(x[epoch])
        comm.Barrier()
        give_up_starting(machine, monkeypatch, channel, x[0])
        comm.Barrier()
        channel.move(x[3])
    else:
        epoch, seen = channel.start([]), []
        comm.Barrier()
        deadline = time.monotonic() + 60
        # Again and again, until what the others have sent has come.
        while seen != list(range(1, late)):
            assert time.monotonic() < deadline, seen
            seen.clear()
            with pytest.raises(ExchangeTimeout, match=f"for rank {late} to send|, {late} to send"):
                seen.extend(piece.peer for piece, _ in channel.receive(epoch, timeout=0.02))
        comm.Barrier()
        assert (channel.gather(x[1], epoch, np.add) == expected(exchange, 1)).all()
        for epoch in (2, 3):
            assert (channel.move(x[epoch]) == expected(exchange, epoch)).all()


@pytest.mark.mpi(min_size=2)
def test_a_receive_whose_last_puts_were_late_hands_out_everything_again(machine, opened, comm, monkeypatch):
    if machine.segments.transport != "remote":
        pytest.skip("on one node a put is over when it returns")
    channel, exchange = opened("all_gather", "late puts")
    x = [values(exchange, machine.rank, epoch) for epoch in range(4)]

    def never(remote, timeout=None):
        raise ExchangeTimeout("its puts are on their way")

    flights = [channel.start(channel.cut(x[epoch])) for epoch in (1, 2)]
    if machine.rank == 0:
        with monkeypatch.context() as patched:
            patched.setattr(RemoteBuffer, "flush", never)
            with pytest.raises(ExchangeTimeout, match="on their way"):
                channel.gather(x[1], flights[0], np.add)
        comm.Barrier()
        comm.Barrier()
        assert (channel.gather(x[1], flights[0], np.add) == expected(exchange, 1)).all()
    else:
        assert (channel.gather(x[1], flights[0], np.add) == expected(exchange, 1)).all()
        comm.Barrier()
        give_up_starting(machine, monkeypatch, channel, x[0])
        comm.Barrier()
    flights.append(channel.start(channel.cut(x[3])))
    for epoch in (2, 3):
        assert (channel.gather(x[epoch], flights[epoch - 1], np.add) == expected(exchange, epoch)).all()


@pytest.mark.mpi(min_size=3)
def test_a_start_that_timed_out_has_told_nobody(machine, opened, comm, monkeypatch):
    # Of the readers one has room for a third epoch, another has not.
    channel, exchange = opened("broadcast", "slow reader")
    x = [values(exchange, machine.rank, epoch) for epoch in range(4)]
    for epoch in (1, 2):
        flight = channel.start(channel.cut(x[epoch]))
        if machine.rank < machine.size - 1:
            assert (channel.gather(x[epoch], flight, np.add) == expected(exchange, epoch)).all()
    comm.Barrier()
    if machine.rank == 0:
        give_up_starting(machine, monkeypatch, channel, x[0])
    comm.Barrier()
    if machine.rank == machine.size - 1:
        for epoch in (1, 2):
            assert (channel.gather(x[epoch], epoch, np.add) == expected(exchange, epoch)).all()
    assert (channel.move(x[3]) == expected(exchange, 3)).all()


@pytest.mark.mpi(min_size=2)
def test_an_iterator_that_was_left_costs_nothing_and_is_of_no_use_later(machine, opened):
    channel, exchange = opened("all_gather", "left")
    x = values(exchange, machine.rank, 1)
    epoch = channel.start(channel.cut(x))
    left = channel.receive(epoch)
    next(left)
    assert (channel.gather(x, epoch, np.add) == expected(exchange, 1)).all()
    channel.start(channel.cut(x))
    with pytest.raises(ProtocolError, match="epoch 1 cannot be received, started are 2, received 1"):
        list(left)
    channel.gather(x, 2, np.add)
