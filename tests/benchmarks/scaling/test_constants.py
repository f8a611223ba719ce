"""Constants are measured on all ranks alike, and are what a model can use."""

from __future__ import annotations

import pytest
import torch

from benchmarks.scaling import constants
from benchmarks.scaling.cases import Case
from benchmarks.scaling.layers import layers_of
from distdl_rma import Machine

TINY = Case("tiny", 2, 1, (16, 8))

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2)]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(constants, "ROUNDS", 5)
    monkeypatch.setattr(constants, "CALLS", 1)


@pytest.mark.processes
def test_a_wire_costs_time_and_all_ranks_are_told(comm):
    with Machine(comm) as machine:
        found = constants.wire(machine)
    assert list(found) == ["o_send", "o_receive", "L", "G", "mpi"]
    assert min(found.values()) >= 0
    assert min(found["o_send"], found["o_receive"], found["mpi"]) > 0
    assert comm.allgather(found) == [found] * comm.size


def test_tiles_are_halved_and_every_module_takes_a_part(comm):
    torch.set_num_threads(1)
    measured = constants.compute(TINY, 2)
    assert [volume for volume, _ in measured] == [64, 32, 16, 8]
    parts = constants.shares(TINY, 2)
    paths = {layer.path for layer in layers_of(TINY.network(), (1, 1, *TINY.shape))}
    # That of the whole model has no path.
    assert set(parts) == paths | {""}
    assert all(part > 0 for part in parts.values())


def test_calls_and_steps_are_measured(comm):
    torch.set_num_threads(1)
    with Machine(comm) as machine:
        assert constants.step(machine, TINY, 2) > 0
        assert set(constants.layers()) == {*constants.calls(machine, 2)}
