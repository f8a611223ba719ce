"""A split convolution against the bare local tile of the same size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.measure import Row, compare
from benchmarks.training_step import forward_and_backward
from distdl_rma import Machine
from distdl_rma.layers import DistributedConv2d

EXTENT = 256
CASES = ((16, 1.10, 1.12), (64, 1.03, 1.03))


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file."""
    torch.set_num_threads(1)
    P_x = machine.partition((1, 1, machine.size, 1))
    for channels, training_target, forward_target in CASES:
        layer = DistributedConv2d(P_x, channels, channels, 3, padding=1)
        bare = torch.nn.Conv2d(channels, channels, 3, padding=1)
        x = torch.randn(1, channels, EXTENT // machine.size, EXTENT, requires_grad=True)
        gradient = torch.randn_like(x)

        def step(module: torch.nn.Module, x: torch.Tensor = x, gradient: torch.Tensor = gradient) -> None:
            forward_and_backward(module, x, gradient)

        def forward(module: torch.nn.Module, x: torch.Tensor = x) -> None:
            with torch.no_grad():
                module(x)

        what = f"3x3 convolution, {channels} channels, {EXTENT}x{EXTENT}"
        for label, call, target in (
            ("training step", step, training_target),
            ("forward", forward, forward_target),
        ):
            yield compare(
                f"{label}, {what}",
                lambda call=call, layer=layer: call(layer),  # type: ignore[misc]
                lambda call=call, bare=bare: call(bare),  # type: ignore[misc]
                against="bare local tile",
                target=target,
                inner=3,
            )
