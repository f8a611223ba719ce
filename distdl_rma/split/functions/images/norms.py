"""Normalisation by statistics of the whole: ranks that share a mean exchange what they have of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.dtypes import sum_dtype
from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.ops.norm.normalisation import Normalisation, NormOptions
from distdl_rma.ops.norm.statistic_groups import NormAxes
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import is_taken, raise_as_torch, refusing
from distdl_rma.split.calls.site import Site, site_of
from distdl_rma.split.calls.table import rule
from distdl_rma.split.functions.images.planes import by_whole_dims
from distdl_rma.split.moves import redistributed, to_blocks
from distdl_rma.split.operands import cut_site, machine_of, needs_of, on_copies, wholes
from distdl_rma.split.reducing import computed, positive, put_back, with_whole
from distdl_rma.split.tensor import SplitTensor, local_of, refused

_RUNNING = "running_mean", "running_var"
_WEIGHTS = "weight", "bias"
_ALIKE = "running statistics are plain tensors, alike on all ranks"
# What kind of normalisation one of a layout is, by eps and whether it tracks; made once for each.
_Options = Callable[[Decomposition, Any, bool], NormOptions]
# A function and its arguments, as the user called it.
_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _normalised(
    call: _Call,
    site: Site,
    x: SplitTensor,
    options: _Options,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: Any,
    running: dict[str, torch.Tensor] | None = None,
    momentum: float = 0.0,
) -> SplitTensor:
    local, layout = local_of(x), x._layout
    weight, bias = wholes(site, weights, layout, _WEIGHTS)
    key = (
        options,
        layout,
        local.dtype,
        eps,
        None if running is None else (running["running_mean"].shape, running["running_var"].shape),
        None if weight is None else (weight.shape, weight.dtype),
        None if bias is None else (bias.shape, bias.dtype),
    )

    def make() -> Normalisation:
        raise_as_torch(*call)
        given = {key: w for key, w in zip(_WEIGHTS, (weight, bias), strict=True) if w is not None}
        kind = options(layout, eps, running is not None)
        return _operation(site, layout, local.dtype, kind, given, running)

    operation = site.kept(key, make)
    needs = needs_of(local, weight, bias)
    if running is None:
        return SplitTensor(operation(needs, local, weight=weight, bias=bias), layout)
    y = operation(needs, local, weight=weight, bias=bias, momentum=momentum, **running)
    return SplitTensor(y, layout)


def _operation(
    site: Site,
    layout: Decomposition,
    dtype: torch.dtype,
    options: NormOptions,
    weights: dict[str, torch.Tensor],
    running: dict[str, torch.Tensor] | None,
) -> Normalisation:
    source, extents = lay.on_grid(layout), tuple(layout.shape[d] for d in options.axes.weighted)
    for key, w in weights.items():
        if w.dtype not in (dtype, sum_dtype(dtype)):
            raise ShapeError(f"{site.name}: input is {dtype}, the {key} {w.dtype}")
    for key, w in {**weights, **(running or {})}.items():
        if tuple(w.shape) != extents:
            raise ShapeError(
                f"{site.name}: {key} is {tuple(w.shape)}, the global input {layout.shape} needs {extents}"
            )
    store = Decomposition.replicated(source.partition, extents)
    dtypes = {key: w.dtype for key, w in weights.items()}
    return Normalisation(site.call_site, source, dtype, options, store, dtypes)


def _buffers(func: Any, mean: Any, variance: Any) -> dict[str, torch.Tensor] | None:
    if mean is None or variance is None:
        return None
    for buffer in (mean, variance):
        if isinstance(buffer, SplitTensor):
            raise refused(func, _ALIKE)
    return {"running_mean": mean, "running_var": variance}


def _on_copies(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changes: bool, running: Sequence[Any]
) -> Any:
    if changes and any(isinstance(buffer, SplitTensor) and buffer.is_split for buffer in running):
        # It would change a copy of what is cut.
        raise refused(func, _ALIKE)
    return on_copies(func, args, kwargs)


def _batch(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = False,
) -> tuple[Any, ...]:
    return input, running_mean, running_var, weight, bias, training, momentum, eps


def _of_batch(layout: Decomposition, eps: float, tracks: bool) -> NormOptions:
    axes = NormAxes(tuple(d for d in range(len(layout.shape)) if d != 1), (1,))
    return NormOptions(axes, eps, tracks=tracks, several="value per channel is needed in training")


@rule("norm", F.batch_norm, torch.batch_norm)
def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By mean and variance of the whole batch; running statistics change alike on all ranks."""
    given = _in_order_of_functional(args) if func is torch.batch_norm else args
    x, mean, variance, weight, bias, training, momentum, eps = _batch(*given, **kwargs)
    site = cut_site(func, x)
    if site is None:
        return _on_copies(func, args, kwargs, training, (mean, variance))
    running = _buffers(func, mean, variance)
    if training:
        return _normalised((func, args, kwargs), site, x, _of_batch, (weight, bias), eps, running, momentum)
    if running is None:
        raise ShapeError(f"{site.name}: running_mean and running_var are needed when training is False")
    return _by_constants((func, args, kwargs), site, x, running, (weight, bias), eps)


def _in_order_of_functional(args: tuple[Any, ...]) -> tuple[Any, ...]:
    # torch.batch_norm and torch.instance_norm take the weights before the running statistics.
    if len(args) < 5:
        return args
    x, weight, bias, mean, variance, *others = args
    return x, mean, variance, weight, bias, *others


def _by_constants(
    call: _Call,
    site: Site,
    x: SplitTensor,
    running: dict[str, torch.Tensor],
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
) -> SplitTensor:
    # Element by element: torch's own function of the block, with the values of its channels.
    local = local_of(x)
    channels = x._layout.slices()[1]
    given = {**running, **dict(zip(_WEIGHTS, wholes(site, weights, x._layout, _WEIGHTS), strict=True))}
    said = tuple([None if w is None else (w.shape, w.dtype) for w in given.values()])
    site.kept(("checked", x._layout, local.dtype, said), lambda: is_taken(*call))
    parts: dict[str, Any] = {key: w[channels] for key, w in given.items() if w is not None}
    if local.numel():
        y = F.batch_norm(local, **parts, training=False, eps=eps)
        if y.requires_grad:
            # Of a block with one sample torch takes a transposed gradient for another.
            y.register_hook(torch.Tensor.contiguous)
        return SplitTensor(y, x._layout)
    # Which refuses a block without elements.
    y = local.clone()
    for key in _WEIGHTS:
        if key in parts:
            y = y + parts[key].sum().to(y.dtype)
    return SplitTensor(y, x._layout)


def _instance(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = False,
) -> tuple[Any, ...]:
    return input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps


def _of_instances(layout: Decomposition, eps: float, tracks: bool) -> NormOptions:
    axes = NormAxes(tuple(range(2, len(layout.shape))), (1,))
    return NormOptions(axes, eps, tracks=tracks, several="spatial element is needed in training")


@rule("norm", F.instance_norm, torch.instance_norm)
def instance_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By mean and variance of each sample and channel, wherever its elements are."""
    given = _in_order_of_functional(args) if func is torch.instance_norm else args
    x, mean, variance, weight, bias, by_input, momentum, eps = _instance(*given, **kwargs)
    site = cut_site(func, x)
    if site is None:
        return _on_copies(func, args, kwargs, by_input, (mean, variance))
    running = _buffers(func, mean, variance)
    if by_input:
        return _normalised(
            (func, args, kwargs), site, x, _of_instances, (weight, bias), eps, running, momentum
        )
    if running is None:
        raise ShapeError(f"{site.name}: running statistics are needed when use_input_stats is False")
    return _by_constants((func, args, kwargs), site, x, running, (weight, bias), eps)


@dataclass(frozen=True)
class _OfGroups:
    groups: int

    def __call__(self, layout: Decomposition, eps: float, tracks: bool) -> NormOptions:
        axes = NormAxes(tuple(range(1, len(layout.shape))), (1,), self.groups)
        return NormOptions(axes, eps, several="value per group is needed")


@rule("norm", F.group_norm, torch.group_norm)
def group_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By mean and variance of each sample and group of channels, which may be on several ranks."""

    def arguments(
        input: Any,
        num_groups: int,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        cudnn_enabled: bool = False,
    ) -> tuple[Any, ...]:
        return input, int(num_groups), weight, bias, eps

    x, groups, weight, bias, eps = arguments(*args, **kwargs)
    site = cut_site(func, x)
    if site is None:
        return on_copies(func, args, kwargs)
    shape = x._layout.shape
    if len(shape) < 2 or groups < 1 or shape[1] % groups:
        raise ShapeError(f"{site.name}: the channels of {shape} do not form {groups} groups")
    return _normalised((func, args, kwargs), site, x, _OfGroups(groups), (weight, bias), eps)


@rule("norm", F.layer_norm, torch.layer_norm)
def layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By mean and variance over the last dimensions; only where these are cut do ranks exchange them."""

    def arguments(
        input: Any,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        cudnn_enable: bool = False,
    ) -> tuple[Any, ...]:
        return input, normalized_shape, weight, bias, eps

    x, shape, weight, bias, eps = arguments(*args, **kwargs)
    site = cut_site(func, x)
    if site is None:
        return on_copies(func, args, kwargs)
    return _over_last((func, args, kwargs), site, x, shape, weight, bias, eps, True)


@rule("norm", F.rms_norm, torch.rms_norm)
def rms_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the root mean square over the last dimensions; only where these are cut do ranks exchange it."""

    def arguments(
        input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
    ) -> tuple[Any, ...]:
        return input, normalized_shape, weight, eps

    x, shape, weight, eps = arguments(*args, **kwargs)
    site = cut_site(func, x)
    if site is None:
        return on_copies(func, args, kwargs)
    return _over_last((func, args, kwargs), site, x, shape, weight, None, eps, False)


@dataclass(frozen=True)
class _OverLast:
    number: int
    centred: bool

    def __call__(self, layout: Decomposition, eps: Any, tracks: bool) -> NormOptions:
        dims = len(layout.shape)
        last = tuple(range(dims - self.number, dims))
        return NormOptions(NormAxes(last, last), eps, self.centred)


def _over_last(
    call: _Call,
    site: Site,
    x: SplitTensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: Any,
    centred: bool,
) -> SplitTensor:
    layout = x._layout
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    dims = len(layout.shape)
    if not shape or len(shape) > dims or layout.shape[dims - len(shape) :] != shape:
        raise ShapeError(f"{site.name}: normalized_shape {shape} is not the end of {layout.shape}")
    if any(d >= dims - len(shape) for d in layout.cut_dims):
        if local_of(x).is_complex():
            # Of which no moments are exchanged.
            local, whole = with_whole(site, x, range(dims - len(shape), dims))
            y = _over_last(call, site, SplitTensor(local, whole), shape, weight, bias, eps, centred)
            return put_back(site, local_of(y), whole, layout)
        return _normalised(call, site, x, _OverLast(len(shape), centred), (weight, bias), eps)
    weight, bias = wholes(site, (weight, bias), layout, _WEIGHTS)
    local = local_of(x)
    if centred:
        return SplitTensor(F.layer_norm(local, shape, weight, bias, eps), layout)
    return SplitTensor(F.rms_norm(local, shape, weight, eps), layout)


@rule("norm", F.local_response_norm)
@refusing
def local_response_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By neighbouring channels; where channels are cut all of them come to every rank that has any."""
    x = args[0] if args else kwargs["input"]
    if not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    others = {key: value for key, value in kwargs.items() if key != "input"}
    return by_whole_dims(func, x, (1,), lambda local: func(local, *args[1:], **others))


@rule("norm", F.normalize)
@refusing
def normalize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the norm along dimensions; where these are cut, by that of the ranks' norms."""

    def arguments(
        input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
    ) -> tuple[Any, ...]:
        return input, p, (dim,) if isinstance(dim, int) else tuple(dim), eps, out

    dims: Any
    x, p, dims, eps, _ = arguments(*args, **kwargs)
    if not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    local, layout = local_of(x), x._layout
    dims = tuple(positive(d, len(layout.shape)) for d in dims)
    cut = [d for d in lay.cut_dims(layout) if d in dims]
    if not cut:
        return SplitTensor(F.normalize(local, p, dims, eps), layout)
    if p <= 0:
        return by_whole_dims(func, x, dims, lambda block: F.normalize(block, p, dims, eps))
    site = site_of(machine_of(x), func)
    # What is no element adds nothing to a norm.
    own = computed(lambda block: block.norm(p, dims, keepdim=True), local, dims)
    norms = lay.with_splits(
        layout,
        {
            d: Balanced(layout.splits[d].parts, layout.splits[d].parts) if d in cut else Balanced(1, 1)
            for d in dims
        },
    )
    everywhere = lay.whole(norms, cut)
    whole = redistributed(site, own, norms, everywhere).norm(p, cut, keepdim=True)
    apart = tuple(g for g, axis in enumerate(layout.axes) if axis in cut)
    norm = to_blocks(site, whole.clamp_min(eps), everywhere, apart, " of the norm")
    return SplitTensor(local / norm, layout)
