"""Random numbers of a block, by the indices of its elements in the whole tensor.

The element at place ``i`` of the whole tensor, in C order, gets number ``i`` of the generator SplitMix64
(Steele, Lea and Flood, 2014), which mixes a counter. So a draw is the same on every grid and number of
ranks. Its seed is one number, which every rank takes from its default generator or from the one that is
passed. So the default generators stay equal, and a repeated run or a recomputation draws the same numbers.

A generator of torch could not do this: its numbers come in a sequence, and a rank would have to draw those of
all other ranks to reach its own. A counter has no state: ``word(i) = mix(seed + (i + 1) * step)``, modulo 2
** 64.

The counter of an element of a block is a sum of one term for each dimension, so that a block needs only two
vectors (:class:`_Plan`), which do not depend on the seed and are kept:

    whole (4, 6), block rows 1..2, columns 3..5        index = 6 * row + column
    rows      [6, 12] * step + step   one number for each row
    columns   [3, 4, 5] * step        one number for each column
    counters = seed + rows[r] + columns[c]             all 6 of them by one addition, then mixed

Numbers are made in chunks that stay in the processor's cache, by numpy, without torch's overhead for each of
the dozen operations. Each distribution turns a word into a number by the formula in its function; the
formulas decide what a seed means: another one would give a user other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import pi, prod, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.staging import up

Words = NDArray[np.uint64]
Numbers = NDArray[Any]
# Of SplitMix64: the step of the counter; the shifts and factors that mix it.
_STEP = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Arrays without dimensions, with which numpy computes faster than with numbers.
_RIGHT = [np.array(bits, np.uint64) for bits in range(64)]
_MIX = (*zip((_RIGHT[30], _RIGHT[27]), (np.array(each, np.uint64) for each in _FACTORS), strict=True),)
_WORDS = 1 << 64
# Elements whose numbers are computed at once, in the processor's cache.
_CHUNK = 1 << 14
# Bits of a uniform number, as torch draws it.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Types of the elements that torch draws by a method.
_FLOATS = frozenset(_BITS)
_PARTS = _FLOATS | {torch.complex32, torch.complex64, torch.complex128}
_COUNTS = _FLOATS | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def seed_from(source: torch.Generator | None = None) -> int:
    """Seed of one draw: a number of the default generator, or of ``source``; on all ranks of the tensor."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=source).item())


def generator_of_block(layout: Decomposition, seed: int) -> torch.Generator:
    """A new generator of torch for this rank's block, equal on ranks with copies of it."""
    return torch.Generator().manual_seed(hash((seed, *layout.own_box.start)))


def fill(out: torch.Tensor, name: str, layout: Decomposition, seed: int, parameters: Sequence[Any]) -> bool:
    """Fill this rank's block as torch's method ``name`` fills a tensor, by the indices of elements; local.

    ``out`` has the block's shape, and is changed in place; in a graph, as by ``copy_``. ``parameters`` are
    all numbers of torch's method, in its order. Returns False if torch has no such numbers of this type; then
    nothing has changed.
    """
    distribution, types = _DISTRIBUTIONS[name]
    if out.dtype not in types:
        return False
    real, mean = out, 0.0
    if out.is_complex():
        real = torch.view_as_real(out)
        if name == "normal_":
            # Both parts have half of the variance.
            mean, parameters = parameters[0], (0.0, parameters[1] / sqrt(2))
    plan = _plan(layout.own_box.bounds, layout.shape, out.is_complex())
    if plan is None:
        return True
    # Elements are drawn in C order on the CPU. Devices, other orders in memory and graphs get copies.
    at_once = real.is_cpu and real.is_contiguous() and not (out.requires_grad and torch.is_grad_enabled())
    target = real.detach() if at_once else torch.empty(real.shape, dtype=real.dtype, device="cpu")
    _fill(target, plan, seed, partial(distribution, real.dtype, *parameters))
    if not at_once:
        real.copy_(up(target, real.device))
    if mean:
        out.add_(mean)
    return True


class _Plan(NamedTuple):
    """What the indices of a block's elements add to the seed, as sums of rows and columns."""

    rows: Words  # of the outer dimensions
    columns: Words  # of the inner dimensions, as far as a chunk goes
    width: int  # elements of a whole row
    piece: int  # elements of a piece of a row
    step: int  # from piece to piece


@lru_cache(maxsize=64)
def _plan(bounds: tuple[tuple[int, int], ...], shape: tuple[int, ...], is_complex: bool) -> _Plan | None:
    # Of a block of a tensor; None without elements. Complex elements have a dimension more.
    if is_complex:
        bounds, shape = (*bounds, (0, 2)), (*shape, 2)
    if any(a == b for a, b in bounds):
        return None
    # A tensor without dimensions has one element.
    steps = [prod(shape[d + 1 :]) * _STEP % _WORDS for d in range(len(shape))] or [0]
    starts, stops = zip(*bounds, strict=True) if bounds else ((0,), (1,))
    at, inner = len(steps) - 1, 1
    while at and inner * (extent := stops[at] - starts[at]) <= _CHUNK:
        inner *= extent
        at -= 1
    # Pieces of about the same size.
    extent = stops[at] - starts[at]
    indices = -(-extent // -(-extent * inner // _CHUNK))
    pieces = starts[at] + indices, *stops[at + 1 :]
    # The first number of SplitMix64 is that of the seed and one step.
    rows = _sums(starts[:at], stops[:at], steps) + np.uint64(_STEP)
    columns = _sums(starts[at:], pieces, steps[at:])
    return _Plan(rows, columns, extent * inner, len(columns), indices * steps[at] % _WORDS)


def _sums(starts: Sequence[int], stops: Sequence[int], steps: Sequence[int]) -> Words:
    # For all indices of a box, row-major: the sum over the dimensions of index times step.
    found = np.zeros(1, np.uint64)
    for start, stop, step in zip(starts, stops, steps, strict=False):
        own = np.arange(start, stop, dtype=np.uint64) * np.uint64(step)
        found = np.add.outer(found, own).reshape(-1)
    return found


def _fill(target: torch.Tensor, plan: _Plan, seed: int, values: Callable[[Words], Numbers]) -> None:
    # Piece by piece of all rows, so that the columns of a piece are added to each row's number.
    table = target.as_strided((len(plan.rows), plan.width), (plan.width, 1))
    rows = (plan.rows + np.uint64(seed)).tolist()
    spare = np.empty_like(plan.columns)
    for at in range(0, plan.width, plan.piece):
        stop = min(at + plan.piece, plan.width)
        base = at // plan.piece * plan.step
        for row, start in enumerate(rows):
            words = plan.columns[: stop - at] + np.uint64((start + base) % _WORDS)
            _mix(words, spare[: stop - at])
            table[row, at:stop] = torch.from_numpy(values(words))


def _mix(words: Words, spare: Words) -> None:
    # SplitMix64's output function, in place.
    for shift, factor in _MIX:
        np.right_shift(words, shift, spare)
        np.bitwise_xor(words, spare, words)
        np.multiply(words, factor, words)
    np.right_shift(words, _RIGHT[31], spare)
    np.bitwise_xor(words, spare, words)


# Distributions: each gets the type of the elements, torch's parameters, and words that it may change.


def _wide(dtype: torch.dtype) -> type[np.floating[Any]]:
    return np.float64 if dtype == torch.float64 else np.float32


def _real(words: Words, bits: int, dtype: Any) -> Numbers:
    # Words below 2 ** bits as numbers in [0, 1). Signed integers convert faster.
    found = words.view(np.int64).astype(dtype)
    found *= dtype(2.0**-bits)
    return found


def _scaled(found: Numbers, factor: float, summand: float) -> Numbers:
    # Float32 remains float32.
    if factor != 1:
        found *= found.dtype.type(factor)
    if summand:
        found += found.dtype.type(summand)
    return found


def _uniform(dtype: torch.dtype, low: float, high: float, words: Words) -> Numbers:
    bits = _BITS[dtype]
    words >>= _RIGHT[64 - bits]
    return _scaled(_real(words, bits, _wide(dtype)), high - low, low)


def _log(words: Words, bits: int, dtype: Any) -> Numbers:
    # Logarithms of numbers in (0, 1] by the highest bits, at most 62.
    counts = words >> _RIGHT[64 - bits]
    counts += np.uint64(1)
    found = _real(counts, bits, dtype)
    return np.log(found, out=found)


def _normal(dtype: torch.dtype, mean: float, std: float, words: Words) -> Numbers:
    # Box and Muller: the higher half is the radius, the lower half the angle.
    wide = _wide(dtype)
    radius = _log(words, 32, wide)
    radius *= wide(-2)
    np.sqrt(radius, out=radius)
    angle = words.astype(np.uint32).view(np.int32).astype(wide)
    angle *= wide(pi * 2.0**-31)
    radius *= np.cos(angle, out=angle)
    return _scaled(radius, std, mean)


def _exponential(dtype: torch.dtype, rate: float, words: Words) -> Numbers:
    found = _log(words, 62, _wide(dtype))
    # Never zero, as torch's.
    np.minimum(found, -np.finfo(found.dtype).eps / 2, out=found)
    return _scaled(found, -1 / rate, 0)


def _bernoulli(dtype: torch.dtype, p: float, words: Words) -> Numbers:
    # Compared as integers: a float of 53 bits would be 1 for some words below 2 ** 64.
    below = int(p * 2.0**64)
    return words <= np.uint64(below - 1) if below else np.zeros(words.shape, np.bool_)


def _random(dtype: torch.dtype, low: int | None, high: int | None, words: Words) -> Numbers:
    # Without an upper bound: up to the largest integer of the type, or that of the bits of a fraction.
    if high is None:
        most = 2 ** _BITS[dtype] if dtype in _BITS else 1 if dtype == torch.bool else torch.iinfo(dtype).max
        high = most + 1
    first = low or 0
    if high - first < _WORDS:
        words %= np.uint64(high - first)
    words += np.uint64(first % _WORDS)
    return words.view(np.int64)


_DISTRIBUTIONS: dict[str, tuple[Callable[..., Numbers], frozenset[torch.dtype]]] = {
    "uniform_": (_uniform, _PARTS),
    "normal_": (_normal, _PARTS),
    "exponential_": (_exponential, _FLOATS),
    "bernoulli_": (_bernoulli, _COUNTS),
    "random_": (_random, _COUNTS),
}
