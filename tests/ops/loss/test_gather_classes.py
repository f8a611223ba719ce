"""Classes that are split come to the ranks that are first among those that share the rest, and back."""

import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition
from distdl_rma.ops.autograd import GradientNeeds
from distdl_rma.ops.loss.gather_classes import GatherClasses, StayHere
from distdl_rma.ops.movement import CallSite
from tests.layers.random_shards import cut
from tests.layers.sequential import shard

NEEDS = GradientNeeds(True, False)


def test_indices_stay_where_they_are():
    x = torch.arange(3)
    stay = StayHere()
    stay.connect()
    assert stay(NEEDS, x) is x


@pytest.mark.mpi
def test_first_ranks_get_whole_classes_and_gradients_go_back(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size, 1))
    x = torch.randint(-9, 9, (2, 5, 3)).double()
    gather = GatherClasses(
        CallSite(Machine.of(P_x), "scores"), Decomposition.balanced(P_x, x.shape), 1, x.dtype
    )
    gather.connect()
    assert gather.output.partition.ranks == P_x.ranks[:1]
    local = shard(P_x, x).requires_grad_()
    y = gather(NEEDS, local)
    assert torch.equal(y, cut(gather.output, x)) or comm.rank > 0
    assert y.numel() == (x.numel() if comm.rank == 0 else 0)
    y.backward(x if comm.rank == 0 else torch.zeros_like(y))
    assert torch.equal(local.grad, shard(P_x, x))
