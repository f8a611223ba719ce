"""Comparison of distributed layers with their sequential torch twins."""

import itertools

import torch
from torch import nn

from distdl_rma.layers.split.shard import balanced_block as shard  # noqa: F401 - what tests compare with is cut by it

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def grids(size, dims):
    """All grids of a number of ranks: batch, one channel block, spatial dimensions."""
    extents = [n for n in range(1, size + 1) if size % n == 0]
    for grid in itertools.product(extents, repeat=dims + 1):
        if torch.tensor(grid).prod() == size:
            yield (grid[0], 1, *grid[1:])


def agree(actual, expected, what=""):
    """Equal to float64 rounding, in shape and dtype too."""
    assert actual is not None, what
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{what}: {text}")
