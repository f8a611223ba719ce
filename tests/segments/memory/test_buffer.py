"""Buffers: what lies in them, puts and notifications between ranks, and the exchange of addresses."""

import gc

import numpy as np
import pytest

from distdl_rma import ClosedError, ExchangeTimeout, Machine, MismatchError, ProtocolError
from distdl_rma.segments.memory.buffer import _UNFINISHED

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
def test_address_exchange_that_times_out_can_be_repeated(machine, comm):
    if comm.rank < 2:
        peer = 1 - comm.rank
        buffer = machine.segments.get_segment_buffer(8, notifications=1)
        if comm.rank == 0:
            with pytest.raises(ExchangeTimeout, match="for rank 1 to connect 'late'"):
                buffer.exchange({peer: (comm.rank, 7)}, "late", timeout=0.05)
            comm.send(None, peer)
        else:
            comm.recv(source=peer)
        remote = buffer.exchange({peer: (comm.rank, 7)}, "late")[peer]
        assert remote.note[:2] == (peer, 7) and remote.nbytes == 8 and remote.peer == peer
        buffer.free()


@pytest.mark.mpi(min_size=2)
def test_exchange_of_different_things_raises_on_both_sides(machine, comm):
    if comm.rank < 2:
        me, other = comm.rank, 1 - comm.rank
        buffer = machine.segments.get_segment_buffer(8)
        for label, plan, words in (
            (f"thing of {me}", 0, f"thing of {me}.*thing of {other}"),
            ("same", me, "the same name, another plan"),
            # Long ones are compared to their end.
            ("x" * 120 + str(me), 0, "same first 120 bytes"),
        ):
            with pytest.raises(MismatchError, match=words):
                buffer.exchange([other], label, plan)
        assert buffer.exchange([other], "x" * 200)
        buffer.free()


@pytest.mark.mpi(min_size=2)
def test_an_unfinished_exchange_is_kept_and_repeated_as_it_was(machine, comm, monkeypatch):
    if comm.rank == 0:
        buffer = machine.segments.get_segment_buffer(8)
        until = machine.segments.waiter.until

        def interrupt(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(machine.segments.waiter, "until", interrupt)
        with pytest.raises(KeyboardInterrupt):
            buffer.exchange({1: (5,)}, "first")
        monkeypatch.setattr(machine.segments.waiter, "until", until)
        for notes, label, plan in (({1: (5,)}, "second", 0), ({1: (5,)}, "first", 1), ({0: ()}, "first", 0)):
            with pytest.raises(ProtocolError, match=f"'first' with ranks .* got one of '{label}'"):
                buffer.exchange(notes, label, plan)
        comm.send(None, 1)
        assert buffer.exchange({1: (5,)}, "first")[1].note[0] == 6
        buffer.free()
    elif comm.rank == 1:
        comm.recv(source=0)
        buffer = machine.segments.get_segment_buffer(8)
        assert buffer.exchange({0: (6,)}, "first")[0].note[0] == 5
        buffer.free()


@pytest.mark.mpi(min_size=2)
def test_memory_of_an_exchange_that_was_given_up_is_kept_until_its_answer_came(comm):
    with Machine(comm, segment_size="1MiB", timeout=15) as machine:
        if comm.rank == 0:
            others = set(_UNFINISHED)
            for k in range(20):
                buffer = machine.segments.get_segment_buffer(8)
                with pytest.raises(ExchangeTimeout):
                    buffer.exchange({1: ()}, f"given up {k}", timeout=0)
                buffer.free()
            del buffer
            gc.collect()
            unfinished = [incoming for key, (*_, incoming, _) in _UNFINISHED.items() if key not in others]
            assert len(unfinished) == 20
            comm.send(None, 1)
            comm.recv(source=1)
            while _UNFINISHED.keys() - others:
                machine.segments.progress()
            assert all(any(incoming[1]) for incoming in unfinished)
        elif comm.rank == 1:
            comm.recv(source=0)
            for k in range(20):
                buffer = machine.segments.get_segment_buffer(8)
                buffer.exchange({0: ()}, f"given up {k}")
            comm.send(None, 0)
        comm.Barrier()


@pytest.mark.mpi(min_size=3)
def test_the_timeout_of_an_exchange_is_one_for_all_peers(machine, comm):
    buffer = machine.segments.get_segment_buffer(8)
    peers = dict.fromkeys(range(comm.size), ())
    if comm.rank == 0:
        with pytest.raises(ExchangeTimeout):
            buffer.exchange(peers, "slow", timeout=0.1)
        waits = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine.segments.waiter, "until", lambda *args: waits.append(args[2]))
            patch.setattr(machine.segments.waiter, "withdraw", lambda _: None)
            patch.setattr("distdl_rma.segments.memory.buffer.Handshake._remote", lambda *_: None)
            buffer._handshake.finish(0.03)
        assert waits == [0.03]
    comm.Barrier()
    buffer.exchange(peers, "slow")
    comm.Barrier()
    buffer.free()


def test_peers_can_be_given_by_rank_alone(machine, comm):
    peers = [rank for rank in machine.ranks if rank != machine.rank]
    buffer = machine.segments.get_segment_buffer(8)
    remotes = buffer.exchange(np.array(peers, np.int64), "listed")
    assert sorted(remotes) == peers and all(remote.note == (0,) * 4 for remote in remotes.values())
    comm.Barrier()
    buffer.free()


def test_buffer_has_address_offset_size_and_view(machine):
    buffer = machine.segments.get_segment_buffer(1000)
    assert buffer.nbytes == 1000 and buffer.array.shape == (1000,) and buffer.array.dtype == np.uint8
    assert buffer.address == buffer.array.ctypes.data and buffer.address % 64 == 0
    buffer.view(np.float64, (5, 3), 40)[:] = 7.0
    assert (buffer.array[40:160].view(np.float64) == 7.0).all()
    buffer.free()


def test_freed_buffer_is_closed_and_its_memory_used_again(machine):
    # What others gave back is freed with the next allocation.
    machine.segments.get_segment_buffer(0).free()
    before = machine.segments.heap.used
    buffer = machine.segments.get_segment_buffer(100_000)
    buffer.free()
    buffer.free()
    assert machine.segments.heap.used <= before
    again = machine.segments.get_segment_buffer(100_000)
    assert again.offset == buffer.offset
    again.free()
    with pytest.raises(ClosedError, match="already freed"):
        buffer.notification(0)
