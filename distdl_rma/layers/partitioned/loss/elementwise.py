"""Losses with a term per element, of two tensors of one shape. To add one, see :class:`DistributedLoss`.

A class is a row: torch's class gives the arguments, their checks and the state, and ``_function`` is what
torch's forward calls with these, here on split tensors.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.layers.partitioned.loss.base import DistributedLoss


class DistributedL1Loss(DistributedLoss, nn.L1Loss):
    """Mean absolute error: ``torch.nn.L1Loss`` of the global tensors.

    Input and target have the same local shape, and their shards form a grid. Every rank of P_x
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
        In a call, on every rank of P_x with the same text, if input and target differ in shape on one of
        them, or do not have the dimensions of P_x, or two ranks differ in dtype, or the shards form no grid.
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
        As in torch, for the **global** tensors. It is right-aligned with them, and has their extent or 1 in
        each dimension. Each rank uses its part.
    """

    _function = staticmethod(F.binary_cross_entropy)

    def _value_problem(self, input: torch.Tensor, target: torch.Tensor) -> str:
        for what, x in (("input", input), ("target", target)):
            if x.numel() and x.is_floating_point():
                low, high = x.detach().aminmax()
                if not (low >= 0 and high <= 1):
                    return f"all elements of {what} should be between 0 and 1"
        return ""


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
        ``"batchmean"`` too: the sum over all elements, divided by the global extent of dimension 0.
        ``"mean"`` warns as torch does.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> loss, x = DistributedKLDivLoss(P_x, "batchmean"), torch.zeros(2, 1, 4, 8)  # this rank's four rows
    >>> loss(x, x.exp()).item()
    0.0
    """

    _function = staticmethod(F.kl_div)
    _reductions = ("mean", "sum", "none", "batchmean")


class DistributedPoissonNLLLoss(DistributedLoss, nn.PoissonNLLLoss):
    """Negative log likelihood of counts: ``torch.nn.PoissonNLLLoss``; as :class:`DistributedL1Loss`."""

    _function = staticmethod(F.poisson_nll_loss)

    def forward(  # type: ignore[override]
        self, log_input: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Global loss of the local shards; the first argument has torch's name."""
        return super().forward(log_input, target)
