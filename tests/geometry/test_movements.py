"""The repartitions that the documents print; that every movement has its laws is in ``test_exchange.py``."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from tests.geometry.simulation import equal, execute, plans_of

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
