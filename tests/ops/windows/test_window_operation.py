"""What all operators of windows have in common."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ShapeError, UnsupportedError
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.halo import Stencil, TableWindow
from distdl_rma.geometry.intervals import Listed
from distdl_rma.ops.windows import AvgPooling, AvgPoolOptions, extents_to_pool
from tests.ops.windows.known_input import equals_sequential, operation_on, rows

PAIRS = AvgPoolOptions(Stencil.of((2,), (2,), (1,), ((0, 0),)))


def test_there_must_be_something_to_pool():
    assert extents_to_pool((0, 2, 3, 4)) == (3, 4)
    with pytest.raises(ShapeError, match=r"the global input \(1, 2, 0, 4\) has no elements to pool"):
        extents_to_pool((1, 2, 0, 4))


@pytest.mark.mpi
def test_sums_need_floating_point_numbers(P_world):
    with pytest.raises(UnsupportedError, match=r"the input is torch\.int64; only floating point"):
        operation_on(rows(P_world), AvgPooling, PAIRS, (1, 1, 8), torch.int64)


@pytest.mark.mpi(min_size=2)
def test_the_batch_stays_cut_as_it_is_on_the_same_ranks_only(P_world):
    n = P_world.size
    P_x = P_world.create_cartesian_topology_partition((n, 1, 1))
    uneven = Listed((3, *[0] * (n - 1)))
    source = Decomposition.balanced(P_x, (3, 1, 8)).with_splits({0: uneven})
    site = operation_on(P_x, AvgPooling, PAIRS, (3, 1, 8))[0].site
    assert AvgPooling(site, source, P_x, torch.float64, PAIRS).output.splits[0] == uneven
    elsewhere = P_world.create_cartesian_topology_partition((1, 1, n))
    output = AvgPooling(site, source, elsewhere, torch.float64, PAIRS).output
    assert output == Decomposition.balanced(elsewhere, (3, 1, 4))


@pytest.mark.mpi
def test_outputs_without_elements_take_part_in_the_backward(P_world):
    x = torch.randn(1, 1, 2, dtype=torch.float64)
    equals_sequential(rows(P_world), AvgPooling, PAIRS, x, lambda x: F.avg_pool1d(x, 2))


@pytest.mark.mpi
def test_tables_say_what_each_rank_reads(P_world):
    operation, _ = operation_on(rows(P_world), AvgPooling, PAIRS, (1, 1, 8))
    reads = operation.read_by_tables([TableWindow((0, 2, 4, 6), (1, 3, 5, 7))])
    outputs = operation.output
    for rank in P_world.ranks:
        (start, stop), read = outputs.box(rank).bounds[2], reads.box(rank).bounds[2]
        assert start == stop or read == (2 * start, 2 * stop)
