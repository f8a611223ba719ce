"""Embedding of indices whose decomposition is known: no message is needed to agree on it."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.operation import Agreed
from distdl_rma.ops.embedding import Embedding, IndexFrequencies

pytestmark = pytest.mark.mpi


def test_vectors_are_where_their_indices_are_and_may_move(P_world, comm):
    machine, n = Machine.of(P_world), comm.size
    P_x = P_world.create_cartesian_topology_partition((1, n))
    P_y = P_world.create_cartesian_topology_partition((n, 1, 1))
    source = Decomposition.balanced(P_x, (4, 9))
    torch.manual_seed(3)
    x, table = torch.randint(7, (4, 9)), torch.randn(7, 3)
    for at, target in enumerate((None, P_y)):
        site = CallSite(machine, f"words {at}")
        operation = Embedding(site, source, torch.int64, 3, None, torch.float32, target)
        found, needs = Agreed(operation, GradientNeeds(False, False)).settle()
        y = found(needs, x[source.slices()], weight=table)
        assert torch.equal(y, F.embedding(x, table)[operation.output.slices()])


def test_gradients_are_divided_by_how_often_an_index_occurs_anywhere(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    frequencies = IndexFrequencies(CallSite(Machine.of(P_world), "words"), P_x, 4)
    y = torch.ones(2, 3, requires_grad=True)
    frequencies.scale(y, torch.tensor([1, 1 if comm.rank else 2])).sum().backward()
    ones = 2 * comm.size - 1
    assert torch.equal(y.grad[:, 0], torch.tensor([1 / ones, 1 / ones if comm.rank else 1]))


def test_what_are_no_indices_is_refused(P_world, comm):
    source = Decomposition.balanced(P_world.create_cartesian_topology_partition((comm.size,)), (4,))
    with pytest.raises(ShapeError, match=r"indices are torch\.float32"):
        Embedding(CallSite(Machine.of(P_world), "words"), source, torch.float32, 3, None, torch.float32)
