"""Replicas by torch's DDP or FSDP2, and in each of them a model that is split: the numbers of one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from distdl_rma import ConfigurationError, GradientSync, MPIPartition, distribute, shard
from distdl_rma.layers import DistributedConv2d, DistributedMSELoss
from tests.torch_backend import nets
from tests.torch_backend.backends import BACKEND, process_group

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.sizes(4)]
REPLICAS, BLOCKS, STEPS = 2, 2, 3
DOUBLE = {"dtype": torch.float64}


@pytest.fixture
def mesh(comm):
    """Two replicas of two blocks each; MPI's ranks are torch's."""
    with process_group(comm):
        yield init_device_mesh("cpu", (REPLICAS, BLOCKS), mesh_dim_names=("replicas", "blocks"))


def network():
    torch.manual_seed(4)
    first, last = (nn.Conv2d(*sizes, 3, padding=1, **DOUBLE) for sizes in ((1, 4), (4, 1)))
    return nn.Sequential(first, nn.Tanh(), last)


def samples(replica, step):
    generator = torch.Generator().manual_seed(10 * step + replica)
    return [torch.randn(2, 1, 9, 8, **DOUBLE, generator=generator) for _ in range(2)]


def train(model, *replicas, loss=F.mse_loss, part=lambda x: x):
    """Steps on the samples of replicas in one batch, or this rank's part of it; the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        drawn = zip(*(samples(replica, step) for replica in replicas), strict=True)
        x, target = (part(torch.cat(parts)) for parts in drawn)
        optimizer.zero_grad()
        loss(model(x), target).backward()
        optimizer.step()
    return nets.whole(model)


def alone():
    return train(network(), *range(REPLICAS))


def blocks(P_world, mesh):
    mine = P_world.create_partition_inclusive(mesh["blocks"].mesh.tolist())
    return mine.create_cartesian_topology_partition((1, 1, BLOCKS, 1))


def sum_by_replicas(_state, bucket):
    total = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return total.then(lambda done: done.value()[0] / REPLICAS)


def test_gradient_sync_and_both_of_torchs_give_the_numbers_of_one_process(mesh, P_world):
    replica, P_x, expected = mesh["replicas"].get_local_rank(), blocks(P_world, mesh), alone()

    ours = distribute(network(), P_x, reduction="mean", replicas=REPLICAS)
    by_sync = train(ours, replica)
    torch.testing.assert_close(by_sync, expected)
    ours.distributed.close()

    hooked = DistributedDataParallel(distribute(network(), P_x, reduction="none"))
    hooked.register_comm_hook(None, sum_by_replicas)
    torch.testing.assert_close(train(hooked, replica), by_sync)

    # The mean of all ranks is short of the sum over blocks by their number.
    scaled = DistributedDataParallel(distribute(network(), P_x, reduction="none"))
    found = train(scaled, replica, loss=lambda *y: BLOCKS * F.mse_loss(*y))
    torch.testing.assert_close(found, by_sync)

    for over in (mesh, mesh._flatten("all")):
        model = fully_shard(distribute(network(), P_x, reduction="none"), mesh=over)
        model.set_gradient_divide_factor(REPLICAS)
        torch.testing.assert_close(train(model, replica), by_sync)

    model = distribute(network(), P_x, reduction="none")
    # torch marks where the backward of a module ends by a function of its own on what goes into it.
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh).set_gradient_divide_factor(REPLICAS)
    torch.testing.assert_close(train(model, replica), expected)


def test_no_sync_is_torchs_where_torch_sums(mesh, P_world):
    model = distribute(network(), blocks(P_world, mesh), reduction="none")
    for what in ("no_sync", "sync"):
        with pytest.raises(ConfigurationError, match="with reduction='none' it sums no gradients") as found:
            getattr(model.distributed, what)()
        assert "GradientSync" not in str(found.value)
    parallel, replica = DistributedDataParallel(model), mesh["replicas"].get_local_rank()
    lessons = [samples(replica, step) for step in range(2)]
    with parallel.no_sync():
        F.mse_loss(parallel(lessons[0][0]), lessons[0][1]).backward()
    F.mse_loss(parallel(lessons[1][0]), lessons[1][1]).backward()

    twin = network()
    for other, step in itertools.product(range(REPLICAS), range(2)):
        x, target = samples(other, step)
        (F.mse_loss(twin(x), target) / (REPLICAS * BLOCKS)).backward()
    torch.testing.assert_close(
        [weight.grad for weight in model.parameters()], [weight.grad for weight in twin.parameters()]
    )


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_layers_that_sum_over_their_blocks_in_replicas_of_torch(mesh, comm, kind):
    replica = mesh["replicas"].get_local_rank()
    part = comm.Split(replica)
    # A machine for each replica: its layers keep copies of their weights on its ranks alone.
    P_blocks = MPIPartition(part)
    P_x = P_blocks.create_cartesian_topology_partition((1, 1, BLOCKS, 1))
    torch.manual_seed(4)
    layers = [DistributedConv2d(P_x, *sizes, 3, padding=1, **DOUBLE) for sizes in ((1, 4), (4, 1))]
    for layer, twin in zip(layers, network()[::2], strict=True):
        layer.load_state_dict(twin.state_dict())
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    if kind == "DDP":
        model = DistributedDataParallel(model, process_group=mesh["replicas"].get_group())
    else:
        for layer in (*layers, model):
            fully_shard(layer, mesh=mesh["replicas"])
    found = train(model, replica, loss=DistributedMSELoss(P_x), part=lambda x: shard(P_x, x).to_local())
    torch.testing.assert_close(found, alone())
    del model, layers
    P_blocks.deactivate()
    part.Free()


def test_a_gradient_sync_and_a_group_share_a_machine(mesh, P_world, comm):
    model = network()
    with GradientSync(model, P_world, reduction="mean"):
        x, target = samples(comm.rank, 0)
        F.mse_loss(model(x), target).backward()
        counted = torch.ones(3)
        dist.all_reduce(counted)
        assert counted.tolist() == [4.0] * 3
        gradients = [weight.grad.clone() for weight in model.parameters()]
    parallel = DistributedDataParallel(network())
    F.mse_loss(parallel(x), target).backward()
    torch.testing.assert_close([weight.grad for weight in parallel.parameters()], gradients)
    assert dist.get_backend() == BACKEND
