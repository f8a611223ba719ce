"""torch.distributed over two hosts; ``make test-hosts`` runs these."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.process_group import nets
from tests.process_group.backends import process_group
from tests.two_hosts import RANKS_VARIABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.processes,
    pytest.mark.skipif(RANKS_VARIABLE not in os.environ, reason="needs two hosts: make test-hosts"),
]


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
