"""Every function that is measured takes a step, in a distributed model and on the block alone."""

from __future__ import annotations

import pytest
import torch

from benchmarks.functions import FUNCTIONS, rows_of
from benchmarks.results import __main__ as command
from benchmarks.split_layers import steps_of
from distdl_rma import Machine

CASES = [
    pytest.param(inputs, function, id=f"{name}, {inputs.large}")
    for inputs, functions in FUNCTIONS.items()
    for name, function in functions.items()
]


def types_of(function):
    return (torch.float32, torch.bfloat16) if function.bfloat16 else (torch.float32,)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("inputs", "function"), CASES)
def test_a_function_takes_a_step_in_a_model_and_alone(P_world, inputs, function):
    shape = inputs.small_shape
    P_x = P_world.create_cartesian_topology_partition(inputs.grid(P_world.size))
    for dtype in types_of(function):
        torch.manual_seed(0)
        for step in steps_of(P_x, function.layer, shape, dtype):
            # A block alone draws as many numbers as it has elements, and blocks differ.
            torch.manual_seed(0)
            for _ in range(2):
                step()


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_a_function_has_a_row_for_each_type_and_one_for_what_it_adds(comm, monkeypatch):
    monkeypatch.setattr("benchmarks.measure.REPETITIONS", 2)
    (images, (name, relu)) = next(
        (inputs, (name, function))
        for inputs, functions in FUNCTIONS.items()
        for name, function in functions.items()
        if name == "relu"
    )
    tiny = images._replace(large="6x5", large_shape=(1, 16, 6, 5), repetitions=2)
    with Machine(comm) as machine:
        rows = list(rows_of(machine, tiny, name, relu))
    assert [(row.what, row.baseline, row.target) for row in rows] == [
        ("function relu, 6x5", "bare local tile", relu.ratio),
        ("function relu, 6x5, bfloat16", "bare local tile", relu.ratio),
        ("function relu, 16x16, time added", f"{relu.added_us:g} us", 1.0),
    ]
    assert {command.section_of(row.what) for row in rows} == {command.FUNCTIONS}


def test_no_two_functions_have_the_same_rows():
    names = [(name, inputs.large) for inputs, functions in FUNCTIONS.items() for name in functions]
    assert len(set(names)) == len(names)
