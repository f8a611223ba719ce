"""How groups are made, how they end, and what users see when that goes wrong."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distdl_rma import Machine
from distdl_rma.errors import ConfigurationError
from distdl_rma.torch_backend.creation import rendezvous
from tests.run_mpi import completed, mpiexec

LIGHT = """
import os, signal, sys, time
import distdl_rma
import torch, torch.distributed as dist
from distdl_rma.errors import *
dist.init_process_group("rma")
rank, size = dist.get_rank(), dist.get_world_size()
"""


def run(ranks, body, **changes):
    done = completed([*mpiexec(ranks), sys.executable, "-m", "mpi4py", "-c", LIGHT + body], **changes)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.mpi
@pytest.mark.sizes(1, 3)
def test_groups_need_no_address_and_can_be_made_again(comm):
    for backend in ("rma", "cpu:rma", "rma"):
        dist.init_process_group(backend)
        assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
        assert dist.get_backend() == backend
        store = dist.distributed_c10d._get_default_store()
        store.set(f"of {comm.rank}", str(comm.rank))
        assert [int(store.get(f"of {rank}")) for rank in range(comm.size)] == [*range(comm.size)]
        pairs = [dist.new_group([rank, (rank + 1) % comm.size]) for rank in range(comm.size) if comm.size > 1]
        for first, pair in enumerate(pairs):
            if comm.rank in (first, (first + 1) % comm.size):
                x = torch.ones(2)
                dist.all_reduce(x, group=pair)
                assert x.tolist() == [2, 2]
        dist.barrier()
        dist.destroy_process_group()
    assert not Machine.on().closed


@pytest.mark.mpi(min_size=3)
@pytest.mark.sizes(3)
def test_ranks_are_those_of_mpi(comm):
    store = dist.HashStore()
    with pytest.raises(
        ConfigurationError, match=f"2 rank.s. are asked for, but MPI started {comm.size}: start the"
    ):
        dist.init_process_group("rma", store=store, rank=comm.rank % 2, world_size=2)
    other = (comm.rank + 1) % comm.size
    with pytest.raises(ConfigurationError, match=f"rank {other} of torch is rank {comm.rank} of MPI"):
        dist.init_process_group("rma", store=store, rank=other, world_size=comm.size)


@pytest.mark.mpi(min_size=3)
@pytest.mark.sizes(3)
def test_a_group_of_some_ranks_beside_another_backend_involves_only_these(comm, monkeypatch):
    monkeypatch.setattr(Machine, "known", classmethod(lambda cls, comm=None: None))
    dist.init_process_group("fake", store=FakeStore(), rank=comm.rank, world_size=comm.size)
    try:
        for _ in range(2):
            group = dist.new_group([2, 0], backend="rma", use_local_synchronization=True)
            if comm.rank in (0, 2):
                x = torch.full((3,), float(comm.rank))
                dist.all_reduce(x, group=group)
                assert x.tolist() == [2, 2, 2]
    finally:
        dist.destroy_process_group()


def test_a_killed_job_leaves_no_file(tmp_path):
    body = "dist.all_reduce(torch.ones(10)); rank or os.kill(os.getpid(), 9); dist.barrier()"
    code, _, err = run(2, "import os\n" + body, TMPDIR=str(tmp_path))
    assert code != 0
    assert not [each for each in tmp_path.iterdir() if "distdl" in each.name], err


@pytest.mark.slow
@pytest.mark.parametrize("who", ["False", "rank == 1"])
def test_a_job_ends_without_a_destroy(who):
    body = f"""
x = torch.ones(100_000)
works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
group = dist.new_group([0, 1])
dist.all_reduce(x)
if {who}:
    dist.destroy_process_group()
print(int(x[0]), flush=True)
"""
    code, out, err = run(2, body)
    assert code == 0, err
    # Two ranks may write at once.
    assert out.replace("\n", "") == "1616"
    assert "rror" not in err


def test_ranks_that_slurm_started_without_mpi_are_told_how_to_start(monkeypatch):
    def by_environment(url, **options):
        raise ValueError("environment variable RANK expected, but not set")
        yield

    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(ValueError, match="RANK expected") as caught:
        next(rendezvous(by_environment, "env://"))
    assert "For 'rma' start the ranks by MPI, as in 'mpiexec -n 4" in caught.value.__notes__[0]
    assert "srun --mpi=pmi2" in caught.value.__notes__[0]
