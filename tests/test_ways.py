"""The ways that docs/architecture.md describes are those that calls take."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, Machine, distribute
from distdl_rma import shard as split_over
from distdl_rma.layers import DistributedConv2d
from distdl_rma.layers.split.shard import block_of as shard

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2)]
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
PACKAGE = "/distdl_rma/"


def named(heading):
    """Files of the package that a section of the page names."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`((?:\w+/)*\w+\.py)`", section))


def entered(act):
    """Files of the package that a call enters on this thread, and its result."""
    seen = set()

    def look(frame, event, _argument):
        if event == "call" and PACKAGE in frame.f_code.co_filename:
            seen.add(frame.f_code.co_filename.rpartition(PACKAGE)[2])

    sys.setprofile(look)
    try:
        return seen, act()
    finally:
        sys.setprofile(None)


def test_a_tensor_and_its_gradient_go_the_ways_of_the_page(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    layer = DistributedConv2d(P_x, 2, 2, 3, padding=1)
    x = shard(P_x, torch.randn(1, 2, 8, 8)).requires_grad_()
    with GradientSync(layer, P_world):
        for _ in range(3):
            layer(x).sum().backward()
        forward, y = entered(lambda: layer(x))
        loss = y.sum()
        # A backward runs on the thread that calls it, tensors of the CPU being all there are.
        backward, _ = entered(loss.backward)
    waited = named("A notification's way")
    for seen, heading in (
        (forward, "A tensor's way through a convolution"),
        (backward, "A gradient's way through a layer"),
    ):
        assert not sorted(seen - waited - named(heading))
        assert not sorted(named(heading) - seen)


def test_a_split_tensor_goes_the_way_of_the_page(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    torch.manual_seed(0)
    model = distribute(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)), P_x)
    # Large enough that halos are convolved apart.
    x = split_over(P_x, torch.randn(1, 16, 128, 128))

    def call():
        # In one place, which keeps the operation.
        return model(x)

    for _ in range(3):
        call().sum().backward()
    forward, y = entered(call)
    backward, _ = entered(y.square().mean().backward)
    waited = named("A notification's way")
    ways = "A split tensor's way through a convolution", "The gradient of a split tensor"
    for seen, heading in zip((forward, backward), ways, strict=True):
        assert not sorted(seen - waited - named(heading))
        assert not sorted(named(heading) - waited - seen)
    model.distributed.close()


def test_a_notification_goes_the_way_of_the_page(P_world, comm):
    buffer = Machine.of(P_world).segments.get_segment_buffer(8, 1, "way")
    remote = buffer.exchange({(comm.rank + 1) % comm.size: (), (comm.rank - 1) % comm.size: ()}, "way")
    sent, _ = entered(lambda: remote[(comm.rank + 1) % comm.size].notify(0))
    comm.Barrier()
    received, _ = entered(buffer.notify_waitsome)
    assert sent == {"segments/memory/remote_buffer.py"}
    assert received == {"segments/memory/buffer.py"}
    assert sent | received <= named("A notification's way")
