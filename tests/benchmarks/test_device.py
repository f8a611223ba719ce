"""The script for a machine with a card, on a device made of Python."""

from __future__ import annotations

import pytest
import torch

from benchmarks import device as script
from distdl_rma.layers import staging
from tests.fake_device import NAME, needs_fake_device, register

pytestmark = pytest.mark.mpi(min_size=2)


@needs_fake_device
# Of torch's own kernel of a squared error on a device made of Python.
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_the_script_compares_and_measures(P_world, comm, monkeypatch, capsys):
    monkeypatch.setattr(staging, "ASYNCHRONOUS", {NAME})
    monkeypatch.setattr(script, "WIDTH", 4)
    register()
    script.main(["--device", f"{NAME}:0", "--side", "48", "--repetitions", "1", "--copied", "1"])
    printed = capsys.readouterr().out
    if comm.rank == 0:
        assert "largest difference" in printed
        assert printed.count("GB/s") == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_script_says_so(P_world, comm, capsys):
    script.main([])
    assert ("sees no GPU" in capsys.readouterr().out) == (comm.rank == 0)
