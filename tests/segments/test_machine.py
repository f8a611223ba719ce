"""The machine: its ranks, options, and end."""

import random
import re
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma import (
    ArgumentError,
    ClosedError,
    ConfigurationError,
    ExchangeTimeout,
    Machine,
    MPIPartition,
    PartitionError,
    ProtocolError,
    SegmentError,
)
from distdl_rma.jobs.out_of_core.processes import Processes
from distdl_rma.segments import SegmentManager
from distdl_rma.segments.machine import launched
from distdl_rma.segments.transport import node_memory
from distdl_rma.segments.waiting import meeting
from distdl_rma.segments.waiting.meeting import JobBoard

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def test_same_communicator_gives_the_same_machine_until_its_last_user_leaves(comm):
    here = comm.Dup()
    first, second = MPIPartition(here), MPIPartition(here)
    assert first.home is second.home and first == second
    first.deactivate()
    first.deactivate()
    machine = Machine.of(second)
    machine.group().barrier()
    second.create_partition_inclusive([0]).deactivate()
    assert Machine.of(second) is machine and not machine.closed
    second.deactivate()
    assert machine.closed
    again = MPIPartition(here)
    assert again.home is not first.home
    with pytest.raises(ClosedError, match="machine: already closed"):
        Machine.of(first)
    first.deactivate()
    assert not Machine.of(again).closed
    again.deactivate()
    here.Free()


def test_machine_outlives_the_communicator_that_it_was_made_of(comm):
    here = comm.Dup()
    world = MPIPartition(here)
    here.Free()
    Machine.of(world).group().barrier()
    world.deactivate()
    assert world.home.closed


def test_wrong_list_of_ranks_names_the_entry(comm):
    with pytest.raises(PartitionError, match=f"rank {comm.size} of M is out of range"):
        Machine(comm, [0, comm.size])
    with pytest.raises(PartitionError, match="rank 0 is listed more than once"):
        Machine(comm, [0, 0])
    for ranks in ("01", [0.5], 3):
        with pytest.raises(
            PartitionError, match=rf"ranks of M must be integers, got {re.escape(repr(ranks))}"
        ):
            Machine(comm, ranks)
    if comm.size > 1:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        with pytest.raises(PartitionError, match=f"rank {comm.rank} made this call but is not in M"):
            Machine(comm, others)


@pytest.mark.processes
def test_what_is_no_communicator_of_one_group_of_ranks_is_refused_at_every_door(comm):
    freed = comm.Dup()
    freed.Free()
    wrong = [(MPI.COMM_NULL, "COMM_NULL"), (freed, "freed"), (3, "int 3"), (MPI.Comm(comm), "Comm: ")]
    if comm.size > 1:
        half = comm.Split(comm.rank % 2, comm.rank)
        wrong.append((half.Create_intercomm(0, comm, 1 - comm.rank % 2), "Intercomm: .*Merge"))
    doors = Machine, Machine.on, Machine.known, MPIPartition, SegmentManager, launched, Processes
    for door in doors:
        for given, text in wrong:
            with pytest.raises(ArgumentError, match=f"communicator of one group of ranks .* got .*{text}"):
                door(given)
    if comm.size > 1:
        wrong[-1][0].Free()
        half.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.processes
def test_messages_under_way_on_the_communicator_stay_those_of_their_owner(comm):
    here = comm.Dup()
    peer, words = (comm.rank + 1) % comm.size, np.zeros(4096, np.int64)
    # Taken by whoever receives on this communicator, with any tag; sent before its receive is there.
    tags = (0, 1, 7, 8, 11, here.Get_attr(MPI.TAG_UB))
    sent = [here.isend((comm.rank, tag), peer, tag) for tag in tags]
    with Machine(here, segment_size="1MiB") as machine:
        for tag in tags:
            assert here.recv(tag=tag) == ((comm.rank - 1) % comm.size, tag)
        open_to_all = here.Irecv(words)
        with Machine(here, segment_size="1MiB"):
            machine.group().barrier()
        assert not open_to_all.Test()
    here.Barrier()
    assert not open_to_all.Test()
    here.Barrier()
    here.Send(np.full(1, comm.rank), peer, 3)
    open_to_all.Wait()
    assert words[0] == (comm.rank - 1) % comm.size
    MPI.Request.waitall(sent)
    here.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.processes
def test_ranks_that_mean_different_machines_are_refused_alike_and_can_go_on(comm):
    everyone = tuple(range(comm.size))
    lists = [everyone, everyone[::-1], (0, 1)]
    for other in lists[1:] if comm.size > 2 else lists[1:2]:
        ranks = other if comm.rank == 1 else everyone
        with pytest.raises(PartitionError) as refused:
            Machine(comm, ranks, segment_size="1MiB")
        wanted = f"rank 0 was given M = {everyone} but rank 1 M = {other}"
        assert str(refused.value) == wanted
        with Machine(comm, segment_size="1MiB") as machine:
            assert machine.ranks == everyone


@pytest.mark.mpi(min_size=3)
@pytest.mark.processes
def test_rank_that_comes_when_the_others_were_refused_already_is_refused_too(comm):
    everyone = tuple(range(comm.size))
    for short in (0, 1) * 4:
        wanted = (
            rf"rank 0 was given M = {((0, 1), everyone)[short]} but rank 1 M = {(everyone, (0, 1))[short]}"
        )
        if comm.rank >= 2:
            comm.Barrier()
        with pytest.raises(PartitionError, match=re.escape(wanted)):
            Machine(comm, (0, 1) if comm.rank == short else everyone, segment_size="1MiB")
        if comm.rank < 2:
            comm.Barrier()
        with Machine(comm, segment_size="1MiB") as machine:
            assert machine.ranks == everyone


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.processes
def test_impossible_list_of_one_rank_is_an_error_on_all_that_wait_for_it(comm, wrong):
    ranks = [*range(comm.size), comm.size] if comm.rank == wrong else None
    with pytest.raises(PartitionError, match=f"rank {comm.size} of M is out of range"):
        Machine(comm, ranks, segment_size="1MiB")
    with Machine(comm, segment_size="1MiB") as machine:
        assert machine.size == comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("early", [0, -1])
@pytest.mark.processes
def test_rank_that_gave_up_waiting_can_make_the_machine_later(comm, early):
    early %= comm.size
    if comm.rank == early:
        with pytest.raises(
            ExchangeTimeout, match=rf"rank {early} waited 0 s for ranks? \d.* to make the machine"
        ):
            Machine(comm, segment_size="1MiB", timeout=0)
    comm.Barrier()
    with Machine(comm, segment_size="1MiB") as machine:
        machine.group().barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_give_up_and_come_again_meet_in_the_end(comm):
    delays, lists = random.Random(comm.rank), random.Random(5)
    for _ in range(8):
        ranks = tuple(lists.sample(range(comm.size), lists.randint(2, comm.size)))
        made, patience = None, 0.01
        comm.Barrier()
        while comm.rank in ranks and made is None:
            time.sleep(0.005 * delays.random())
            with suppress(ExchangeTimeout):
                made = meeting.meet(comm, ranks, patience * delays.random())
            patience *= 1.5
        if made is not None:
            assert (made.size, made.rank) == (len(ranks), ranks.index(comm.rank))
            made.Free()


@pytest.mark.parametrize("lacks", ["nothing", "name service", "groups"])
def test_ranks_may_be_permuted_and_a_subset_whatever_the_launcher_lacks(comm, monkeypatch, lacks):
    def unsupported(*_):
        raise MPI.Exception(MPI.ERR_UNSUPPORTED_OPERATION)

    class Without:
        Intracomm = SimpleNamespace(Create_from_group=unsupported)

        def __getattr__(self, name):
            return getattr(MPI, name)

    if lacks == "name service":
        monkeypatch.setattr(MPI, "Publish_name", unsupported)
        monkeypatch.setattr(meeting, "_board", JobBoard())
    if lacks == "groups":
        monkeypatch.setattr(meeting, "MPI", Without())
    for ranks in ([comm.rank], range(comm.size)[::-1], range(comm.size)[1:][::-1]):
        if comm.rank in ranks:
            with Machine(comm, ranks, segment_size="1MiB") as machine:
                assert machine.ranks == tuple(ranks) and machine.rank == comm.rank
                assert machine.partition().rank == ranks.index(comm.rank)
                machine.group().barrier()


@pytest.mark.mpi(min_size=2)
def test_options_that_differ_are_told_by_rank_id_alike_on_all_ranks(comm):
    ranks = tuple(reversed(range(comm.size)))
    told = []
    unknown = (
        {"transport": "pigeon"},
        {"progress": "maybe"},
        {"timeout": "soon"},
        {"segment_size": "2 parsecs"},
    )
    for wrong in ({"transport": "remote"}, *unknown):
        with pytest.raises(ConfigurationError) as refused:
            Machine(comm, ranks, **({"segment_size": "1MiB"} | (wrong if comm.rank == 1 else {})))
        told.append(str(refused.value))
    assert set(comm.allgather(tuple(told))) == {tuple(told)}
    assert "'remote' on rank 1" in told[0] and "'auto' on rank" in told[0]
    assert all(words.startswith("rank 1: ") for words in told[1:])


@pytest.mark.processes
def test_memory_that_mpi_refuses_is_an_error_on_all_ranks_and_reserves_nothing(comm, monkeypatch):
    class Win:
        @staticmethod
        def Allocate_shared(*_, **__):  # noqa: N802
            raise MPI.Exception(MPI.ERR_NO_MEM)

        # Of a rank that is alone on its node.
        Create = Allocate_shared

    class Refusing:
        def __getattr__(self, name):
            return Win if name == "Win" else getattr(MPI, name)

    before = dict(node_memory._untouched)
    with monkeypatch.context() as patch:
        patch.setattr(node_memory, "MPI", Refusing())
        for _ in range(20):
            with pytest.raises(SegmentError, match=r"rank 0: no window of .* bytes can be had"):
                Machine(comm, segment_size="1MiB")
    assert node_memory._untouched == before
    Machine(comm, segment_size="1MiB").close()


@pytest.mark.parametrize("transport", ["auto", "remote"])
def test_machines_close_in_any_order(comm, transport):
    first, second = (Machine(comm, segment_size="1MiB", transport=transport) for _ in range(2))
    first.close()
    assert first.closed and not second.closed
    second.group().barrier()
    second.close()
    assert second.closed


def test_record_keeps_what_happens_in_it_and_ends_with_it(machine):
    sums = machine.group().allreduce(4, name="sums")
    with machine.record() as recording:
        assert recording.rank == machine.rank
        with pytest.raises(ProtocolError, match="a recording of this machine is under way"):
            machine.trace.begin(machine.rank)
        sums.active[:] = 1
        sums.start()
        sums.wait()
    kinds = [event.kind for event in recording.events if event.name == "sums"]
    assert sorted(kinds) == ["allreduce", "start", "wait"]
    sums.active[:] = 1
    sums.start()
    sums.wait()
    assert len([event for event in recording.events if event.name == "sums"]) == 3
    sums.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.processes
def test_second_0_of_a_recording_is_when_all_ranks_have_come(machine, comm):
    if machine.rank == comm.size - 1:
        time.sleep(0.05)
    came = time.perf_counter()
    with machine.record() as recording:
        pass
    # The ranks of a node have one clock.
    assert recording.zero >= max(comm.allgather(came))


@pytest.mark.parametrize("step", range(3))
def test_a_handshake_that_was_given_up_meets_none_of_a_later_machine(comm, step):
    # The numbers of communicators come again, as of those that are split or made by a group.
    for ranks in (range(comm.size), range(comm.size)[::-1], range(comm.size)[step:]):
        if comm.rank not in ranks:
            continue
        with Machine(comm, ranks, segment_size="1MiB") as machine:
            machine.group().barrier()
            others = [rank for rank in machine.ranks if rank != comm.rank]
            if comm.rank == ranks[0] and others:
                with pytest.raises(ExchangeTimeout):
                    machine.segments.get_segment_buffer(64).exchange(others, "given up", timeout=0.01)
            machine.segments.forget_handshakes(others)
