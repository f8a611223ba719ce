"""Normalisation by statistics of the whole: ranks that share a mean exchange what they have of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.ops.core.tensors import sum_dtype
from distdl_rma.ops.norm.normalisation import Normalisation, NormOptions
from distdl_rma.ops.norm.statistic_groups import NormAxes
from distdl_rma.split import layout as lay
from distdl_rma.split.functions.images.planes import by_whole_dims
from distdl_rma.split.moves import redistributed, to_blocks
from distdl_rma.split.operands import as_whole, machine_of, needs_of, on_copies
from distdl_rma.split.reducing import positive
from distdl_rma.split.site import Site, site_of
from distdl_rma.split.table import rule
from distdl_rma.split.tensor import SplitTensor, local_of, refused

_RUNNING = "running_mean", "running_var"


def _weights(
    site: Site, layout: Decomposition, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    given = {"weight": weight, "bias": bias}
    return {key: as_whole(site, w, layout, key) for key, w in given.items() if w is not None}


def _normalised(
    site: Site,
    x: SplitTensor,
    options: NormOptions,
    weights: dict[str, torch.Tensor],
    running: dict[str, torch.Tensor] | None = None,
    momentum: float = 0.0,
) -> SplitTensor:
    local, layout = local_of(x), x._layout
    dtypes = {key: w.dtype for key, w in weights.items()}

    def make() -> Normalisation:
        for key, dtype in dtypes.items():
            if dtype not in (local.dtype, sum_dtype(local.dtype)):
                raise ShapeError(f"{site.name}: input is {local.dtype}, the {key} {dtype}")
        source, axes = lay.on_grid(layout), options.axes
        extents = tuple(layout.shape[d] for d in axes.weighted)
        for key, w in {**weights, **(running or {})}.items():
            if tuple(w.shape) != extents:
                raise ShapeError(
                    f"{site.name}: {key} is {tuple(w.shape)}, the global input {layout.shape} needs {extents}"
                )
        store = Decomposition.replicated(source.partition, extents)
        return Normalisation(site.call_site, source, local.dtype, options, store, dtypes)

    operation = site.kept((layout, local.dtype, options, *dtypes.items()), make)
    others: dict[str, Any] = {**weights, **(running or {})}
    if options.tracks:
        others["momentum"] = momentum
    return SplitTensor(operation(needs_of(local, *weights.values()), local, **others), layout)


def _buffers(func: Any, mean: Any, variance: Any) -> dict[str, torch.Tensor] | None:
    if mean is None or variance is None:
        return None
    for buffer in (mean, variance):
        if isinstance(buffer, SplitTensor):
            raise refused(func, "running statistics are plain tensors, alike on all ranks")
    return dict(zip(_RUNNING, (mean, variance), strict=True))


@rule("norm", F.batch_norm, torch.batch_norm)
def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By mean and variance of the whole batch; running statistics change alike on all ranks."""

    def arguments(
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

    given = _in_order_of_functional(func, args)
    x, mean, variance, weight, bias, training, momentum, eps = arguments(*given, **kwargs)
    if not isinstance(x, SplitTensor) or not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    site, layout = site_of(machine_of(x), func), x._layout
    running = _buffers(func, mean, variance)
    weights = _weights(site, layout, weight, bias)
    dims = len(layout.shape)
    if not training:
        if running is None:
            raise ShapeError(f"{site.name}: running_mean and running_var are needed when training is False")
        return _by_constants(site, x, running, weights, eps)
    axes = NormAxes(tuple(d for d in range(dims) if d != 1), (1,))
    several = "value per channel is needed in training"
    options = NormOptions(axes, eps, tracks=running is not None, several=several)
    return _normalised(site, x, options, weights, running, momentum)


def _in_order_of_functional(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # torch.batch_norm and torch.instance_norm take the weights before the running statistics.
    if func not in (torch.batch_norm, torch.instance_norm) or len(args) < 5:
        return args
    x, weight, bias, mean, variance, *others = args
    return x, mean, variance, weight, bias, *others


def _by_constants(
    site: Site,
    x: SplitTensor,
    running: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    eps: float,
) -> SplitTensor:
    # Element by element: torch's own function of the block, with the values of its channels.
    local = local_of(x)
    channels = x._layout.slices()[1]
    parts: dict[str, Any] = {key: w[channels] for key, w in {**running, **weights}.items()}
    if local.numel():
        y = F.batch_norm(local, **parts, training=False, eps=eps)
        if y.requires_grad:
            # Of a block with one sample torch takes a transposed gradient for another.
            y.register_hook(torch.Tensor.contiguous)
        return SplitTensor(y, x._layout)
    # Which refuses a block without elements.
    y = local.clone()
    for w in weights.values():
        y = y + w.sum().to(y.dtype)
    return SplitTensor(y, x._layout)


@rule("norm", F.instance_norm, torch.instance_norm)
def instance_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By mean and variance of each sample and channel, wherever its elements are."""

    def arguments(
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

    given = _in_order_of_functional(func, args)
    x, mean, variance, weight, bias, by_input, momentum, eps = arguments(*given, **kwargs)
    if not isinstance(x, SplitTensor) or not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    site, layout = site_of(machine_of(x), func), x._layout
    running, weights = _buffers(func, mean, variance), _weights(site, layout, weight, bias)
    if not by_input:
        if running is None:
            raise ShapeError(f"{site.name}: running statistics are needed when use_input_stats is False")
        return _by_constants(site, x, running, weights, eps)
    axes = NormAxes(tuple(range(2, len(layout.shape))), (1,))
    several = "spatial element is needed in training"
    options = NormOptions(axes, eps, tracks=running is not None, several=several)
    return _normalised(site, x, options, weights, running, momentum)


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
    if not isinstance(x, SplitTensor) or not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    site, layout = site_of(machine_of(x), func), x._layout
    dims = len(layout.shape)
    if dims < 2 or groups < 1 or layout.shape[1] % groups:
        raise ShapeError(f"{site.name}: the channels of {layout.shape} do not form {groups} groups")
    axes = NormAxes(tuple(range(1, dims)), (1,), groups)
    options = NormOptions(axes, eps, several="value per group is needed")
    return _normalised(site, x, options, _weights(site, layout, weight, bias))


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
    if not isinstance(x, SplitTensor) or not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    return _over_last(func, x, shape, {"weight": weight, "bias": bias}, eps, True)


@rule("norm", F.rms_norm, torch.rms_norm)
def rms_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the root mean square over the last dimensions; only where these are cut do ranks exchange it."""

    def arguments(
        input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
    ) -> tuple[Any, ...]:
        return input, normalized_shape, weight, eps

    x, shape, weight, eps = arguments(*args, **kwargs)
    if not isinstance(x, SplitTensor) or not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    return _over_last(func, x, shape, {"weight": weight, "bias": None}, eps, False)


def _over_last(
    func: Any,
    x: SplitTensor,
    normalized_shape: int | Sequence[int],
    parameters: dict[str, Any],
    eps: Any,
    centred: bool,
) -> SplitTensor:
    site, layout = site_of(machine_of(x), func), x._layout
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    dims = len(layout.shape)
    last = tuple(range(dims - len(shape), dims))
    if not shape or len(shape) > dims or tuple(layout.shape[d] for d in last) != shape:
        raise ShapeError(f"{site.name}: normalized_shape {shape} is not the end of {layout.shape}")
    weights = _weights(site, layout, **parameters)
    if not set(last) & set(lay.cut_dims(layout)):
        y = (F.layer_norm if centred else F.rms_norm)(local_of(x), shape, **weights, eps=eps)
        return SplitTensor(y, layout)
    options = NormOptions(NormAxes(last, last), eps, centred)
    return _normalised(site, x, options, weights)


@rule("norm", F.local_response_norm)
def local_response_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By neighbouring channels; where channels are cut all of them come to every rank that has any."""
    x = args[0] if args else kwargs["input"]
    if not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    others = {key: value for key, value in kwargs.items() if key != "input"}
    return by_whole_dims(func, x, (1,), lambda local: func(local, *args[1:], **others))


@rule("norm", F.normalize)
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
        return by_whole_dims(func, x, cut, lambda block: F.normalize(block, p, dims, eps))
    site = site_of(machine_of(x), func)
    # What is no element adds nothing to a norm.
    empty = any(local.shape[d] == 0 for d in dims)
    own = local.sum(dims, keepdim=True) if empty else local.norm(p, dims, keepdim=True)
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
