"""Layers with explicit partitions: families that do not know each other, on the core that they share.

A user builds a layer on partitions and passes this rank's shards, plain tensors. So each call begins with an
agreement on shapes, which a split tensor does not need (``layers/split``)::

    module called  ->  facts of this rank's tensors  ->  plan of all ranks  ->  operation  ->  plain tensor
    core/layer         core/input_facts                  core/agreement         layers/ops

Begin with ``core/operator_layer.py``, which has these steps, then read one family: ``windows`` is the
shortest, ``norm`` has parameters, buffers and callbacks. ``loss`` alone goes another way, and says why in
``loss/base.py``.
"""

from distdl_rma.layers.ops.core.movement import Movement as Movement
from distdl_rma.layers.partitioned.conv import DistributedConv1d as DistributedConv1d
from distdl_rma.layers.partitioned.conv import DistributedConv2d as DistributedConv2d
from distdl_rma.layers.partitioned.conv import DistributedConv3d as DistributedConv3d
from distdl_rma.layers.partitioned.conv import DistributedConvTranspose1d as DistributedConvTranspose1d
from distdl_rma.layers.partitioned.conv import DistributedConvTranspose2d as DistributedConvTranspose2d
from distdl_rma.layers.partitioned.conv import DistributedConvTranspose3d as DistributedConvTranspose3d
from distdl_rma.layers.partitioned.data_movement import AllGather as AllGather
from distdl_rma.layers.partitioned.data_movement import AllSumReduce as AllSumReduce
from distdl_rma.layers.partitioned.data_movement import Broadcast as Broadcast
from distdl_rma.layers.partitioned.data_movement import DistributedConcat as DistributedConcat
from distdl_rma.layers.partitioned.data_movement import DistributedTranspose as DistributedTranspose
from distdl_rma.layers.partitioned.data_movement import HaloExchange as HaloExchange
from distdl_rma.layers.partitioned.data_movement import ReduceScatter as ReduceScatter
from distdl_rma.layers.partitioned.data_movement import Repartition as Repartition
from distdl_rma.layers.partitioned.data_movement import SumReduce as SumReduce
from distdl_rma.layers.partitioned.embedding import DistributedEmbedding as DistributedEmbedding
from distdl_rma.layers.partitioned.from_global import Concat as Concat
from distdl_rma.layers.partitioned.from_global import Conv as Conv
from distdl_rma.layers.partitioned.from_global import InstanceNorm as InstanceNorm
from distdl_rma.layers.partitioned.linear import DistributedLinear as DistributedLinear
from distdl_rma.layers.partitioned.linear import DistributedLinearAllGather as DistributedLinearAllGather
from distdl_rma.layers.partitioned.linear import (
    DistributedLinearReduceScatter as DistributedLinearReduceScatter,
)
from distdl_rma.layers.partitioned.loss.classification import (
    DistributedCrossEntropyLoss as DistributedCrossEntropyLoss,
)
from distdl_rma.layers.partitioned.loss.classification import DistributedNLLLoss as DistributedNLLLoss
from distdl_rma.layers.partitioned.loss.elementwise import DistributedBCELoss as DistributedBCELoss
from distdl_rma.layers.partitioned.loss.elementwise import (
    DistributedBCEWithLogitsLoss as DistributedBCEWithLogitsLoss,
)
from distdl_rma.layers.partitioned.loss.elementwise import DistributedHuberLoss as DistributedHuberLoss
from distdl_rma.layers.partitioned.loss.elementwise import DistributedKLDivLoss as DistributedKLDivLoss
from distdl_rma.layers.partitioned.loss.elementwise import DistributedL1Loss as DistributedL1Loss
from distdl_rma.layers.partitioned.loss.elementwise import DistributedMSELoss as DistributedMSELoss
from distdl_rma.layers.partitioned.loss.elementwise import (
    DistributedPoissonNLLLoss as DistributedPoissonNLLLoss,
)
from distdl_rma.layers.partitioned.loss.elementwise import DistributedSmoothL1Loss as DistributedSmoothL1Loss
from distdl_rma.layers.partitioned.norm import DistributedBatchNorm1d as DistributedBatchNorm1d
from distdl_rma.layers.partitioned.norm import DistributedBatchNorm2d as DistributedBatchNorm2d
from distdl_rma.layers.partitioned.norm import DistributedBatchNorm3d as DistributedBatchNorm3d
from distdl_rma.layers.partitioned.norm import DistributedGroupNorm as DistributedGroupNorm
from distdl_rma.layers.partitioned.norm import DistributedInstanceNorm1d as DistributedInstanceNorm1d
from distdl_rma.layers.partitioned.norm import DistributedInstanceNorm2d as DistributedInstanceNorm2d
from distdl_rma.layers.partitioned.norm import DistributedInstanceNorm3d as DistributedInstanceNorm3d
from distdl_rma.layers.partitioned.norm import DistributedLayerNorm as DistributedLayerNorm
from distdl_rma.layers.partitioned.norm import DistributedRMSNorm as DistributedRMSNorm
from distdl_rma.layers.partitioned.windows import DistributedAdaptiveAvgPool1d as DistributedAdaptiveAvgPool1d
from distdl_rma.layers.partitioned.windows import DistributedAdaptiveAvgPool2d as DistributedAdaptiveAvgPool2d
from distdl_rma.layers.partitioned.windows import DistributedAdaptiveAvgPool3d as DistributedAdaptiveAvgPool3d
from distdl_rma.layers.partitioned.windows import DistributedAdaptiveMaxPool1d as DistributedAdaptiveMaxPool1d
from distdl_rma.layers.partitioned.windows import DistributedAdaptiveMaxPool2d as DistributedAdaptiveMaxPool2d
from distdl_rma.layers.partitioned.windows import DistributedAdaptiveMaxPool3d as DistributedAdaptiveMaxPool3d
from distdl_rma.layers.partitioned.windows import DistributedAvgPool1d as DistributedAvgPool1d
from distdl_rma.layers.partitioned.windows import DistributedAvgPool2d as DistributedAvgPool2d
from distdl_rma.layers.partitioned.windows import DistributedAvgPool3d as DistributedAvgPool3d
from distdl_rma.layers.partitioned.windows import DistributedCircularPad1d as DistributedCircularPad1d
from distdl_rma.layers.partitioned.windows import DistributedCircularPad2d as DistributedCircularPad2d
from distdl_rma.layers.partitioned.windows import DistributedCircularPad3d as DistributedCircularPad3d
from distdl_rma.layers.partitioned.windows import DistributedConstantPad1d as DistributedConstantPad1d
from distdl_rma.layers.partitioned.windows import DistributedConstantPad2d as DistributedConstantPad2d
from distdl_rma.layers.partitioned.windows import DistributedConstantPad3d as DistributedConstantPad3d
from distdl_rma.layers.partitioned.windows import DistributedMaxPool1d as DistributedMaxPool1d
from distdl_rma.layers.partitioned.windows import DistributedMaxPool2d as DistributedMaxPool2d
from distdl_rma.layers.partitioned.windows import DistributedMaxPool3d as DistributedMaxPool3d
from distdl_rma.layers.partitioned.windows import DistributedReflectionPad1d as DistributedReflectionPad1d
from distdl_rma.layers.partitioned.windows import DistributedReflectionPad2d as DistributedReflectionPad2d
from distdl_rma.layers.partitioned.windows import DistributedReflectionPad3d as DistributedReflectionPad3d
from distdl_rma.layers.partitioned.windows import DistributedReplicationPad1d as DistributedReplicationPad1d
from distdl_rma.layers.partitioned.windows import DistributedReplicationPad2d as DistributedReplicationPad2d
from distdl_rma.layers.partitioned.windows import DistributedReplicationPad3d as DistributedReplicationPad3d
from distdl_rma.layers.partitioned.windows import DistributedUpsample as DistributedUpsample
from distdl_rma.layers.partitioned.windows import (
    DistributedUpsamplingBilinear2d as DistributedUpsamplingBilinear2d,
)
from distdl_rma.layers.partitioned.windows import (
    DistributedUpsamplingNearest2d as DistributedUpsamplingNearest2d,
)
from distdl_rma.layers.partitioned.windows import DistributedZeroPad1d as DistributedZeroPad1d
from distdl_rma.layers.partitioned.windows import DistributedZeroPad2d as DistributedZeroPad2d
from distdl_rma.layers.partitioned.windows import DistributedZeroPad3d as DistributedZeroPad3d
