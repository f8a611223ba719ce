"""Exchanges of periodic tensors, whose images continue them beyond their ends."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced
from tests.geometry.simulation import execute, inputs, product_of
from tests.geometry.strategies import RANKS, partitions


@st.composite
def periodic(draw):
    """Own blocks, what circularly padded windows read of them, and the shifts of the images."""
    dim = draw(st.integers(1, 2))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(dim))
    P_x, P_y = draw(partitions(dim)), draw(partitions(dim))
    source, reads = Decomposition.balanced(P_x, shape), {}
    for d, n in enumerate(shape):
        left, right = draw(st.integers(0, n)), draw(st.integers(0, n))
        window = Window(draw(st.integers(1, 1 + left + right)), left=left, right=right)
        reads[d] = WindowSplit(Balanced(window.outputs(n), P_y.shape[d]), window, n)
    target = Decomposition.balanced(P_y, shape).with_splits(reads)
    images = tuple(product(*((0, -n, n) for n in shape)))
    return source, target, images


@settings(max_examples=60)
@given(movement=periodic(), seed=st.integers(0, 99))
def test_images_continue_the_tensor_periodically_and_the_adjoint_sums_them(movement, seed):
    source, target, images = movement
    shape = source.shape
    whole = np.random.default_rng(seed).integers(-9, 10, shape)
    plans = {rank: Exchange(rank, source, target, images=images) for rank in range(RANKS)}
    origin = Box.of_shape(shape)
    y = execute(plans, {rank: whole[source.box(rank).slices(origin)] for rank in plans})
    for rank, plan in plans.items():
        index = np.ix_(*(np.arange(*bounds) % n for bounds, n in zip(plan.need.bounds, shape, strict=True)))
        assert (y[rank] == whole[index]).all()
        assert plan.disjoint
        assert plan.complete
    adjoints = {rank: plan.T for rank, plan in plans.items()}
    x, g = inputs(plans, seed), inputs(adjoints, seed + 1)
    assert product_of(execute(plans, x), g) == product_of(x, execute(adjoints, g))
