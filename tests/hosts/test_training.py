"""Layers, models that nobody rewrote, and torch.distributed over two hosts, by ``make test-hosts``."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.fuzz.movement import check
from tests.layers.model.nets import UNet
from tests.layers.model.training import train_beside
from tests.layers.sync.training import train_on_every_grid
from tests.matrix import check_each
from tests.torch_backend import nets
from tests.torch_backend.backends import process_group
from tests.two_hosts import RANKS_VARIABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.processes,
    pytest.mark.skipif(RANKS_VARIABLE not in os.environ, reason="needs two hosts: make test-hosts"),
]


def test_ranks_of_a_host_share_memory_and_others_do_not(comm):
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first, second = (int(ranks) for ranks in os.environ[RANKS_VARIABLE].split(","))
    assert node.allgather(comm.rank) in (list(range(first)), list(range(first, first + second)))
    node.Free()


def test_training_over_two_hosts_equals_the_sequential_one(P_world, comm):
    train_on_every_grid(P_world, comm)


# Broadcasts and sums go by way of one rank of each host.
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_moving_layers_give_what_the_operation_on_global_tensors_gives(P_world, comm, first):
    check_each(check, P_world, comm, range(first, first + 10))


def test_a_unet_trains_as_it_does_alone(comm):
    # The cable lies between rows; of four ranks, each has a neighbour on either host.
    grid = {"H": 2, "W": 2} if comm.size == 4 else {"H": -1}
    torch.manual_seed(5)
    x = torch.randn(2, 1, 21, 18)
    train_beside(UNet(), grid, x, lambda y: (y - 0.3).square().mean(), steps=2)


def test_training_over_two_hosts_is_that_of_one_process(comm):
    expected = nets.alone(comm.size)
    with process_group(comm):
        parallel = DistributedDataParallel(nets.network(), bucket_cap_mb=1e-4)
        for model in (parallel, nets.sharded()):
            nets.steps(model, [nets.batch(comm.rank, step) for step in range(3)])
            torch.testing.assert_close(nets.whole(model), expected)


def test_collectives_and_messages_cross_between_the_hosts(comm):
    with process_group(comm):
        count = 300_000
        x = torch.arange(count, dtype=torch.float64) + comm.rank
        dist.all_reduce(x)
        total = comm.size * torch.arange(count) + sum(range(comm.size))
        torch.testing.assert_close(x, total.double(), rtol=0, atol=0)
        objects = [None] * comm.size
        dist.all_gather_object(objects, {"rank": comm.rank, "text": "x" * 1000 * comm.rank})
        assert [each["rank"] for each in objects] == list(range(comm.size))
        ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent, received = torch.full((1000,), float(comm.rank)), torch.empty(1000)
        work = dist.isend(sent, ahead)
        dist.recv(received, behind)
        work.wait()
        assert (received == behind).all()
        parts = [torch.full((rank + 1,), float(comm.rank)) for rank in range(comm.size)]
        mine = [torch.empty(comm.rank + 1) for _ in range(comm.size)]
        dist.all_to_all(mine, parts)
        assert [part.unique().tolist() for part in mine] == [[float(rank)] for rank in range(comm.size)]
