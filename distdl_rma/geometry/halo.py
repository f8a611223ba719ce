"""Width of halos: which inputs the outputs of windows read, for sliding windows and for tables of windows.

A window with kernel 3, stride 2 and padding 1 on 8 inputs, whose outputs two ranks compute::

    inputs        p 0 1 2 3 4 5 6 7 p
    output 0      #-#-#                      j * 2 - 1 + (0, 1, 2)
    output 1          #-#-#
    output 2              #-#-#              rank 1: outputs [2:4) read inputs [3:8)
    output 3                  #-#-#          and own [4:8): the halo is input 3, on the left only

The width of a halo is the difference of what outputs read and what a rank owns. It depends on the place:
with strides, uneven blocks and padding each rank and each side has another one, perhaps none, and may need
several neighbours. So no halo is a number here: ``Stencil.with_halo`` gives the inputs that each part reads
as a split of the input, and the exchange finds who owns them.

The adjoint asks the other way round, which outputs read an input (``readers``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.intervals import Listed, Mapped, Split


def each_dim(value: Any, dims: int, read: Callable[[Any], Any] = int) -> tuple[Any, ...]:
    """A number per dimension, from an argument of torch: one for all, or a sequence of one or of several."""
    if value is None or isinstance(value, (int, float)):
        return (value,) * dims
    # Numbers of NumPy, and tensors without dimensions, cannot be iterated over.
    several = value if getattr(value, "ndim", 1) else (value,)
    numbers = tuple([None if number is None else read(number) for number in several])
    return numbers * dims if len(numbers) == 1 else numbers


@dataclass(frozen=True)
class Window:
    """Sliding window of one dimension.

    Output ``j`` reads the inputs ``j * stride - left + t * dilation`` for ``t`` in ``range(kernel)``.

    Examples
    --------
    >>> window = Window(3, 1, 1, 1, 1)  # kernel, stride, dilation, padding left and right
    >>> window.outputs(8)
    8
    >>> window.reads(4, 8)  # outputs 4 to 7 read one input more on each side; 8 is padding
    (3, 9)
    """

    kernel: int  # number of taps, at least 1
    stride: int = 1  # step between outputs
    dilation: int = 1  # step between taps
    left: int = 0  # padding at the two ends of the dimension; negative padding crops
    right: int = 0
    ceil: bool = False  # whether a last window that ends beyond the padding counts, if it begins before it

    def __post_init__(self) -> None:
        if min(self.kernel, self.stride, self.dilation) < 1:
            raise ShapeError(f"kernel, stride and dilation must be at least 1, got {self}")

    @property
    def span(self) -> int:
        """Number of inputs from the first to the last tap, both included."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, extent: int) -> int:
        """Number of outputs for an input of the given extent; 0 or less if the window does not fit."""
        beyond = self.stride - 1 if self.ceil else 0
        count = (extent + self.left + self.right - self.span + beyond) // self.stride + 1
        # As in torch, a window must not begin beyond the input and its left padding.
        return count - (self.ceil and (count - 1) * self.stride >= extent + self.left)

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """Half-open range from the first to the last input that outputs ``[start, stop)`` read."""
        return start * self.stride - self.left, (stop - 1) * self.stride - self.left + self.span

    def readers(self, start: int, stop: int) -> tuple[int, int]:
        """Outputs whose window, first to last tap, meets inputs ``[start, stop)``."""
        first = -((self.span - 1 - self.left - start) // self.stride)
        return first, (stop - 1 + self.left) // self.stride + 1

    def taps(self, start: int, stop: int, first: int, last: int) -> tuple[int, int]:
        """Half-open range of taps by which outputs ``[first, last)`` read inputs ``[start, stop)``.

        Bounds only: taps between them may read none of the inputs.
        """
        at_first, at_last = first * self.stride - self.left, (last - 1) * self.stride - self.left
        lowest = max(0, -((at_last - start) // self.dilation))
        highest = min(self.kernel - 1, (stop - 1 - at_first) // self.dilation)
        return lowest, max(lowest, highest + 1)


@dataclass(frozen=True)
class TableWindow:
    """Index of the first and of the last input that each output of one dimension reads, non-decreasing."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    # A table reads no padding.
    left: ClassVar[int] = 0
    right: ClassVar[int] = 0

    @classmethod
    def adaptive(cls, extent: int, outputs: int) -> TableWindow:
        """Windows of adaptive pooling: from ``floor(j * n / m)`` to before ``ceil((j + 1) * n / m)``."""
        return cls(
            tuple(j * extent // outputs for j in range(outputs)),
            tuple(-(-(j + 1) * extent // outputs) - 1 for j in range(outputs)),
        )

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return len(self.first)

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """Half-open range from the first to the last input that outputs ``[start, stop)`` read."""
        if not self.first:
            return 0, 0
        return self.first[min(start, self.outputs - 1)], self.last[max(stop - 1, 0)] + 1

    def readers(self, start: int, stop: int) -> tuple[int, int]:
        """Outputs that read from inputs ``[start, stop)``."""
        return bisect_left(self.last, start), bisect_left(self.first, stop)


def outputs_behind(source: Split, extent: int, last_read: Callable[[int], int]) -> Listed:
    """Parts of ``extent`` outputs of which each reads inputs of its own and of earlier parts only.

    For ranks that run one after another, and pass on what later ones need: no rank waits for a later one.

    ``last_read(output)`` is the end of the inputs that an output reads; it never decreases. What lies behind
    the inputs is padding: the last part has all outputs that are left, and an earlier part whose inputs end
    there has no more than others have.
    """
    ends, most, longest = [0], 0, 0
    for start, stop in map(source.interval, range(source.parts - 1)):
        longest = max(longest, (stop - start) * extent // max(1, source.extent))
        if stop < source.extent:
            end = max(ends[-1], bisect_right(range(extent), stop, key=last_read))
            most = max(most, end - ends[-1])
        else:
            end = min(extent, ends[-1] + max(most, longest))
        ends.append(end)
    return Listed(tuple(b - a for a, b in pairwise([*ends, extent])))


@dataclass(frozen=True)
class WindowSplit(Mapped):
    """Inputs that each part of an output dimension reads, padding included; ``extent`` is without it."""

    window: Window | TableWindow
    extent: int

    def image(self, start: int, stop: int) -> tuple[int, int]:
        """Inputs that outputs read."""
        return self.window.reads(start, stop)


@dataclass(frozen=True)
class InnerSplit(Mapped):
    """Inputs inside the domain that each part reads, if the padding is made from elements of the domain.

    A rank that pads makes its padding itself: what it lacks are elements of the domain, perhaps more of them
    than its windows read directly.

    By ``mode`` the padding reads: ``"constant"`` nothing; ``"replicate"`` the last element; ``"reflect"`` as
    many elements next to the last one as the padding is wide.
    """

    base: WindowSplit
    mode: str

    @property
    def extent(self) -> int:
        """Extent of the dimension."""
        return self.base.extent

    def image(self, start: int, stop: int) -> tuple[int, int]:
        """Elements of the domain that lie in an interval, or that its part in the padding reads."""
        n = self.extent
        start, stop = min(max(start, 0), n), min(max(stop, 0), n)
        if self.mode == "replicate":
            return min(start, n - 1), max(stop, 1)
        if self.mode == "reflect":
            # The same bounds for all parts, so that ends never decrease: some parts near the end need a
            # little less.
            window = self.base.window
            return min(start, max(0, n - 1 - window.right)), max(stop, min(n, window.left + 1))
        return start, stop


@dataclass(frozen=True)
class ReadersSplit(WindowSplit):
    """Outputs that read each part of an input dimension, and ``more`` before them; parts may share some.

    In a transposed convolution the window slides over its outputs, as in the adjoint: its inputs read these.
    What is found may reach beyond ``extent``.
    """

    more: int = 0

    def image(self, start: int, stop: int) -> tuple[int, int]:
        """Outputs whose windows meet an interval of inputs."""
        first, last = self.window.readers(start, stop)
        return first - self.more, last


@dataclass(frozen=True)
class Stencil:
    """One sliding window per spatial dimension.

    Examples
    --------
    >>> stencil = Stencil.of(kernel=(3, 3), stride=(2, 2), dilation=(1, 1), padding=((1, 1), (1, 1)))
    >>> stencil.outputs((8, 8))
    (4, 4)
    >>> stencil.reads(Box(((2, 4), (0, 4))))
    Box(bounds=((3, 8), (-1, 8)))
    """

    windows: tuple[Window, ...]

    @classmethod
    def of(
        cls,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
        padding: tuple[tuple[int, int], ...],
        ceil: bool = False,
    ) -> Stencil:
        """Stencil from one tuple per parameter; ``padding`` has a (left, right) pair per dimension."""
        if min((side for sides in padding for side in sides), default=0) < 0:
            raise ShapeError(f"padding must be at least 0, got {padding}")
        each = zip(kernel, stride, dilation, padding, strict=True)
        return cls(tuple(Window(k, s, d, left, right, ceil) for k, s, d, (left, right) in each))

    def with_halo(self, outputs: Sequence[Split], shape: Sequence[int]) -> tuple[WindowSplit, ...]:
        """Inputs that each part of the outputs reads, by dimension, for an input of the given global shape.

        ``Window.reads`` alone determines the width of the halo around a rank's own inputs.
        """
        return tuple(WindowSplit(s, w, n) for s, w, n in zip(outputs, self.windows, shape, strict=True))

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Global output shape for a global input; ``ShapeError`` if a window does not fit."""
        extents = tuple(w.outputs(n) for w, n in zip(self.windows, shape, strict=True))
        if any(extent < 1 for extent in extents):
            raise ShapeError(
                f"global input {shape} is too small for kernel {tuple(w.kernel for w in self.windows)}"
                f" with dilation {tuple(w.dilation for w in self.windows)}"
                f" and padding {tuple((w.left, w.right) for w in self.windows)}"
            )
        return extents

    def reads(self, box: Box) -> Box:
        """Inputs that a box of outputs reads; the box may reach beyond the domain, into the padding."""
        if box.empty:
            return Box(tuple((w.reads(*b)[0],) * 2 for w, b in zip(self.windows, box.bounds, strict=True)))
        return Box(tuple(w.reads(*b) for w, b in zip(self.windows, box.bounds, strict=True)))

    def readers(self, box: Box) -> Box:
        """Outputs whose windows meet a box of inputs."""
        bounds = (w.readers(*b) for w, b in zip(self.windows, box.bounds, strict=True))
        return Box(tuple((first, max(first, last)) for first, last in bounds))
