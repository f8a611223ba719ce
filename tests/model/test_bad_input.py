"""Models and inputs that do not fit together: right, or refused with a sentence, on all ranks."""

import copy

import pytest
import torch
from torch import nn

from distdl_rma import ArgumentError, ConfigurationError, PartitionError, ShapeError, distribute, shard
from tests.model.against_alone import train_beside
from tests.model.nets import UNet

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4), pytest.mark.in_turn(4)]


@pytest.fixture
def P_x(P_world):  # noqa: N802
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))


class Positions(nn.Module):
    """Holds tensors of the size of the image."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(1, 2, 11, 7))
        self.rows = nn.Parameter(torch.randn(11, 1))
        self.register_buffer("mask", (torch.rand(11, 7) > 0.3).double())
        self.register_buffer("grid", torch.linspace(0, 1, 11).view(1, 1, -1, 1))
        self.tokens = nn.Parameter(torch.randn(77, 2))
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.mix = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x):
        y = self.conv(x) + self.embedding
        y = y * self.mask + self.rows * self.grid
        y = self.mix(torch.cat([y, self.grid.expand(y.shape[0], 1, -1, y.shape[3])], 1))
        tokens = y.flatten(2).transpose(1, 2) + self.tokens
        return tokens.square().mean((0, 2)) * self.rows.mean()


def test_parameters_and_buffers_of_image_size(comm):
    for grid in (f"{comm.size}x1", f"1x{comm.size}", *(["2x2"] if comm.size == 4 else [])):
        torch.manual_seed(2)
        train_beside(Positions(), grid, torch.randn(2, 1, 11, 7), lambda y: y.sum(), steps=3)


@pytest.mark.parametrize("bilinear", [False, True])
def test_more_blocks_than_rows(comm, bilinear):
    # In the middle of the net two rows are left, of more ranks.
    torch.manual_seed(2)
    x = torch.randn(2, 1, 16 if bilinear else 18, 9)
    grid = f"{comm.size}x1"
    train_beside(UNet(bilinear=bilinear), grid, x, lambda y: (y - 0.3).square().mean(), steps=3)


def test_fewer_rows_than_ranks_at_once(comm):
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1)
    )
    net.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten()).append(nn.Linear(3, 2))
    x = torch.randn(2, 1, 2, 9)
    train_beside(net, f"{comm.size}x1", x, lambda y: y.square().mean(), steps=3)


def test_grids_that_do_not_fit_the_ranks(comm):
    x = torch.randn(1, 1, 8, 8)
    for grid in (f"{comm.size + 1}x1", {"H": comm.size, "W": 2}, {"H": 5}):
        with pytest.raises((PartitionError, ArgumentError), match="rank"):
            shard(grid, x)
        model = nn.Conv2d(1, 1, 3)
        with pytest.raises((PartitionError, ArgumentError), match="rank"):
            distribute(model, grid)
        assert not hasattr(model, "distributed")
    for grid in ("two by two", "2x-1", 4, {"Q": 2}, {"H": -1, "W": -1}):
        with pytest.raises((PartitionError, ArgumentError)):
            distribute(nn.Conv2d(1, 1, 3), grid)
        with pytest.raises((PartitionError, ArgumentError)):
            shard(grid, x)


def test_inputs_that_the_grid_does_not_cut(comm):
    # Labels, times and tokens stay plain, alike on all ranks.
    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3, padding=1)
            self.time = nn.Linear(3, 2)

        def forward(self, x, t, scale=1.0):
            return self.conv(x) * scale + self.time(t)[:, :, None, None]

    alone = Conditioned().double()
    split = distribute(copy.deepcopy(alone), {"H": -1})
    x, t = torch.randn(2, 1, 9, 6).double(), torch.randn(2, 3).double()
    for model in (alone, split):
        model(x, t, scale=2.0).square().mean().backward()
    for p, other in zip(split.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad)
    split.distributed.close()


def test_inputs_beside_that_have_no_memory_of_their_elements(comm):
    class Labelled(nn.Conv2d):
        def forward(self, x, _label):
            return super().forward(x)

    model = distribute(Labelled(1, 1, 3, padding=1), {"H": -1})
    for beside in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        for _ in range(2):
            assert model(torch.ones(1, 1, 8, 8), beside).shape == (1, 1, 8, 8)
    model.distributed.close()


def test_a_batch_dimension_that_is_missing_a_numpy_array_and_no_memory_are_named(P_x, comm):
    x = torch.ones(3, 12, 5)
    for grid in (P_x, {"H": -1}):
        model = distribute(nn.Conv2d(3, 2, 3), grid)
        with pytest.raises((ShapeError, ArgumentError), match=r"batch dimension .*missing\? x\.uns"):
            model(x)
        with pytest.raises(ArgumentError, match=r"torch\.from_numpy"):
            model(x.unsqueeze(0).numpy())
        assert model(x.unsqueeze(0)).shape == (1, 2, 10, 3)
    for reduction in ("sum", "none"):
        with pytest.raises(ConfigurationError, match=r"'weight' is on the device meta.*to_empty"):
            distribute(nn.Conv2d(3, 2, 3, device="meta"), P_x, reduction=reduction)
