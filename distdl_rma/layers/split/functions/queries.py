"""Queries, gradients, values and new tensors: facts of the whole tensor, the graph of the block.

A split tensor has two faces. Whatever a program asks about *shape, type and place* is answered for the whole
tensor. Whatever belongs to *autograd* is the block's: the block is in the graph, has ``.grad`` and hooks, and
the split tensor is only a handle to it:

    SplitTensor  (6, 4)      x.shape, x.dim(), x.device, len(x)
       |
       '--> block (3, 4)     x.grad_fn, x.requires_grad, x.grad (as a split tensor), x.register_hook

So ``backward`` of a loss is torch's own backward of this rank's block, on all ranks at once. Gradients that
the user passes in, or sets, are cut like the tensor on the way in (``_cut_like``) and become split tensors on
the way out.

No rank may decide alone. *Values* (``item``, ``if x:``) are read from copies only: of a cut tensor each rank
would see another one. Where a backward begins is noted (``LOSS_ORIGIN``), since it must be the same tensor on
all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.checks.gradient_origin import from_split_tensor
from distdl_rma.layers.ops.core.autograd import grad_call
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.loss_origin import LOSS_ORIGIN
from distdl_rma.layers.split.calls.signatures import mapped, named, tensors_in
from distdl_rma.layers.split.calls.site import site_of
from distdl_rma.layers.split.calls.table import rule
from distdl_rma.layers.split.function_nodes import OF_NO_BLOCK, is_lost
from distdl_rma.layers.split.functions.pointwise import pointwise
from distdl_rma.layers.split.operands import block_of, common_partition
from distdl_rma.layers.split.plain_operands import beside, contributes
from distdl_rma.layers.split.redistribution import reduced
from distdl_rma.layers.split.tensor import (
    ON_MANY_RANKS,
    SplitTensor,
    any_cut,
    checked_block,
    composed,
    into_graph,
    refused,
)
from distdl_rma.layers.split.views import seen_of
from distdl_rma.segments.machine import Machine

_T: Any = torch.Tensor

_OF_WHOLE = """
size dim numel nelement ndimension is_floating_point is_complex is_signed element_size get_device is_inference
""".split()
_PROPERTIES_OF_WHOLE = """
shape ndim dtype device layout itemsize names is_cuda is_sparse is_quantized is_nested is_mkldnn is_meta
nbytes is_cpu is_mps is_xpu is_vulkan
""".split()
_DEVICE: Any = _T.device.__get__
_OF_BLOCK = "is_leaf grad_fn requires_grad retains_grad output_nr _version _backward_hooks".split()


@rule("query", *_OF_WHOLE, *(getattr(_T, name).__get__ for name in _PROPERTIES_OF_WHOLE if hasattr(_T, name)))
def of_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read from the global shape, type and device."""
    if func == _DEVICE and args[0].grad_fn is not None and torch.is_grad_enabled():
        # A checkpoint asks its arguments for it, before it saves them: later they would be detached.
        into_graph(args[0])
    return func(*args, **kwargs)


@rule("query", *(getattr(_T, name).__get__ for name in _OF_BLOCK))
def of_block(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read from the block."""
    x = args[0]
    # The result of an autograd function is in torch's graph, its block is not yet in one.
    return func(x._local if x.grad_fn is None else x)


rule("query", _T.is_contiguous, _T.stride, doc="Read from the block.")(
    lambda func, args, kwargs: func(args[0]._local, *args[1:], **kwargs)
)
rule("query", _T._base.__get__, doc="None: no split tensor is a view of another.")(lambda *_: None)
rule("query", _T._backward_hooks.__set__, doc="Set by torch at a change in place; hooks are the block's.")(
    lambda func, args, kwargs: func(*args)
)
rule("query", _T.__len__, doc="Extent of the first dimension.")(
    lambda func, args, kwargs: len(torch.empty(args[0]._layout.shape, device="meta"))
)
rule("query", torch.result_type, doc="Follows types and numbers of dimensions.")(
    lambda func, args, kwargs: func(*map(block_of, args))
)


_ON_GRAPH = "requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook".split()


@rule("gradient", _T.requires_grad.__set__, *(getattr(_T, name) for name in _ON_GRAPH))
def on_graph(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Acts on the block, on all ranks in the same way; hooks receive split gradients."""
    x = into_graph(args[0])
    if func in (_T.register_hook, _T.register_post_accumulate_grad_hook):
        hook = args[1]

        def on_split(gradient: torch.Tensor) -> Any:
            return _cut_like(hook(SplitTensor(gradient, x._layout)), x)

        return func(checked_block(x), on_split)
    result = func(checked_block(x), *args[1:], **kwargs)
    if x.requires_grad != x._local.requires_grad:
        x.requires_grad_(x._local.requires_grad)
    return x if result is x._local else result


@rule("gradient", _T.grad.__get__)
def gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of the whole tensor, cut as the tensor is."""
    x = args[0]
    found = x._local.grad
    return None if found is None else SplitTensor(found, x._layout)


@rule("gradient", _T.grad.__set__, _T.grad.__delete__)
def set_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Sets the gradient to a plain tensor, or to one that is cut as the tensor is; or deletes it."""
    value = args[1] if len(args) > 1 else None
    if isinstance(value, SplitTensor) and value._layout is not args[0]._layout:
        raise refused(func, "the gradient is cut otherwise than the tensor")
    args[0]._local.grad = _cut_like(value, args[0])


@rule("gradient", _T.backward)
def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Backward of a replicated loss, or of a split tensor from a gradient that is cut as the tensor is."""
    x, given = args[0], named(func, args, kwargs)
    gradient = given.pop("gradient")
    if given["inputs"] is not None:
        composed(torch.autograd.backward, [x], grad_tensors=gradient, **given)
        return
    gradient = _cut_like(gradient, x)
    LOSS_ORIGIN.begins_backward([x])
    # Hooks, and recomputation for a checkpoint, call functions of split tensors.
    with from_split_tensor():
        composed(func, checked_block(into_graph(x)), gradient, **given)


@rule("gradient", torch.autograd.grad)
def gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Gradients of split tensors are cut as these are; those of plain tensors are summed over the ranks."""
    # In a backward() a GradientSync sums the gradients of plain tensors. It does not see those that torch
    # returns from here, so they are summed at the end, unless their uses have summed them already.
    outputs, inputs = args
    partition = common_partition(func, [*outputs, *inputs])
    site = site_of(Machine.of(partition), func)
    given = _all_cut_like(kwargs.pop("grad_outputs", None), outputs)
    ends, roots = _roots(outputs, partition), mapped(_block_of, list(inputs))
    _check_reached(func, ends)
    # Before the backward frees the graph that this reads.
    later = [not isinstance(x, SplitTensor) and contributes(x) for x in inputs]
    LOSS_ORIGIN.begins_backward(outputs)
    with grad_call(partition.ranks):
        found = composed(func, ends, roots, grad_outputs=given, **kwargs)

    def whole(x: torch.Tensor, gradient: torch.Tensor | None, at: int) -> torch.Tensor | None:
        if gradient is None:
            return None
        if isinstance(x, SplitTensor):
            return SplitTensor(gradient, x._layout)
        if not later[at]:
            return gradient
        return reduced(site, gradient, partition.ranks, what=f"gradient of input {at}")

    return tuple(whole(x, g, at) for at, (x, g) in enumerate(zip(inputs, found, strict=True)))


@rule("gradient", torch.autograd.backward)
def backward_of_several(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``backward`` of each tensor, in one pass."""
    (ends,) = args
    given, inputs = kwargs.pop("grad_tensors", None), kwargs.pop("inputs", None)
    partition = common_partition(func, tensors_in(ends, given, inputs))
    given = _all_cut_like(given, ends)
    if inputs is not None:
        inputs = [_block_of(x) for x in ([inputs] if isinstance(inputs, torch.Tensor) else inputs)]
    LOSS_ORIGIN.begins_backward(tensors_in(ends))
    roots = _roots(ends, partition)
    if inputs is not None:
        _check_reached(func, roots)
    with from_split_tensor():
        composed(func, roots, given, inputs=inputs, **kwargs)


def _check_reached(func: Any, roots: Sequence[torch.Tensor]) -> None:
    # Raises where torch drops a gradient silently: it reaches a split tensor itself, not a block.
    if is_lost(roots, SplitTensor):
        raise refused(func, OF_NO_BLOCK)


def _roots(ends: Sequence[torch.Tensor], partition: Partition) -> list[torch.Tensor]:
    # All ranks compute plain ends equally, such as a term of parameters: these count once.
    everywhere = lay.replicated(partition, ())
    return [_block_of(x) if isinstance(x, SplitTensor) else beside(x, everywhere) for x in ends]


def _block_of(x: torch.Tensor) -> torch.Tensor:
    return checked_block(into_graph(x)) if isinstance(x, SplitTensor) else x


def _all_cut_like(gradients: Any, ends: Sequence[torch.Tensor]) -> Any:
    # Gradients that the user passes for the ends of a backward: one, several or None.
    if gradients is None:
        return None
    several = (gradients,) if isinstance(gradients, torch.Tensor) else tuple(gradients)
    return [_cut_like(gradient, x) for gradient, x in zip(several, ends, strict=True)]


def _cut_like(gradient: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    # A gradient cut into blocks as ``x`` is.
    if gradient is None or not isinstance(x, SplitTensor):
        return gradient
    if isinstance(gradient, SplitTensor):
        return checked_block(gradient.redistribute(layout=x._layout))
    if gradient.shape != x.shape:
        # Its part for this rank might have the shape of the block.
        raise RuntimeError(f"a gradient has shape {tuple(gradient.shape)}, its tensor {tuple(x.shape)}")
    return gradient[x._layout.slices()]


_VALUES = "item tolist __bool__ __float__ __int__ __index__ __complex__ numpy __array__".split()


@rule("value", *(getattr(_T, name) for name in _VALUES))
def value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values of a replicated tensor; a cut tensor raises an error."""
    if args[0].is_split:
        numpy = (
            "; of a numpy array beside it make a tensor by torch.from_numpy()" if func is _T.__array__ else ""
        )
        raise refused(func, ON_MANY_RANKS + numpy)
    return func(args[0]._local, *args[1:], **kwargs)


@rule("value", _T.__format__)
def formatted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A replicated tensor as torch formats it; a cut tensor only without a format, as ``repr``."""
    x, form = args
    return value(func, args, kwargs) if form or not x.is_split else repr(x)


@rule("pointwise", _T.data.__get__)
def data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The block outside of any graph, for reading; to write, call ``detach()``."""
    x = args[0]
    # Outside of the graph, changes of the result would not invalidate copies that were made of the tensor.
    return seen_of(x, checked_block(x).data, x._layout, x._strides, moved=True)


rule("value", _T.__deepcopy__, doc="A copy of the block; of leaves only, as in torch.")(pointwise)


_NEW = "new new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()


@rule("creation", *(getattr(_T, name) for name in _NEW))
def new_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A plain tensor of the requested size, the same on every rank; it is cut where it is used."""
    x, *others = args
    if any_cut(others, kwargs):
        raise refused(func, "the values are on many ranks")
    return func(x._local, *map(block_of, others), **kwargs)
