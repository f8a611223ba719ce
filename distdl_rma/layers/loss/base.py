"""The base of all losses: their arguments, and a call of the operator that sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch

from distdl_rma.errors import ArgumentError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import LayerOptions
from distdl_rma.layers.core.error_exchange import ErrorExchange
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.ops.core.autograd import GradientNeeds, tells_peers, tied
from distdl_rma.ops.core.tensors import trouble_with
from distdl_rma.ops.loss.global_loss import MISFITS, GlobalLoss, LossOptions, LossSums, result_dtype

_LEGACY = ("size_average", "reduce")


class DistributedLoss(DistributedLayer):
    """Loss over all elements of tensors that are split over ranks, evenly or not; base of all losses.

    To add a loss, add a row to ``elementwise``: a class of this one and torch's, whose ``_function`` is
    torch's function, and whose constructor hands on torch's arguments of that, by name. ``_weights`` names
    those that are tensors, ``_reductions`` what is allowed beyond the usual ones. Losses over classes are
    in ``classification``; how the ranks come to one value is in ``distdl_rma.ops.loss``.
    """

    _operation: ClassVar[type[GlobalLoss]] = GlobalLoss
    _function: ClassVar[Callable[..., torch.Tensor]]
    _weights: ClassVar[tuple[str, ...]] = ()
    _reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "none")
    reduction: str

    def __init__(
        self, P_x: Partition, reduction: str, arguments: Mapping[str, Any], **options: Unpack[LayerOptions]
    ) -> None:
        kind, given = type(self).__name__, dict[str, Any](options)
        for key in _LEGACY:
            if given.pop(key, None) is not None:
                raise UnsupportedError(
                    f"{kind}: {key} is not supported; say reduction='mean', 'sum' or 'none'"
                )
        if reduction not in self._reductions:
            raise ArgumentError(f"{kind}: reduction is one of {self._reductions}, got {reduction!r}")
        super().__init__(P_x, **given)
        self.P_x, self.reduction = P_x, reduction
        self._arguments = tuple(key for key in arguments if key not in self._weights)
        for key, value in arguments.items():
            if key in self._arguments:
                setattr(self, key, value)
            else:
                self._check_weight(kind, key, value)
                self.register_buffer(key, value)
        # Torch knows which values are legal, and says so when it is called.
        try:
            type(self)._function(*self._sample(), reduction="sum", **self.options.arguments)
        except MISFITS as error:
            raise ArgumentError(f"{kind}: {error}") from None

    def _check_weight(self, kind: str, key: str, weight: Any) -> None:
        if weight is None:
            return
        if not isinstance(weight, torch.Tensor):
            raise ArgumentError(f"{kind}: {key} is a tensor, got {weight!r}")
        if weight.requires_grad:
            raise UnsupportedError(f"{kind}: {key} requires a gradient, which a loss does not give it")
        if weight.dim() > self.P_x.dim:
            raise ShapeError(
                f"{kind}: {key} of shape {tuple(weight.shape)} has more dimensions than P_x {self.P_x.shape}"
            )

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        # Tensors that torch's function takes.
        x = torch.full((1,), 0.5)
        return x, x

    @property
    def options(self) -> LossOptions:
        """The loss without its tensors."""
        arguments = {key: getattr(self, key) for key in self._arguments}
        return LossOptions(type(self)._function, self.reduction, arguments)

    @property
    def loss_weights(self) -> dict[str, torch.Tensor | None]:
        """The tensors that the loss is called with besides its two, of the global ones."""
        return {key: getattr(self, key) for key in self._weights}

    @cached_property
    def _sums(self) -> LossSums:
        refuse = ErrorExchange(self.machine, self.P_x.ranks, self.name).refuse
        return LossSums(self.site, self.P_x, self.extra_repr(), refuse)

    @cached_property
    def _last(self) -> list[GlobalLoss]:
        return []  # of which a copy of the layer gets one of its own

    @property
    def operation(self) -> GlobalLoss:
        """The loss of shards that nobody has said more of, with the arguments of the moment."""
        options = self.options
        if not self._last or self._last[0].options != options:
            self._last[:] = [self._operation(self.site, self.P_x, options, self._sums)]
        return self._last[0]

    def agree(self, input: torch.Tensor, target: torch.Tensor) -> tuple[GlobalLoss, GradientNeeds]:
        """The operation for local shards, and what any rank needs."""
        return self.operation, GradientNeeds(False, False)

    def output_layout(self) -> Decomposition | None:
        """A number that every rank has; None of the losses of single elements."""
        return None if self.reduction == "none" else Decomposition.replicated(self.P_x, ())

    def extra_repr(self) -> str:
        """One line for ``print(loss)``."""
        shapes = {key: tuple(weight.shape) for key, weight in self.loss_weights.items() if weight is not None}
        words = {"reduction": self.reduction, **self.options.arguments, **shapes, "P_x": self.P_x.shape}
        return ", ".join(f"{key}={value}" for key, value in words.items())

    @tells_peers
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Global loss of the local shards ``input`` and ``target``, which are empty outside of P_x; blocking.

        Returns
        -------
        torch.Tensor
            A number, the same on all ranks of P_x and 0 elsewhere; for ``"none"`` the loss of each local
            element.

        Raises
        ------
        ShapeError
            On every rank of P_x with the same words, if the tensors of one of them do not fit each other
            or the layer, or those of two ranks differ in dtype.
        """
        if not self.P_x.active:
            return self._idle(input, target)
        operation, needs = self.agree(input, target)
        return operation(needs, input, target, **self.loss_weights)

    def _idle(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        problem = trouble_with(input) or trouble_with(target, "target")
        if problem:
            raise ShapeError(f"{self.name!r}: rank {self.machine.rank}: {problem}")
        if input.numel():
            raise ShapeError(
                f"{self.name!r}: rank {self.machine.rank} is not in P_x but passes a tensor of shape"
                f" {tuple(input.shape)}; pass one without elements"
            )
        result = input.clone() if self.reduction == "none" else input.sum()
        # So that a backward reaches what made the target, on this rank too.
        result = tied(result, [target] if target.requires_grad else [])
        return (result.real if result.is_complex() else result).to(result_dtype(input))
