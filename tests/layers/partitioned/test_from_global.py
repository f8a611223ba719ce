"""Layers from global parameters, on any machine and with any distributions."""

import pytest
import torch

from distdl_rma import Distribution, Machine, MismatchError, PartitionError, ShapeError, UnsupportedError
from distdl_rma.layers import Concat, Conv, InstanceNorm

pytestmark = pytest.mark.mpi


# Calls, and what they are refused with; good, tall, deep, many and split are distributions, M the machine.
INEQUALITIES = {
    "Conv(M, conv, tall, kernel_size=1)": r"Conv: input: \(3.1\): {more} x 1 = {more} > {n}",
    "Conv(M, conv, deep, kernel_size=1)": r"input: \(3.2\): ",
    "Conv(M, conv, many, kernel_size=1)": r"input: \(3.3\): ",
    "Conv(M, conv, split, kernel_size=1)": r"\(3.3\): 1 x 1 x {more} = {more} > \|M\| = {n}",
    "Conv(M, conv, good, tall, kernel_size=1)": r"Conv: output: \(3.4\): ",
    "Conv(M, conv, good, deep, kernel_size=1)": r"output: \(3.5\): ",
    "Conv(M, conv, good, many, kernel_size=1, name='c1')": r"c1: output: \(3.6\): ",
    "InstanceNorm(M, (2, 3, 8, 8), tall)": r"InstanceNorm: \(4.1\): ",
    "InstanceNorm(M, (2, 3, 8, 8), deep)": r"\(4.2\): ",
    "InstanceNorm(M, (2, 3, 8, 8), many)": r"\(4.3\): ",
    "Concat(M, (2, (3, 1), 8, 8), [good, deep])": r"Concat: input 1: \(3.2\): ",
    "Concat(M, (2, (3, 1), 8, 8), [good, good], split)": r"Concat: output: \(3.6\): ",
}
REFUSED = {
    "Conv(M, (2, 3, 4), one, kernel_size=1)": (ShapeError, r"\(N, C, F, H, W\)"),
    "Conv(M, (2, 3, 4, 5, 5, 5, 5), one, kernel_size=1)": (ShapeError, "1 to 3 spatial"),
    "Conv(M, (2, 3, 4, 5, -1), one, kernel_size=1)": (ShapeError, "none below 0"),
    "Conv(M, (2, 3, 4, 5, 5.5), one, kernel_size=1)": (ShapeError, "are integers"),
    "Conv(M, (2, 3, 4, 5, 5), line, kernel_size=1)": (PartitionError, "has 3 dimensions"),
    "Conv(M, (2, 3, 4, 5, 5), (1, 1, 1, 1), kernel_size=1)": (PartitionError, "needs a Dist"),
    "Conv(M, (2, 0, 4, 5, 5), one, kernel_size=1)": (ShapeError, "needs channels"),
    "Conv(M, (2, 3, 4, 5, 5), one, kernel_size=7)": (ShapeError, "Conv: .* too small"),
    "Conv(M, (2, 3, 4, 5, 5), one, kernel_size=1, weights='root')": (UnsupportedError, "weights='root'"),
    "InstanceNorm(M, (2, 3), one)": (ShapeError, r"\(N, C, H, W\)"),
    "Concat(M, (2, 3, 5, 5), [one])": (ShapeError, r"\(C1, C2, ...\)"),
    "Concat(M, (2, (3, 1), 5, 5), [one])": (ShapeError, "1 distributions"),
    "Concat(M, (2, (3, 1), 5, 5), one)": (PartitionError, r"a sequence, .* got Distribution\("),
    "Concat(M, (2, (3,), 5, 5), (3,))": (PartitionError, "input 0: needs a Distribution, got 3"),
}


def test_what_does_not_fit_is_refused_and_inequalities_before_anything_is_sent(permuted, comm):
    n, puts = comm.size, permuted.segments.counters.puts
    names = {
        "M": permuted,
        "Conv": Conv,
        "InstanceNorm": InstanceNorm,
        "Concat": Concat,
        "conv": (2, 3, 4, 8, 8),
        "good": Distribution(1, 1, n, 1),
        "split": Distribution(1, 1, n + 1, 1),
        "tall": Distribution(1, 1, n + 1, 1, strides=(1, 1, n)),
        "deep": Distribution(1, n + 1, 1, 1, strides=(1, n, 1)),
        "many": Distribution(n + 1, 1, 1, 1, strides=(n, 1, 1)),
        "one": Distribution(1, 1, 1, 1),
        "line": Distribution(1, 1, 1),
    }
    for call, said in INEQUALITIES.items():
        with pytest.raises(PartitionError, match=said.format(n=n, more=n + 1)):
            eval(call, names)
    assert permuted.segments.counters.puts == puts
    for call, (kind, message) in REFUSED.items():
        with pytest.raises(kind, match=message):
            eval(call, names)


def unlike(n, batch, high):
    """Layers that talk, from global parameters that ranks may be given differently, and their inputs."""
    cut, wide = Distribution(1, 1, n, 1), Distribution(1, 1, 1, n)
    here, there = torch.ones(2, 3, 2, 8), torch.ones(2, 3, 2 * n, 8 // n)
    yield lambda M: Conv(M, (batch, 3, 2, high, 8), cut, kernel_size=3, padding=1), [here]
    yield lambda M: Conv(M, (batch, 3, 2, high, 8), cut, wide, kernel_size=3, padding=1), [here]
    yield lambda M: InstanceNorm(M, (batch, 3, high, 8), cut), [here]
    yield lambda M: Concat(M, (batch, (3, 3), high, 8), [cut, wide]), [here, there]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("connects", [False, True])
def test_ranks_that_were_given_different_extents_find_out_when_they_meet(comm, which, connects):
    for batch, high in ((3, 2 * comm.size), (2, 2 * comm.size + 1)):
        machine = Machine(comm, segment_size="4MiB", timeout=15)
        given = (batch, high) if comm.rank == 1 else (2, 2 * comm.size)
        make, xs = list(unlike(comm.size, *given))[which]
        layer = make(machine)
        with pytest.raises(MismatchError, match="with the same arguments"):
            layer.connect() if connects else layer(*xs)
        machine.close()


def test_weights_of_a_norm_are_whole_on_all_ranks_wherever_its_channels_are(permuted, comm):
    # Channels in as many parts as there is room for, with idle ranks behind them.
    cut = Distribution(1, max(1, comm.size - 1), 1, 1)
    norm = InstanceNorm(permuted, (2, 5, 6, 7), cut, affine=True, dtype=torch.float64)
    assert norm.weight.shape == norm.bias.shape == (5,)
    assert norm.get_ranks_synch_weights() == (list(permuted.ranks) if comm.size > 1 else [])
    assert norm.get_sizeof_gradients() == 2 * 5 * 8
