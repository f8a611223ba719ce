"""Tile: a rank's own data and its halo in one tensor, convolved at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distdl_rma.dtypes import as_words
from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.ops.conv.kernels import Needs, convolution, convolution_adjoint
from distdl_rma.ops.conv.own_and_halo import Patch
from distdl_rma.ops.core.movement import Movement
from distdl_rma.ops.core.result_memory import SMALLEST_NBYTES
from distdl_rma.ops.core.tensors import as_tensor

Mark = Callable[[str], object]


class JoinedTile:
    """The convolution of a patch that consists of ``own`` data and of a halo, which a movement brings."""

    def __init__(self, patch: Patch, own: Box, halo: Movement) -> None:
        self.patch, self._halo = patch, halo
        read = patch.inside & own
        # Place of own data in the tile, and the slices of own data that are read: None if all.
        self._there = read.slices(patch.held)
        self._here = None if read == own else read.slices(own)
        # The forward receives a piece where the adjoint sends it.
        self._remote = [piece.box.slices(patch.held) for piece in halo.forward.receives]
        self._edges = [piece.box.slices(own) for piece in halo.forward.sends]
        # Small tiles are saved for the backward. For others the halo is, and the backward makes a new tile.
        self._kept = patch.held.volume * halo.dtype.itemsize < SMALLEST_NBYTES

    def hold(self, x: Tensor) -> Tensor:
        """Tile with own data, and zeros beyond the domain; the halo is still uninitialised."""
        data = self.patch.hold(self._halo.dtype)
        data[self._there] = x if self._here is None else x[self._here]
        return data

    def convolve(
        self, data: Tensor, epoch: int, weight: Tensor, bias: Tensor | None, mark: Mark
    ) -> tuple[Tensor, list[Tensor]]:
        """Receive the halo; outputs, and the tensors to save for the backward beside own data. Blocking."""
        words = as_words(data)
        for (_, view), place in zip(self._halo.forward.receive(epoch), self._remote, strict=True):
            words[place] = view
        mark("local")
        y = convolution(data, weight, bias, self.patch.steps)
        return y, [data] if self._kept else [data[place].clone() for place in self._remote]

    def adjoint(
        self, gradient: Tensor, x: Tensor, kept: list[Tensor], weight: Tensor, needs: Needs, mark: Mark
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of own data, weight and bias; gradients of the halo go to its owners. Blocking."""
        mark("local")
        if self._kept:
            (data,) = kept
        else:
            data = self.hold(x)
            for place, part in zip(self._remote, kept, strict=True):
                data[place] = part
        # Without the weight's gradient, the bias's is a plain sum: no call of the adjoint for it.
        wanted = needs[0], needs[1], needs[1] and needs[2]
        inner, d_weight, d_bias = convolution_adjoint(gradient, data, weight, self.patch.steps, wanted)
        if needs[2] and d_bias is None:
            d_bias = gradient.sum((0, *range(LEADING, gradient.dim())))
        if inner is None:
            return None, d_weight, d_bias
        channel = self._halo.adjoint
        mark("start")
        words = as_words(inner)
        epoch = channel.start([words[place] for place in self._remote])
        mark("wait")
        own = inner[self._there]
        if self._here is not None:
            own, part = torch.zeros_like(x), own
            own[self._here] = part
        # No other code refers to this tensor: the received gradients are added in place.
        for (_, view), place in zip(channel.receive(epoch), self._edges, strict=True):
            own[place].add_(as_tensor(view, own.dtype))
        return own, d_weight, d_bias
