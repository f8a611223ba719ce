"""A convolution of collected data, in parts, against the whole; all in one process."""

import random

import pytest
import torch

from distdl_rma.geometry import Box, Stencil
from distdl_rma.ops.conv.own_and_others import OwnAndOthers
from distdl_rma.ops.conv.split_convolution import LocalConvolution


def some(rng, extent):
    start = rng.randint(0, extent)
    return start, rng.randint(start, extent)


def random_parts(rng):
    """Windows, boxes and their parts, of which there is one before and one after."""
    while True:
        dims = rng.choice([1, 2, 2, 3])
        kernel, stride, dilation = (tuple(rng.randint(1, n) for _ in range(dims)) for n in (4, 2, 2))
        padding = tuple((rng.randint(0, 3), rng.randint(0, 3)) for _ in range(dims))
        stencil = Stencil.of(kernel, stride, dilation, padding)
        extents = tuple(rng.randint(9, 13) for _ in range(dims))
        batch, channels, filters = rng.randint(1, 4), rng.randint(1, 5), 2
        domain = Box.of_shape((batch, channels, *extents))
        space = (some(rng, n) for n in stencil.outputs(extents))
        outputs = Box((some(rng, batch), (0, filters), *space))
        read = stencil.reads(Box(outputs.bounds[2:])).bounds
        reads = Box((outputs.bounds[0], some(rng, channels), *read))
        own = Box(tuple(some(rng, n) for n in domain.shape))
        parts = OwnAndOthers(stencil, own, reads, domain, outputs)
        if parts.both:
            return stencil, domain, filters, parts


@pytest.mark.parametrize("seed", range(100))
def test_parts_add_up_to_the_whole_and_so_do_their_adjoints(seed):
    torch.manual_seed(seed)
    stencil, domain, filters, parts = random_parts(random.Random(seed))
    own, reads = parts.own, parts.reads
    low, high = reads.bounds[1]
    kernel = [window.kernel for window in stencil.windows]
    x = torch.randn(domain.shape, dtype=torch.float64)
    weight = torch.randn(filters, high - low, *kernel, dtype=torch.float64, requires_grad=True)
    # All that is read, with zeros beyond the domain.
    whole = torch.zeros(reads.shape, dtype=torch.float64)
    whole[(reads & domain).slices(reads)] = x[(reads & domain).slices(domain)]
    mine = x[own.slices(domain)].clone().requires_grad_()
    # What is the rank's own is not read a second time.
    others = whole.clone()
    others[(own & reads).slices(reads)] = torch.nan
    local = LocalConvolution(stencil, 1)
    found = parts.of_own(local, mine, weight, low) + parts.of_others(local, others, weight, low)
    y = parts.fuse(found)
    both = whole.clone().requires_grad_()
    twin = weight.detach().clone().requires_grad_()
    expected = local.valid(both, twin, None, 1)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    g = torch.randn_like(y)
    y.backward(g)
    expected.backward(g)
    torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-11, atol=1e-11)
    inside = (own & reads).slices(own)
    torch.testing.assert_close(
        mine.grad[inside], both.grad[(own & reads).slices(reads)], rtol=1e-11, atol=1e-11
    )
    mine.grad[inside] = 0
    assert not mine.grad.any()
