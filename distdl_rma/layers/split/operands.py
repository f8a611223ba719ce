"""Operands of one function: the layout of its result, and each operand as the ranks need it.

A rule first chooses the layout of the result, then brings each operand to this rank's block of it. Here
``x * scale + bias`` of an image (N, C, H, W), cut in rows over two ranks:

    operand               what a rank needs              how it gets there
    x     (2, 3, 8, 8)    its rows (2, 3, 4, 8)          the block that it has; nothing moves
    scale (1, 1, 8, 1)    its rows (1, 1, 4, 1)          ``as_part``: if it is cut otherwise, it moves
    bias  (1, 3, 1, 1)    all of it                      ``as_part``, whole where its extent is 1
    table, of no place    all of it                      ``as_whole``
    a plain tensor        the same parts of it           ``beside``, then a slice: every rank has all of it

The gradient goes the same way back. An operand that is whole along a grid dimension which cuts the result
meets another block on every rank, and gets a contribution from each: ``to_blocks`` sums these. An operand
that is cut like the result has one owner for each element, and needs no sum.

The decorators at the end of the first half (``of_cut``, ``of_any_cut``, ``composition``) decide what all
rules would otherwise decide each by itself: whether there is anything to distribute at all, which place in
the program this is, and which name an argument has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from itertools import count
from math import prod
from typing import Any

import torch

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Split
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.autograd import GradientNeeds, is_synchronised
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.signatures import mapped, named, tensors_in
from distdl_rma.layers.split.calls.site import Site, site_of
from distdl_rma.layers.split.calls.table import Handler, name_of
from distdl_rma.layers.split.calls.torch_errors import BLOCK_HINT
from distdl_rma.layers.split.plain_operands import beside
from distdl_rma.layers.split.redistribution import BY_USER, redistributed, to_blocks
from distdl_rma.layers.split.tensor import SplitTensor, any_cut, checked_block, composed, refused
from distdl_rma.layers.split.views import begin_change


def common_partition(func: Any, tensors: Sequence[torch.Tensor]) -> Partition:
    """Partition of all split tensors among ``tensors``; ``PartitionError`` if two differ."""
    found: Partition | None = None
    for x in tensors:
        if not isinstance(x, SplitTensor):
            continue
        mine = x._layout.partition
        if found is not None and mine is not found and (mine != found or mine.home is not found.home):
            machines = "" if mine.home is found.home else ", of two machines"
            raise PartitionError(
                f"{name_of(func)}: tensors on different partitions meet{machines}: {found} and {mine}; bring"
                " them to one, by Repartition or by distribute() of both with the same grid"
            )
        found = mine
    if found is None:
        raise PartitionError(f"{name_of(func)}: no split tensor among the arguments")
    return found


def site_for(func: Any, *tensors: Any) -> Site:
    """Site of the current call, on the machine of the first split tensor among ``tensors``."""
    return site_of(next(x for x in tensors if isinstance(x, SplitTensor)).machine, func)


def on_whole_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call any function on all ranks with whole tensors; cut tensors are redistributed before, blocking.

    Exact for every function, since each rank computes what one machine would compute; but each rank needs the
    memory of the whole tensors. Rules use it where blocks cannot help, and for tensors that no rank cuts. A
    function that changes its first argument in place returns that split tensor itself.
    """
    arguments = tensors_in(args, kwargs)
    partition = common_partition(func, arguments)
    cut = [x for x in arguments if isinstance(x, SplitTensor) and x.is_split]
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], SplitTensor):
        if args[0].is_split:
            raise refused(func, "it changes a tensor in place that not every rank has all of")
        begin_change(func, args[0])
    site = site_for(func, *cut) if cut else None
    numbers, everywhere = {id(x): at for at, x in enumerate(cut)}, lay.replicated(partition, ())

    def whole(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, SplitTensor):
            return beside(x, everywhere)
        if site is None or id(x) not in numbers:
            return checked_block(x)
        return everywhere_of(site, x, f"all of operand {numbers[id(x)]}")

    args, kwargs = mapped(whole, args), mapped(whole, kwargs)
    # A function returns the tensors that it changes in place.
    same = {id(x._local): x for x in arguments if isinstance(x, SplitTensor)}
    result = func(*args, **kwargs)

    def split(y: torch.Tensor) -> SplitTensor:
        known = same.get(id(y))
        return SplitTensor(y, lay.replicated(partition, y.shape)) if known is None else known

    return mapped(split, result)


Handled = Callable[..., Any]


def of_cut(
    *, empty: bool = True, uncut: bool = False, plain: str = "", otherwise: Handler = on_whole_tensors
) -> Callable[[Handled], Handler]:
    """Makes a handler of functions whose first tensor is cut; else every rank computes the whole result.

    The decorated function gets the user's call, its site, the tensor, and the other arguments under torch's
    names. ``empty`` and ``uncut`` say whether it takes split tensors without elements, and uncut ones;
    ``otherwise`` handles the rest. ``plain`` is the reason why a plain first
    tensor is refused, if it is.

    Copies take the other way because torch's own function on them is exact, needs no site, and keeps what a
    rule may not have: an output argument, a rare dtype, a second derivative.
    """

    def decorate(handler: Handled) -> Handler:
        @wraps(handler)
        def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0]
            layout = x._layout if isinstance(x, SplitTensor) else None
            takes = layout is not None and (layout.cut_dims or uncut)
            if layout is None or not takes or (not empty and 0 in layout.shape):
                if layout is None and plain:
                    raise refused(func, plain)
                return otherwise(func, args, kwargs)
            return handler((func, args, kwargs), site_of(x.machine, func), x, **named(func, args, kwargs))

        return called

    return decorate


def of_any_cut(handler: Handled) -> Handler:
    """As :func:`of_cut`, if any tensor of the call is cut, not only the first argument."""

    @wraps(handler)
    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any_cut(args, kwargs):
            return on_whole_tensors(func, args, kwargs)
        site = site_for(func, *tensors_in(args, kwargs))
        return handler((func, args, kwargs), site, args[0], **named(func, args, kwargs))

    return called


def composition(function: Handled) -> Handler:
    """Handler of functions that are made of others, which ``function`` calls; it gets torch's arguments.

    Within it the functions of torch use their own rules, so it reads like the definition in torch's
    documentation, and its gradient follows by itself.
    """

    @wraps(function)
    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any_cut(args, kwargs):
            return on_whole_tensors(func, args, kwargs)
        return composed(function, args[0], **named(func, args, kwargs))

    return called


def common_layout(func: Any, operands: Sequence[torch.Tensor]) -> Decomposition:
    """Layout of operands after broadcasting: the cuts of the largest operand, then those of others that fit.

    The largest, since all operands with another layout move, and moving the small ones costs least. The first
    of several operands of one size counts. Where ranks run in order, no part ends behind others.
    """
    # Checked first, since layouts of two machines compare equal.
    partition = common_partition(func, operands)
    known = tuple([x._layout if isinstance(x, SplitTensor) else x.shape for x in operands])

    def make() -> Decomposition:
        split = [x for x in known if isinstance(x, Decomposition)]
        shapes = [x.shape if isinstance(x, Decomposition) else tuple(x) for x in known]
        try:
            shape = torch.broadcast_shapes(*shapes)
        except RuntimeError:
            raise ShapeError(
                f"{name_of(func)}: shapes {' and '.join(map(str, shapes))} do not go together. {BLOCK_HINT}"
            ) from None
        places = [range(len(shape) - len(found.shape), len(shape)) for found in split]
        return lay.ending_first(cut_by_largest(partition, shape, split, places), split)

    return lay.kept(partition, "common", known, make)


def cut_by_largest(
    partition: Partition,
    shape: Sequence[int],
    operands: Sequence[Decomposition],
    places: Sequence[Sequence[Any]],
    never: Collection[int | None] = (),
) -> Decomposition:
    """Layout of a tensor of which each operand has some dimensions, which lie at its ``places``.

    It has the cuts of the largest operand, then those of others that fit, but none of dimensions ``never``.
    Broadcasting and contractions both come here: ``places`` are the last dimensions for the one, the labels
    of an operand among all labels for the other.
    """
    splits: list[Split] = [Balanced(n, 1) for n in shape]
    axes: list[int | None] = [None] * partition.dim
    for found, its in sorted(zip(operands, places, strict=True), key=lambda each: -prod(each[0].shape)):
        for g, axis in enumerate(found.axes):
            if axis is None or axes[g] is not None or its[axis] in never:
                continue
            at = its[axis]
            if splits[at].parts == 1 and found.shape[axis] == shape[at]:
                axes[g], splits[at] = at, found.splits[axis]
    return lay.layout(partition, splits, tuple(axes))


def part_at(shape: Sequence[int], places: Sequence[int], result: Decomposition) -> Decomposition:
    """Layout of an operand with dimensions at ``places`` of a result: cut alike where extents agree."""
    cut = [n == result.shape[at] for n, at in zip(shape, places, strict=True)]
    splits = [result.splits[at] if c else Balanced(n, 1) for n, at, c in zip(shape, places, cut, strict=True)]
    own = [None if axis is None or axis not in places else places.index(axis) for axis in result.axes]
    return lay.layout(result.partition, splits, tuple(d if d is not None and cut[d] else None for d in own))


def part_for(shape: Sequence[int], result: Decomposition) -> Decomposition:
    """Layout of an operand that broadcasts to a result: cut like the result, whole where it has extent 1."""
    shape = tuple(shape)
    if shape == result.shape:
        return result
    places, key = range(len(result.shape) - len(shape), len(result.shape)), (shape, result)
    return lay.kept(result.partition, "part", key, lambda: part_at(shape, places, result))


def as_part(
    site: Site, x: torch.Tensor, part: Decomposition, result: Decomposition, at: int = 0
) -> torch.Tensor:
    """An operand's part for this rank's block of the result, with layout ``part``; differentiable, may block.

    ``at`` distinguishes the operands of one site: each has a movement of its own, which reports name.
    """
    if not isinstance(x, SplitTensor):
        x = beside(x, result)
        return x[lay.kept(part.partition, "slices", part, part.slices)] if part.cut_dims else x
    local = redistributed(site, checked_block(x), x._layout, part, f"operand {at}")
    # Along these grid dimensions, ranks use copies beside different blocks.
    grid_dims = tuple(
        g
        for g, (mine, its) in enumerate(zip(part.axes, result.axes, strict=True))
        if mine is None and its is not None
    )
    return to_blocks(site, local, part, grid_dims, f" of operand {at}") if grid_dims else local


def block_of(x: Any) -> Any:
    """The block of a split tensor; any other object unchanged."""
    return checked_block(x) if isinstance(x, SplitTensor) else x


def as_blocks(site: Site, arguments: Any, result: Decomposition, at: int = 0) -> Any:
    """Arguments of a call; every tensor among them broadcasts to the result and is cut like it."""
    numbers = count(at)
    return mapped(lambda x: as_part(site, x, part_for(x.shape, result), result, next(numbers)), arguments)


def everywhere_of(site: Site, x: SplitTensor, what: str = BY_USER) -> torch.Tensor:
    """All of a split tensor on every rank, which all use in the same way; differentiable, may block."""
    target = lay.replicated(x._layout.partition, x._layout.shape)
    return redistributed(site, checked_block(x), x._layout, target, what)


def as_whole(site: Site, x: torch.Tensor, result: Decomposition, what: str) -> torch.Tensor:
    """A whole operand on every rank, for use beside blocks of a result; differentiable, may block."""
    if not isinstance(x, SplitTensor):
        return beside(x, result)
    cut = tuple(g for g, axis in enumerate(result.axes) if axis is not None)
    return to_blocks(site, everywhere_of(site, x, what), result, cut, f" of {what}")


def wholes(
    site: Site, tensors: Sequence[torch.Tensor | None], result: Decomposition, names: Sequence[str]
) -> list[torch.Tensor | None]:
    """``as_whole`` of each operand that is not None."""
    found = list(tensors)
    for at, x in enumerate(tensors):
        if x is None or (is_synchronised(x) and not result.copied_along):
            # Most parameters of a distributed model need nothing.
            continue
        found[at] = as_whole(site, x, result, names[at])
    return found


def needs_of(x: torch.Tensor, *weights: torch.Tensor | None) -> GradientNeeds:
    """Which gradients a call needs; equal on all ranks, whose tensors are blocks of the same ones."""
    records = torch.is_grad_enabled()
    of_weights = any(w is not None and w.requires_grad for w in weights)
    return GradientNeeds(records and x.requires_grad, records and of_weights)
