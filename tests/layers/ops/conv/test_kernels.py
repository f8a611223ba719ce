"""Convolutions of blocks that are narrower than their windows, in the types that oneDNN computes."""

import itertools
import random

import pytest
import torch

from distdl_rma.layers.ops.conv import kernels
from distdl_rma.layers.ops.conv.kernels import (
    ConvolutionArguments,
    KernelChoice,
    convolution,
    convolution_adjoint,
)
from tests.layers.partitioned.twins import Form, N, Twins

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def near(found, expected, dtype, what):
    """Equal but for the rounding of the result to its type, nowhere infinite."""
    assert found is not None and found.dtype == dtype, what
    assert bool(found.isfinite().all()), what
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    assert float((found.double() - expected).abs().max()) <= TOLERANCE[dtype] * scale + 1e-6, what


def dirty():
    """Leave memory behind that nobody may take for zeros."""
    for nbytes in range(64, 1 << 13, 64):
        torch.full((nbytes,), 255, dtype=torch.uint8)


def random_narrow(rng):
    """Steps, extents of input and output and channels of a convolution, few of which fill their windows."""
    dims = rng.choice([1, 2, 3])
    while True:
        kernel, stride = ([rng.randint(1, high) for _ in range(dims)] for high in (5, 3))
        dilation, padding = ([rng.choice(some) for _ in range(dims)] for some in ((1, 1, 2), (0, 1, 2, 3)))
        extents = [rng.choice([1, 1, 2, 3, 4, 6]) for _ in range(dims)]
        spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        outputs = [
            (n + 2 * p - span) // s + 1 for n, p, span, s in zip(extents, padding, spans, stride, strict=True)
        ]
        if min(outputs) > 0:
            break
    groups = rng.choice([1, 1, 2])
    channels = [groups * rng.choice([1, 3, 16, 17]) for _ in range(2)]
    return (
        ConvolutionArguments(tuple(stride), tuple(padding), tuple(dilation), groups=groups),
        kernel,
        extents,
        channels,
    )


def compare(x, weight, bias, steps, what):
    """Output, and gradients of what is needed, are those in float64. Returns the extents of the output."""
    tensors = [each.detach().double() for each in (x, weight, bias)]
    exact = torch.convolution(*tensors, *steps)
    gradient = torch.randn(exact.shape).to(x.dtype)
    wanted = torch.ops.aten.convolution_backward(
        gradient.double(), *tensors[:2], bias.shape, *steps, (True, True, True)
    )
    near(convolution(x, weight, bias, steps), exact, x.dtype, f"{what}: without gradients")
    for needs in itertools.product((False, True), repeat=3):
        found = convolution_adjoint(gradient, x, weight, steps, needs)
        for mine, right, needed in zip(found, wanted, needs, strict=True):
            assert mine is not None or not needed
            if needed:
                assert mine.layout == torch.strided
                near(mine, right, x.dtype, f"{what}: of {needs}")
    operands = [each.detach().requires_grad_() for each in (x, weight, bias)]
    y = convolution(*operands, steps)
    near(y.detach(), exact, x.dtype, what)
    for create_graph in (False, True):
        found = torch.autograd.grad(y, operands, gradient, retain_graph=True, create_graph=create_graph)
        assert all(mine.requires_grad == create_graph for mine in found[:2])
        for mine, right in zip(found, wanted, strict=True):
            near(mine.detach(), right, x.dtype, f"{what}: {create_graph}")
    return exact.shape[2:]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("transposed", [False, True])
def test_narrow_blocks_are_convolved_as_in_float64(dtype, transposed):
    rng, narrow, plain = random.Random(3), 0, 0
    for seed in range(60):
        steps, kernel, extents, (inner, outer) = random_narrow(rng)
        if transposed:
            most = map(max, steps.stride, steps.dilation)
            steps = steps._replace(transposed=True, output_padding=tuple(map(rng.randrange, most)))
        sizes = (inner, outer // steps.groups) if transposed else (outer, inner // steps.groups)
        torch.manual_seed(seed)
        x, weight = torch.randn(2, inner, *extents).to(dtype), torch.randn(*sizes, *kernel).to(dtype)
        if transposed and min(steps.outputs(extents, kernel)) < 1:
            continue
        plain += KernelChoice.of(steps, x.shape, weight.shape, dtype).plain is not None
        what = f"{seed}: {steps}, kernel {kernel}, input {tuple(x.shape)}"
        shape = compare(x, weight, torch.zeros(outer, dtype=dtype), steps, what)
        if transposed:
            bare = steps._replace(output_padding=(0,) * len(kernel))
            assert steps.outputs(extents, kernel) == shape
            assert bare.windows(bare.outputs(extents, kernel), kernel) == (*extents,)
        narrow += not steps.fills(shape if transposed else extents, kernel, dtype != torch.float32)
    assert narrow > 10
    assert (plain > 0) == (transposed and dtype == torch.float32)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (3, 3, 2), (4, 2, 3), (5, 3, 3)])
def test_taps_that_meet_padding_only_have_no_gradient(dims, kernel, stride, padding):
    steps = ConvolutionArguments((1,) * (dims - 1) + (stride,), (0,) * (dims - 1) + (padding,), (1,) * dims)
    for _ in range(3):
        x = torch.randn(2, 16, *(3,) * (dims - 1), 1).bfloat16()
        weight = torch.randn(17, 16, *(1,) * (dims - 1), kernel).bfloat16()
        gradient = torch.randn_like(convolution(x, weight, None, steps))
        dirty()
        _, taps, _ = convolution_adjoint(gradient, x, weight, steps, (False, True, False))
        # The outputs that read the one input do so through these.
        read = {padding - o * stride for o in range(gradient.shape[-1])}
        for tap in range(kernel):
            assert bool(taps[..., tap].isfinite().all())
            assert bool(taps[..., tap].any()) == (tap in read)


def test_images_are_left_to_the_fast_kernels():
    for kernel, stride, padding, dilation, n in (
        (3, 1, 1, 1, 4),
        (3, 2, 1, 1, 6),
        (5, 1, 2, 2, 11),
        (7, 2, 3, 1, 12),
    ):
        steps = ConvolutionArguments((stride,) * 2, (padding,) * 2, (dilation,) * 2)
        assert steps.fills((n, n), (kernel, kernel), short=True)
        # Rows that come from a neighbour, as many as windows reach over.
        rows = dilation * (kernel - 1)
        assert steps._replace(padding=(0, padding)).fills((rows, n), (kernel - 1, kernel), short=False)


# Kernel, stride, padding, dilation, channels and extents.
CHOSEN = [
    ((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (8, 8), (12, 10, 11)),
    ((3, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), (16, 9), (12, 10, 11)),
    ((3, 3, 3), (1, 1, 1), (2, 0, 2), (2, 1, 1), (3, 32), (12, 10, 11)),
    ((2, 1, 3), (1, 1, 1), (0, 0, 2), (1, 1, 1), (20, 20), (12, 10, 11)),
    ((3, 3, 3), (2, 1, 2), (1, 1, 1), (1, 1, 1), (8, 24), (17, 16, 18)),
    ((1, 3, 3), (1, 1, 1), (0, 3, 3), (1, 1, 1), (12, 12), (12, 10, 11)),
    ((3, 3), (1, 1), (1, 1), (1, 1), (48, 48), (16, 16)),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "channels", "extents"), CHOSEN)
def test_what_torch_leaves_to_slow_kernels_is_convolved_as_in_float64(
    kernel, stride, padding, dilation, channels, extents
):
    steps = ConvolutionArguments(stride, padding, dilation)
    inner, outer = channels
    torch.manual_seed(1)
    # No block of its own in memory, as parts of shards have none.
    x = torch.randn(1, inner + 1, *extents)[:, 1:]
    weight, bias = torch.randn(outer, inner, *kernel), torch.randn(outer)
    choice = KernelChoice.of(steps, x.shape, weight.shape, x.dtype)
    assert choice.safe and choice.chosen
    # Windows that begin far ahead of the volume are no convolution backwards.
    turns = max(stride) == 1 and all(p < k for p, k in zip(padding, kernel, strict=True))
    assert (choice.mirrored is not None) == turns
    compare(x, weight, bias, steps, "chosen")


def test_oneDNN_is_chosen_only_where_it_is_allowed_and_worth_it():  # noqa: N802
    steps = ConvolutionArguments((1,) * 3, (1,) * 3, (1,) * 3)
    shape, weight = (1, 8, 8, 9, 9), (8, 8, 3, 3, 3)
    assert KernelChoice.of(steps, shape, weight, torch.float32).chosen
    # Torch does so itself with these.
    assert not KernelChoice.of(steps, (2, *shape[1:]), weight, torch.float32).chosen
    assert not KernelChoice.of(steps, (1, 8, 60, 60, 2), weight, torch.float32).chosen
    # These have fewer products than a call takes time for, no kernels, or only a matrix.
    as_torch = KernelChoice(safe=True)
    assert KernelChoice.of(steps, (1, 8, 4, 4, 4), weight, torch.float32) == as_torch
    assert KernelChoice.of(steps, shape, weight, torch.float64) == as_torch
    bare = steps._replace(padding=(0,) * 3)
    assert KernelChoice.of(bare, (1, 64, 20, 9, 9), (64, 64, 1, 1, 1), torch.float32) == as_torch
    assert KernelChoice.of(steps._replace(groups=2), shape, (8, 4, 3, 3, 3), torch.float32) == as_torch
    x, kernel = torch.randn(shape), torch.randn(weight)
    found = convolution(x, kernel, None, steps)
    with kernels._without_onednn():
        plain = torch.nn.functional.conv3d(x, kernel, padding=1)
        assert torch.equal(convolution(x, kernel, None, steps), plain)
        adjoint = convolution_adjoint(plain, x, kernel, steps, (True, True, True))
        right = torch.ops.aten.convolution_backward(plain, x, kernel, (8,), *steps, (True, True, True))
        assert all(map(torch.equal, adjoint, right))
    near(found, plain.double(), torch.float32, "output")


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1])
def test_blocks_of_one_output_are_convolved_as_the_whole(P_world, comm, dtype, dims, padding):
    # One column of outputs per rank, from two or three columns of inputs; with padding of a single row.
    extents = (*(1 if padding else 4,) * (dims - 1), 2 * comm.size + 1 - 2 * padding)
    grid = (*(1,) * (dims + 1), N)
    form = Form(f"Conv{dims}d", (6, 17, 3, 2, padding), {}, (grid,), shape=(2, 6, *extents))
    twins = Twins(P_world, form, dtype)
    twins.twin.double()
    x = twins.draw()
    local, whole = twins.into(x).requires_grad_(), x.double().requires_grad_()
    y, expected = twins.layer(local), twins.twin(whole)
    near(y.detach(), twins.out(expected), dtype, "output")
    gradient = torch.randn(expected.shape).to(dtype)
    dirty()
    y.backward(twins.out(gradient))
    expected.backward(gradient.double())
    twins.compare((local, whole), same=lambda found, exact, what: near(found, exact, dtype, what))


def test_onednn_is_left_out_also_where_torch_has_frozen_its_flags():
    # As torch's own tests do when they are imported.
    torch.backends.disable_global_flags()
    try:
        before = torch.backends.mkldnn.enabled
        with kernels._without_onednn():
            assert not torch.backends.mkldnn.enabled
        assert torch.backends.mkldnn.enabled == before
    finally:
        torch.backends.__allow_nonbracketed_mutation_flag = True
