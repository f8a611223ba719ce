"""Layers that work along dimensions of one grid: which ones they are told."""

import pytest

from distdl_rma import ArgumentError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers import AllGather, AllSumReduce, ReduceScatter
from distdl_rma.layers.moves.along_axes import chosen_axes

KINDS = {"axes_reduce": AllSumReduce, "axes_all_gather": AllGather, "axes_reduce_scatter": ReduceScatter}


@pytest.mark.mpi
@pytest.mark.parametrize("what", KINDS)
def test_axes_are_given_in_one_way(P_world, what):
    for axes in ({}, {what: 0, "axes_keep": 0}):
        with pytest.raises(ArgumentError, match=f"{KINDS[what].__name__}: give either {what} or axes_keep"):
            KINDS[what](P_world, **axes)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("axes", "message"),
    [(1, "out of range"), (-2, "out of range"), ([0, -1], "more than once"), (0.5, "are integers")],
)
def test_axes_are_those_of_the_grid(P_world, axes, message):
    with pytest.raises(ArgumentError, match=message):
        AllSumReduce(P_world, axes_reduce=axes)


def test_axes_are_sorted_and_may_be_those_that_are_kept():
    P = Partition(tuple(range(8)), (2, 2, 2), 0)
    assert chosen_axes("it", P, "axes", (-1, 0), None) == chosen_axes("it", P, "axes", None, 1) == (0, 2)
