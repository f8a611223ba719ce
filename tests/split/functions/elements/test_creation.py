"""New tensors that say their size."""

import pytest
import torch

from distdl_rma.split import SplitTensor
from tests.split.against_whole import block, check


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
def test_they_are_plain_and_cut_where_they_are_used(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))
    x = block(P_x, torch.randn(3, 7, 5))
    for made in (
        x.new_empty(7, 5),
        x.new_zeros((7, 5)),
        x.new_ones(7, 5),
        x.new_full((7, 5), 2.0),
        x.new_zeros(x.shape[1:]),
    ):
        assert not isinstance(made, SplitTensor)
        assert (made.shape, made.dtype) == ((7, 5), x.dtype)
    assert x.new_zeros(2, dtype=torch.int32).dtype == torch.int32
    assert x.new_tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    whole = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    check(P_world, lambda x: x + x.new_full(x.shape, 2.0) * x.new_ones(7, 1), [whole])
