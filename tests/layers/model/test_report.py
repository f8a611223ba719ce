"""The report of a step says what was called where, and what it moved."""

import pytest
import torch
from torch import nn

from distdl_rma import ConfigurationError, report


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_a_row_for_each_function_at_each_place(comm, split_of):
    torch.manual_seed(0)
    split = split_of(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3)))
    x = torch.randn(2, 3, 12, 8)
    for _ in range(2):
        with report(split) as step:
            y = split(x)
            (y * y.redistribute()).sum().backward()
    rows = {(call.module, call.function): call for call in step.calls}
    assert ("0", "conv2d") in rows
    assert rows["1", "relu"].nbytes == rows["1", "relu"].messages == 0
    several = comm.size > 1
    assert (rows["0", "conv2d"].messages > 0) == several
    # Each rank has its own rows of the product: copies are cut where they are used, and nothing moves.
    assert not step.moved
    assert (step.nbytes > sum(call.nbytes for call in step.calls)) == several
    first, *shown = str(step).splitlines()
    assert first.startswith("the step: ") and first.endswith("a rule moved operands of 0 calls")
    assert "conv2d" in str(step) and len(shown) == 1 + min(5, len(step.calls)) + 1
    assert len(step.table().splitlines()) == 1 + len(step.calls)


class Added(nn.Module):
    """Adds its input, cut otherwise if it is told so."""

    def forward(self, x, otherwise):
        return x + (x.redistribute(None, None, 3, None) if otherwise else x)


@pytest.mark.mpi(min_size=2)
def test_operands_that_moved_in_an_earlier_step_are_not_reported(split_of):
    split = split_of(Added())
    for otherwise in (True, False):
        with report(split) as step:
            split(torch.randn(2, 3, 12, 8), otherwise)
        assert bool(step.moved) == otherwise


@pytest.mark.mpi
def test_a_model_that_is_not_distributed_is_refused(comm):
    with pytest.raises(ConfigurationError, match="not distributed"), report(nn.ReLU()):
        pass
