"""Thousands of random operations between all ranks, checked against a model that every rank computes.

``STRESS_SEED`` and ``STRESS_OPERATIONS`` in the environment try others.
"""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma import Machine
from distdl_rma import machine as machine_module
from distdl_rma.segments import Allreduce
from distdl_rma.segments.waiting import meeting
from tests.handles import handles, leak

pytestmark = pytest.mark.mpi

SEED = int(os.environ.get("STRESS_SEED", "1"))
# In each of the four ways; fewer ranks have fewer pairs.
OPERATIONS = (
    int(os.environ.get("STRESS_OPERATIONS", "0"))
    or (4000, 8000, 12_000, 20_000)[min(MPI.COMM_WORLD.size, 4) - 1]
)
WAYS = [("auto", "none"), ("auto", "thread"), ("remote", "none"), ("remote", "thread")]
# What one rank writes of a peer's buffer: stripes, each written once per round, and a counter.
STRIPES, ROWS, COLUMNS = 12, 6, 20
STRIPE = ROWS * COLUMNS
WORDS = STRIPES * STRIPE + 8
OPERATIONS_PER_ROUND = 10
ROUNDS_PER_BUFFER = 7


class Writer:
    """One rank's operations on one peer's buffer; the peer draws the same ones and only keeps the model."""

    def __init__(self, way, writer, reader, remote=None, queues=()):
        self.chance = random.Random(f"{SEED} {way} {writer} {reader}")
        self.model = np.zeros((STRIPES, ROWS, COLUMNS), np.int64)
        self.counter = 0
        self.remote, self.queues = remote, queues
        self.begin = 8 * writer * WORDS
        self.operations = 0

    def round(self):
        """Ten operations, each on a stripe of its own, so that they need no order."""
        for stripe in self.chance.sample(range(STRIPES), OPERATIONS_PER_ROUND):
            name = self.chance.choice(("put", "slice", "list", "get", "flush", "add", "swap", "pause"))
            value = self.chance.randrange(1 << 62)
            getattr(self, name)(stripe, value)
            self.operations += 1

    def renew(self, remote):
        self.remote = remote
        self.model[:] = 0
        self.counter = 0

    def at(self, stripe, word=0):
        return self.begin + 8 * (stripe * STRIPE + word)

    def queue(self, value):
        return (None, *self.queues)[value % (1 + len(self.queues))]

    def put(self, stripe, value):
        first = value % STRIPE
        count = value // 7 % (STRIPE - first + 1)
        data = np.arange(value, value + count)
        self.model[stripe].reshape(-1)[first : first + count] = data
        if self.remote:
            queue = self.queue(value)
            self.remote.put(data, self.at(stripe, first), queue)
            if queue is None:
                data[:] = -1

    def slice(self, stripe, value):
        step = (1, 2, -1, -3)[value % 4]
        key = slice(None, None, step), slice(value % 5, COLUMNS - value % 3, 1 + value % 2)
        data = np.arange(self.model[stripe][key].size).reshape(self.model[stripe][key].shape) + value
        self.model[stripe][key] = data
        if self.remote:
            self.remote.view(np.int64, (ROWS, COLUMNS), self.at(stripe)).put(key, data, self.queue(value))
            data[...] = -1

    def list(self, stripe, value):
        words = sorted({value % STRIPE, value // 3 % STRIPE, value // 11 % STRIPE})
        self.model[stripe].reshape(-1)[words] = [value + word for word in words]
        if self.remote:
            parts = [(np.array([value + word]), self.at(stripe, word)) for word in words]
            self.remote.put_list(parts, self.queue(value))

    def get(self, stripe, value):
        if self.remote:
            self.remote.flush()
            rows = np.empty((ROWS, COLUMNS), np.int64)
            queue = self.queue(value)
            self.remote.get(rows, self.at(stripe), queue)
            if queue is not None:
                queue.wait()
            assert (rows == self.model[stripe]).all()
            column = self.remote.view(np.int64, (ROWS, COLUMNS), self.at(stripe))[::-1, value % COLUMNS]
            assert (column == self.model[stripe, ::-1, value % COLUMNS]).all()

    def flush(self, stripe, value):
        if self.remote:
            self.remote.flush()

    def add(self, stripe, value):
        if self.remote:
            assert self.remote.fetch_add(self.at(STRIPES), value % 1000) == self.counter
        self.counter += value % 1000

    def swap(self, stripe, value):
        if self.remote:
            assert self.remote.compare_swap(self.at(STRIPES), self.counter - 1, 7) == self.counter
            assert self.remote.compare_swap(self.at(STRIPES), self.counter, value % 1000) == self.counter
        self.counter = value % 1000

    def pause(self, stripe, value):
        if self.remote and value % 4 == 0:
            time.sleep(value % 1000 * 1e-6)

    def check(self, words):
        """Compare what is there with what this writer should have written, the counter apart."""
        assert (words[: STRIPES * STRIPE] == self.model.reshape(-1)).all()


class Rank:
    """This rank's writers, and those of the others that write to it."""

    def __init__(self, machine, way, comm):
        self.comm, self.machine, self.size = comm, machine, comm.size
        self.queues = [machine.segments.queue("a"), machine.segments.queue("b")]
        self.chance = random.Random(f"{SEED} {way} own {comm.rank}")
        self.mine = [Writer(way, comm.rank, peer, queues=self.queues) for peer in range(comm.size)]
        self.theirs = [Writer(way, peer, comm.rank) for peer in range(comm.size)]
        self.have_read = [0] * comm.size
        self.buffer = None
        self.renew()

    def renew(self):
        """Everybody gets another buffer; the old one is free when all puts to it have arrived."""
        self.free()
        self.buffer = self.machine.segments.get_segment_buffer(8 * WORDS * self.size, 2 * self.size, "stress")
        self.buffer.array[:] = 0
        self.remotes = self.buffer.exchange(dict.fromkeys(range(self.size), ()), "stress")
        for writers in (self.mine, self.theirs):
            for peer, writer in enumerate(writers):
                writer.renew(self.remotes[peer] if writers is self.mine else None)
        self.free_to_write = set(range(self.size))

    def free(self):
        if self.buffer is not None:
            while len(self.free_to_write) < self.size:
                self.take_acknowledgement(self.buffer.notify_waitsome(self.size, self.size))
            self.flush()
            for queue in self.queues:
                queue.wait()
            self.comm.Barrier()
            self.buffer.free()

    def flush(self):
        for remote in self.remotes.values():
            remote.flush()

    def take_acknowledgement(self, index):
        self.buffer.notify_reset(index)
        self.free_to_write.add(index - self.size)

    def round(self, number):
        """Write to all, and read from all, in the order in which it comes about."""
        to_write = set(range(self.size))
        while to_write or min(self.have_read) < number:
            ready = sorted(to_write & self.free_to_write)
            if ready and (self.chance.random() < 0.5 or min(self.have_read) >= number):
                peer = self.chance.choice(ready)
                self.mine[peer].round()
                self.remotes[peer].notify(self.comm.rank, number)
                to_write.remove(peer)
                self.free_to_write.remove(peer)
                continue
            found = self.buffer.notify_test() if ready else self.buffer.notify_waitsome()
            if found is not None and found >= self.size:
                self.take_acknowledgement(found)
            elif found is not None:
                # Of this round, or of the next one of a peer that is ahead.
                self.read(found)

    def read(self, peer):
        self.have_read[peer] += 1
        self.theirs[peer].round()
        assert self.buffer.notification(peer) == self.have_read[peer]
        self.theirs[peer].check(self.buffer.view(np.int64, (self.size, WORDS))[peer])
        assert self.buffer.notify_reset(peer) == self.have_read[peer]
        self.remotes[peer].notify(self.size + self.comm.rank)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(("transport", "progress"), WAYS)
def test_random_operations_leave_what_the_model_says_and_nothing_behind(comm, transport, progress):
    rounds = -(-OPERATIONS // (OPERATIONS_PER_ROUND * comm.size**2))
    common = random.Random(SEED)
    with Machine(comm, segment_size="16MiB", timeout=30, transport=transport, progress=progress) as machine:
        manager = machine.segments
        before = manager.stats()
        rank = Rank(machine, f"{transport} {progress}", comm)
        job = Allreduce(manager, machine.ranks, 500, np.float64, name="stress")
        for number in range(1, rounds + 1):
            rank.round(number)
            event = common.choice(("barrier", "sum", "nothing"))
            if event == "barrier":
                if progress == "none":
                    # Nobody would send on what is pending while this rank is in there.
                    rank.flush()
                comm.Barrier()
            elif event == "sum":
                job.active[:] = number + comm.rank
                job.start()
                job.wait()
                assert (job.result == number * comm.size + sum(range(comm.size))).all()
            if number % ROUNDS_PER_BUFFER == 0:
                rank.renew()
        assert sum(writer.operations for writer in rank.mine) == rounds * OPERATIONS_PER_ROUND * comm.size
        rank.free()
        job.close()
        comm.Barrier()
        deadline = time.monotonic() + 60
        while manager.stats().owners != before.owners and time.monotonic() < deadline:
            manager.progress()
        after = manager.stats()
        assert (after.used, after.owners, after.largest_free) == (
            before.used,
            before.owners,
            before.largest_free,
        )


class Counted(MPI.Intracomm):
    """A communicator that counts those that are made of it and of them."""

    alive = 0

    def _made(self, comm):
        Counted.alive += 1
        return Counted(comm)

    def Dup(self, info=None):  # noqa: N802
        return self._made(super().Dup(info))

    def Create_group(self, group, tag=0):  # noqa: N802
        return self._made(super().Create_group(group, tag))

    def Split(self, color=0, key=0):  # noqa: N802
        return self._made(super().Split(color, key))

    def Split_type(self, split_type, key=0, info=MPI.INFO_NULL):  # noqa: N802
        return self._made(super().Split_type(split_type, key, info))

    def Free(self):  # noqa: N802
        Counted.alive -= 1
        super().Free()


@pytest.mark.parametrize(("transport", "progress"), WAYS)
def test_a_machine_gives_back_communicators_files_and_shared_memory(comm, monkeypatch, transport, progress):
    def met(*arguments):
        Counted.alive += 1
        return Counted(meeting.meet(*arguments))

    monkeypatch.setattr(machine_module, "meet", met)
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
