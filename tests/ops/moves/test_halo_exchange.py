"""Blocks with the elements around them."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.moves import HaloExchange

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("mode", ["zeros", "constant", "reflect", "replicate", "circular"])
def test_a_block_and_what_is_around_it_is_cut_out_of_the_padded_tensor(P_world, comm, mode):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    x = torch.arange(1.0, 12.0).reshape(1, 1, 11)
    source = Decomposition.balanced(P_x, x.shape)
    operation = HaloExchange(CallSite(Machine.of(P_world), mode), source, x.dtype, ((2, 1),), mode, 7.0)
    y = operation(GradientNeeds(False, False), x[source.slices()])
    constants = {"zeros": ("constant", 0.0), "constant": ("constant", 7.0)}
    padded = F.pad(x, (2, 1), *constants.get(mode, (mode,)))
    start, stop = source.box(P_x.me).bounds[2]
    assert torch.equal(y, padded[:, :, start : stop + 3])
    assert operation.output.shape == padded.shape
    assert torch.equal(y, padded[operation.output.slices()])


def test_a_tensor_too_small_for_its_padding_is_refused(P_world, comm):
    source = Decomposition.balanced(P_world.create_cartesian_topology_partition((1, 1, comm.size)), (1, 1, 2))
    with pytest.raises(ShapeError, match="'reflect' needs padding smaller than the extent"):
        HaloExchange(CallSite(Machine.of(P_world), "it"), source, torch.float32, ((2, 1),), "reflect", 0.0)
