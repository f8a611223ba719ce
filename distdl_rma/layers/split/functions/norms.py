"""Normalisation by statistics of the whole tensor: ranks exchange their parts of a mean.

A norm keeps the layout of its input: each rank normalises its block by moments that it shares with the ranks
whose blocks have elements of the same group.

    batch norm     moments of each channel, over all ranks with elements of the channel
    group norm     moments of each sample and group of channels, over the ranks of the sample
    layer norm     moments over the last dimensions; no exchange unless these are cut
    evaluation     given moments: a function of elements, of which each rank takes its channels

``layers/ops/norm`` has the operation, which distributed layers use too. Here it is found for the call, and
kept by its site for one kind of input: layout, dtypes, and shapes of weights and running statistics. Torch's
own checks run once, where the operation is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.norm.normalisation import Normalisation, NormOptions, axes_of, by_constants
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.signatures import named
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call, rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule, raise_as_torch
from distdl_rma.layers.split.operands import needs_of, of_cut, on_whole_tensors, wholes
from distdl_rma.layers.split.reduction_axes import chosen_dims
from distdl_rma.layers.split.tensor import SplitTensor, any_cut, checked_block, composed, refused

Weights = tuple[torch.Tensor | None, torch.Tensor | None]
Running = dict[str, torch.Tensor]
_RUNNING = "running_mean", "running_var"
_WEIGHTS = "weight", "bias"
_ALIKE = "running statistics are plain tensors, alike on all ranks"


def _normalised(
    call: Call,
    site: Site,
    x: SplitTensor,
    number: int,
    weights: Weights,
    eps: Any,
    running: Running | None = None,
    momentum: float = 0.0,
) -> SplitTensor:
    # Normalises by moments of the input. ``number`` is that of groups, or of the last dimensions.
    local, layout = checked_block(x), x._layout
    weight, bias = wholes(site, weights, layout, _WEIGHTS)
    if call[0].__name__ == "rms_norm" and weight is not None and weight.is_floating_point():
        # Torch takes any type; the type of the result is the input's.
        weight = weight if weight.dtype == local.dtype else weight.to(sum_dtype(local.dtype))
    key = (
        *(number, layout, local.dtype, eps),
        None if running is None else (running["running_mean"].shape, running["running_var"].shape),
        None if weight is None else (weight.shape, weight.dtype),
        None if bias is None else (bias.shape, bias.dtype),
    )

    def make() -> Normalisation:
        raise_as_torch(*call)
        name = call[0].__name__
        axes = axes_of(name, len(layout.shape), number)
        options = NormOptions(axes, eps, name, tracks=running is not None)
        source, extents = lay.on_grid(layout), tuple(layout.shape[d] for d in options.axes.weighted)
        given = {key: w for key, w in zip(_WEIGHTS, (weight, bias), strict=True) if w is not None}
        for key, w in given.items():
            if w.dtype not in (local.dtype, sum_dtype(local.dtype)):
                raise ShapeError(f"{site.name}: input is {local.dtype}, the {key} {w.dtype}")
        for key, w in {**given, **(running or {})}.items():
            if tuple(w.shape) != extents:
                raise ShapeError(
                    f"{site.name}: {key} is {tuple(w.shape)}, the global input {layout.shape} needs {extents}"
                )
        store = Decomposition.replicated(source.partition, extents)
        dtypes = {key: w.dtype for key, w in given.items()}
        return Normalisation(site.call_site, source, local.dtype, options, store, dtypes)

    tracked = {} if running is None else {"momentum": momentum, **running}
    y = site.kept(key, make)(needs_of(local, weight, bias), local, weight=weight, bias=bias, **tracked)
    return SplitTensor(y, layout)


def _on_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = named(func, args, kwargs)
    buffers = [given[name] for name in _RUNNING]
    changes = given["training"] if "training" in given else given["use_input_stats"]
    if changes and any_cut(buffers):
        # It would change a copy of a cut buffer.
        raise refused(func, _ALIKE)
    return on_whole_tensors(func, args, kwargs)


_OF_BATCH = "Uses mean and variance of the whole batch; running statistics are equal on all ranks."
_OF_INSTANCES = "Uses mean and variance of each sample and channel of the whole tensor."


@rule("norm", F.batch_norm, torch.batch_norm, doc=_OF_BATCH)
@rule("norm", F.instance_norm, torch.instance_norm, doc=_OF_INSTANCES)
@of_cut(empty=False, otherwise=_on_copies)
def with_running_statistics(
    call: Call, site: Site, x: SplitTensor, weight: Any, bias: Any, momentum: float, eps: float, **how: Any
) -> SplitTensor:
    """Uses mean and variance of the input, or given ones."""
    name = "training" if "training" in how else "use_input_stats"
    running, running_mean, running_var = None, how["running_mean"], how["running_var"]
    if running_mean is not None and running_var is not None:
        if isinstance(running_mean, SplitTensor) or isinstance(running_var, SplitTensor):
            raise refused(call[0], _ALIKE)
        running = {"running_mean": running_mean, "running_var": running_var}
        if torch.is_grad_enabled() and (running_mean.requires_grad or running_var.requires_grad):
            # torch's error, which stand-ins without a gradient do not raise.
            raise RuntimeError(f"{site.name} is not differentiable with respect to running statistics")
    if how[name]:
        return _normalised(call, site, x, 0, (weight, bias), eps, running, momentum)
    if running is None:
        raise ShapeError(f"{site.name}: running_mean and running_var are needed when {name} is False")
    # Pointwise: torch's own function on the block, with the values of its channels.
    local, channels = checked_block(x), x._layout.slices()[1]
    weights = wholes(site, (weight, bias), x._layout, _WEIGHTS)
    given = {**running, **dict(zip(_WEIGHTS, weights, strict=True))}
    kinds = tuple([None if w is None else (w.shape, w.dtype) for w in given.values()])
    site.kept(("checked", x._layout, local.dtype, kinds), lambda: raise_as_torch(*call) is not None)
    parts = [None if w is None else w[channels] for w in given.values()]
    return SplitTensor(by_constants(local, parts, eps), x._layout)


@rule("norm", F.group_norm, torch.group_norm)
@of_cut(empty=False)
def group_norm(
    call: Call, site: Site, x: SplitTensor, num_groups: Any, weight: Any, bias: Any, eps: float, **_: Any
) -> Any:
    """Uses mean and variance of each sample and group of channels of the whole tensor."""
    return _normalised(call, site, x, int(num_groups), (weight, bias), eps)


_OF_LAST = "Uses {} over the last dimensions; ranks exchange {} only if these are cut."


@rule("norm", F.layer_norm, torch.layer_norm, doc=_OF_LAST.format("mean and variance", "them"))
@rule("norm", F.rms_norm, torch.rms_norm, doc=_OF_LAST.format("the root mean square", "it"))
@of_cut(empty=False)
def over_last(
    call: Call, site: Site, x: SplitTensor, normalized_shape: Any, weight: Any, eps: Any, **others: Any
) -> Any:
    """Uses moments over the last dimensions."""
    layout, local, bias = x._layout, checked_block(x), others.get("bias")
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    dims = len(layout.shape)
    if not shape or len(shape) > dims or layout.shape[dims - len(shape) :] != shape:
        raise ShapeError(f"{site.name}: normalized_shape {shape} is not the end of {layout.shape}")
    if any(d >= dims - len(shape) for d in layout.cut_dims):
        if local.is_complex():
            # Moments of complex numbers cannot be exchanged.
            return on_whole_tensors(*call)
        return _normalised(call, site, x, len(shape), (weight, bias), eps)
    weight, bias = wholes(site, (weight, bias), layout, _WEIGHTS)
    if call[0].__name__ == "layer_norm":
        y = F.layer_norm(local, shape, weight, bias, eps)
    else:
        y = F.rms_norm(local, shape, weight, eps)
    return SplitTensor(y, layout)


@checked_rule("norm", F.normalize)
@of_cut()
def normalize(call: Call, site: Site, x: SplitTensor, p: float, dim: Any, eps: float, out: Any) -> Any:
    """Uses the norm along dimensions; if these are cut, ranks combine their norms."""
    if not set(chosen_dims(dim, len(x._layout.shape))) & set(x._layout.cut_dims):
        return SplitTensor(F.normalize(checked_block(x), p, dim, eps), x._layout)
    return composed(lambda: x / x.norm(p, dim, keepdim=True).clamp_min(eps))
