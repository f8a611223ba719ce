"""PyTorch layers whose tensors are split over ranks."""

from distdl_rma.layers.classification import DistributedCrossEntropyLoss, DistributedNLLLoss
from distdl_rma.layers.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from distdl_rma.layers.gather import AllGather, ReduceScatter
from distdl_rma.layers.halo_exchange import HaloExchange
from distdl_rma.layers.linear import (
    DistributedLinear,
    DistributedLinearAllGather,
    DistributedLinearReduceScatter,
)
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
from distdl_rma.layers.movement import Movement
from distdl_rma.layers.norm import (
    DistributedBatchNorm1d,
    DistributedBatchNorm2d,
    DistributedBatchNorm3d,
    DistributedGroupNorm,
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from distdl_rma.layers.reduction import AllSumReduce, Broadcast, SumReduce
from distdl_rma.layers.repartition import DistributedTranspose, Repartition
from distdl_rma.layers.transposed import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from distdl_rma.layers.zero import DistributedLinearAllGatherZero, DistributedLinearReduceScatterZero

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedBatchNorm1d",
    "DistributedBatchNorm2d",
    "DistributedBatchNorm3d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedConvTranspose1d",
    "DistributedConvTranspose2d",
    "DistributedConvTranspose3d",
    "DistributedCrossEntropyLoss",
    "DistributedGroupNorm",
    "DistributedHuberLoss",
    "DistributedInstanceNorm1d",
    "DistributedInstanceNorm2d",
    "DistributedInstanceNorm3d",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedLinearAllGather",
    "DistributedLinearAllGatherZero",
    "DistributedLinearReduceScatter",
    "DistributedLinearReduceScatterZero",
    "DistributedMSELoss",
    "DistributedNLLLoss",
    "DistributedPoissonNLLLoss",
    "DistributedRMSNorm",
    "DistributedSmoothL1Loss",
    "DistributedTranspose",
    "HaloExchange",
    "Movement",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
]
