"""PyTorch layers whose tensors are split over ranks."""

from distdl_rma.layers.classification import DistributedCrossEntropyLoss, DistributedNLLLoss
from distdl_rma.layers.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from distdl_rma.layers.loss import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedHuberLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedPoissonNLLLoss,
    DistributedSmoothL1Loss,
)
from distdl_rma.layers.movement import Movement, Repartition
from distdl_rma.layers.norm import (
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
)

__all__ = [
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedCrossEntropyLoss",
    "DistributedHuberLoss",
    "DistributedInstanceNorm1d",
    "DistributedInstanceNorm2d",
    "DistributedInstanceNorm3d",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedMSELoss",
    "DistributedNLLLoss",
    "DistributedPoissonNLLLoss",
    "DistributedSmoothL1Loss",
    "Movement",
    "Repartition",
]
