"""Operations of the form gather, compute, scatter."""

import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.operation import GatherComputeScatter
from distdl_rma.layers.ops.core.staged import movement_or_none

pytestmark = pytest.mark.mpi


class Scaled(GatherComputeScatter):
    """``finish`` adds 1 to what was multiplied elsewhere."""

    def __init__(self, site, source, works, output, dtype):
        super().__init__(site, source.partition.active, works.partition.active, output)
        self.gather = movement_or_none(site, source, works, dtype, "there")
        self.scatter = movement_or_none(site, works, output, dtype, "back")

    def compute(self, x, **weights):
        return x * weights["factor"]

    def finish(self, y, **weights):
        return y + 1


def test_what_is_computed_elsewhere_comes_to_its_owners_and_gradients_go_back(P_world, comm):
    last = P_world.create_partition_inclusive([comm.size - 1])
    on_all = Decomposition.balanced(P_world.create_cartesian_topology_partition((comm.size,)), (7,))
    on_last = Decomposition.balanced(last.create_cartesian_topology_partition((1,)), (7,))
    operation = Scaled(CallSite(Machine.of(P_world), "it"), on_all, on_last, on_all, torch.float64)
    operation.connect()
    operation.void()
    x = torch.arange(7.0, dtype=torch.float64)[on_all.slices()].requires_grad_()
    factor = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    y = operation(GradientNeeds(True, True), x, factor=factor)
    assert torch.equal(y, 3 * x + 1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    # Ranks that do not compute are in the graph of the weight all the same.
    assert factor.grad == (21.0 if last.active else 0.0)


def test_ranks_outside_of_the_output_get_what_has_no_elements(P_world, comm):
    first = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1,))
    on_first = Decomposition.balanced(first, (3,))
    operation = Scaled(CallSite(Machine.of(P_world), "it"), on_first, on_first, on_first, torch.float32)
    x = torch.ones(3) if first.active else torch.ones(2)[:0]
    y = operation(GradientNeeds(False, False), x, factor=torch.tensor(2.0))
    assert y.tolist() == ([3.0] * 3 if first.active else [])
