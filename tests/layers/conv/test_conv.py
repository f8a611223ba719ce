"""Distributed convolutions against the sequential layer."""

import gc
import random
import time
from contextlib import nullcontext

import pytest
import torch

from distdl_rma import Machine, MismatchError, PartitionError, ShapeError, gather_state_dict
from distdl_rma.layers import DistributedConv1d, DistributedConvTranspose1d
from tests.layers.twins import Form, Twins, columns, features

pytestmark = pytest.mark.mpi
LINE = Form("Conv1d", (2, 3, 3), {"padding": 1}, (features,), shape=(2, 2, 9))


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


def test_more_shapes_in_one_graph_than_plans_are_kept(P_world, comm):
    twins = Twins(P_world, LINE)
    inputs = [twins.draw((1, 2, width)) for width in range(6, 30)]
    sum(twins.layer(twins.into(x)).sum() for x in inputs).backward()
    sum(twins.twin(x).sum() for x in inputs).backward()
    twins.compare()


@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_state_may_be_gathered_on_one_rank_alone(P_world, comm, weights):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 2, 3, 3, weights=weights)
    last = comm.size - 1
    state = gather_state_dict(layer, rank=last)
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    assert shapes == ({"weight": (3, 2, 3), "bias": (3,)} if comm.rank == last else {})
    with pytest.raises(PartitionError, match="rank 99 is none of the ranks"):
        gather_state_dict(layer, rank=99)


@pytest.mark.mpi(min_size=2)
def test_weights_on_one_rank_may_change_their_dtype(P_world, comm):
    twins = Twins(P_world, LINE, torch.float32, weights="root")
    twins.layer(twins.into(twins.draw()))
    for net in (twins.layer, twins.twin):
        net.double()
    twins.dtype = torch.float64
    twins.step(twins.draw())


@pytest.mark.mpi(min_size=2)
def test_layers_built_differently_on_one_rank_are_named(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 1, 1, 1, stride=2 if comm.rank == 0 else 1, name="uneven")
    if comm.size == 2:
        with pytest.raises(MismatchError, match="'uneven \\(shapes"):
            layer(torch.randn(1, 1, 4))


@pytest.mark.parametrize("kind", [DistributedConv1d, DistributedConvTranspose1d])
def test_only_what_is_not_usual_of_a_placement_is_printed(P_world, comm, kind):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    assert "placement" not in repr(kind(P_x, 2, 2, 3))
    # One argument by two names.
    layer = kind(P_x, P_x, P_x, 2, 2, 3, placement="root", weights="root", bias=False)
    assert layer.placement == layer.weights == "root"
    for part in ("kernel_size=(3,)", "bias=False", f"P_W={P_x.shape}", "placement='root'"):
        assert part in repr(layer)


def test_input_that_no_window_fits_is_refused(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 1, 1, 9)
    with pytest.raises(ShapeError, match=r"global input \(\d,\) is too small for kernel \(9,\)"):
        layer(torch.randn(1, 1, 1))


def refused(layer, x):
    """Whether a call is refused; what it raised holds no layer afterwards."""
    try:
        layer(x)
    except ShapeError:
        return True
    return False


@pytest.mark.mpi(min_size=2)
def test_a_layer_dropped_after_a_refused_call_gives_its_memory_back_once_all_edges_came(P_world, comm):
    # With two taps each rank reads the edge of the next one. All but the first have put theirs.
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    segments = Machine.of(P_x).segments
    layer = DistributedConv1d(P_x, 1, 1, 2, name="dropped")
    x = torch.randn(1, 1, 8)
    layer(x)
    assert refused(layer, x.double() if comm.rank == 0 else x)
    del layer
    gc.collect()
    deadline = time.monotonic() + 60
    while "dropped" in segments.stats().owners and time.monotonic() < deadline:
        segments.progress()
    assert "dropped" not in segments.stats().owners
