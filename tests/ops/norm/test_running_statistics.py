"""Running statistics of all keepers are those of the whole batch, whoever computed them."""

import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.norm.normalisation import Normalisation, NormOptions
from distdl_rma.ops.norm.statistic_groups import NormAxes

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("grid", [lambda n: (n, 1, 1), lambda n: (1, 1, n), lambda n: (1, n, 1)])
@pytest.mark.parametrize("reduced", [(0, 2), (2,)])
def test_buffers_follow_torch_on_every_rank_of_the_machine(P_world, comm, grid, reduced):
    inside = max(1, comm.size - 1)
    P_x = P_world.create_partition_inclusive(range(inside)).create_cartesian_topology_partition(grid(inside))
    source, store = Decomposition.balanced(P_x, (4, 3, 5)), Decomposition.replicated(P_world, (3,))
    options = NormOptions(NormAxes(reduced, (1,)), tracks=True)
    site = CallSite(Machine.of(P_world), "test")
    operation = Normalisation(site, source, torch.float64, options, store, {})
    operation.connect()
    twin = (torch.nn.BatchNorm1d if 0 in reduced else torch.nn.InstanceNorm1d)(
        3, affine=False, track_running_stats=True, dtype=torch.float64
    )
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for _ in range(3):
        x = torch.randn(4, 3, 5, dtype=torch.float64) * 2 + 1
        twin(x)
        local = x[source.slices()] if P_x.active else torch.empty(0, dtype=torch.float64)
        operation(GradientNeeds(False, False), local, running_mean=mean, running_var=variance, momentum=0.1)
        torch.testing.assert_close(mean, twin.running_mean)
        torch.testing.assert_close(variance, twin.running_var)
