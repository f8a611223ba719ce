"""The layers of a network with the sizes of their tensors, found by a forward of shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from distdl_rma.geometry.halo import Stencil

KINDS: dict[type[nn.Module], str] = {
    nn.Conv2d: "Conv",
    nn.Conv3d: "Conv",
    nn.BatchNorm2d: "BatchNorm",
    nn.BatchNorm3d: "BatchNorm",
    nn.ReLU: "ReLU",
    nn.MaxPool2d: "MaxPool",
    nn.MaxPool3d: "MaxPool",
    nn.ConvTranspose2d: "ConvTranspose",
    nn.ConvTranspose3d: "ConvTranspose",
}
WITHOUT_HALO = "Conv without halo"


@dataclass(frozen=True)
class Layer:
    """One call of a layer: its path and kind, global shapes, windows if it has any, and its parameters.

    ``first`` is the layer whose input needs no gradient.
    """

    path: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stencil: Stencil | None = None
    parameters: tuple[int, ...] = ()
    first: bool = False


def layers_of(network: nn.Module, shape: Sequence[int]) -> list[Layer]:
    """All layers in the order of their calls, for an input of a global shape; nothing is computed.

    ``KeyError`` for a module without children of a kind that the model of scaling does not know.
    """
    network, found = network.to("meta"), list[Layer]()
    for path, module in network.named_modules():
        if not list(module.children()):
            module.register_forward_hook(partial(_note, found, path))
    with _Joins(found), torch.no_grad():
        network(torch.empty(*shape, device="meta"))
    return found


def _note(
    found: list[Layer], path: str, module: nn.Module, args: tuple[torch.Tensor], y: torch.Tensor
) -> None:
    stencil = _stencil(module) if hasattr(module, "kernel_size") else None
    kind = KINDS[type(module)]
    if kind == "Conv" and stencil is not None and all(w.span == 1 for w in stencil.windows):
        kind = WITHOUT_HALO
    counts = tuple(parameter.numel() for parameter in module.parameters())
    found.append(Layer(path, kind, tuple(args[0].shape), tuple(y.shape), stencil, counts, first=not found))


def _stencil(module: Any) -> Stencil:
    dims = 3 if type(module).__name__.endswith("3d") else 2
    kernel, stride, dilation, padding = (
        value if isinstance(value, tuple) else (value,) * dims
        for value in (module.kernel_size, module.stride, module.dilation, module.padding)
    )
    return Stencil.of(kernel, stride, dilation, tuple((n, n) for n in padding))


class _Joins(TorchFunctionMode):
    # Concatenations are no modules.
    def __init__(self, found: list[Layer]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is torch.cat:
            self._found.append(Layer("", "cat", tuple(args[0][0].shape), tuple(y.shape)))
        return y
