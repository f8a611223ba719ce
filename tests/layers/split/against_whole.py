"""A function of split tensors, and of plain ones beside them, against the same function of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distdl_rma import Partition
from distdl_rma.layers.ops.core.autograd import mark_summed_later
from distdl_rma.layers.split import SplitTensor
from distdl_rma.layers.split import layout as lay


def grids(dims: int, size: int) -> Iterator[tuple[int, ...]]:
    """Grids of so many ranks that cut each dimension alone, or of four ranks each with the next one."""
    if size == 4 and dims > 1:
        for d in range(dims):
            yield tuple(2 if at in (d, (d + 1) % dims) else 1 for at in range(dims))
        return
    for d in range(dims):
        yield tuple(size if at == d else 1 for at in range(dims))


def block(P_x: Partition, whole: torch.Tensor) -> SplitTensor:
    """Split tensor of a whole one, a leaf that needs a gradient if that one does."""
    layout = lay.balanced(P_x, whole.shape)
    local = whole.detach()[layout.slices()].clone().requires_grad_(whole.requires_grad)
    return SplitTensor(local, layout)


def cut_along(P_world: Partition, dim: int, whole: torch.Tensor) -> SplitTensor:
    """Split tensor of a whole one, which all ranks cut in one dimension."""
    grid = (P_world.size if d == dim else 1 for d in range(whole.dim()))
    return block(P_world.create_cartesian_topology_partition(tuple(grid)), whole)


def whole(y: Any) -> Any:
    """All of a split tensor; anything else as it is."""
    return y.full_tensor() if isinstance(y, SplitTensor) else y


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random numbers that need a gradient."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def called(function: Callable[..., Any], *others: Any, **options: Any) -> Callable[..., Any]:
    """The function of a tensor alone, with these arguments behind it."""
    return lambda x: function(x, *others, **options)


def forms(table: Mapping[str, Sequence[Any]], **options: Any) -> Callable[..., None]:
    """Test that checks each form of a table: a function, its split operands, and plain ones beside them.

    An operand is a tensor, a function that draws one, or the shape of random numbers that need a gradient.
    """

    def drawn(given: Any) -> torch.Tensor:
        made = numbers(*given) if isinstance(given, tuple) else given
        return made if isinstance(made, torch.Tensor) else made()

    @pytest.mark.sizes(1, 2, 3, 4)
    @pytest.mark.parametrize("name", table)
    def test(P_world: Partition, name: str) -> None:
        function, *operands = table[name]
        check(P_world, function, *([drawn(each) for each in some] for some in operands), **options)

    return test


def check(
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
    """Call ``function(*split, *plain)`` on split and whole tensors: results and all gradients are equal.

    On every grid for the dimensions of the first tensor, which all of ``split`` have; those of ``plain`` are
    used as they are, and their gradients are sums over the ranks.
    """
    for shape in only or grids(split[0].dim(), P_world.size):
        P_x = P_world.create_cartesian_topology_partition(shape)
        given = [x.detach().clone().requires_grad_(x.requires_grad) for x in (*split, *plain)]
        cut = [block(P_x, x) for x in split]
        beside = [x.detach().clone().requires_grad_(x.requires_grad) for x in plain]
        for x in beside:
            # As parameters of a model, of which every rank has a contribution.
            mark_summed_later(x, True)
        try:
            # torch.manual_seed keeps the stack of each call for devices that are not there: 0.5 ms.
            torch.default_generator.manual_seed(3)
            expected = function(*given)
            torch.default_generator.manual_seed(3)
            found = function(*cut, *beside)
            _same(found, expected, atol, rtol)
            if gradients:
                _backward(expected, found)
                for one, other in zip(cut, given[: len(split)], strict=True):
                    _same(one.grad, other.grad, atol, rtol)
                for one, other in zip(beside, given[len(split) :], strict=True):
                    if other.grad is not None:
                        total = (torch.zeros_like(other) if one.grad is None else one.grad).detach()
                        total = total.clone(memory_format=torch.contiguous_format)
                        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total.numpy())
                        _close(total, other.grad, atol, rtol)
        except BaseException as error:
            error.add_note(f"on a grid {shape}")
            raise


def _tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [x for each in found for x in _tensors(each)]


def _same(found: Any, expected: Any, atol: float, rtol: float) -> None:
    if not isinstance(expected, (torch.Tensor, list, tuple)):
        assert found == expected
        return
    for one, other in zip(_tensors(found), _tensors(expected), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        _close(whole(one).detach(), other.detach(), atol, rtol)


def _close(found: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, equal_nan=True)


def _backward(expected: Any, found: Any) -> None:
    ends = [(e, f) for e, f in zip(_tensors(expected), _tensors(found), strict=True) if e.requires_grad]
    for at, (e, f) in enumerate(ends):
        torch.default_generator.manual_seed(at)
        gradient = torch.randn(e.shape, dtype=e.dtype)
        e.backward(gradient, retain_graph=True)
        f.backward(gradient, retain_graph=True)
