"""Tables that indices are looked up in."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import UnsupportedError
from tests.layers.split.against_whole import cut_along
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi

test_samples_of_torch = samples_of("embedding")


@pytest.mark.mpi(min_size=2)
def test_sparse_gradients_that_nobody_sums_are_refused_where_the_table_is_used(P_world):
    indices = cut_along(P_world, 0, torch.tensor([[0, 1, 1], [2, 0, 4]]))
    table = torch.zeros(5, 3, requires_grad=True)
    with pytest.raises(UnsupportedError, match="sparse=False"):
        F.embedding(indices, table, sparse=True)
    assert F.embedding(indices, table.detach(), sparse=True).shape == (2, 3, 3)
