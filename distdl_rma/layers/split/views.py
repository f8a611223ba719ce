"""Tensors that share memory in torch: views of blocks, or copies if elements moved; changes in place.

Whether a result shares memory with its input is part of what a program sees: ``y = x[1:]; y += 1`` changes x.
Here blocks do the same wherever no element moved:

    in torch   x ......... memory            here   x: block ....... memory of the block
               y = x[1:] .... same memory           y: block[...] ..... same memory, if nothing moved
                                                       a copy, if something moved: y += 1 is refused

Strides are part of it too: ``view``, ``contiguous`` and the order in memory of results depend on those of the
whole tensor, which are not those of the block. So a split tensor has them (``_strides``), and torch itself is
asked on the meta device what a function makes of them (``strides_of``).

A change in place may put a block into a graph, if what is written has a gradient. The blocks of its views are
in the graph then, too, and all their split tensors say so (``end_change``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.split.function_nodes import open_port
from distdl_rma.layers.split.tensor import SplitTensor, into_graph, note_change, refused

_MOVED = (
    "it changes what torch has as a view of another tensor, and elements of it were moved here; use the form"
    " that returns a new tensor, without an underscore"
)
# Order of the dimensions in memory, the slowest one first.
_ORDERS: dict[Any, tuple[int, ...]] = {
    torch.channels_last: (0, 2, 3, 1),
    torch.channels_last_3d: (0, 2, 3, 4, 1),
}


def seen_of(
    x: SplitTensor,
    y: torch.Tensor,
    layout: Decomposition,
    strides: tuple[int, ...] | None,
    moved: bool = False,
) -> SplitTensor:
    """Split tensor of a result that is a view of ``x`` in torch, with these ``strides``.

    ``moved`` says that it is a copy here.
    """
    original = None if x._copy_of is None else x._copy_of.block
    found = SplitTensor(y, layout, x._local if moved and original is None else original)
    if strides is not None:
        found._strides = strides
    if not moved:
        found._is_seen = True
        if not x._local.requires_grad:
            # Otherwise a change cannot put it into a graph; and a detached tensor must not keep the graph.
            viewed = found._viewed = x if x._viewed is None else x._viewed
            if viewed._views is None:
                viewed._views = set()
            viewed._views.add(ref(found, viewed._views.discard))
    return found


def in_memory(x: SplitTensor) -> torch.Tensor:
    """A tensor of the meta device with shape, type and strides of the whole tensor."""
    whole = torch.empty(x._layout.shape, dtype=x._local.dtype, device="meta")
    return whole if x._strides is None else whole.as_strided(x._layout.shape, x._strides)


def strides_of(x: SplitTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[int, ...] | None:
    """Strides of a function's result of the whole tensor; None if it fills memory in order.

    For example ``x.t()`` of a (4, 6) tensor has strides (1, 6), on every rank, whatever its block has.
    """
    y = function(in_memory(x))
    return None if y.is_contiguous() else y.stride()


def order_kept(x: SplitTensor) -> tuple[int, ...] | None:
    """As ``strides_of`` a function of elements, whose result keeps the order in memory."""
    return None if x._strides is None else strides_of(x, torch.empty_like)


def fills_memory(x: SplitTensor, memory_format: Any = torch.contiguous_format) -> bool:
    """Whether the block's strides are those of memory without gaps in the order of the whole's dimensions.

    Unlike in torch, extents of 1 count if they are not those of the whole tensor.
    """
    shape, strides, here, expected = x._layout.shape, x._local.stride(), x._local.shape, 1
    for d in reversed(_ORDERS.get(memory_format, range(len(shape)))):
        if shape[d] != 1 and strides[d] != expected:
            return False
        expected *= max(here[d], 1)
    return True


def begin_change(func: Any, x: SplitTensor, why: str = _MOVED) -> None:
    """Begin a change in place; refuse that of a tensor which is a view in torch, but a copy here."""
    if x._copy_of is not None:
        raise refused(func, why)
    note_change(x._local)


def end_change(x: SplitTensor) -> SplitTensor:
    """The same tensor after a change in place, which may put its block into a graph or take it out.

    The tensor of which it is a view, and that tensor's other views, change with it.
    """
    # Torch puts integers into a graph, too, if a comparison writes them; they have no gradient.
    if x._local.requires_grad is x.requires_grad or not (x.is_floating_point() or x.is_complex()):
        return x
    viewed = x if x._viewed is None else x._viewed
    for each in (viewed, *(view() for view in viewed._views or ())):
        if each is not None and each.grad_fn is None:
            each.requires_grad_(each._local.requires_grad)
            # Torch makes the node of a view when it is asked, and refuses some views, then and when they are
            # used. The node is to be older than those of calls that use the view.
            with suppress(RuntimeError):
                _ = each._local.grad_fn
    return x


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's ``Function.apply``, whose function may change split tensors in place (``ctx.mark_dirty``)."""
    given = {id(x): x for x in (*args, *kwargs.values()) if isinstance(x, SplitTensor)}
    if not given or not torch.is_grad_enabled():
        return _APPLY.__get__(None, function)(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        before = [(into_graph(x), open_port(x)) for x in given.values()]
    try:
        return _APPLY.__get__(None, function)(*args, **kwargs)
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            changed = [x for x, node in before if x.grad_fn is not node]
            for x, node in before:
                if node is not None and x.grad_fn is node:
                    x.detach_().requires_grad_()
            for x in changed:
                end_change(into_graph(x, changed=True))


# A class method of Python, and of C since torch 2.14.
_APPLY: Any = vars(torch.autograd.Function)["apply"]
# Torch has no hook for calls of autograd functions, which know nothing of split tensors.
torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
