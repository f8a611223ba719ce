"""The model of a step, where it has a closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scaling.cases import Case
from benchmarks.scaling.layers import layers_of
from benchmarks.scaling.loggp import Network, Wire
from benchmarks.scaling.model import Constants, call_seconds, exposed_gradients, step_seconds, tile_seconds
from benchmarks.scaling.plans import Cluster

CASE = Case("net", 4, 2, (64, 64))
NOTHING = Wire(0.0, 0.0, 0.0, 0.0, 0.0)
PATHS = ["first.0", "first.3", "up.1.3"]
CONSTANTS = Constants(
    {},
    {"Conv": 2.0, "BatchNorm": 1.0},
    {"net": 100.0},
    {"net": [(1024, 8.0), (4096, 32.0)]},
    {"net": {"": 0.3, **dict.fromkeys(PATHS, 0.1)}},
    {},
)


def cut(*grid, per_node=1, near=NOTHING, far=NOTHING):
    return Network(Cluster((1, 1, *grid), per_node), near, far)


def test_a_tile_takes_what_was_measured_and_powers_between():
    measured = [(4, 1.0), (16, 4.0), (64, 64.0)]
    for n, seconds in ((1, 1), (4, 1), (8, 2), (16, 4), (32, 16), (64, 64), (640, 640)):
        assert tile_seconds(measured, n) == pytest.approx(seconds)


def test_without_costs_of_messages_a_step_is_compute_calls_and_the_halo():
    assert step_seconds(CASE, CONSTANTS, cut(1, 1)).seconds == 32.0
    for grid, volume in (((4, 1), 1024), ((2, 2), 1024)):
        found = step_seconds(CASE, CONSTANTS, cut(*grid))
        assert (found.compute, found.calls, found.norms, found.gradients) == (8.0, 100.0, 0.0, 0.0)
        # Of the three convolutions at the full resolution that take any time: two rows, or a row, a column
        # and a corner.
        halo = 2 * 64 if grid == (4, 1) else 32 + 32 + 1
        assert found.halos == pytest.approx(3 * 3 * 0.1 * 8.0 * halo / volume)


def test_ranks_that_share_a_core_take_as_many_times_as_long():
    network = cut(2, 1, near=Wire(1.0, 1.0, 0.0, 0.0, 0.0), per_node=2)
    one, two = (step_seconds(CASE, CONSTANTS, network, crowd) for crowd in (1.0, 2.0))
    assert two.compute == 2 * one.compute
    assert two.norms == 2 * one.norms


def test_messages_cost_what_they_cost_and_latency_hides_behind_compute():
    halos, norms = 2 * 10 - 1, 10
    for wire, expected in ((Wire(1.0, 0.0, 0.0, 0.0, 0.0), halos), (Wire(0.0, 1.0, 0.0, 0.0, 0.0), halos)):
        found = step_seconds(CASE, CONSTANTS, cut(2, 1, far=wire))
        free = step_seconds(CASE, CONSTANTS, cut(2, 1))
        assert found.halos - free.halos == pytest.approx(expected)
        assert found.norms == pytest.approx(2 * norms)
    late = step_seconds(CASE, CONSTANTS, cut(2, 1, far=Wire(0.0, 0.0, 0.5, 0.0, 0.0)))
    # Three of the convolutions compute for longer than that.
    assert late.halos - free.halos == pytest.approx(0.5 * (halos - 2 * 3 + 1))
    assert late.norms == pytest.approx(0.5 * 2 * norms)


def test_gradients_that_are_summed_during_the_backward_cost_what_is_left_behind_it():
    layers = layers_of(Case("", 64, 2, (8, 8)).network(), (1, 1, 8, 8))
    wire = Wire(0.0, 0.0, 0.0, 1e-6, 0.0)
    network = cut(2, 1, far=wire)
    nbytes = 4 * sum(sum(layer.parameters) + len(layer.parameters) for layer in layers)
    # 2 (n - 1) / n of all bytes travel, and all of them where nothing computes meanwhile.
    assert exposed_gradients(layers, {}, network) == pytest.approx(nbytes * 1e-6)
    # Where the first layer takes for ever, only the bucket that it is in is left.
    left = exposed_gradients(layers, {"first.0": 1e6}, network)
    assert 0 < left <= 1.05 * (1 << 20) * 1e-6


def test_calls_are_those_of_the_layers_and_a_rest():
    found = call_seconds(CASE, CONSTANTS)
    assert found["Conv"] == (10, 20.0)
    assert found["BatchNorm"] == (10, 10.0)
    assert found["the rest"] == (1, 70.0)


@pytest.mark.parametrize("size", [8, 64, 512, 4096])
def test_more_ranks_never_have_more_to_compute(size):
    side = 1 << ((size.bit_length() - 1) // 2)
    image = replace(CASE, shape=(1024, 1024))
    few, many = (step_seconds(image, CONSTANTS, cut(side, n)) for n in (size // side // 2, size // side))
    assert many.compute <= few.compute
