"""What constructors of layers refuse, before any communication: calls as users write them.

The names of layers are here without their "Distributed"."""

import pytest
import torch

from distdl_rma import errors, layers

pytestmark = pytest.mark.mpi

# The call, and its error. All ranks are along the last dimension of flat, plane and line.
REFUSED = {
    "Conv2d(line, 1, 1, 3)": r"PartitionError: P_x has 3 dimensions .* the tensor has 4",
    "Conv1d(line, 3, 3, 3, groups=2)": "ArgumentError: DistributedConv1d: in_channels must be div",
    "Conv1d(line, 1, 1, 3, padding_mode='mirror')": "ArgumentError: Conv1d: padding_mode must be",
    "Conv1d(line, 1, 1, 3, stride=0)": "ArgumentError: kernel, stride and dilation must be at least 1",
    "Conv1d(line, 1, 1, 3, stride=(1, 2))": "ArgumentError: Conv1d: stride needs 1 numbers",
    "Conv1d(line, 1, 1, 3, padding=(1, 1))": "ArgumentError: Conv1d: padding needs 1 numbers",
    "Conv1d(line, 1, 0, 3)": "ArgumentError: needs channels, got 1 in and 0 out",
    "Conv1d(line, line, line, 1, 1, 3, P_w=line)": "PartitionError: P_W is given twice",
    "Conv1d(line, line, line, line, 1, 1, 3)": "PartitionError: takes P_x, P_y and P_W, got 4 part",
    "Conv1d(line, line, flat, 1, 1, 3)": "PartitionError: P_W has 1 dimensions",
    "Conv1d(line, 1, 1, 3, P_y=3)": "PartitionError: P_y must be a partition, got 3",
    "Conv2d(rows, 1, 1)": "TypeError: DistributedConv2d: missing .*'kernel_size'; it takes partitions, then",
    "Conv2d(rows, 1, 1, 3, strid=2)": "TypeError: DistributedConv2d: got an unexpected .* 'strid'",
    "Conv2d(rows, 1, 1, 3, 2, stride=2)": "TypeError: Conv2d: multiple values for argument 'stride'",
    "Conv1d(line, 1, 1, 3, dtype=torch.complex64)": r"UnsupportedError: torch\.complex64 is not supp",
    "Conv1d(line, 1, 1, 3, device='meta')": "UnsupportedError: device meta is not supported",
    "ConvTranspose2d(line, 1, 1, 3)": "PartitionError: Transpose2d: P_x has 3 dimensions",
    "ConvTranspose1d(line, 1, 1, 3, 2, output_padding=2)": "ArgumentError: 1d: output_padding",
    "ConvTranspose1d(line, 1, 1, 3, padding=-1)": "ArgumentError: ConvTranspose1d: .*padding",
    "ConvTranspose1d(line, 1, 1, 3, padding_mode='circular')": 'ArgumentError: Only "zeros" padding',
    "ConvTranspose1d(line, 1, 1, 3, dtype=torch.complex64)": "UnsupportedError: dtype",
    "Linear(plane, line, plane, 3, 4)": r"PartitionError: Linear: P_y has 3 dimensions .* has 2",
    "Linear(plane, plane, flat, 3, 4)": r"PartitionError: P_W is a grid of \(rows, columns\)",
    "LinearAllGather(3, 4, plane)": "PartitionError: P_y must be a partition, got 3",
    "LinearReduceScatter(plane, -1, 4)": "ArgumentError: negative dimension -1: .* got in_features=-1, out",
    "LinearAllGather(plane, 3, plane)": "ArgumentError: got in_features=3, out_features=Partition",
    "LinearReduceScatter(plane, 3, 4, device='meta')": "UnsupportedError: device meta is not supp",
    "LinearReduceScatter(plane, 3, 4, dtype=torch.int32)": "ArgumentError: floating .* dtype=torch.int32",
    "LinearReduceScatter(plane, 3, 4, dtype=torch.complex64)": "UnsupportedError: got torch.complex64",
    "BatchNorm2d(plane, 4)": r"PartitionError: Norm2d: P_x has 2 dimensions .*the tensor has 4",
    "BatchNorm1d(plane, -1)": "ArgumentError: DistributedBatchNorm1d: .*negative dimension -1",
    "InstanceNorm1d(line, -1)": "ArgumentError: none below 0, got .-1,.",
    "BatchNorm1d(plane, 4, eps=0)": "ArgumentError: eps must be positive, got 0",
    "InstanceNorm3d(line, 4)": "PartitionError: the tensor has 4",
    "InstanceNorm1d(line, 6, placement='root')": "ArgumentError: placement is one of",
    "InstanceNorm1d(line, 4, device='meta')": "UnsupportedError: InstanceNorm1d: device meta is not",
    "GroupNorm(plane, 3, 4)": "ArgumentError: GroupNorm: num_channels .4. must be divisible",
    "GroupNorm(plane, 0, 4)": "ArgumentError: DistributedGroupNorm: .*; got num_groups=0, num_channels=4$",
    "GroupNorm(plane, -1, 4)": "ArgumentError: needs at least one group, got num_groups -1",
    "GroupNorm(flat, 1, 4)": r"PartitionError: P_x has 1 dimensions .* the tensor has 2 to 8",
    "LayerNorm(plane, ())": "ArgumentError: needs at least one extent",
    "LayerNorm(plane, 1.5)": "ArgumentError: DistributedLayerNorm: .*; got normalized_shape=1.5$",
    "LayerNorm(plane, (2, 3, 4))": r"PartitionError: P_x has 2 dimensions .* the tensor has 3 to 8",
    "LayerNorm(plane, 4, device='meta')": "UnsupportedError: LayerNorm: device meta is not",
    "Embedding(plane, 3, 2, device='meta')": "UnsupportedError: Embedding: device meta is not",
    "Embedding(plane, 3, 2, sparse=True)": "UnsupportedError: DistributedEmbedding: sparse",
    "Embedding(plane, 3, 2, max_norm=1.0)": r"UnsupportedError: DistributedEmbedding: max_norm=1\.0",
    "Embedding(plane, 3, 2, scale_grad_by_freq=True)": "UnsupportedError: DistributedEmbedding: scale_grad_b",
    "Embedding(plane, 3, 2, padding_idx=3)": "ArgumentError: Padding_idx must be within num_embeddings",
    "Embedding(plane, 3, 2, True)": "ArgumentError: 'padding_idx' .* must be int, not bool; got num_embed",
    "Embedding(plane, 3, 2, P_y=plane)": "PartitionError: P_y has 2 dimensions",
    # Torch's own words, of its constructor or of a call.
    "AvgPool2d(rows, 0)": "ArgumentError: DistributedAvgPool2d: stride should not be zero",
    "MaxPool2d(rows, (1, 2, 3))": "ArgumentError: DistributedMaxPool2d: max_pool2d: kernel_size must",
    "AvgPool2d(rows, '12')": "ArgumentError: 'kernel_size' .* must be tuple of ints",
    "AvgPool2d(rows, 2, padding=2)": "ArgumentError: pad should be at most half of effective kernel size",
    "MaxPool2d(rows, 2, padding=-1)": "ArgumentError: pad must be non-negative",
    "MaxPool1d(line, 2, dilation=0)": "ArgumentError: dilation must be greater than zero",
    "AvgPool2d(rows, 2, divisor_override=0)": "ArgumentError: divisor_override is an integer but 0, got 0",
    "AvgPool2d(rows, 2, divisor_override=True)": "ArgumentError: an integer but 0, got True",
    "AvgPool1d(line, 2, divisor_override=2.5)": r"ArgumentError: an integer but 0, got 2\.5",
    "AvgPool1d(rows, 2)": "PartitionError: DistributedAvgPool1d: P_x has 4 dimensions",
    "MaxPool2d(rows, 2, P_y=flat)": "PartitionError: DistributedMaxPool2d: P_y has 1 dimensions",
    "MaxPool2d(rows, 2, dilatation=2)": "TypeError: dilatation",
    "AdaptiveMaxPool2d(rows, (1, 2, 3))": "ArgumentError: output_size",
    "AdaptiveMaxPool1d(line, -1)": "ArgumentError: DistributedAdaptiveMaxPool1d: .*negative dimension",
    "AdaptiveAvgPool2d(rows, -1)": "ArgumentError: elements of output_size must be greater than or equal",
    "AdaptiveAvgPool2d(rows, (1, None, 2))": "ArgumentError: output_size must be 2",
    "AdaptiveAvgPool2d(rows, None)": "ArgumentError: got output_size=None, tried with an input of shape",
    "AdaptiveAvgPool2d(rows, 1.5)": "ArgumentError: DistributedAdaptiveAvgPool2d: .*float",
    "ZeroPad2d(rows, (1, 2, 3))": "ArgumentError: DistributedZeroPad2d: Padding length must be divisible",
    "ZeroPad2d(rows, (1, 2, 3, 4, 5, 6))": r"ArgumentError: DistributedZeroPad2d: .*5, 6\) has more than 4",
    "ConstantPad1d(line, [1] * 4, 3.0)": "ArgumentError: ConstantPad1d: padding .* has more than 2 numbers",
    "ReflectionPad2d(rows, (1, 2))": "ArgumentError: Padding size 2 is not supported",
    "CircularPad2d(rows, (0, 0, -1, 2))": "UnsupportedError: crops one end of a dimension and wraps",
    "Upsample(line)": "ArgumentError: DistributedUpsample: either size or scale_factor should be defined",
    "Upsample(rows, size=(3, 3, 3))": "ArgumentError: tried with an input of shape .1, 1, 1048576, 1048576",
    "Upsample(line, size=3, scale_factor=2)": "ArgumentError: only one of size or scale_factor",
    "Upsample(line, size=0)": "ArgumentError: Input and output sizes should be greater than 0",
    "Upsample(line, scale_factor=-1.0)": "ArgumentError: Input and output sizes should be greater than 0",
    "Upsample(line, size=3, mode='area')": "ArgumentError: 'area' is an adaptive average pool",
    "Upsample(line, size=3, mode='bilinear')": "ArgumentError: Got 3D input, but bilinear mode needs 4D",
    "Upsample(line, size=3, align_corners=False)": "ArgumentError: align_corners option can only be set",
    "Upsample(line, size=3, recompute_scale_factor=True)": "ArgumentError: is not meaningful with",
    "Upsample(flat, size=2)": "PartitionError: tensors have 3, 4 or 5",
    "UpsamplingNearest2d(line, size=2)": "PartitionError: P_x has 3 dimensions",
    "MSELoss(blocks, reduction='batchmean')": r"ArgumentError: one of .*'none'.*, got 'batchmean'",
    "BCELoss(blocks, size_average=True)": "UnsupportedError: DistributedBCELoss: size_average is not",
    "BCELoss(blocks, reduce=False)": "UnsupportedError: DistributedBCELoss: reduce is not",
    "HuberLoss(blocks, beta=1.0)": "TypeError: unexpected keyword argument 'beta'",
    "HuberLoss(blocks, delta=0.0)": "ArgumentError: DistributedHuberLoss: .*delta",
    "SmoothL1Loss(blocks, beta=-1.0)": "ArgumentError: DistributedSmoothL1Loss: .*beta",
    "CrossEntropyLoss(blocks, label_smoothing=1.5)": "ArgumentError: between .*; got label_smoothing=1.5,",
    "NLLLoss(blocks, torch.ones(3, 1))": r"ShapeError: one number per class, got shape \(3, 1\)",
    "NLLLoss(blocks, [1.0, 2.0])": "ArgumentError: weight is a tensor, got",
    "BCEWithLogitsLoss(blocks, pos_weight=torch.ones(3, 1, 1))": "ShapeError: more dimensions than P_x",
    "CrossEntropyLoss(blocks, torch.ones(3, requires_grad=True))": "UnsupportedError: weight requires a",
    "Concat([])": "PartitionError: at least one input",
    "Concat([line, rows], line)": r"PartitionError: P_xs\[1\] has 4 dimensions",
    "Concat([flat])": r"PartitionError: P_xs\[0\] has 1 dimensions",
    "Repartition(blocks, flat)": "PartitionError: P_x has 2 dimensions",
    "Repartition(flat, elsewhere)": "PartitionError: partitions of a layer must belong to one machine",
    **dict.fromkeys(
        [
            f"HaloExchange(rows, {width})"
            for width in (-1, [1], [1, 2, 3], [(1, 2, 3), 1], [(0, -1), 0], 1.5, [0.5, 1])
        ],
        "ArgumentError: HaloExchange: width",
    ),
    "HaloExchange(line, 1, 'mirror')": r"ArgumentError: padding_mode is one of .* got 'mirror'",
    "HaloExchange(flat, 1)": "PartitionError: spatial dimensions",
    "AllSumReduce(flat)": "ArgumentError: AllSumReduce: give either axes_reduce or axes_keep",
    "AllGather(flat, 0, axes_keep=0)": "ArgumentError: AllGather: give either axes_all_gather or axes_keep",
    "ReduceScatter(flat)": "ArgumentError: ReduceScatter: give either axes_reduce_scatter or axes_keep",
    "AllSumReduce(flat, 1)": r"ArgumentError: axes are integers of grid .*: axis -?\d is out of bounds",
    "AllSumReduce(flat, -2)": r"ArgumentError: axes are integers of grid .*: axis -?\d is out of bounds",
    "AllSumReduce(flat, [0, -1])": "ArgumentError: repeated axis",
    "AllSumReduce(flat, 0.5)": "ArgumentError: are integers",
}
REFUSED_OF_SEVERAL = {
    "Linear(flat, flat, space, 3, 4)": "PartitionError: data-parallel blocks, but P_x",
    "SumReduce(plane, blocks)": r"PartitionError: SumReduce: grids \(1, \d\) and \(\d, 1\) do not fit",
    "Broadcast(plane, blocks)": r"PartitionError: Broadcast: grids \(\d, 1\) and \(1, \d\) do not fit",
    "SumReduce(one, flat)": r"PartitionError: grids \(1,\) and \(\d,\)",
}
REFUSED_OF_ONE = {
    "NLLLoss(point)": "PartitionError: no dimension for the classes",
    "LinearAllGather(point, 3, 4)": r"PartitionError: P_y has 0 dimensions \(\), the tensor has 1 to 8",
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_impossible_arguments_are_refused_before_anything_is_sent(P_world, comm, permuted):
    n = comm.size
    shapes = {"plane": (1, n), "line": (1, 1, n), "rows": (1, 1, n, 1), "blocks": (n, 1), "space": (n, 1, 1)}
    names = {name.removeprefix("Distributed"): getattr(layers, name) for name in sorted(layers.__all__)}
    names |= {"torch": torch, "flat": P_world}
    names |= {key: P_world.create_cartesian_topology_partition(shape) for key, shape in shapes.items()}
    names["one"] = P_world.create_partition_inclusive([0])
    names["elsewhere"] = permuted.partition((n,))
    if n == 1:
        names["point"] = P_world.create_cartesian_topology_partition(())
    for call, said in (REFUSED | (REFUSED_OF_SEVERAL if n > 1 else REFUSED_OF_ONE)).items():
        error, _, words = said.partition(": ")
        kind = TypeError if error == "TypeError" else getattr(errors, error)
        try:
            with pytest.raises(kind, match=words):
                eval(call, names)
        except BaseException as failure:
            failure.add_note(call)
            raise
