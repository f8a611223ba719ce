"""Memory of results that is alive."""

import torch
from torch import nn

from distdl_rma.jobs.out_of_core.live_memory import LiveMemory

MIB = 1 << 20


def numbers():
    return torch.ones(MIB, dtype=torch.uint8)


def test_memory_counts_as_long_as_any_tensor_uses_it():
    with LiveMemory(counts=True) as alive:
        x = numbers()
        y = (x + 1).view(2, -1)[1:]
        assert alive.peak == 2 * MIB
        assert sum(storage.nbytes() for storage in alive.storages()) == 2 * MIB
        del x
        z = y + 1
        assert alive.peak == 2 * MIB
        z = torch.cat([y, z, y])
        assert alive.peak == 3 * MIB
        del y, z
        assert not list(alive.storages())


def test_views_and_memory_from_outside_do_not_count():
    x, weight = numbers(), nn.Parameter(torch.ones(MIB))
    with LiveMemory(counts=True) as alive, torch.no_grad():
        x[3:].add_(1)
        weight.view(2, -1).expand(3, 2, -1)
        assert not list(alive.storages()) and alive.peak == 0


def test_kernels_of_convolutions_fill_channels_up():
    x, weight = torch.rand(1, 4, 64, 64), torch.rand(4, 4, 3, 3)
    with LiveMemory(counts=True) as alive, torch.no_grad():
        nn.functional.conv2d(x, weight, padding=1)
    # The result, and copies of 16 channels of the operand and of the result.
    assert alive.peak == 4 * 64 * 64 * (4 + 16 + 16)
    assert alive.weight_nbytes > 0


def test_a_product_does_not_copy_a_weight_for_each_matrix_that_it_is_expanded_to():
    x, weight = torch.zeros(64, 1, 32), torch.zeros(96, 32).t()
    with LiveMemory(counts=True) as alive:
        torch.bmm(x, weight.expand(64, 32, 96))
    assert alive.peak == 2 * 4 * 64 * 96 + weight.nbytes
