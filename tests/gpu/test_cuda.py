"""What is exact on a device made of Python is so on a GPU, whose copies and kernels are really late."""

from __future__ import annotations

import pytest
import torch

from distdl_rma.layers import staging
from tests.layers.model.test_on_a_device import (  # noqa: F401
    on_a_device,
    test_loops_on_a_device,
    test_public_models_on_a_device,
)
from tests.layers.test_devices import (  # noqa: F401
    test_functions_of_split_tensors_leave_them_on_their_device,
    test_gradients_of_a_plain_model_are_summed_on_the_device,
    test_tensors_move_between_cuts_on_the_device,
    test_training_on_a_device_gives_what_one_process_gives,
)

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2)]


def test_pieces_are_copied_while_kernels_run(P_world, device):
    x = torch.rand(1 << 20, device=device)
    # Many kernels are queued before and behind each copy, so that one without a wait for it is wrong.
    for _ in range(200):
        x = x * 1.0001
    down = staging.to_host([x[::2], x[1::2]])
    y = x.clone()
    for _ in range(200):
        y = y * 1.0001
    even, odd = down.wait()
    there = staging.from_host([even, odd], x.numel(), x.dtype, device)
    assert torch.equal(torch.stack(there, 1).flatten(), x)
