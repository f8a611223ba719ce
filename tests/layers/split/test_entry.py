"""Grids as users write them."""

import pytest

from distdl_rma import ArgumentError, Machine, PartitionError
from distdl_rma.layers.split.entry import grid_for

pytestmark = pytest.mark.mpi


@pytest.mark.sizes(1, 2, 3, 4)
def test_grids_in_words(P_world):
    machine, size = Machine.of(P_world), P_world.size
    assert grid_for(f"{size}x1", machine, 4).shape == (1, 1, size, 1)
    assert grid_for((1, 1, size, 1), machine, 4).shape == (1, 1, size, 1)
    assert grid_for([-1, 1], machine, 5).shape == (1, 1, 1, size, 1)
    assert grid_for({"W": -1}, machine, 4).shape == (1, 1, 1, size)
    assert grid_for({"D": -1, "N": 1}, machine, 5).shape == (1, 1, size, 1, 1)
    assert grid_for(P_world, machine, 1) is P_world


WORDS = {"H": 2.0}, {"H": "a"}, {"H": None}, {2: -1}, {"": -1}, {"Z": 2}
NO_GRIDS = ["2y2", 3, (1.0, 2), (1, 1, 1, 1, 1), *WORDS]


@pytest.mark.parametrize("grid", NO_GRIDS)
def test_what_is_no_grid(P_world, grid):
    with pytest.raises(ArgumentError, match="a grid"):
        grid_for(grid, Machine.of(P_world), 4)


def test_a_batch_dimension_is_said_to_be_missing_where_the_name_is_that_of_a_dimension(P_world):
    with pytest.raises(ArgumentError, match="got 'H'; or is the batch dimension of the tensor missing"):
        grid_for({"H": -1}, Machine.of(P_world), 3)
    for name in ("h", "X", "HW"):
        with pytest.raises(
            ArgumentError, match=f"names the dimensions N, C, H, W of a tensor of 4, got '{name}'$"
        ):
            grid_for({name: -1}, Machine.of(P_world), 4)


@pytest.mark.mpi(min_size=2)
def test_a_grid_of_another_number_of_ranks_or_dimensions(P_world):
    size = P_world.size
    for grid in (f"{size + 1}x1", "0x1", {}, {"H": 2 * size}, {"H": -1, "W": -1}, {"H": -1, "W": size + 1}):
        with pytest.raises(PartitionError, match=rf"grid .* number of ranks, which is {size};") as error:
            grid_for(grid, Machine.of(P_world), 5)
        assert repr(grid) in str(error.value)
    with pytest.raises(PartitionError, match="the tensor has 4"):
        grid_for(P_world, Machine.of(P_world), 4)
