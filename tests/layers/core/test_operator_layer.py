"""Layers that enter, call an operation, and leave."""

import pytest
import torch

from distdl_rma import ShapeError
from distdl_rma.layers.core.input_facts import source_of
from distdl_rma.layers.core.operator_layer import OperatorLayer
from distdl_rma.ops.core.operation import Operation
from distdl_rma.ops.core.tensors import problem_with

pytestmark = pytest.mark.mpi


class Add(Operation):
    """The sum of two shards."""

    def __init__(self, output):
        self.output, self.connected = output, False

    def connect(self):
        self.connected = True

    def __call__(self, needs, x, y):
        return x + y


class AddLayer(OperatorLayer[Add]):
    """A layer of two inputs."""

    def __init__(self, P_x, P_y, **options):
        super().__init__([P_x, P_x], P_y, **options)

    def plan(self, facts):
        one, other = (
            source_of(self.P_x, {rank: fact.of(at) for rank, fact in facts.items()}) for at in (0, 1)
        )
        if one != other:
            raise ShapeError("they differ")
        return Add(one[0])

    def input_problem(self, x, y):
        return "" if problem_with(y) or x.shape == y.shape else "shapes differ"

    def forward(self, x, y):
        return self.apply_to(x, y)


def test_a_call_passes_several_inputs(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    layer = AddLayer(P_x, P_x, name="sum")
    x = torch.ones(2, 3, requires_grad=True)
    y = layer(x, x)
    y.sum().backward()
    assert torch.equal(y, 2 * x) and torch.equal(x.grad, torch.full((2, 3), 2.0))
    for one in range(comm.size):
        with pytest.raises(ShapeError, match=f"'sum': rank {one}: shapes differ"):
            layer(x, torch.ones(2) if comm.rank == one else x)
        with pytest.raises(ShapeError, match=f"'sum': rank {one}: input 1 is of type int"):
            layer(x, 7 if comm.rank == one else x)
    assert torch.equal(layer(x, x), y)


def test_a_layer_is_connected_for_inputs_before_they_are_there(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    layer = AddLayer(P_x, P_x)
    layer.connect_for([layer.expected(P_x, (comm.size, 3), None, at) for at in (0, 1)])
    connected = layer.agreement.last
    assert connected.connected
    layer(torch.ones(1, 3), torch.ones(1, 3))
    assert layer.agreement.last is connected
