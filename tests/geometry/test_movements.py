"""The movements of the documents: which is whose transpose, and the examples of repartitions as printed.

That each of them moves what it should is in ``test_exchange.py``.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from tests.geometry.simulation import equal, everywhere, execute, plans_of
from tests.geometry.strategies import all_gathers, all_sum_reduces, broadcasts, scatters

TRANSPOSES = {
    "sum-reduce of broadcast": broadcasts(),
    "reduce-scatter of all-gather": all_gathers(),
    "gather of scatter": scatters(),
    "all-sum-reduce of itself": all_sum_reduces(),
}


@pytest.mark.parametrize("ends", TRANSPOSES.values(), ids=TRANSPOSES)
@settings(max_examples=40)
@given(data=st.data())
def test_one_movement_is_the_transpose_of_the_other(ends, data):
    source, target = data.draw(ends)
    there, back = everywhere(source, target), everywhere(target, source)
    for rank, plan in back.items():
        other = there[rank].T
        assert (plan.own, plan.need, plan.local) == (other.own, other.need, other.local)
        assert (plan.sends, plan.receives) == (other.sends, other.receives)


EXAMPLES = {
    "1: remap 1-D": ((5,), (3,)),
    "2: remap 2-D": ((3, 4), (4, 2)),
    "3: remap 3-D": ((3, 2, 2), (1, 2, 3)),
    "4: scatter": ((1, 1, 1), (1, 3, 2)),
    "5: gather": ((1, 3, 2), (1, 1, 1)),
    "sketch": ((3, 3), (4, 4)),
    "all-to-all that transposes a matrix": ((4, 1), (1, 4)),
}


def grid(shape):
    return Partition(tuple(range(prod(shape))), shape, me=0)


@pytest.mark.parametrize("grids", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("extent", [13, 4, 2])
def test_a_printed_repartition_arrives_balanced_and_comes_back(grids, extent):
    shape = (extent,) * len(grids[0])
    whole = np.arange(prod(shape)).reshape(shape)
    source, target = (Decomposition.balanced(grid(each), shape) for each in grids)
    ranks = range(max(source.partition.size, target.partition.size))
    plans = plans_of(source, target, ranks)
    nothing = {rank: np.zeros((0,) * len(shape), int) for rank in ranks}
    x, y = ({**nothing, **{r: whole[d.slices(r)] for r in d.partition.ranks}} for d in (source, target))
    assert equal(execute(plans, x), y)
    assert equal(execute({rank: plan.T for rank, plan in plans.items()}, y), x)


def test_middle_of_3_x_3_goes_to_the_4_middle_ranks_of_4_x_4():
    source, target = (Decomposition.balanced(grid(shape), (12, 12)) for shape in ((3, 3), (4, 4)))
    plan = Exchange(4, source, target)
    places = {target.partition.index_of(piece.peer) for piece in plan.sends + plan.local}
    assert places == {(1, 1), (1, 2), (2, 1), (2, 2)}
