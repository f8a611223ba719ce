"""Channels and vectors of virtual ranks that run ahead of their readers."""

import pickle
import time

import numpy as np
import pytest

from distdl_rma import Machine, MismatchError, rehearse
from distdl_rma.segments.mailbox import Address, BufferedChannel, BufferedVectors, Mailbox, Message
from distdl_rma.segments.virtual_ranks.rehearse import played
from tests.segments.exchanges import NAMES, expected, movements, values


def opened(comm, mailbox, kind, name="some"):
    """A machine of a virtual rank, and a channel of a kind of exchange with that exchange."""
    machine = Machine(comm, segment_size="1MiB")
    exchange = movements(machine)[kind]
    return machine, BufferedChannel(machine.segments, exchange, np.int64, name, mailbox), exchange


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_movements_are_those_of_channels_with_all_epochs_started_first(name, ranks):
    mailbox = Mailbox()

    def play(comm):
        machine, channel, exchange = opened(comm, mailbox, name)
        epochs = [channel.start(channel.cut(values(exchange, comm.rank, epoch))) for epoch in range(1, 5)]
        machine.group().barrier()
        for epoch in epochs:
            assert channel.ready(epoch)
            y = channel.gather(values(exchange, comm.rank, epoch), epoch, np.add)
            assert np.array_equal(y, expected(exchange, epoch))
        channel.close()

    rehearse(ranks, play, seed=ranks)
    assert not mailbox.messages and mailbox.nbytes == 0 and (mailbox.peak_nbytes > 0) == (ranks > 1)


def test_messages_of_channels_with_one_name_come_in_their_order():
    mailbox = Mailbox()

    def play(comm):
        both = [opened(comm, mailbox, kind, "same")[1:] for kind in ("halo", "all_gather")]
        for channel, exchange in both:
            channel.start(channel.cut(values(exchange, comm.rank, 1)))
        for channel, exchange in both:
            y = channel.gather(values(exchange, comm.rank, 1), 1, np.add)
            assert np.array_equal(y, expected(exchange, 1))

    rehearse(3, play)


def test_ranks_with_other_exchanges_raise():
    mailbox = Mailbox()

    def play(comm):
        _, channel, exchange = opened(comm, mailbox, "halo" if comm.rank else "all_gather", "both")
        channel.move(values(exchange, comm.rank, 1))

    with pytest.raises(MismatchError, match=r"'both': rank . sends .*expects .*did every rank call"):
        rehearse(2, play)


def test_a_rank_that_has_ended_in_an_earlier_process_is_named():
    mailbox = Mailbox(first=1)

    def play(comm):
        machine, channel, exchange = opened(comm, mailbox, "halo")
        if comm.rank:
            with pytest.raises(MismatchError, match="rank 0 has ended in an earlier process"):
                channel.move(values(exchange, comm.rank, 1))
            vectors = BufferedVectors(machine.segments, (0, 1), "sums", mailbox)
            vectors.start(np.ones(1))
            with pytest.raises(MismatchError, match="Remove what that process has left"):
                vectors.wait()

    rehearse(2, play)


def test_an_epoch_that_is_given_up_leaves_nothing():
    mailbox = Mailbox()

    def play(comm):
        machine, channel, exchange = opened(comm, mailbox, "halo")
        channel.start(channel.cut(values(exchange, comm.rank, 1)))
        machine.group().barrier()
        channel.void()
        assert np.array_equal(channel.move(values(exchange, comm.rank, 2)), expected(exchange, 2))

    rehearse(3, play)
    assert not mailbox.messages


def test_vectors_of_all_ranks_come_with_one_wait():
    mailbox, waits = Mailbox(), []

    class Counting:
        def wait_begun(self, rank):
            if rank in begun:
                waits.append(rank)

        def wait_ended(self, rank):
            pass

    begun = set()

    def play(comm):
        machine = Machine(comm, segment_size="1MiB")
        vectors = BufferedVectors(machine.segments, machine.ranks, "sums", mailbox)
        comm.wait_until(lambda: len(begun) == comm.rank, "its turn")
        begun.add(comm.rank)
        for epoch in range(3):
            vectors.start(np.array([comm.rank, epoch]))
            rows = vectors.wait()
            assert np.array_equal(rows, [[rank, epoch] for rank in range(comm.size)])
        begun.remove(comm.rank)

    played(4, play, None, keeper=Counting())
    # The last rank finds all others' vectors.
    assert len(waits) == 3 * (4 - 1)
    assert not mailbox.vectors


def test_without_a_seed_the_first_rank_that_can_go_on_runs():
    order = []

    def play(comm):
        comm.wait_until(lambda: len(order) >= comm.rank, "its turn")
        order.append(comm.rank)

    played(5, play, None)
    assert order == [0, 1, 2, 3, 4]


def test_a_mailbox_counts_its_bytes():
    mailbox, address = Mailbox(), Address("x", 0, 1)
    for _ in range(2):
        mailbox.put(address, Message([np.zeros(3), np.zeros(2)], (0, "")))
    assert mailbox.nbytes == mailbox.peak_nbytes == 80
    mailbox.remove(address)
    assert mailbox.nbytes == 40 and address in mailbox.messages
    mailbox.remove(address)
    assert mailbox.nbytes == 0 and not mailbox.messages and mailbox.peak_nbytes == 80


def test_a_piece_for_several_receivers_is_one_array():
    mailbox, kept = Mailbox(), []

    class Keeper:
        def store(self, parcel, receiver):
            kept.append((parcel, receiver))

        def drop(self, parcel):
            kept.remove(next(each for each in kept if each[0] is parcel))

    mailbox.keeper = Keeper()

    def play(comm):
        machine, channel, exchange = opened(comm, mailbox, "all_gather")
        epoch = channel.start(channel.cut(values(exchange, comm.rank, 1)))
        machine.group().barrier()
        if comm.rank == 0:
            assert len(kept) == comm.size
            assert mailbox.nbytes == sum(parcel.nbytes for parcel, _ in kept)
        machine.group().barrier()
        y = channel.gather(values(exchange, comm.rank, 1), epoch, np.add)
        assert np.array_equal(y, expected(exchange, 1))

    rehearse(4, play)
    assert not kept and mailbox.nbytes == 0


def test_messages_to_other_processes_are_copies_with_readers_of_their_own():
    mailbox, address = Mailbox(), Address("x", 0, 1)
    message = Message([np.arange(4)], (7, "int64"))
    mailbox.put(address, message)
    copied = pickle.loads(pickle.dumps(message))
    assert copied.kind == (7, "int64") and np.array_equal(copied.pieces[0], np.arange(4))
    assert [parcel.readers for parcel in (*message.parcels, *copied.parcels)] == [1, 0]


def test_a_rank_that_has_sent_may_leave_while_another_one_is_late():
    mailbox = Mailbox()

    def play(comm):
        _, channel, exchange = opened(comm, mailbox, "all_gather")
        if comm.rank == 2:
            late = time.monotonic() + 1.5
            comm.wait_until(lambda: time.monotonic() > late, "a time")
        epoch = channel.start(channel.cut(values(exchange, comm.rank, 1)))
        if comm.rank == 1:
            y = channel.gather(values(exchange, 1, 1), epoch, np.add)
            assert np.array_equal(y, expected(exchange, 1))

    played(3, play, None)
