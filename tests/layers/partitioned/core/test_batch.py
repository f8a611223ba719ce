"""The batch stays cut as it comes through every layer whose output is where its input is."""

from dataclasses import replace

import pytest
import torch

from distdl_rma import layers
from tests.layers.partitioned.sequential import agree
from tests.layers.partitioned.twins import FORMS, IMAGE, Twins, batches

pytestmark = pytest.mark.mpi

STAYING = ["conv", "circular", "transposed", "AvgPool2d", "MaxPool2d", "AdaptiveAvgPool2d", "bilinear"]
STAYING += ["AdaptiveMaxPool2d", "ConstantPad2d", "ReflectionPad2d", "batch norm", "group norm"]


@pytest.mark.parametrize("form", STAYING)
def test_an_uneven_batch_stays_where_it_is(P_world, comm, form):
    twins = Twins(P_world, replace(FORMS[form], grids=(batches,), named={}))
    lengths = [3, 0, 2, 1][: comm.size]
    x = twins.draw((sum(lengths), *IMAGE[1:])).requires_grad_()
    here = slice(sum(lengths[: comm.rank]), sum(lengths[: comm.rank + 1]))
    mine = x[here].detach().clone().requires_grad_()
    y, expected = twins.layer(mine), twins.twin(x)
    agree(y, expected[here], "output")
    for out in (y, expected):
        out.square().sum().backward()
    agree(mine.grad, x.grad[here], "input gradient")
    twins.compare()


def test_an_output_partition_balances_the_batch(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    order = P_world.create_partition_inclusive(reversed(range(comm.size)))
    P_y = order.create_cartesian_topology_partition((comm.size, 1, 1))
    x = torch.randn([2 * comm.size, 0, 0, 0][comm.rank], 2, 6)
    for layer in (
        layers.DistributedMaxPool1d(P_x, 2, P_y=P_y),
        layers.DistributedConv1d(P_x, P_y, 2, 3, 3),
        layers.DistributedConvTranspose1d(P_x, P_y, 2, 3, 3),
        layers.DistributedZeroPad1d(P_x, 1, P_y=P_y),
    ):
        assert len(layer(x)) == (2 if comm.size > 1 else len(x))
