"""Random models, slabs and delays: predictions by all ranks, against the whole at once."""

import random
import time
from collections import Counter
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Partition, Sink, Source, UnsupportedError, predict
from distdl_rma.segments.shared_mailbox import SharedMailbox
from tests.jobs.out_of_core.nets import whole

DTYPE = torch.float64
REFUSED: Counter[str] = Counter()
CALLS = {
    "relu": torch.relu,
    "cumsum": lambda x: x.cumsum(2) * 0.1,
    "flip": lambda x: x.flip(2),
    "mean": lambda x: x + x.mean(tuple(range(2, x.dim())), keepdim=True),
    "roll": lambda x: x.roll(3, 2),
    "roll back": lambda x: x.roll(-5, -1),
    "softmax": lambda x: x.softmax(2),
}
LAYERS = {
    "wide": lambda c, d: _of(d, "Conv")(c, c, 5, padding=2),
    "dilated": lambda c, d: _of(d, "Conv")(c, c, 3, padding=4, dilation=4),
    "conv": lambda c, d: _of(d, "Conv")(c, c, 3, padding=1),
    "stride": lambda c, d: _of(d, "Conv")(c, c, 3, 2, 1),
    "up": lambda c, d: _of(d, "ConvTranspose")(c, c, 2, 2),
    "pool": lambda c, d: _of(d, "MaxPool")(2, ceil_mode=True),
    "instance": lambda c, d: _of(d, "InstanceNorm")(c),
    "group": lambda c, d: nn.GroupNorm(1, c),
}
# Twice, since most models have these.
KINDS = [*CALLS, *LAYERS, "conv", "stride", "up", "pool", "keep", "keep", "skip", "skip"]


def _of(dims, name):
    return getattr(nn, f"{name}{dims}d")


# What a model makes of other elements than those of its parameters; None if torch refuses these.
ENTRIES = {
    "as they are": lambda x, dtype: x,
    "float": lambda x, dtype: (x.real if x.is_complex() else x).to(dtype),
    "labels": lambda x, dtype: ((x.real if x.is_complex() else x).long() % 7).to(dtype),
    "imaginary": lambda x, dtype: torch.view_as_real(x)[..., 1] if x.is_complex() else x.to(dtype),
    "compared": lambda x, dtype: (x == x[:, :, :1]).to(dtype),
}
# Of several samples, which depend on each other by the last ones.
SAMPLES = {
    "each": lambda x: x,
    "instance": lambda x: x - x.mean(tuple(range(1, x.dim())), keepdim=True),
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cumsum": lambda x: x.cumsum(0),
    "neighbour": lambda x: x - x.roll(1, 0),
}
TYPES = [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64, torch.complex64, torch.complex128]


class Model(nn.Module):
    """Functions and layers in turn; a skip adds what was kept last, resized."""

    def __init__(self, kinds, channels, dims, entry, samples):
        super().__init__()
        self.entry, self.samples = ENTRIES[entry], SAMPLES[samples]
        # Of types in which the model does not compute.
        self.register_buffer("unit", torch.tensor([1 + 1j]))
        self.register_buffer("number", torch.tensor(2**60 + 1))
        self.kinds, self.first = kinds, _of(dims, "Conv")(1, channels, 3, padding=1)
        self.layers = nn.ModuleList(
            LAYERS[kind](channels, dims) if kind in LAYERS else nn.Identity() for kind in kinds
        )

    def forward(self, x):
        x = self.first(self.entry(x, self.first.weight.dtype))
        x, kept = self.samples(x * (self.unit.imag.to(x.dtype) + self.number % 2)) / 2, []
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "keep":
                kept.append(x)
            elif kind != "skip":
                x = CALLS.get(kind, layer)(x)
            elif kept:
                skip = kept.pop()
                x = x + (skip if skip.shape == x.shape else F.interpolate(skip, x.shape[2:]))
        return x


def _wanted(model, x):
    # As predict does with what torch refuses: integers become floats.
    try:
        return whole(model, x)
    except RuntimeError:
        if x.dtype.is_floating_point or x.is_complex():
            raise
        return whole(model, x.to(model.first.weight.dtype))


def check(P_world: Partition, comm, seed: int) -> None:
    """Compare one prediction of all ranks of ``comm``, which are late at random."""
    rng = random.Random(seed)
    dims, channels = rng.choice([2, 2, 3]), rng.randint(1, 3)
    kinds = [rng.choice(KINDS) for _ in range(rng.randint(1, 8))]
    extents = [rng.randint(8, 60), *(rng.randint(6, 16) for _ in range(dims - 1))]
    samples = rng.choice([1, 1, 2, 3])
    cut = dict(zip("DHW"[3 - dims :], (rng.randint(1, 9), rng.choice([1, 1, 1, 2, 3])), strict=False))
    torch.manual_seed(seed)
    kind = rng.choice([DTYPE, DTYPE, *TYPES])
    entry, together = rng.choice([*ENTRIES]), rng.choice(["each", "each", *SAMPLES])
    model = Model(kinds, channels, dims, entry, together)
    if cast := rng.random() < 0.75:
        for part in model.children():
            # The unit of the model itself stays complex.
            part.to(DTYPE)
    x = torch.rand(samples, 1, *extents, dtype=DTYPE)
    x = torch.complex(x, x.flip(2)).to(kind) if kind.is_complex else (x * 50).to(kind) if kind != DTYPE else x
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=not cast and rng.random() < 0.5)
    try:
        with autocast:
            want = _wanted(model, x)
    except (RuntimeError, ValueError):
        # The extents are too small for so many strides, or torch does not take the elements.
        return
    late = random.Random(f"{seed} {comm.rank}")
    pace = late.choice([0, 0, 1e-3, 1e-2])

    def delay(share=0.3):
        if late.random() < share:
            time.sleep(late.uniform(0, pace))

    def read(box):
        delay()
        return x[box]

    exact = want.dtype == DTYPE
    want = want if exact else want.float()
    found = np.full(tuple(want.shape), np.nan, np.float64 if exact else np.float32)

    def write(box, y):
        delay()
        assert np.isnan(found[box]).all()
        found[box] = y

    poll = SharedMailbox.poll

    def poll_late(mailbox):
        delay(0.02)
        poll(mailbox)

    sink = Sink(found.shape, found.dtype, write) if rng.random() < 0.5 else None
    try:
        with mock.patch.object(SharedMailbox, "poll", poll_late), autocast:
            # Numpy has no bfloat16.
            post = None if exact else torch.Tensor.float
            y = predict(model, Source(x.shape, x.dtype, read), sink, grid=cut, comm=comm, post=post)
    except UnsupportedError as error:
        REFUSED[str(error).partition(":")[0]] += 1
        return
    y = torch.from_numpy(found) if y is None else y
    if sink is None or comm.rank == 0:
        # Norms of what is constant show roundings alone.
        rtol, atol = (1e-7, 1e-9) if exact else (0, 1e-4 * max(float(want.abs().max()), 0.1))
        case = f"{kinds} {cut} {kind} {entry} {together} {samples}"
        if autocast._enabled:
            # Norms of what is nearly constant enlarge the roundings to 8 bits.
            assert y.shape == want.shape and torch.equal(y.isfinite(), want.isfinite()), case
            return
        torch.testing.assert_close(y, want, rtol=rtol, atol=atol, msg=lambda text: f"{case}: {text}")
