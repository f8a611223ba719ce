"""Tensors that share memory in torch: views of blocks, or copies if elements moved; changes in place."""

from __future__ import annotations

from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.split.tensor import SplitTensor, note_change, refused

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
    x: SplitTensor, y: torch.Tensor, layout: Decomposition, moved: bool = False, strided: bool = False
) -> SplitTensor:
    """Split tensor of a result that is a view of ``x`` in torch.

    ``moved`` says that it is a copy here. ``strided`` says that the view of the whole tensor does not fill
    its memory in the order of its dimensions, which the strides of blocks may not show.
    """
    original = None if x._copy_of is None else x._copy_of.block
    found = SplitTensor(y, layout, x._local if moved and original is None else original)
    if strided:
        found._strided = True
    elif x._strided is not False:
        found._strided = None
    if not moved:
        found._is_seen = True
        if not x._local.requires_grad:
            # Otherwise a change cannot put it into a graph; and a detached tensor must not keep the graph.
            found._viewed = x
    return found


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

    The tensors of which it is a view change with it.
    """
    viewed: SplitTensor | None = x
    while viewed is not None:
        needs = viewed._local.requires_grad
        # Torch puts integers into a graph, too, if a comparison writes them; they have no gradient.
        if (
            needs is not viewed.requires_grad
            and viewed.grad_fn is None
            and (viewed.is_floating_point() or viewed.is_complex())
        ):
            viewed.requires_grad_(needs)
        viewed = viewed._viewed
    return x
