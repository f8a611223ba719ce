"""Convolutions in every form (channel, general, all padding modes) against the sequential layers."""

from dataclasses import replace

import pytest
import torch

from distdl_rma.layers import DistributedConv1d, DistributedConv2d
from tests.fuzz.convolutions import check
from tests.layers.sequential import agree, shard
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@over_seeds(100, each=10)
def test_random_convolutions_of_any_form_equal_the_sequential_ones(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


def grid(P_world, shape, ranks=None):
    chosen = range(P_world.size) if ranks is None else ranks
    return P_world.create_partition_inclusive(chosen).create_cartesian_topology_partition(shape)


def halves(n):
    """Two factors of a number of ranks, the larger one last."""
    return (2, n // 2) if n % 2 == 0 else (1, n)


def test_only_made_up_padding_and_cut_groups_do_not_overlap(P_world, comm):
    P_x = grid(P_world, (1, 1, comm.size))
    overlap = [
        DistributedConv1d(P_x, 1, 1, 3, padding=1),
        DistributedConv1d(P_x, P_x, P_x, 1, 1, 3, padding=1),
        DistributedConv1d(P_x, 1, 1, 3, padding_mode="circular"),
        DistributedConv1d(P_x, 1, 1, 3, P_W=grid(P_world, (1, comm.size, 1))),
        DistributedConv1d(P_x, 2, 2, 3, groups=2),
    ]
    gathered = [
        DistributedConv1d(P_x, 1, 1, 3, padding=1, padding_mode="circular"),
        DistributedConv1d(P_x, 2, 2, 3, groups=2, P_W=grid(P_world, (comm.size, 1, 1))),
    ]
    assert all(layer.options.overlaps for layer in overlap)
    assert not any(layer.options.overlaps for layer in gathered[: min(2, comm.size)])


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_overlapping_way_equals_the_gathered_one(P_world, comm, weights):
    P_x = grid(P_world, (1, 1, *halves(comm.size)))
    arguments = {"stride": (1, 2), "padding": (3, 1), "dilation": (2, 1), "groups": 2, "weights": weights}
    pair = []
    for overlaps in (True, False):
        torch.manual_seed(2)
        pair.append(DistributedConv2d(P_x, 4, 6, (3, 4), **arguments, dtype=torch.float64))
        pair[-1].options = replace(pair[-1].options, overlaps=overlaps)
    for shape in ((2, 4, 9, 11), (1, 4, 3, 2)):
        x = torch.randn(shape, dtype=torch.float64)
        given = [shard(P_x, x).requires_grad_() for _ in pair]
        outputs = [layer(local) for layer, local in zip(pair, given, strict=True)]
        for layer, y in zip(pair, outputs, strict=True):
            layer.zero_grad()
            y.square().sum().backward()
        agree(*outputs, "output")
        agree(*(local.grad for local in given), "input gradient")
        for one, other in zip(*(layer.parameters() for layer in pair), strict=True):
            agree(one.grad, other.grad, "weight gradient")


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_weights_are_kept_where_the_document_says(P_world, comm, weights):
    P_W = grid(P_world, (1, 2, 2), ranks=(3, 2, 1, 0))
    P = grid(P_world, (1, 1, 1), ranks=(1,))
    layer = DistributedConv1d(P, P, P_W, 6, 5, 3, weights=weights)
    # Ranks 3, 2 hold the first in-channel block, 1 and 0 the second; 3 and 1 come first in space.
    keeps = {"replicated": {0, 1, 2, 3}, "root": {1, 3}}[weights]
    assert layer.weight.shape == ((5, 3, 3) if comm.rank in keeps else (0,))
    assert layer.bias.shape == ((5,) if comm.rank in keeps & {2, 3} else (0,))
    peers = {3: [3, 2], 2: [3, 2], 1: [1, 0], 0: [1, 0]}[comm.rank]
    assert layer.get_ranks_synch_weights() == (peers if weights == "replicated" else [])
