"""Losses with a global mean, element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.loss.base import DistributedLoss


class DistributedL1Loss(DistributedLoss):
    """Mean absolute error: ``torch.nn.L1Loss`` of the global tensors.

    Input and target have the same local shape and dtype, on a partition of as many dimensions; shards may
    have any size. Every rank of P_x gets the same value, that of the sequential loss. The backward gives
    each rank the gradient of its own elements, so that the sum over ranks is the sequential gradient and
    no scaling by hand is needed. Ranks outside of P_x pass tensors without elements and get 0. Collective
    to construct over the machine; a call involves the ranks of P_x.

    Parameters
    ----------
    P_x
        Partition of input and target.
    reduction
        ``"mean"`` or ``"sum"`` over all elements of all ranks, or ``"none"``: the local elements.
    name
        For messages.

    Raises
    ------
    ShapeError
        If an argument is illegal. In a call, on every rank of P_x, if input and target differ in shape or
        dtype on one of them, or do not have the dimensions of P_x, or two ranks differ in dtype.
    UnsupportedError
        If ``size_average`` or ``reduce`` is given.

    Notes
    -----
    Requirement B11.
    """

    _function = staticmethod(F.l1_loss)

    def __init__(
        self, P_x: Partition, reduction: str = "mean", *, name: str | None = None, **legacy: Any
    ) -> None:
        super().__init__(P_x, reduction, name, legacy)


class DistributedMSELoss(DistributedLoss):
    """Mean squared error: ``torch.nn.MSELoss`` of the global tensors.

    Shapes, arguments and errors are those of ``DistributedL1Loss``.
    """

    _function = staticmethod(F.mse_loss)

    def __init__(
        self, P_x: Partition, reduction: str = "mean", *, name: str | None = None, **legacy: Any
    ) -> None:
        super().__init__(P_x, reduction, name, legacy)


class DistributedSmoothL1Loss(DistributedLoss):
    """Squared below ``beta``, absolute above: ``torch.nn.SmoothL1Loss`` of the global tensors.

    Shapes, arguments and errors are those of ``DistributedL1Loss``; ``beta`` is as in torch.
    """

    _function = staticmethod(F.smooth_l1_loss)
    _options = ("beta",)

    def __init__(
        self,
        P_x: Partition,
        reduction: str = "mean",
        beta: float = 1.0,
        *,
        name: str | None = None,
        **legacy: Any,
    ) -> None:
        super().__init__(P_x, reduction, name, legacy, beta=beta)


class DistributedHuberLoss(DistributedLoss):
    """Squared below ``delta``, linear above: ``torch.nn.HuberLoss`` of the global tensors.

    Shapes, arguments and errors are those of ``DistributedL1Loss``; ``delta`` is as in torch.
    """

    _function = staticmethod(F.huber_loss)
    _options = ("delta",)

    def __init__(
        self,
        P_x: Partition,
        reduction: str = "mean",
        delta: float = 1.0,
        *,
        name: str | None = None,
        **legacy: Any,
    ) -> None:
        super().__init__(P_x, reduction, name, legacy, delta=delta)


class DistributedBCELoss(DistributedLoss):
    """Binary cross entropy of probabilities: ``torch.nn.BCELoss`` of the global tensors.

    Shapes, arguments and errors are those of ``DistributedL1Loss``, and:

    Parameters
    ----------
    weight
        As in torch, for the **global** tensors, in their dtype: it is right-aligned with them, and of
        their extent or 1 in each dimension. Each rank takes its part. Where it is cut the shards must be
        balanced; a call raises ``ShapeError`` on every rank of P_x if they are not.
    """

    _function = staticmethod(F.binary_cross_entropy)
    _weights = ("weight",)

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        *,
        reduction: str = "mean",
        name: str | None = None,
        **legacy: Any,
    ) -> None:
        super().__init__(P_x, reduction, name, legacy, weight=weight)


class DistributedBCEWithLogitsLoss(DistributedLoss):
    """Binary cross entropy of logits: ``torch.nn.BCEWithLogitsLoss`` of the global tensors.

    Shapes, arguments and errors are those of ``DistributedBCELoss``; ``pos_weight``, the weight of
    positive targets, is given and cut like ``weight``.
    """

    _function = staticmethod(F.binary_cross_entropy_with_logits)
    _weights = ("weight", "pos_weight")

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        *,
        reduction: str = "mean",
        pos_weight: torch.Tensor | None = None,
        name: str | None = None,
        **legacy: Any,
    ) -> None:
        super().__init__(P_x, reduction, name, legacy, weight=weight, pos_weight=pos_weight)


class DistributedKLDivLoss(DistributedLoss):
    """Kullback-Leibler divergence: ``torch.nn.KLDivLoss`` of the global tensors.

    Shapes, arguments and errors are those of ``DistributedL1Loss``, and:

    Parameters
    ----------
    reduction
        ``"batchmean"`` too: the sum over everything, divided by the global extent of dimension 0. The
        ranks that share a batch block must then have the same batch size, or a call raises ``ShapeError``
        on every rank of P_x.
    log_target
        As in torch.
    """

    _function = staticmethod(F.kl_div)
    _options = ("log_target",)
    _reductions = ("mean", "sum", "none", "batchmean")

    def __init__(
        self,
        P_x: Partition,
        reduction: str = "mean",
        log_target: bool = False,
        *,
        name: str | None = None,
        **legacy: Any,
    ) -> None:
        super().__init__(P_x, reduction, name, legacy, log_target=log_target)


class DistributedPoissonNLLLoss(DistributedLoss):
    """Negative log likelihood of Poisson counts: ``torch.nn.PoissonNLLLoss`` of the global tensors.

    Shapes, arguments and errors are those of ``DistributedL1Loss``; ``log_input``, ``full`` and ``eps``
    are as in torch. Targets have the dtype of the input.
    """

    _function = staticmethod(F.poisson_nll_loss)
    _options = ("log_input", "full", "eps")

    def __init__(
        self,
        P_x: Partition,
        log_input: bool = True,
        full: bool = False,
        *,
        eps: float = 1e-8,
        reduction: str = "mean",
        name: str | None = None,
        **legacy: Any,
    ) -> None:
        super().__init__(P_x, reduction, name, legacy, log_input=log_input, full=full, eps=eps)

    def forward(self, log_input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Global loss of the local shards, by torch's name of the first one."""
        return super().forward(log_input, target)
