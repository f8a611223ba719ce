"""What a step sends, from plans of simulated ranks: by closed forms, and by the real counters."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.scaling.cases import Case
from benchmarks.scaling.layers import layers_of
from benchmarks.scaling.plans import Cluster, Movement, Round, Sum, gradients, planned, step_traffic
from distdl_rma import Machine

FLAT = Case("flat", 4, 2, (32, 24))
DEEP = Case("deep", 2, 1, (12, 8, 6))
COUNTED = ("puts", "bytes_put", "gets", "bytes_got", "collectives", "bytes_collective")


def layers(case, shape=None):
    return layers_of(case.network(), (1, 1, *(shape or case.shape)))


def test_layers_are_found_in_the_order_of_their_calls_without_computing():
    found = layers(Case("vast", 4, 2, (1 << 16, 1 << 16)))
    assert [layer.kind for layer in found[:7]] == [*["Conv", "BatchNorm", "ReLU"] * 2, "MaxPool"]
    assert [layer.kind for layer in found].count("cat") == 2
    assert found[-1].kind == "Conv without halo"
    assert (found[0].inputs, found[-1].outputs) == ((1, 1, 1 << 16, 1 << 16), (1, 2, 1 << 16, 1 << 16))
    assert [layer.first for layer in found].index(True) == 0
    parameters = Case("vast", 4, 2, (1,)).network().parameters()
    assert sum(sum(layer.parameters) for layer in found) == sum(p.numel() for p in parameters)


@pytest.mark.parametrize(("grid", "neighbours"), [((8,), 2), ((8, 8), 8), ((4, 4, 4), 26)])
def test_a_convolution_sends_its_edges_to_all_neighbours(grid, neighbours):
    tile, dims = 8, len(grid)
    shape = tuple(n * tile for n in grid)
    if dims == 1:
        grid, shape = (*grid, 1), (*shape, tile)
    layer = layers(Case("", 4, 1, shape))[3]
    cluster = Cluster((1, 1, *grid), 4)
    plan = planned(layer, cluster, cluster.middle)
    (forward,), (backward,) = plan.forward, plan.backward
    assert isinstance(forward, Movement)
    for each in (forward, backward):
        assert each.traffic(cluster, cluster.middle).puts == neighbours
    halo = 2 * tile if dims == 1 else (tile + 2) ** dims - tile**dims
    assert forward.traffic(cluster, cluster.middle).bytes_put == 4 * 4 * halo
    assert backward.traffic(cluster, cluster.middle).bytes_put == 4 * 4 * halo


def test_what_needs_no_neighbour_and_gradients_of_the_input_of_the_model_send_nothing():
    cluster = Cluster((1, 1, 4, 2), 4)
    first, *others = layers(FLAT)
    for layer in others:
        if layer.kind not in ("Conv", "BatchNorm"):
            assert planned(layer, cluster, 3)[1:] == ((), ())
    found = planned(first, cluster, 3)
    assert (len(found.forward), len(found.backward)) == (1, 0)


def test_a_norm_takes_one_round_on_few_ranks_and_sums_on_many():
    norm = layers(FLAT)[1]
    few, many = (planned(norm, Cluster((1, 1, n, 1), 4), 0) for n in (8, 64))
    assert few.forward == (Round(2 * 4 * 8),)
    assert few.backward == (Sum(8, 8, one_round=True),)
    assert many.forward == (Sum(4, 8), Sum(4, 8))
    assert many.backward == (Sum(8, 8),)


def test_all_gradients_travel_once_the_last_ones_first():
    found = layers(Case("wide", 64, 2, (32, 32)))
    totals = gradients(found)
    assert len(totals) > 1
    count = sum(p.numel() + 1 for p in Case("", 64, 2, (1,)).network().parameters())
    assert sum(total.count for _, total in totals) == count
    assert totals[0][0][0].path == "last"
    assert totals[-1][0][-1].path == "first.0"


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("case", [FLAT, DEEP], ids=lambda case: case.name)
def test_the_plans_of_a_step_are_what_its_counters_count(comm, case):
    torch.set_num_threads(1)
    shape = (3 * case.shape[0] // 2, *case.shape[1:]) if comm.size == 3 else case.shape
    with Machine(comm) as machine:
        grid = (2, 2) if comm.size == 4 else (comm.size, 1)
        P_x = machine.partition((1, 1, *grid, *(1,) * (len(shape) - 2)))
        step = case.split_step(P_x, shape)
        for _ in range(2):
            step()
        counters = machine.segments.counters
        before = copy.copy(counters)
        step()
        counted = {name: getattr(counters, name) - getattr(before, name) for name in COUNTED}
        nodes = machine.segments.segment.nodes
        cluster = Cluster(P_x.shape, len(nodes[0]))
        assert cluster.nodes == nodes
        expected = step_traffic(layers(case, shape), cluster, machine.rank)
        assert counted == {name: getattr(expected, name) for name in COUNTED}
        del step
