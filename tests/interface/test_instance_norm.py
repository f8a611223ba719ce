"""The interface document, chapter 4: requirement A19; its numbers are those of ``layers/test_twins.py``."""

import pytest
import torch

from distdl_rma import Distribution, GradientSync, Machine
from distdl_rma.layers import InstanceNorm
from tests.layers.sequential import shard

pytestmark = pytest.mark.mpi

SHAPE = (2, 3, 11, 7)


@pytest.fixture
def M(comm):  # noqa: N802
    """The full machine, its list of ranks turned round."""
    with Machine(comm, ranks=range(comm.size - 1, -1, -1), segment_size="16MiB", timeout=30) as machine:
        yield machine


@pytest.mark.mpi(min_size=2)
def test_a19_one_norm_allreduce_forward_and_one_backward_gamma_and_beta_go_elsewhere(M):
    rows = Distribution(1, 1, M.size, 1)
    norm = InstanceNorm(M, SHAPE, rows, affine=True, name="norm")
    x = shard(M.distribute(rows), torch.randn(SHAPE)).requires_grad_()
    with GradientSync(norm, M):
        norm(x).sum().backward()
        x.grad = None
        with M.record() as recording:
            y = norm(x)
        forward = [event.name for event in recording.events if event.travels]
        with M.record() as recording:
            y.sum().backward()
        backward = [event.name for event in recording.events if event.travels]
    assert len([name for name in forward if "(norm" in name]) == 1
    assert len([name for name in backward if "(norm" in name]) == 1
    assert [name for name in backward if "(norm" not in name] == ["gradients 0"]
    assert not [name for name in forward if "(norm" not in name]
