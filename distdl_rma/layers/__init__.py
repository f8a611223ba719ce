"""PyTorch layers whose tensors are split over ranks."""

from distdl_rma.layers.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from distdl_rma.layers.loss import DistributedMSELoss
from distdl_rma.layers.movement import Movement, Repartition
from distdl_rma.layers.norm import (
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
)

__all__ = [
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedInstanceNorm1d",
    "DistributedInstanceNorm2d",
    "DistributedInstanceNorm3d",
    "DistributedMSELoss",
    "Movement",
    "Repartition",
]
