"""Blocks of weight, bias, inputs and outputs, all ranks in one process."""

import itertools

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry import Partition
from distdl_rma.ops.linear import COLUMNS, IN, OUT, ROWS, LinearGrid, grid_of_workers

GRIDS = [(1, 1, 1), (2, 1, 1), (1, 3, 2), (2, 3, 1), (3, 2, 2)]


def grid_of(shape, in_features, out_features, me=0):
    size = shape[0] * shape[1] * shape[2]
    return LinearGrid(Partition(tuple(range(size)), shape, me), in_features, out_features)


def part(decomposition, rank, whole):
    return whole[decomposition.slices(rank)]


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("sizes", [(5, 7), (2, 1), (0, 3), (3, 0)])
def test_products_of_blocks_add_up_to_the_product(shape, sizes):
    torch.manual_seed(0)
    grid = grid_of(shape, *sizes)
    x, weight = torch.randint(9, (4, 2, sizes[0])), torch.randint(9, (sizes[1], sizes[0]))
    bias, y = torch.randint(9, (sizes[1],)), torch.zeros(4, 2, sizes[1], dtype=torch.int64)
    read, made = grid.inputs(x.shape), grid.outputs(x.shape)
    assert made.shape == tuple(y.shape)
    for rank in grid.P_w.ranks:
        local = part(read, rank, x) @ part(grid.weight, rank, weight).T
        if grid_of(shape, *sizes, me=rank).adds_bias:
            local += part(grid.bias, rank, bias)
        part(made, rank, y).add_(local)
    assert torch.equal(y, F.linear(x.double(), weight.double(), bias.double()).long())


@pytest.mark.parametrize(
    ("shape", "dim"), [((2, 1, 1), IN), ((2, 1, 1), OUT), ((2, 3, 1), IN), ((3, 1, 2), OUT)]
)
def test_zero_shards_of_the_data_parallel_blocks_are_their_block_of_the_weight(shape, dim):
    grid = grid_of(shape, 7, 5)
    weight, bias = torch.zeros(5, 7), torch.zeros(5)
    shards, shares = grid.zero_weight(dim), grid.zero_bias()
    for rank in grid.P_w.ranks:
        part(shards, rank, weight).add_(1)
        box, block = shards.box(rank), grid.weight.box(rank)
        assert (box & block) == box, "a shard of the block that the rank computes with"
    for rank in shares.partition.ranks:
        part(shares, rank, bias).add_(1)
        assert (shares.box(rank) & grid.bias.box(rank)) == shares.box(rank)
    assert (weight == 1).all() and (bias == 1).all(), "each element is kept once"


def test_the_first_extent_counts_the_data_parallel_blocks():
    for shape, dim in itertools.product([(6,), (2, 3), (3, 1, 2), (1, 2, 3)], (ROWS, COLUMNS)):
        P = grid_of_workers(Partition(tuple(range(6)), shape, 0), dim)
        blocks = shape[0] if len(shape) > 1 else 1
        assert P.shape[0] == blocks and P.shape[dim] == 6 // blocks and P.ranks == tuple(range(6))
