"""The interface document, chapter 4: requirement A19."""

import pytest
import torch
from torch import nn

from distdl_rma import Distribution, GradientSync, Machine
from distdl_rma.layers import InstanceNorm
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi

SHAPE = (2, 3, 11, 7)


@pytest.fixture
def M(comm):  # noqa: N802
    """The full machine, its list of ranks turned round."""
    with Machine(comm, ranks=range(comm.size - 1, -1, -1), segment_size="16MiB", timeout=30) as machine:
        yield machine


def test_a19_statistics_and_gradients_are_those_of_the_whole_image(M):
    rows = Distribution(1, 1, M.size, 1)
    P_x = M.distribute(rows)
    options = {"affine": True, "track_running_stats": True, "eps": 1e-3, "dtype": torch.float64}
    norm, twin = InstanceNorm(M, SHAPE, rows, **options), nn.InstanceNorm2d(SHAPE[1], **options)
    for layer in (norm, twin):
        nn.init.constant_(layer.weight, 1.5)
        nn.init.constant_(layer.bias, -0.5)
    torch.manual_seed(3)
    whole = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    g = torch.randn(SHAPE, dtype=torch.float64)
    mine = shard(P_x, whole).requires_grad_()
    with GradientSync(norm, M):
        y, expected = norm(mine), twin(whole)
        y.backward(shard(P_x, g))
        expected.backward(g)
        agree(y, shard(P_x, expected), "output")
        agree(mine.grad, shard(P_x, whole.grad), "error signal")
        agree(norm.weight.grad, twin.weight.grad, "gamma")
        agree(norm.bias.grad, twin.bias.grad, "beta")
    agree(norm.running_mean, twin.running_mean)
    agree(norm.running_var, twin.running_var)
    norm.eval()
    twin.eval()
    agree(norm(mine), shard(P_x, twin(whole)), "by running statistics")


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
