"""Arguments of convolutions: what editors show of them, and where partitions stand."""

import inspect

from distdl_rma import layers
from distdl_rma.geometry import Partition
from distdl_rma.layers.ops.conv.worker_grid import IN, OUT, grid_of_workers

P = Partition((0, 1), (1, 2, 1), 0)
Q = Partition((1, 0), (2, 1, 1), 0)


def test_a_layer_of_ones_own_shows_its_own_arguments():
    class Twice(layers.DistributedConv2d):
        def __init__(self, P_x, channels):
            super().__init__(P_x, channels, channels, 3)

    assert list(inspect.signature(Twice).parameters) == ["P_x", "channels"]


def test_without_work_of_their_own_the_channels_of_one_side_are_cut():
    assert grid_of_workers(None, P, OUT).shape == grid_of_workers(Q, P, OUT).shape == (1, 2, 1, 1)
    assert grid_of_workers(None, P, IN).shape == (1, 1, 2, 1)
    assert grid_of_workers(Q, P, OUT).ranks == Q.ranks
