"""The batch stays cut as it comes through every layer whose output is where its input is."""

import pytest
import torch

from distdl_rma import layers

pytestmark = pytest.mark.mpi

LAYERS = {
    "convolution": lambda P: layers.DistributedConv1d(P, 2, 3, 3, padding=1),
    "circular": lambda P: layers.DistributedConv1d(P, 2, 3, 3, padding=1, padding_mode="circular"),
    "transposed": lambda P: layers.DistributedConvTranspose1d(P, 2, 3, 3),
    "average": lambda P: layers.DistributedAvgPool1d(P, 2),
    "maximum": lambda P: layers.DistributedMaxPool1d(P, 3, 1, return_indices=True),
    "adaptive average": lambda P: layers.DistributedAdaptiveAvgPool1d(P, 3),
    "adaptive maximum": lambda P: layers.DistributedAdaptiveMaxPool1d(P, 3),
    "upsampling": lambda P: layers.DistributedUpsample(P, scale_factor=2, mode="linear"),
    "constant": lambda P: layers.DistributedConstantPad1d(P, 1, 2.0),
    "reflection": lambda P: layers.DistributedReflectionPad1d(P, 1),
    "batch norm": lambda P: layers.DistributedBatchNorm1d(P, 2),
    "group norm": lambda P: layers.DistributedGroupNorm(P, 1, 2),
    "halo": lambda P: layers.HaloExchange(P, 1),
    "concatenation": lambda P: layers.DistributedConcat([P]),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_an_uneven_batch_stays_where_it_is(P_world, comm, make):
    lengths = [3, 0, 2, 1][: comm.size]
    layer = make(P_world.create_cartesian_topology_partition((comm.size, 1, 1)))
    torch.manual_seed(1)
    x = torch.randn(sum(lengths), 2, 6)
    here = slice(sum(lengths[: comm.rank]), sum(lengths[: comm.rank + 1]))
    mine = x[here].clone().requires_grad_()
    y = layer(mine)
    y = y[0] if isinstance(y, tuple) else y
    assert len(y) == lengths[comm.rank]
    y.square().sum().backward()
    assert mine.grad.shape == mine.shape
    if not isinstance(layer, layers.DistributedBatchNorm1d):
        # What becomes of an instance does not depend on where it is.
        torch.manual_seed(2)
        alone = layer.train()(x if comm.rank == 0 else x[:0])
        alone = alone[0] if isinstance(alone, tuple) else alone
        everyones = comm.allgather(y.detach())
        if comm.rank == 0:
            torch.testing.assert_close(torch.cat(everyones), alone.detach())


def test_an_output_partition_balances_the_batch(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    P_y = P_world.create_partition_inclusive(list(range(comm.size))[::-1])
    P_y = P_y.create_cartesian_topology_partition((comm.size, 1, 1))
    x = torch.randn([2 * comm.size, 0, 0, 0][comm.rank], 2, 6)
    for layer in (
        layers.DistributedMaxPool1d(P_x, 2, P_y=P_y),
        layers.DistributedConv1d(P_x, P_y, 2, 3, 3),
        layers.DistributedConvTranspose1d(P_x, P_y, 2, 3, 3),
        layers.DistributedZeroPad1d(P_x, 1, P_y=P_y),
    ):
        assert len(layer(x)) == (2 if comm.size > 1 else len(x))
