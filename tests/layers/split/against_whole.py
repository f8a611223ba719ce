"""A function of split tensors, and of plain ones beside them, against the same function of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from distdl_rma import Partition
from distdl_rma.layers.split import SplitTensor
from distdl_rma.testing import assert_equals_whole, block, grids

check = assert_equals_whole


def cut_along(P_world: Partition, dim: int, whole: torch.Tensor) -> SplitTensor:
    """Split tensor of a whole one, which all ranks cut in one dimension."""
    grid = (P_world.size if d == dim else 1 for d in range(whole.dim()))
    return block(P_world.create_cartesian_topology_partition(tuple(grid)), whole)


def on_grids(P_world: Partition, whole: torch.Tensor) -> Iterator[SplitTensor]:
    """Split tensors of a whole one, on each grid of all ranks."""
    for grid in grids(whole.dim(), P_world.size):
        yield block(P_world.create_cartesian_topology_partition(grid), whole)


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
