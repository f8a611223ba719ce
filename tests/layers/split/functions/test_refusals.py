"""Functions without a rule for blocks."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import UnsupportedError, shard
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
# Of the functions that every rank computes of the whole tensors.
test_samples_of_torch = samples_of("split.operands", 3)


@pytest.fixture
def rows(P_world):
    return shard(P_world.create_cartesian_topology_partition((P_world.size, 1)), torch.rand(6, 4) + 0.1)


@pytest.mark.mpi(min_size=2)
def test_what_is_cut_is_refused_and_copies_are_computed(rows):
    index = (torch.tensor([1]), torch.tensor([2]))
    for function, why in (
        (lambda x: torch.index_put(x, index, torch.ones(())), "writes by indices or a mask"),
        (lambda x: torch.multinomial(x, 2), "what it draws depends on elements"),
        (lambda x: F.ctc_loss(x.view(6, 1, 4), torch.ones(1, 2).long(), (6,), (2,)), "every step needs"),
        (torch.special.airy_ai, "it has no rule"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            function(rows)
        torch.manual_seed(1)
        y = function(rows.redistribute())
        torch.manual_seed(1)
        assert not y.is_split and torch.equal(y.to_local(), function(rows.full_tensor()))


def test_memory_and_shapes_in_place_are_refused_of_copies_too(rows):
    for x in (rows, rows.redistribute()):
        with pytest.raises(UnsupportedError, match="no rank has the memory"):
            x.data_ptr()
        with pytest.raises(UnsupportedError, match="use the form without the underscore"):
            x.t_()


def test_what_depends_on_all_elements_is_of_all_of_them(rows):
    assert torch.equal(torch.histc(rows).to_local(), torch.histc(rows.full_tensor()))
