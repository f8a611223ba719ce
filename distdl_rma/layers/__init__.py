"""PyTorch layers whose tensors are split over ranks."""

from distdl_rma.layers.conv.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from distdl_rma.layers.conv.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from distdl_rma.layers.embedding import (
    DistributedEmbedding,
)
from distdl_rma.layers.from_global import Concat, Conv, InstanceNorm
from distdl_rma.layers.linear.linear import (
    DistributedLinear,
    DistributedLinearAllGather,
    DistributedLinearAllGatherZero,
    DistributedLinearReduceScatter,
    DistributedLinearReduceScatterZero,
)
from distdl_rma.layers.loss.classification import DistributedCrossEntropyLoss, DistributedNLLLoss
from distdl_rma.layers.loss.elementwise import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedHuberLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedPoissonNLLLoss,
    DistributedSmoothL1Loss,
)
from distdl_rma.layers.moves.broadcast_reduce import AllSumReduce, Broadcast, SumReduce
from distdl_rma.layers.moves.concat import DistributedConcat
from distdl_rma.layers.moves.gather_scatter import AllGather, ReduceScatter
from distdl_rma.layers.moves.halo_exchange import HaloExchange
from distdl_rma.layers.moves.repartition import DistributedTranspose, Repartition
from distdl_rma.layers.norm.batch_instance_group import (
    DistributedBatchNorm1d,
    DistributedBatchNorm2d,
    DistributedBatchNorm3d,
    DistributedGroupNorm,
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
)
from distdl_rma.layers.norm.layer_rms import DistributedLayerNorm, DistributedRMSNorm
from distdl_rma.layers.windows.adaptive_pool import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
)
from distdl_rma.layers.windows.pad import (
    DistributedCircularPad1d,
    DistributedCircularPad2d,
    DistributedCircularPad3d,
    DistributedConstantPad1d,
    DistributedConstantPad2d,
    DistributedConstantPad3d,
    DistributedReflectionPad1d,
    DistributedReflectionPad2d,
    DistributedReflectionPad3d,
    DistributedReplicationPad1d,
    DistributedReplicationPad2d,
    DistributedReplicationPad3d,
    DistributedZeroPad1d,
    DistributedZeroPad2d,
    DistributedZeroPad3d,
)
from distdl_rma.layers.windows.pool import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from distdl_rma.layers.windows.upsample import (
    DistributedUpsample,
    DistributedUpsamplingBilinear2d,
    DistributedUpsamplingNearest2d,
)
from distdl_rma.ops.movement import Movement

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "Concat",
    "Conv",
    "DistributedAdaptiveAvgPool1d",
    "DistributedAdaptiveAvgPool2d",
    "DistributedAdaptiveAvgPool3d",
    "DistributedAdaptiveMaxPool1d",
    "DistributedAdaptiveMaxPool2d",
    "DistributedAdaptiveMaxPool3d",
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedBatchNorm1d",
    "DistributedBatchNorm2d",
    "DistributedBatchNorm3d",
    "DistributedCircularPad1d",
    "DistributedCircularPad2d",
    "DistributedCircularPad3d",
    "DistributedConcat",
    "DistributedConstantPad1d",
    "DistributedConstantPad2d",
    "DistributedConstantPad3d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedConvTranspose1d",
    "DistributedConvTranspose2d",
    "DistributedConvTranspose3d",
    "DistributedCrossEntropyLoss",
    "DistributedEmbedding",
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
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedNLLLoss",
    "DistributedPoissonNLLLoss",
    "DistributedRMSNorm",
    "DistributedReflectionPad1d",
    "DistributedReflectionPad2d",
    "DistributedReflectionPad3d",
    "DistributedReplicationPad1d",
    "DistributedReplicationPad2d",
    "DistributedReplicationPad3d",
    "DistributedSmoothL1Loss",
    "DistributedTranspose",
    "DistributedUpsample",
    "DistributedUpsamplingBilinear2d",
    "DistributedUpsamplingNearest2d",
    "DistributedZeroPad1d",
    "DistributedZeroPad2d",
    "DistributedZeroPad3d",
    "HaloExchange",
    "InstanceNorm",
    "Movement",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
]
