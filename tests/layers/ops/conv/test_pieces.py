"""Pieces of a large patch give what the patch gives."""

from __future__ import annotations

import random

import pytest
import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.layers.ops.conv import pieces as pieces_file
from distdl_rma.layers.ops.conv.own_and_halo import OwnAndHalo, with_channels
from distdl_rma.layers.ops.conv.pieces import InPieces, in_pieces, pieces_of_data
from distdl_rma.layers.ops.core.result_memory import MAPPED
from tests.layers.ops.conv.test_own_and_halo import random_parts


@pytest.mark.parametrize("nbytes", [1, 20, 60])
def test_pieces_of_the_outputs_are_those_of_the_patch(nbytes, monkeypatch):
    monkeypatch.setattr(pieces_file, "_OUTPUTS_NBYTES", nbytes)
    monkeypatch.setattr(pieces_file, "_KEPT_NBYTES", 0)
    counts = []
    for seed in range(60):
        torch.manual_seed(seed)
        stencil, parts, (low, high) = random_parts(random.Random(seed))
        core = parts.core
        large = InPieces(core, 8 * max(3, core.data.shape[1]))
        monkeypatch.setattr(MAPPED, "nbytes", 4 * nbytes)
        pieces = large.pieces_of_outputs(4 * nbytes)
        if pieces:
            x = torch.randn(core.held.shape, dtype=torch.float64)
            weight = torch.randn(3, high - low, *(w.kernel for w in stencil.windows), dtype=torch.float64)
            bias = torch.randn(3, dtype=torch.float64)
            y = large.convolve(x, weight, bias)
            torch.testing.assert_close(y, core.convolve(x, weight, bias), rtol=1e-11, atol=1e-11)
        counts.append(len(pieces))
        assert not large.pieces_of_outputs(1 << 20)
    assert max(counts) > 1
    assert any(counts) and not all(counts)


# Windows, extents of all inputs, which of them are own in the first dimension, instances, groups, pieces.
CUTS = {
    "rows": ([Window(3, 1, 1, 1, 1)] * 2, (160, 5), (0, 90), 1, 1, 3),
    "rows between others": ([Window(3, 1, 1, 1, 1)] * 2, (160, 5), (40, 130), 1, 2, 3),
    "dilated": ([Window(3, 1, 2, 2, 2)] * 2, (200, 9), (0, 130), 2, 1, 3),
    "strided": ([Window(3, 2, 1, 1, 1)] * 2, (160, 6), (0, 80), 1, 1, 3),
    "columns": ([Window(1, 1, 1, 0, 0), Window(4, 1, 1, 2, 1)], (6, 140), (0, 3), 1, 1, 4),
    "volume": ([Window(2, 1, 1, 0, 1)] * 3, (70, 4, 3), (0, 60), 1, 1, 3),
    "instances": ([Window(3, 1, 1, 1, 1)], (20,), (0, 10), 6, 1, 5),
    "line": ([Window(5, 1, 1, 2, 2)], (300,), (0, 200), 1, 1, 5),
}


def core_of_rows(windows, extents, rows, instances, groups):
    """What own rows add to the outputs of an even number of ranks."""
    stencil, shape = Stencil(tuple(windows)), (instances, 2 * groups, *extents)
    own = Box.of_shape(shape).replace(2, *rows)
    outputs = Box.of_shape((instances, 1, *stencil.outputs(extents)))
    outputs = outputs & with_channels(stencil, 0, 2 * groups).readers(own)
    return OwnAndHalo(with_channels(stencil, 0, 2 * groups), Box.of_shape(shape), own, outputs, groups).core


@pytest.mark.parametrize("case", CUTS)
def test_gradients_of_pieces_are_those_of_the_whole(case):
    *tile, count = CUTS[case]
    core = core_of_rows(*tile)
    pieces = pieces_of_data(core, count)
    assert len(pieces) == count
    torch.manual_seed(0)
    groups = core.groups
    # Integers, whose sums are exact in any order.
    x, weight, gradient = (
        torch.randint(-9, 10, shape).to(torch.float64)
        for shape in (
            core.data.shape,
            (3 * groups, 2, *(window.kernel for window in core.stencil.windows[2:])),
            (core.outputs.shape[0], 3 * groups, *core.outputs.shape[2:]),
        )
    )
    for needs in ((True, True, False), (True, False, False), (False, True, False)):
        found = InPieces(core, 1, pieces).convolve_adjoint(gradient, x, weight, needs)
        expected = core.convolve_adjoint(gradient, x, weight, needs)
        for mine, theirs, needed in zip(found, expected, needs, strict=True):
            assert torch.equal(mine, theirs) if needed else mine is None


def test_pieces_that_leave_data_out_are_none():
    jumps = core_of_rows([Window(1, 2)], (200,), (0, 100), 1, 1)
    assert pieces_of_data(jumps, 3) == (), "of two elements nobody reads the second"
    short = core_of_rows([Window(3, 1, 1, 1, 1)], (20,), (0, 20), 1, 1)
    counts = 3, 1, 0
    assert not any(pieces_of_data(short, n) for n in counts), "windows would be most of a piece"


def test_a_large_patch_goes_in_pieces_and_a_small_one_stays(monkeypatch):
    for name, number in (("_LARGE_NBYTES", 1 << 10), ("_PIECE_NBYTES", 1 << 11), ("_KEPT_NBYTES", 1 << 12)):
        monkeypatch.setattr(pieces_file, name, number)
    monkeypatch.setattr(pieces_file, "_PIECE_ELEMENTS", 1)
    monkeypatch.setattr(MAPPED, "nbytes", 1 << 13)
    core = core_of_rows([Window(3, 1, 1, 1, 1)] * 2, (320, 5), (0, 180), 1, 1)
    whole = in_pieces(core, 3, torch.float64)
    assert isinstance(whole, InPieces) and len(whole.of_data) > 1
    assert not in_pieces(core, 3, torch.bfloat16).of_data, "a sum in 16 bits is rounded once"
    small = core_of_rows([Window(3)] * 2, (20, 5), (0, 10), 1, 1)
    assert in_pieces(small, 3, torch.float64) is small
