"""Arguments of convolutions: what editors show of them, and where partitions stand."""

import inspect

import pytest

from distdl_rma import PartitionError, layers
from distdl_rma.geometry import Partition
from distdl_rma.layers.ops.conv.worker_grid import IN, OUT, grid_of_workers
from distdl_rma.layers.partitioned.conv import partitions_among
from distdl_rma.layers.partitioned.core.arguments import torchs_layer

P = Partition((0, 1), (1, 2, 1), 0)
Q = Partition((1, 0), (2, 1, 1), 0)
NONE = {"P_y": None, "P_W": None, "P_w": None}


def test_a_layer_of_ones_own_shows_its_own_arguments():
    class Twice(layers.DistributedConv2d):
        def __init__(self, P_x, channels):
            super().__init__(P_x, channels, channels, 3)

    assert list(inspect.signature(Twice).parameters) == ["P_x", "channels"]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (1, 1),
            {},
            "DistributedConv2d: missing a required argument: 'kernel_size'; it takes partitions, then ",
        ),
        ((1, 1, 3), {"strid": 2}, "DistributedConv2d: got an unexpected keyword argument 'strid'"),
        ((1, 1, 3, 2), {"stride": 2}, "DistributedConv2d: multiple values for argument 'stride'"),
    ],
)
def test_typos_are_refused_by_the_name_of_the_layer(arguments, options, message):
    with pytest.raises(TypeError, match=message):
        torchs_layer(layers.DistributedConv2d, *arguments, **options)


def test_partitions_come_first_or_by_name():
    assert partitions_among(layers.DistributedConv1d, 3, (P, 4, 5), NONE) == (None, None, (4, 5))
    assert partitions_among(layers.DistributedConv1d, 3, (P, Q, 4), NONE) == (Q, None, (4,))
    assert partitions_among(layers.DistributedConv1d, 3, (P, Q, P, 4), NONE) == (Q, P, (4,))
    assert partitions_among(layers.DistributedConv1d, 3, (P, Q, 4), {**NONE, "P_w": P}) == (Q, P, (4,))
    with pytest.raises(PartitionError, match="P_W is given twice"):
        partitions_among(layers.DistributedConv1d, 3, (P, 4), {**NONE, "P_W": P, "P_w": Q})
    with pytest.raises(PartitionError, match="P_y must be a partition, got 3"):
        partitions_among(layers.DistributedConv1d, 3, (P, 4), {**NONE, "P_y": 3})


def test_without_work_of_their_own_the_channels_of_one_side_are_cut():
    assert grid_of_workers(None, P, OUT).shape == grid_of_workers(Q, P, OUT).shape == (1, 2, 1, 1)
    assert grid_of_workers(None, P, IN).shape == (1, 1, 2, 1)
    assert grid_of_workers(Q, P, OUT).ranks == Q.ranks
