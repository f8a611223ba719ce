"""Distributed convolutions, plain and transposed, in every form against the sequential layers."""

import gc
import random
import re
import time
from contextlib import nullcontext

import pytest
import torch

from distdl_rma import Machine, MismatchError, PartitionError, ShapeError, gather_state_dict
from distdl_rma.layers import DistributedConv1d
from tests.layers.partitioned.same_error import same_error
from tests.layers.partitioned.twins import Form, Twins, columns, features

pytestmark = pytest.mark.mpi
LINE = Form("Conv1d", (2, 3, 3), {"padding": 1}, (features,), shape=(2, 2, 9))
TRANSPOSED = Form("ConvTranspose2d", (2, 3, 3, (2, 3), 1), shape=(1, 2, 5, 4))


@pytest.fixture
def P_x(P_world):  # noqa: N802
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size))


def test_shapes_may_change_from_call_to_call_on_some_ranks_only(P_world, comm):
    # A smaller last batch, another image size: some ranks see their own shard unchanged.
    twins = Twins(P_world, Form("Conv2d", (2, 3, 5, 2, 2), grids=(columns,)))
    rng, mine = random.Random(3), random.Random(comm.rank)
    for step in range(60):
        torch.manual_seed(step)
        x = twins.draw((rng.choice([1, 2]), 2, 7, rng.choice([13, 14, 15, 16, 17, 9, 8, 3])))
        if mine.random() < 0.1:
            time.sleep(mine.random() * 5e-3)
        with torch.no_grad() if rng.random() < 0.3 else nullcontext():
            twins.step(x)


def test_more_shapes_in_one_graph_than_plans_are_kept(P_world):
    twins = Twins(P_world, LINE)
    inputs = [twins.draw((1, 2, width)) for width in range(6, 30)]
    sum(twins.layer(twins.into(x)).sum() for x in inputs).backward()
    sum(twins.twin(x).sum() for x in inputs).backward()
    twins.compare()


@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_state_may_be_gathered_on_one_rank_alone(P_x, comm, weights):
    layer, last = DistributedConv1d(P_x, 2, 3, 3, weights=weights), comm.size - 1
    shapes = {key: tuple(value.shape) for key, value in gather_state_dict(layer, rank=last).items()}
    assert shapes == ({"weight": (3, 2, 3), "bias": (3,)} if comm.rank == last else {})
    with pytest.raises(PartitionError, match="rank 99 is none of the ranks"):
        gather_state_dict(layer, rank=99)


@pytest.mark.mpi(min_size=2)
def test_weights_on_one_rank_may_change_their_dtype(P_world):
    twins = Twins(P_world, LINE, torch.float32, weights="root")
    twins.layer(twins.into(twins.draw()))
    for net in (twins.layer, twins.twin):
        net.double()
    twins.dtype = torch.float64
    twins.step(twins.draw())


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_layers_built_differently_on_one_rank_are_named(P_x, comm):
    layer = DistributedConv1d(P_x, 1, 1, 1, stride=2 if comm.rank == 0 else 1, name="uneven")
    with pytest.raises(MismatchError, match="'uneven \\(shapes"):
        layer(torch.randn(1, 1, 4))


@pytest.mark.mpi(min_size=2)
def test_a_layer_dropped_after_a_refused_call_gives_its_memory_back_once_all_edges_came(P_x, comm):
    # With two taps each rank reads the edge of the next one. All but the first have put theirs.
    segments = Machine.of(P_x).segments
    layer = DistributedConv1d(P_x, 1, 1, 2, name="dropped")
    x = torch.randn(1, 1, 8)
    layer(x)
    same_error(comm, lambda layer=layer: layer(x.double() if comm.rank == 0 else x), ShapeError)
    del layer
    gc.collect()
    deadline = time.monotonic() + 60
    while "dropped" in segments.stats().owners and time.monotonic() < deadline:
        segments.progress()
    assert "dropped" not in segments.stats().owners


def test_the_output_size_of_a_transposed_convolution_may_be_asked_for(P_world):
    twins = Twins(P_world, TRANSPOSED)
    x = twins.draw()
    for size in ((9, 10), (10, 12), [1, 3, 10, 11], torch.Size((9, 11)), None):
        twins.step(x, size)


# A layer that torch does not call either, its input, further arguments, and the words.
IMPOSSIBLE = [
    (
        Form("Conv1d", (1, 1, 9), {}, (features,), shape=(1, 1, 3)),
        (),
        r"global input \(3,\) is too small for kernel \(9,\)",
    ),
    (
        Form("ConvTranspose1d", (1, 1, 3, 1, 2), {}, (features,), shape=(1, 1, 2)),
        (),
        r"global input \(2,\) is too small: the output would be \(0,\)",
    ),
    *(
        (TRANSPOSED, (size,), rf"'it': .*output_size {re.escape(f'{size}')} is not between \(9, 10\) and")
        for size in ((9, 13), (8, 10))
    ),
    *(
        (TRANSPOSED, (size,), f"'it': .*output_size has {len(size)} numbers, it needs 2 or 4")
        for size in ((9,), (1, 9, 10))
    ),
]


@pytest.mark.parametrize(("form", "more", "words"), IMPOSSIBLE)
def test_what_torch_cannot_compute_is_refused(P_world, form, more, words):
    twins = Twins(P_world, form, name="it")
    x = twins.draw()
    with pytest.raises((RuntimeError, ValueError)):
        twins.twin(x, *more)
    with pytest.raises(ShapeError, match=words):
        twins.layer(twins.into(x), *more)
    if more:
        twins.step(x)


@pytest.mark.mpi(min_size=2)
def test_an_output_size_that_differs_between_ranks_is_told_to_all(P_world, comm):
    twins = Twins(P_world, Form("ConvTranspose1d", (2, 3, 3, 2), {}, (features,), shape=(1, 2, 5)))
    x = twins.draw()
    with pytest.raises(ShapeError, match=r"alike on all ranks: rank 0 has None but rank 1 \(12,\)"):
        twins.layer(twins.into(x), (12,) if comm.rank == 1 else None)
    twins.step(x, (12,))
