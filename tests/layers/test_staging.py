"""Pieces between a device and the host travel as one copy, and are right once they were waited for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distdl_rma.layers import staging
from distdl_rma.layers.dtypes import as_words
from tests.fake_device import NAME, counted, needs_fake_device, register

pytestmark = needs_fake_device


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool])
def test_pieces_come_down_and_go_up_in_one_copy(monkeypatch, late, dtype):
    monkeypatch.setattr(staging, "ASYNCHRONOUS", {NAME} if late else set())
    whole = torch.rand(3, 4).mul(5).to(dtype)
    x = whole.to(register())
    with counted() as moved:
        words = staging.to_host([x[:, 1:2], x[2], x[:0]]).wait()
    assert (moved.downs, moved.down_nbytes) == (1, 7 * dtype.itemsize)
    assert [part.shape for part in words] == [(3, 1), (4,), (0, 4)]
    assert np.array_equal(words[0], as_words(whole[:, 1:2]))
    with counted() as moved:
        column, row = staging.from_host(iter(words[:2]), 7, dtype, x.device)
    torch.fake.synchronize()
    assert moved.ups == 1
    assert torch.equal(column.cpu(), whole[:, 1:2])
    assert torch.equal(row.cpu(), whole[2])


def test_what_goes_up_may_change_as_soon_as_it_was_read():
    slot = np.zeros(2, np.int64)

    def pieces():
        for number in range(3):
            slot[:] = number
            yield slot

    found = staging.from_host(pieces(), 6, torch.int64, register())
    assert [part.cpu().tolist() for part in found] == [[0, 0], [1, 1], [2, 2]]
