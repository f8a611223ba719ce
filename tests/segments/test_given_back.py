"""What a machine leaves behind: nothing."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma import Machine
from distdl_rma.segments import Allreduce
from distdl_rma.segments import machine as machine_module
from distdl_rma.segments.waiting import meeting
from tests.handles import handles, leak

pytestmark = pytest.mark.mpi

WAYS = [("auto", "none"), ("auto", "thread"), ("remote", "none"), ("remote", "thread")]


class Counted(MPI.Intracomm):
    """A communicator that counts those that are made of it and of them."""

    alive = 0

    def Free(self):  # noqa: N802
        Counted.alive -= 1
        super().Free()


def counting(make):
    def made(*arguments, **options):
        Counted.alive += 1
        return Counted(make(*arguments, **options))

    return made


for name in ("Dup", "Create_group", "Split", "Split_type"):
    setattr(Counted, name, counting(getattr(MPI.Intracomm, name)))


@pytest.mark.parametrize(("transport", "progress"), WAYS)
@pytest.mark.processes
def test_a_machine_gives_back_communicators_files_and_shared_memory(comm, monkeypatch, transport, progress):
    monkeypatch.setattr(machine_module, "meet", counting(meeting.meet))
    counts = []
    for _ in range(6):
        Counted.alive = 0
        with Machine(comm, segment_size="1MiB", transport=transport, progress=progress) as machine:
            assert Counted.alive >= 3
            buffer = machine.segments.get_segment_buffer(1000, 1)
            remotes = buffer.exchange(dict.fromkeys(range(comm.size), ()), "all")
            for remote in remotes.values():
                remote.put_notify(np.zeros(100), 0)
                remote.fetch_add(800, 1)
            job = Allreduce(machine.segments, machine.ranks, 10, np.float32, name="leak")
            job.start()
            job.wait()
            job.close()
        assert Counted.alive == 0
        counts.append(handles())
    # The first ones open what MPI keeps.
    assert not leak(counts[2], counts[-1]), counts
