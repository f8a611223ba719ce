"""Torch's convolution and its adjoint, with a kernel that is correct and fast for the shapes.

torch chooses between its own kernels and those of oneDNN by rules for whole images. Blocks of split tensors
are narrower, and often single samples: for some of them the choice is wrong, or slow::

    shapes                                           torch's choice          here
    narrower than a window and its padding           oneDNN: wrong results   torch's own kernels, not oneDNN
    one sample of few elements                       its own kernels: slow   torch.mkldnn_convolution
    gradient of the input, few output channels       oneDNN's adjoint: slow  convolution, mirrored kernel
    transposed, of volumes in float32                its adjoint: slow       a convolution, the adjoint of one

Every other call goes to torch unchanged. The choice depends on shapes and type alone, is the same for forward
and backward, and is made once for each (:class:`KernelChoice`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distdl_rma.geometry.halo import Stencil
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.autograd import OperatorFunction, uncompiled

# Types for which oneDNN's kernels can be wrong; see convolution.
_UNSAFE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# torch uses its own kernels for one sample of at most so many elements, not counting the last dimension of
# volumes. Given the number of spatial dimensions, oneDNN is faster from so many products on: it takes a fifth
# to a tenth of the time for volumes. Below, oneDNN's start-up costs more.
_LEFT_BY_TORCH, _WORTH_ONEDNN = 20480, {2: 1 << 22, 3: 1 << 20}
# oneDNN may reorder channels into blocks of so many, filled up with zeros.
_CHANNELS_OF_BLOCK = 16
_onednn_enabled: Callable[[], bool] = (
    torch._C._get_mkldnn_enabled if torch.backends.mkldnn.is_available() else bool
)
# Whether the gradients of the input, of the weight and of the bias are needed.
Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
# Without the check of torch.ops for operators of classes.
_backward: Callable[..., Gradients] = torch.ops.aten.convolution_backward._op


class ConvolutionArguments(NamedTuple):
    """Arguments of torch's convolution other than tensors, in torch's order."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = (0,)
    groups: int = 1

    @classmethod
    def of(cls, stencil: Stencil, groups: int, transposed: bool = False) -> ConvolutionArguments:
        """Arguments for the spatial windows of a stencil, without padding."""
        windows = stencil.windows
        stride, dilation = tuple(w.stride for w in windows), tuple(w.dilation for w in windows)
        return cls(stride, (0,) * len(windows), dilation, transposed, groups=groups)

    def fills(self, extents: Sequence[int], kernel: Sequence[int], short: bool) -> bool:
        """Whether in every dimension the extent is at least the span of a window plus the padding.

        The extents are those of the input, or of the output of a transposed convolution, without padding. For
        ``short`` elements, of 16 bits, they must be larger by ``2 * (stride - 1)``.
        """
        return all(
            n >= d * (k - 1) + 1 + p + (2 * (s - 1) if short else 0)
            for n, k, s, p, d in zip(extents, kernel, self.stride, self.padding, self.dilation, strict=True)
        )

    def windows(self, extents: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Extents of a convolution's output; of a transposed convolution's input, given its output."""
        return tuple(
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(extents, kernel, self.stride, self.padding, self.dilation, strict=True)
        )

    def mirrored(self, kernel: Sequence[int]) -> ConvolutionArguments | None:
        """Arguments of the convolution by the mirrored kernel that gives the input's gradient; or None."""
        padding = tuple(d * (k - 1) - p for k, p, d in zip(kernel, self.padding, self.dilation, strict=True))
        plain = max(self.stride) == 1 and self.groups == 1 and not self.transposed and min(padding) >= 0
        return self._replace(padding=padding) if plain else None

    def outputs(self, extents: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Extents of the output of a transposed convolution."""
        stride, padding, dilation, _, more, _ = self
        more = more if len(more) == len(stride) else more * len(stride)
        each = zip(extents, kernel, stride, padding, dilation, more, strict=True)
        return tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + m for n, k, s, p, d, m in each)


class KernelChoice(NamedTuple):
    """Which kernel computes a convolution."""

    safe: bool = False  # whether oneDNN's kernels are correct
    chosen: bool = False  # whether oneDNN is called where torch would use its own kernels
    mirrored: ConvolutionArguments | None = None  # of the convolution that gives the gradient of the input
    plain: ConvolutionArguments | None = None  # of the convolution that a transposed one is the adjoint of
    front: int = 0  # zeros to add at both ends of a volume's depth for the gradient of the weight

    @classmethod
    def of(
        cls, steps: ConvolutionArguments, x: Sequence[int], weight: Sequence[int], dtype: torch.dtype
    ) -> KernelChoice:
        """Choice for the shapes of an input and of a weight."""
        extents, kernel, empty = x[2:], weight[2:], 0 in x
        block = steps.outputs(extents, kernel) if steps.transposed else extents
        if dtype in _UNSAFE_DTYPES and not empty and not steps.fills(block, kernel, dtype.itemsize < 4):
            return cls()
        least = _WORTH_ONEDNN.get(len(extents))
        if steps.transposed and len(extents) == 3 and dtype == torch.float32 and not empty:
            plain = steps._replace(transposed=False, output_padding=(0,))
            return cls(safe=True, plain=plain if plain.windows(block, kernel) == (*extents,) else None)
        if least is None or dtype != torch.float32 or steps.groups > 1 or steps.transposed or empty:
            return cls(safe=True)
        outputs = steps.windows(extents, kernel)
        # torch raises the error for a weight with other channels.
        if prod(weight) * prod(outputs) < least or max(kernel[-2:]) == 1 or weight[1] != x[1]:
            return cls(safe=True)
        chosen = x[0] == 1 and prod(x[:4]) <= _LEFT_BY_TORCH
        mirrored = steps.mirrored(kernel) if chosen or weight[0] < _CHANNELS_OF_BLOCK else None
        if mirrored is not None and not mirrored.fills(outputs, kernel, short=False):
            mirrored = None
        # oneDNN's kernels for few channels do not pad the depth.
        narrow = len(extents) == 3 and x[1] < _CHANNELS_OF_BLOCK
        return cls(True, chosen, mirrored, front=steps.padding[0] if narrow else 0)


_AS_TORCH = KernelChoice(safe=True)
# Cached: a program convolves few shapes, many times.
_choice = lru_cache(maxsize=1024)(KernelChoice.of)


def _fits_onednn(x: Tensor, weight: Tensor, bias: Tensor | None, steps: ConvolutionArguments) -> bool:
    # Operands that do not fit together go to torch, whose error the user knows.
    channels = weight.shape[1] * steps.groups if steps.transposed else weight.shape[0]
    fits = bias is None or (bias.dtype == x.dtype and bias.shape == (channels,))
    return fits and weight.dtype == x.dtype and _onednn_enabled()


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, steps: ConvolutionArguments) -> Tensor:
    """Local convolution by torch, also under autograd.

    oneDNN's kernels are wrong for blocks that are narrower than a window and its padding: they write beyond
    their memory, or leave weight gradients uninitialised for taps that read only padding; in 16 bits outputs
    too. Shards are so narrow more often than whole images. torch's own kernels convolve such blocks, in the
    type of sums. oneDNN convolves others wherever it is faster than the kernel that torch would use.
    """
    choice = _choice(steps, x.shape, weight.shape, x.dtype)
    differentiated = choice != _AS_TORCH and torch.is_grad_enabled()
    if choice.safe and (differentiated or choice.chosen) and not _fits_onednn(x, weight, bias, steps):
        choice, differentiated = _AS_TORCH, False
    if differentiated:
        return _Convolution.apply(x, weight, bias, steps)
    if not choice.safe:
        wide = sum_dtype(x.dtype)
        offset = None if bias is None else bias.to(wide)
        with _without_onednn():
            return torch.convolution(x.to(wide), weight.to(wide), offset, *steps).to(x.dtype)
    if choice.chosen:
        stride, padding, dilation, *_, groups = steps
        return torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)
    return torch.convolution(x, weight, bias, *steps)


def convolution_adjoint(
    gradient: Tensor, x: Tensor, weight: Tensor, steps: ConvolutionArguments, needs: Needs
) -> Gradients:
    """Gradients of :func:`convolution`: of input, weight and bias; None where not needed."""
    choice = _choice(steps, x.shape, weight.shape, x.dtype)
    if not choice.safe:
        wide, dtype = sum_dtype(x.dtype), x.dtype
        with _without_onednn():
            found = _adjoint_by_torch(gradient.to(wide), x.to(wide), weight.to(wide), steps, needs)
        inner, taps, offsets = (None if part is None else part.to(dtype) for part in found)
        return inner, taps, offsets
    if choice == _AS_TORCH or not _onednn_enabled():
        # As _adjoint_by_torch, without another call.
        channels = (gradient.shape[1],) if needs[2] else None
        return _backward(gradient, x, weight, channels, *steps, needs)
    if choice.plain is not None:
        # torch's adjoint of a transposed convolution of volumes takes up to twice as long as these two.
        inner = convolution(gradient, weight, None, choice.plain) if needs[0] else None
        of_weight = False, needs[1], False
        _, taps, _ = convolution_adjoint(x, gradient, weight, choice.plain, of_weight)
        return inner, taps, gradient.sum((0, 2, 3, 4)) if needs[2] else None
    inner, others = None, needs
    if needs[0] and choice.mirrored is not None:
        turned = weight.transpose(0, 1).flip(tuple(range(2, weight.dim())))
        stride, padding, dilation, *_, groups = choice.mirrored
        inner = torch.mkldnn_convolution(gradient, turned, None, padding, stride, dilation, groups)
        others = False, *needs[1:]
    if True not in others:
        return inner, None, None
    if choice.front and not others[0]:
        x = torch.constant_pad_nd(x, (0, 0, 0, 0, choice.front, choice.front))
        steps = steps._replace(padding=(0, *steps.padding[1:]))
    # torch uses oneDNN for tensors in oneDNN's layout.
    operand = x.to_mkldnn() if choice.chosen else x
    d_x, taps, offsets = _adjoint_by_torch(gradient, operand, weight, steps, others)
    if inner is None and d_x is not None:
        inner = d_x.to_dense() if choice.chosen else d_x
    return inner, taps, offsets


def _adjoint_by_torch(
    gradient: Tensor, x: Tensor, weight: Tensor, steps: ConvolutionArguments, needs: Needs
) -> Gradients:
    return _backward(gradient, x, weight, (gradient.shape[1],) if needs[2] else None, *steps, needs)


class _Convolution(OperatorFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, steps: ConvolutionArguments
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.steps = steps
        # Autograd is off in here, so this call does not return to this function.
        return convolution(x, weight, bias, steps)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # Tensors in oneDNN's layout have no second derivatives.
        again = torch.is_grad_enabled() and _choice(ctx.steps, x.shape, weight.shape, x.dtype).safe
        adjoint = _adjoint_by_torch if again else convolution_adjoint
        return *adjoint(gradient, x, weight, ctx.steps, ctx.needs_input_grad[:3]), None


@contextmanager
def _without_onednn() -> Iterator[None]:
    # torch's own context also sets other options; its attribute is frozen once torch's tests are imported.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
