"""Torch's convolution and its adjoint, on a way that is right for the extents at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distdl_rma.geometry.halo import Stencil
from distdl_rma.ops.core.autograd import OperatorFunction, uncompiled
from distdl_rma.ops.core.tensors import sum_dtype

# Types that oneDNN computes in.
_AT_FAULT = (torch.float32, torch.float16, torch.bfloat16)
# Whether the gradients of the input, of the weight and of the bias are wanted.
Needs = tuple[bool, bool, bool]


class ConvolutionArguments(NamedTuple):
    """What torch's convolution wants to know beside its tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False

    @classmethod
    def of(cls, stencil: Stencil, groups: int, transposed: bool = False) -> ConvolutionArguments:
        """Steps of the windows in space, without any padding."""
        windows = stencil.windows
        stride, dilation = tuple(w.stride for w in windows), tuple(w.dilation for w in windows)
        return cls(stride, (0,) * len(windows), dilation, groups, transposed)

    def fills(self, extents: Sequence[int], kernel: Sequence[int], short: bool) -> bool:
        """Whether a block is as wide as a window that starts in the padding, in every dimension.

        The extents are those of the input, or of the output of a transposed convolution, without padding.
        Elements of 16 bits are ``short``, and need two strides more where windows jump.
        """
        return all(
            n >= d * (k - 1) + 1 + p + (2 * (s - 1) if short else 0)
            for n, k, s, p, d in zip(extents, kernel, self.stride, self.padding, self.dilation, strict=True)
        )

    def outputs(self, extents: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Extents of the output of a transposed convolution."""
        return tuple(
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, k, s, p, d in zip(extents, kernel, self.stride, self.padding, self.dilation, strict=True)
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As torch takes them, behind the tensors."""
        stride, padding, dilation, groups, transposed = self
        return stride, padding, dilation, transposed, (0,) * len(stride), groups


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, steps: ConvolutionArguments) -> Tensor:
    """Local convolution by torch, also under autograd.

    Torch's oneDNN kernels are at fault where windows stick out of a block on either side: they write beyond
    their memory, or leave weight gradients of taps that meet padding only unset, and in 16 bits outputs too.
    Whole images are rarely as narrow, shards of them are. These are computed by torch's own kernels, in the
    type that sums are taken in.
    """
    if _safe(x, weight, steps):
        stride, padding, dilation, groups, transposed = steps
        nothing = (0,) * len(stride)
        return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, nothing, groups)
    y: Tensor = _Plain.apply(x, weight, bias, steps)
    return y


def convolution_adjoint(
    gradient: Tensor, x: Tensor, weight: Tensor, steps: ConvolutionArguments, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input, the weight and the bias of :func:`convolution`, those that are needed."""
    if not _safe(x, weight, steps):
        return _adjoint(gradient, x, weight, steps, needs)
    stride, padding, dilation, groups, transposed = steps
    behind = stride, padding, dilation, transposed, (0,) * len(stride), groups, needs
    channels = (gradient.shape[1],) if needs[2] else None
    inner, taps, offsets = torch.ops.aten.convolution_backward(gradient, x, weight, channels, *behind)
    return inner, taps, offsets


def _adjoint(
    gradient: Tensor, x: Tensor, weight: Tensor, steps: ConvolutionArguments, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    # By torch's own kernels.
    behind = (gradient.shape[1],) if needs[2] else None, *steps.arguments, needs
    wide, dtype = sum_dtype(x.dtype), x.dtype
    with _without_onednn():
        found = torch.ops.aten.convolution_backward(gradient.to(wide), x.to(wide), weight.to(wide), *behind)
    inner, taps, offsets = (None if part is None else part.to(dtype) for part in found)
    return inner, taps, offsets


class _Plain(OperatorFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, steps: ConvolutionArguments
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.steps = steps
        wide = sum_dtype(x.dtype)
        offset = None if bias is None else bias.to(wide)
        with _without_onednn():
            return torch.convolution(x.to(wide), weight.to(wide), offset, *steps.arguments).to(x.dtype)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_adjoint(gradient, x, weight, ctx.steps, ctx.needs_input_grad[:3]), None


@contextmanager
def _without_onednn() -> Iterator[None]:
    # Not by torch's own context, which also sets, and warns of, what it is not asked for.
    switch: Any = torch.backends.mkldnn
    before = switch.enabled
    switch.enabled = False
    try:
        yield
    finally:
        switch.enabled = before


def _safe(x: Tensor, weight: Tensor, steps: ConvolutionArguments) -> bool:
    if x.dtype not in _AT_FAULT or 0 in x.shape:
        return True
    return _wide_enough(steps, x.shape[2:], weight.shape[2:], x.dtype.itemsize < torch.float32.itemsize)


# Asked for every patch of every step, mostly of the same few shapes.
@lru_cache(maxsize=1024)
def _wide_enough(
    steps: ConvolutionArguments, extents: tuple[int, ...], kernel: tuple[int, ...], short: bool
) -> bool:
    return steps.fills(steps.outputs(extents, kernel) if steps.transposed else extents, kernel, short)
