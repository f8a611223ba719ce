"""Adaptive windows: averages by sums that travel, largest elements by inputs that do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.halo import TableWindow
from distdl_rma.ops.windows import (
    AdaptiveAvgPooling,
    AdaptiveMaxPooling,
    AdaptiveOptions,
    _contributions,
    _even,
)
from tests.layers.random_shards import cut
from tests.ops.windows.known_input import equals_sequential, rows

SIZES = [(3, 2), (1, 1), (None, 4), (9, 12)]


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_contributions_of_all_parts_make_every_window(n, m, data):
    window = TableWindow.adaptive(n, m)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    read = []
    for own in zip([0, *cuts], [*cuts, n], strict=True):
        sums = window.readers(*own) if own[0] < own[1] else (0, 0)
        inputs, outputs, count = _contributions(window, own, sums)
        assert count == sums[1] - sums[0]
        read += [(j + sums[0], i + own[0]) for i, j in zip(inputs.tolist(), outputs.tolist(), strict=True)]
    assert sorted(read) == [(j, i) for j in range(m) for i in range(window.first[j], window.last[j] + 1)]


@given(st.integers(1, 12), st.integers(1, 12))
def test_even_windows_repeat_first_inputs_only(n, m):
    window = TableWindow.adaptive(n, m)
    for j, row in enumerate(_even(window, 0, m).tolist()):
        assert sorted(set(row)) == list(range(window.first[j], window.last[j] + 1))
        assert row == sorted(row)
        assert len(set(row[row.count(row[0]) - 1 :])) == len(row) - row.count(row[0]) + 1


@pytest.mark.mpi
@pytest.mark.parametrize("size", SIZES)
def test_averages_are_those_of_the_whole(P_world, size):
    x = torch.randn(2, 3, 11, 7, dtype=torch.float64)
    options = AdaptiveOptions(size)
    operation = equals_sequential(
        rows(P_world, 2), AdaptiveAvgPooling, options, x, lambda x: F.adaptive_avg_pool2d(x, size)
    )
    assert operation.gather is None


@pytest.mark.mpi
@pytest.mark.parametrize("size", SIZES)
def test_largest_elements_are_those_of_the_whole_and_so_are_their_places(P_world, size):
    x = torch.randint(0, 3, (2, 3, 11, 7)).double()
    options = AdaptiveOptions(size, return_indices=True)
    operation = equals_sequential(
        rows(P_world, 2), AdaptiveMaxPooling, options, x, lambda x: F.adaptive_max_pool2d(x, size)
    )
    _, index = F.adaptive_max_pool2d(x, size, return_indices=True)
    assert torch.equal(operation.take_indices(torch.empty(operation.box.shape)), cut(operation.output, index))


@pytest.mark.mpi(min_size=2)
def test_sums_of_idle_owners_go_to_other_ranks(P_world, comm):
    last = P_world.create_partition_inclusive([comm.size - 1]).create_cartesian_topology_partition((1, 1, 1))
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    equals_sequential(
        rows(P_world),
        AdaptiveAvgPooling,
        AdaptiveOptions((2,)),
        x,
        lambda x: F.adaptive_avg_pool1d(x, 2),
        last,
    )
