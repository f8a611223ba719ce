"""Layers, models that nobody rewrote, and torch.distributed over two hosts, by ``make test-hosts``."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distdl_rma import GradientSync
from distdl_rma.layers import DistributedConv2d, DistributedInstanceNorm2d, DistributedMSELoss
from tests.fuzz.movement import check
from tests.layers.model.nets import UNet
from tests.layers.model.training import train_beside
from tests.layers.partitioned.sequential import grids, shard
from tests.matrix import check_each
from tests.torch_backend import nets
from tests.torch_backend.backends import process_group
from tests.two_hosts import RANKS_VARIABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.processes,
    pytest.mark.skipif(RANKS_VARIABLE not in os.environ, reason="needs two hosts: make test-hosts"),
]
WIDTH, STEPS = 24, 3


def network(conv, norm):
    torch.manual_seed(5)
    return nn.Sequential(
        conv(2, WIDTH, 5, padding=2, dtype=torch.float64),
        norm(WIDTH, affine=True, dtype=torch.float64),
        nn.ReLU(inplace=True),
        conv(WIDTH, WIDTH, 3, stride=2, padding=1, dtype=torch.float64),
        nn.ReLU(inplace=True),
        conv(WIDTH, 2, 3, padding=1, dtype=torch.float64),
    )


def train(model, criterion, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches():
    torch.manual_seed(6)
    double = {"dtype": torch.float64}
    return [(torch.randn(2, 2, 31, 45, **double), torch.randn(2, 2, 16, 23, **double)) for _ in range(STEPS)]


def test_ranks_of_a_host_share_memory_and_others_do_not(comm):
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first, second = (int(ranks) for ranks in os.environ[RANKS_VARIABLE].split(","))
    assert node.allgather(comm.rank) in (list(range(first)), list(range(first, first + second)))
    node.Free()


def test_training_step_over_two_hosts_equals_the_sequential_one(P_world, comm):
    sequential = network(nn.Conv2d, nn.InstanceNorm2d)
    expected = train(sequential, nn.MSELoss(), batches())
    for grid in grids(comm.size, 2):
        P_x = P_world.create_cartesian_topology_partition(grid)
        model = network(
            lambda *sizes, P_x=P_x, **options: DistributedConv2d(P_x, *sizes, **options),
            lambda *sizes, P_x=P_x, **options: DistributedInstanceNorm2d(P_x, *sizes, **options),
        )
        with_sync = GradientSync(model, P_world)
        mine = [(shard(P_x, x), shard(P_x, target)) for x, target in batches()]
        assert train(model, DistributedMSELoss(P_x), mine) == pytest.approx(expected, rel=1e-12)
        for actual, twin in zip(model.parameters(), sequential.parameters(), strict=True):
            torch.testing.assert_close(actual, twin, rtol=1e-10, atol=1e-12)
        with_sync.close()


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


def steps(model, rank):
    nets.steps(model, [nets.batch(rank, step) for step in range(3)])
    weights = [weight.detach() for weight in model.parameters()]
    return [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights]


def test_training_over_two_hosts_is_that_of_one_process(comm):
    expected = nets.alone(comm.size)
    with process_group(comm):
        model = DistributedDataParallel(nets.network(), bucket_cap_mb=1e-4)
        torch.testing.assert_close(steps(model, comm.rank), expected)
        sharded = nets.network()
        for layer in (*sharded, sharded):
            fully_shard(layer, mesh=init_device_mesh("cpu", (comm.size,)))
        torch.testing.assert_close(steps(sharded, comm.rank), expected)


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
