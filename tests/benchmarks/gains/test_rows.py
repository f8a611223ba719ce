"""Rows of what splitting gains: steps beside one process with as many threads, memory beside one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks import memory
from benchmarks.gains import rows
from benchmarks.gains.networks import NETWORKS, scaffold, unet
from benchmarks.results import __main__ as results
from distdl_rma import Machine

TINY = {"image": unet(16, 2), "volume": scaffold(8, 2)}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_blocks_of_whole_rows_on_all_numbers_of_ranks(name):
    network = NETWORKS[name]
    assert network.shape[0] % (8 * max(rows.RANKS)) == 0
    assert network.part(4) == (network.shape[0] // 4, *network.shape[1:])


def test_samples_and_networks_are_the_same_whenever_they_are_made():
    for network in TINY.values():
        first, second = (list(network.made().parameters()) for _ in range(2))
        assert all(map(torch.equal, first, second))
        assert all(map(torch.equal, network.sample(network.shape), network.sample(network.shape)))


def test_the_process_alone_has_nothing_of_mpi():
    program = "import benchmarks.memory, sys; benchmarks.memory.step_alone('unet-128')"
    program += "; sys.exit('mpi4py' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.processes
@pytest.mark.parametrize("name", TINY)
def test_steps_are_beside_one_process_one_rank_and_a_part(comm, monkeypatch, name):
    monkeypatch.setattr(rows, "NETWORKS", TINY)
    with Machine(comm) as machine:
        found = [(row.what, row.baseline) for row in rows.time_rows(name, machine)]
    what = TINY[name].what
    expected = [(f"strong scaling, {what}, 1 rank", "one process, 1 thread")]
    for size in (2, 4):
        if size <= comm.size:
            expected += [
                (f"strong scaling, {what}, {size} ranks", f"one process, {size} threads"),
                (f"strong scaling, {what}, {size} ranks", f"1 rank, {size} threads"),
                (f"weak scaling, {what}, {size} ranks", f"1 rank with 1/{size} of the image"),
            ]
    assert found == expected
    assert {results.section_of(what) for what, _ in found} == {results.GAINS}


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
@pytest.mark.processes
def test_memory_is_that_of_the_rank_with_most_beside_one_process(comm, monkeypatch):
    monkeypatch.setattr(rows, "NETWORKS", TINY)
    monkeypatch.setattr(memory, "alone_mib", lambda *_arguments, **_options: (8.0, 0.5))
    with Machine(comm) as machine:
        (row,) = rows.memory_rows("volume", machine)
    assert (row.baseline, row.baseline_us, row.unit) == ("one process", 8.0, "MiB")
    assert row.what == f"peak memory of a rank of {comm.size}, unmodified {TINY['volume'].what}"
    assert results.section_of(row.what) == results.GAINS
