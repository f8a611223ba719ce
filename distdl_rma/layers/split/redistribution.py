"""Redistribution of split tensors, sums over ranks, and the gradients of both.

The meaning of a gradient is defined here, for the whole package:

- **Split tensor**, cut or **replicated**: every rank holds the gradient of its own block. All ranks compute
  the same loss, and the gradient is that of this loss. Copies hold equal gradients.
- **Plain tensor**, such as a parameter: every rank holds a *contribution*. The gradient is the sum over the
  ranks, which a ``GradientSync`` computes. So one parameter may be used on cut and on replicated tensors. If
  no ``GradientSync`` has a plain tensor, ``plain_operands.py`` sums its gradient where it is used.

A function on blocks keeps the first rule by itself. If ranks use copies beside different blocks,
``to_blocks`` sums the contributions to their gradient. ``all_sum``, a sum over ranks, passes its gradient on
unchanged. If ranks with equal blocks use a plain tensor, only the first of them contributes (``once``)::

    function             forward                         backward all_sum              blocks -> their sum,
    copied     the gradient as it is: copies hold equal ones to_blocks            copies, as they are
    the sum of the contributions, copied once                 a plain tensor, as it is        the gradient on
    one rank of each set of copies, else zeros redistributed        blocks -> other blocks          the way
    back, from one of several copies

Why ``all_sum`` does not sum in its backward, as the adjoint of a sum over ranks would: all ranks compute the
same loss of the sum. The adjoint would count that loss once for each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from distdl_rma.errors import UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.arithmetic import reduction_dtype
from distdl_rma.layers.dtypes import as_numbers, sum_dtype
from distdl_rma.layers.ops.core.autograd import OperatorFunction, as_step, first_derivative
from distdl_rma.layers.ops.core.order import Reduces, reduction_of
from distdl_rma.layers.ops.core.staged import Moves, movement_between
from distdl_rma.layers.ops.core.tensors import as_tensor
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.site import Site, may_move
from distdl_rma.layers.staging import down, up


@as_step
def reduced(
    site: Site, x: torch.Tensor, ranks: Sequence[int], op: str = "sum", what: str = ""
) -> torch.Tensor:
    """Reduction of a local tensor over some ranks, outside of autograd; blocking, equal on all of them."""
    if len(ranks) == 1 or not x.numel():
        return x.detach().clone()
    wide, some, machine = sum_dtype(x.dtype), tuple(ranks), site.machine

    def make() -> Reduces:
        name = f"{site.name} ({what or op})"
        return reduction_of(machine, some, x.numel(), reduction_dtype(wide), op, name)

    sums = site.kept((op, what, some, x.shape, wide), make, some)
    own = x if x.dtype is wide and x.is_cpu else down(x.detach().to(wide))
    # Copied: the next sum but one overwrites the total.
    found = as_tensor(sums(as_numbers(own).reshape(-1)).reshape(x.shape), wide)
    result = found.clone() if x.dtype is wide else found.to(x.dtype)
    return result if x.is_cpu else up(result, x.device)


# Redistributions that the user asked for; all others are done by rules.
BY_USER = "redistribute"


class _AllSum(OperatorFunction):
    # So a loss has second derivatives, as its own gradient is a constant. Those of a function of the loss,
    # such as its square, have terms of two ranks, and are refused.
    hands_on = True

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, site: Site, ranks: Sequence[int]) -> torch.Tensor:
        return reduced(site, x, ranks)

    @staticmethod
    @first_derivative
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None, None


class SummedGradient(OperatorFunction):
    """The gradient of the output is a contribution of each rank, that of the input is the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, site: Site, ranks: Sequence[int], what: str) -> torch.Tensor:
        """The tensor itself; ``what`` distinguishes tensors of one site."""
        ctx.site, ctx.ranks, ctx.machine, ctx.what = site, ranks, site.machine, what
        return x.view_as(x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """The sum over the ranks; blocking."""
        return reduced(ctx.site, gradient, ctx.ranks, what=f"gradient{ctx.what}"), None, None, None


class _Once(OperatorFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: bool) -> torch.Tensor:
        ctx.first = first
        return x.view_as(x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient if ctx.first else torch.zeros_like(gradient), None


def all_sum(site: Site, x: torch.Tensor, layout: Decomposition, grid_dims: Collection[int]) -> torch.Tensor:
    """Sum of a tensor over the ranks along some grid dimensions; differentiable, blocking."""
    ranks = lay.line(layout, grid_dims)
    return x if len(ranks) == 1 else _AllSum.apply(x, site, ranks)


def to_blocks(
    site: Site, x: torch.Tensor, layout: Decomposition, grid_dims: Collection[int], what: str = ""
) -> torch.Tensor:
    """A copy that ranks will use beside different blocks; its backward sums their contributions, blocking.

    ``what`` distinguishes tensors of one site.
    """
    ranks = lay.line(layout, grid_dims)
    return x if len(ranks) == 1 or not x.requires_grad else SummedGradient.apply(x, site, ranks, what)


def once(x: torch.Tensor, result: Decomposition) -> torch.Tensor:
    """A plain tensor for use beside blocks of ``result``: one of the ranks with equal blocks contributes."""
    copied = result.copied_along
    if not copied or not x.requires_grad:
        return x
    index = result.partition.index
    first = index is not None and not any(index[g] for g in copied)
    return _Once.apply(x, first)


class _Move(OperatorFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, redistribution: _Redistribution) -> torch.Tensor:
        ctx.redistribution, ctx.machine = redistribution, redistribution.site.machine
        return redistribution.forward(x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.redistribution.backward(gradient), None


class _Redistribution:
    # Moves a tensor to another layout, and its gradient back. Either is a slice if ranks hold what they need.
    def __init__(
        self, site: Site, source: Decomposition, target: Decomposition, dtype: torch.dtype, what: str
    ) -> None:
        self.site, self.source, self.target, self.dtype, self.what = site, source, target, dtype, what
        self._forward = self._movement(source, target, what)
        self._backward: Moves | None = None

    def _movement(self, source: Decomposition, target: Decomposition, what: str) -> Moves | None:
        if lay.holds(source, target):
            return None
        return movement_between(self.site.call_site, lay.owners(source), target, self.dtype, what)

    @property
    def moves(self) -> bool:
        """Whether the forward exchanges data."""
        return self._forward is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._moved(self._forward, self.source, self.target, x)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._backward is None:
            self._backward = self._movement(self.target, self.source, f"{self.what}, gradient")
        return self._moved(self._backward, self.target, self.source, gradient)

    def _moved(
        self, movement: Moves | None, source: Decomposition, target: Decomposition, x: torch.Tensor
    ) -> torch.Tensor:
        if movement is not None:
            return movement.move(x)
        rank = self.site.machine.rank
        return x[target.box(rank).slices(source.box(rank))].clone()


def redistributed(
    site: Site, x: torch.Tensor, source: Decomposition, target: Decomposition, what: str = BY_USER
) -> torch.Tensor:
    """A rank's block in another layout of the same partition; differentiable, blocking if data moves."""
    if source is target or source == target:
        return x
    key, ranks = (source, target, x.dtype, what), source.partition.ranks
    redistribution = site.kept(key, lambda: _Redistribution(site, source, target, x.dtype, what), ranks)
    if redistribution.moves and what != BY_USER:
        site.moved.add(what)
        if not may_move():
            raise UnsupportedError(
                f"{site.name}: {what} would move from {lay.described(source)} to"
                f" {lay.described(target)}, which fallback='error' forbids; redistribute() it before"
            )
    return _Move.apply(x, redistribution)
