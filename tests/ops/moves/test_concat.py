"""Concatenation of tensors whose decompositions are known."""

import pytest
import torch

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.moves import Concat, joined


@pytest.mark.mpi
@pytest.mark.parametrize("keep_batch", [False, True])
def test_inputs_and_gradients_are_where_their_decompositions_say(P_world, comm, keep_batch):
    rows, channels = (
        P_world.create_cartesian_topology_partition(s) for s in ((comm.size, 1), (1, comm.size))
    )
    xs = torch.arange(15.0).reshape(5, 3), torch.arange(20).reshape(5, 4)
    sources = Decomposition.balanced(rows, (5, 3)), Decomposition.balanced(channels, (5, 4))
    site = CallSite(Machine.of(P_world), "cat")
    operation = Concat(site, sources, [x.dtype for x in xs], rows, keep_batch)
    operation.connect()
    whole = torch.cat(xs, 1)
    first = xs[0][sources[0].slices()].requires_grad_()
    y = operation(GradientNeeds(True, False, (False,)), first, xs[1][sources[1].slices()])
    assert torch.equal(y, whole[operation.output.slices()])
    y.backward(whole[operation.output.slices()])
    assert torch.equal(first.grad, first)


def test_what_torch_would_not_concatenate_is_refused():
    floats = [torch.float32, torch.float32]
    assert joined([(2, 3, 4), (2, 0, 4)], [torch.int8, torch.float32], 3) == ((2, 3, 4), torch.float32)
    with pytest.raises(ShapeError, match="input 1 has 2 dimensions"):
        joined([(2, 3, 4), (2, 3)], floats, 3)
    with pytest.raises(ShapeError, match=r"input 1 \(1, 3, 4\), which must agree in dimension 0"):
        joined([(2, 3, 4), (1, 3, 4)], floats, 3)
    with pytest.raises(ShapeError, match=r"input 0 is torch\.float64 but input 1 is torch\.float8_e5m2"):
        joined([(2, 3, 4), (2, 3, 4)], [torch.float64, torch.float8_e5m2], 3)
