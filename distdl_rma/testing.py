"""Checks for tests of one's own functions and layers: against whole tensors, and the adjoint identity.

The tests of this package use them on 1 to 4 ranks. All functions are collective: every rank of the partition
calls them with the same arguments, and an error of one comparison is raised on the ranks that see it.

The two checks find different faults. A comparison with whole tensors finds wrong numbers, for the inputs that
it was given. The adjoint identity finds a backward that is not that of the forward, for any linear function,
and needs no whole tensor to compare with: so it also tests what has no counterpart on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from distdl_rma.errors import ArgumentError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.autograd import mark_summed_later
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.signatures import tensors_in
from distdl_rma.layers.split.tensor import SplitTensor
from distdl_rma.segments.machine import Machine

__all__ = ["assert_adjoint", "assert_equals_whole", "block", "grids"]

# Numbers that are summed over the ranks at a time.
_COUNT = 1 << 10


def grids(dims: int, size: int) -> Iterator[tuple[int, ...]]:
    """Grids of ``size`` ranks for tensors of ``dims`` dimensions: one dimension is cut at a time.

    On four ranks two neighbouring ones are, 2 x 2.

    Examples
    --------
    >>> list(grids(2, 3)), list(grids(3, 4))
    ([(3, 1), (1, 3)], [(2, 2, 1), (1, 2, 2), (2, 1, 2)])
    """
    wide = size == 4 and dims > 1
    cuts = [{d: 2, (d + 1) % dims: 2} if wide else {d: size} for d in range(dims)]
    yield from dict.fromkeys(tuple(cut.get(at, 1) for at in range(dims)) for cut in cuts)


def assert_equals_whole(
    P_world: Partition,
    function: Callable[..., Any],
    split: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor] = (),
    *,
    only: Sequence[tuple[int, ...]] | None = None,
    atol: float = 1e-10,
    rtol: float = 1e-10,
    gradients: bool = True,
) -> None:
    """A function of split tensors gives what it gives of whole ones, with all gradients; collective.

    Parameters
    ----------
    P_world
        The ranks; the function is called once for each grid of them.
    function
        What is tested: a rule of one's own, a module in a distributed model, any program. Its results are
        tensors, other values, or lists and tuples of these.
    split
        Whole tensors, equal on all ranks, of one number of dimensions. Each rank passes its balanced block as
        a split tensor, which needs a gradient where the whole one does.
    plain
        Tensors that are passed as they are, such as weights; their gradients are summed over the ranks.
    only
        Grids in place of those of :func:`grids`.
    atol, rtol
        Of ``torch.testing.assert_close``; NaN equals NaN. Shapes and dtypes have to be equal.
    gradients
        Whether gradients of all results are compared, for random gradients of the results.

    Raises
    ------
    AssertionError
        If something differs; a note names the grid.
    ArgumentError
        If there is no grid.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    >>> assert_equals_whole(P_world, lambda x: x.softmax(1) @ x.T, [x])
    """
    shapes = [*(grids(split[0].dim(), P_world.size) if only is None else only)]
    if not shapes:
        raise ArgumentError("assert_equals_whole: there is no grid to compare on: a tensor of no dimensions?")
    for shape in shapes:
        P_x = P_world.create_cartesian_topology_partition(shape)
        given = [_leaf(x, x) for x in (*split, *plain)]
        cut = [block(P_x, x) for x in split]
        beside = [_leaf(x, x) for x in plain]
        for x in beside:
            # As parameters of a model, of which every rank has a contribution.
            mark_summed_later(x, True)
        try:
            # torch.manual_seed keeps the stack of each call for devices that are not there: 0.5 ms.
            torch.default_generator.manual_seed(3)
            expected = function(*given)
            torch.default_generator.manual_seed(3)
            found = function(*cut, *beside)
            _assert_same(found, expected, atol, rtol)
            if gradients:
                _backward(expected, found)
                for one, other in zip(cut, given[: len(split)], strict=True):
                    _assert_same(one.grad, other.grad, atol, rtol)
                for x, other in zip(beside, given[len(split) :], strict=True):
                    if other.grad is not None:
                        total = _sum(P_world, torch.zeros_like(other) if x.grad is None else x.grad)
                        _assert_same(total, other.grad, atol, rtol)
        except BaseException as error:
            error.add_note(f"on a grid {shape}")
            raise


def assert_adjoint(
    P_world: Partition,
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    *,
    rtol: float = 1e-10,
) -> None:
    """The backward of a linear function is its adjoint, <f(x), y> = <x, f*(y)>; collective.

    Parameters
    ----------
    P_world
        The ranks that call this, with parts of one input.
    function
        A linear function of this rank's part, such as a layer that moves data.
    x
        This rank's part, real; parts of other ranks may have other shapes, or be empty.
    rtol
        Relative to the product of the norms; float32 needs a larger one.

    Raises
    ------
    AssertionError
        If the two products differ, on all ranks.

    Examples
    --------
    >>> from distdl_rma.layers import Repartition
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, 2, 1))
    >>> move = Repartition(P_x, P_world.create_cartesian_topology_partition((1, 1, 1, 2)))
    >>> assert_adjoint(P_world, move, torch.randn(1, 3, 4, 6, dtype=torch.float64))
    """
    x = x.detach().clone().requires_grad_()
    found = function(x)
    y = torch.randn_like(found)
    back = torch.zeros_like(x) if not found.requires_grad else torch.autograd.grad(found, x, y)[0]
    pairs = (found, y), (x, back), (found, found), (y, y), (x, x), (back, back)
    products = torch.stack([(a.detach() * b.detach()).sum().double() for a, b in pairs])
    there, here, *norms = _sum(P_world, products).tolist()
    scale = max(norms[0] * norms[1], norms[2] * norms[3]) ** 0.5
    if not abs(there - here) <= rtol * scale:
        raise AssertionError(f"<f(x), y> is {there}, <x, f*(y)> is {here}, of all ranks together")


def block(P_x: Partition, whole: torch.Tensor) -> SplitTensor:
    """Split tensor of a whole one, a leaf that needs a gradient if that one does; local.

    Its block is the balanced one of this rank, in new memory.

    Examples
    --------
    >>> P_x = MPIPartition(MPI.COMM_WORLD).create_cartesian_topology_partition((2, 1))
    >>> block(P_x, torch.arange(6.0).view(3, 2)).to_local()
    tensor([[0., 1.],
            [2., 3.]])
    """
    layout = lay.balanced(P_x, whole.shape)
    return SplitTensor(_leaf(whole.detach()[layout.slices()], whole), layout)


def _leaf(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.detach().clone().requires_grad_(like.requires_grad)


def _sum(P_world: Partition, x: torch.Tensor) -> torch.Tensor:
    # Sum over the ranks, in pieces of one allreduce that is kept: tests would use up the segment with one for
    # each size of tensor.
    machine = Machine.of(P_world)
    key = f"testing of {P_world.ranks}"
    if key not in machine.kept:
        machine.kept[key] = machine.group(P_world.ranks, "testing").allreduce(
            _COUNT, "float64", name="testing"
        )
    numbers = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).detach().double().flatten()
    total = numbers.new_zeros(-(-len(numbers) // _COUNT) * _COUNT)
    total[: len(numbers)] = numbers
    for piece in total.split(_COUNT) if len(total) else ():
        piece.copy_(torch.as_tensor(machine.kept[key](piece.numpy())))
    summed = total[: len(numbers)]
    summed = torch.view_as_complex(summed.view(-1, 2)) if x.is_complex() else summed
    return summed.view(x.shape).to(x.dtype)


def _assert_same(found: Any, expected: Any, atol: float, rtol: float) -> None:
    if isinstance(expected, torch.Tensor):
        whole = found.full_tensor() if isinstance(found, SplitTensor) else found
        if not isinstance(whole, torch.Tensor):
            raise AssertionError(f"{found} is no tensor")
        torch.testing.assert_close(whole.detach(), expected.detach(), atol=atol, rtol=rtol, equal_nan=True)
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            raise AssertionError(f"{len(found)} results, not {len(expected)}")
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other, atol, rtol)
    elif found != expected:
        raise AssertionError(f"{found} is not {expected}")


def _backward(expected: Any, found: Any) -> None:
    # The same random gradient for a result of whole tensors and for that of split ones, on all ranks.
    ends = [(e, f) for e, f in zip(tensors_in(expected), tensors_in(found), strict=True) if e.requires_grad]
    for at, (e, f) in enumerate(ends):
        torch.default_generator.manual_seed(at)
        if not f.requires_grad:
            raise AssertionError("a result needs a gradient if tensors are whole, and none if they are split")
        gradient = torch.randn(e.shape, dtype=e.dtype)
        e.backward(gradient, retain_graph=True)
        f.backward(gradient, retain_graph=True)
