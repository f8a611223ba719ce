"""Losses with a term per element, of two tensors of one shape. To add one, see :class:`DistributedLoss`.

A class is a row: torch's class gives the arguments, their checks and the state, and ``_function`` is what
torch's forward calls with these. It is named here because the forward of torch's class would reduce as the
user asked, to a mean of this rank's shard, while a rank needs the sum of its terms.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.layers.partitioned.loss.base import DistributedLoss


class DistributedL1Loss(DistributedLoss, nn.L1Loss):
    """Mean absolute error: ``torch.nn.L1Loss`` of the global tensors.

    Input and target have the same local shape and dtype; their shards need not form a grid. Every rank of P_x
    receives the value of the sequential loss. The backward computes on each rank the gradient of its own
    elements, which is its part of the sequential gradient: do not scale it by the number of ranks. Ranks
    outside of P_x pass tensors without elements and receive 0.

    Parameters
    ----------
    P_x
        Partition of input and target, with as many dimensions as these.
    reduction
        ``"mean"`` or ``"sum"`` over all elements of all ranks, or ``"none"``: the local elements.

    Raises
    ------
    ShapeError
        In a call, on every rank of P_x with the same text, if input and target differ in shape or dtype on
        one of them, or do not have the dimensions of P_x, or two ranks differ in dtype.
    UnsupportedError
        If torch's old ``size_average`` or ``reduce`` is given.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/losses.md``.
    """

    _function = staticmethod(F.l1_loss)


class DistributedMSELoss(DistributedLoss, nn.MSELoss):
    """Mean squared error: ``torch.nn.MSELoss``; otherwise as :class:`DistributedL1Loss`."""

    _function = staticmethod(F.mse_loss)


class DistributedSmoothL1Loss(DistributedLoss, nn.SmoothL1Loss):
    """Squared below ``beta``, absolute above: ``torch.nn.SmoothL1Loss``; as :class:`DistributedL1Loss`."""

    _function = staticmethod(F.smooth_l1_loss)


class DistributedHuberLoss(DistributedLoss, nn.HuberLoss):
    """Squared below ``delta``, linear above: ``torch.nn.HuberLoss``; as :class:`DistributedL1Loss`."""

    _function = staticmethod(F.huber_loss)


class DistributedBCELoss(DistributedLoss, nn.BCELoss):
    """Binary cross entropy of probabilities: ``torch.nn.BCELoss``; otherwise as :class:`DistributedL1Loss`.

    Parameters
    ----------
    weight
        As in torch, for the **global** tensors and in their dtype. It is right-aligned with them, and has
        their extent or 1 in each dimension. Each rank uses its part. Where its extent is not 1 the shards
        must be balanced; otherwise a call raises ``ShapeError`` on every rank of P_x.
    """

    _function = staticmethod(F.binary_cross_entropy)


class DistributedBCEWithLogitsLoss(DistributedLoss, nn.BCEWithLogitsLoss):
    """Binary cross entropy of logits: ``torch.nn.BCEWithLogitsLoss``; as :class:`DistributedBCELoss`.

    ``pos_weight``, the weight of positive targets, is global and cut like ``weight``.
    """

    _function = staticmethod(F.binary_cross_entropy_with_logits)


class DistributedKLDivLoss(DistributedLoss, nn.KLDivLoss):
    """Kullback-Leibler divergence: ``torch.nn.KLDivLoss``; otherwise as :class:`DistributedL1Loss`.

    Parameters
    ----------
    reduction
        ``"batchmean"`` too: the sum over all elements, divided by the global extent of dimension 0. Ranks
        that share a batch block must then have the same batch size; otherwise a call raises ``ShapeError``
        on every rank of P_x.
    """

    _function = staticmethod(F.kl_div)
    _reductions = ("mean", "sum", "none", "batchmean")


class DistributedPoissonNLLLoss(DistributedLoss, nn.PoissonNLLLoss):
    """Negative log likelihood of counts: ``torch.nn.PoissonNLLLoss``; as :class:`DistributedL1Loss`."""

    _function = staticmethod(F.poisson_nll_loss)

    def forward(self, log_input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Global loss of the local shards; the first argument has torch's name."""
        return super().forward(log_input, target)
