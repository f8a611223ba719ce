"""Halo exchange: own shard, the neighbours' elements around it, and padding beyond the domain."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ArgumentError, PartitionError, ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import HaloExchange
from tests.layers.sequential import grids, shard

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def windows_of(P, x, left, right):
    """This rank's part of a padded tensor."""
    spatial = Decomposition.balanced(P, (x.shape[0], x.shape[1], *(n - left - right for n in x.shape[2:])))
    batch, channel, *places = spatial.slices()
    return x[(batch, channel, *(slice(s.start, s.stop + left + right) for s in places))]


@pytest.mark.parametrize("width", [0, 1, 3, 6])
def test_halo_is_what_lies_around_corners_included(P_world, comm, width):
    x = torch.arange(2 * 3 * 7 * 6).reshape(2, 3, 7, 6)
    expected = F.pad(x, (width,) * 4)
    for grid in grids(comm.size, 2):
        P = P_world.create_cartesian_topology_partition(grid)
        local = shard(P, x)
        y = HaloExchange(P, width)(local)
        assert torch.equal(y, windows_of(P, expected, width, width))
        assert not y.numel() or y.data_ptr() != local.data_ptr()


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding_is_that_of_torch(P_world, comm, mode):
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    value = 2.5 if mode == "constant" else 0.0
    expected = F.pad(x, (4, 4, 4, 4), mode, value)
    for grid in grids(comm.size, 2):
        P = P_world.create_cartesian_topology_partition(grid)
        y = HaloExchange(P, [4, (4, 4)], padding_mode=mode, value=value)(shard(P, x))
        assert torch.equal(y, windows_of(P, expected, 4, 4))


def test_widths_differ_by_dimension_and_side(P_world, comm):
    P = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    x = torch.arange(5 * 4).reshape(1, 1, 5, 4)
    y = HaloExchange(P, [(2, 0), (0, 1)])(shard(P, x))
    rows = Decomposition.balanced(P, x.shape).slices()[2]
    assert torch.equal(y, F.pad(x, (0, 1, 2, 0))[:, :, rows.start : rows.stop + 2])


def test_shards_may_be_uneven_and_smaller_than_the_halo(P_world, comm):
    P = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    lengths = [1, 4, 0, 2][: comm.size]
    start, n = sum(lengths[: comm.rank]), lengths[comm.rank]
    x = torch.arange(1, sum(lengths) + 1).reshape(1, 1, -1)
    y = HaloExchange(P, 3)(x[..., start : start + n])
    # Without elements of its own a rank has no neighbourhood.
    assert torch.equal(y, F.pad(x, (3, 3))[..., start : start + n + 6 if n else start])


def test_adjoint_adds_every_gradient_to_the_element_that_was_copied(P_world, comm):
    P = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    x = torch.ones(1, 1, 8, dtype=torch.float64, requires_grad=True)
    local = shard(P, x).requires_grad_()
    y = HaloExchange(P, 2, "circular")(local)
    y.sum().backward()
    padded = F.pad(x, (2, 2), "circular")
    sum(padded[..., s.start : s.stop + 4].sum() for s in slices_of(P, x.shape)).backward()
    assert torch.equal(local.grad, shard(P, x.grad))


def slices_of(P, shape):
    blocks = Decomposition.balanced(P, shape)
    return [blocks.slices(rank)[2] for rank in P.ranks]


def test_image_too_small_for_its_padding_is_refused_on_all_ranks(P_world, comm):
    P = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = HaloExchange(P, 4, "reflect", name="halo")
    with pytest.raises(ShapeError, match="'halo': padding mode 'reflect' needs padding smaller than"):
        layer(shard(P, torch.ones(1, 1, 4)))
    assert layer(shard(P, torch.ones(1, 1, 5))).min() == 1


@pytest.mark.parametrize("width", [-1, [1], [1, 2, 3], [(1, 2, 3), 1], [(0, -1), 0], 1.5, [0.5, 1]], ids=str)
def test_impossible_widths_are_refused(P_world, comm, width):
    P = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    with pytest.raises(ArgumentError, match="HaloExchange: width"):
        HaloExchange(P, width)


def test_unknown_modes_and_grids_without_space_are_refused(P_world, comm):
    P = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    with pytest.raises(ArgumentError, match=r"padding_mode is one of .* got 'mirror'"):
        HaloExchange(P, 1, "mirror")
    with pytest.raises(PartitionError, match="spatial dimensions"):
        HaloExchange(P_world, 1)
