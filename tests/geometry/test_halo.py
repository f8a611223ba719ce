"""Sliding windows: what outputs read, which outputs read given inputs, and through which taps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.halo import Stencil, Window, WindowSplit, outputs_behind
from distdl_rma.geometry.intervals import Balanced, Listed, meeting
from tests.geometry.counting import Counting
from tests.geometry.strategies import splits, windows

some = settings(max_examples=80)
interval = st.tuples(st.integers(-6, 14), st.integers(1, 6)).map(lambda pair: (pair[0], sum(pair)))


def positions(window, output):
    """Input positions that one output reads, by tap."""
    return [output * window.stride - window.left + t * window.dilation for t in range(window.kernel)]


@st.composite
def window_splits(draw):
    """Parts of an output, some of them empty, seen through a window."""
    window, extent, parts = draw(windows()), draw(st.integers(1, 12)), draw(st.integers(1, 6))
    return WindowSplit(draw(splits(max(0, window.outputs(extent)), parts)), window, extent)


@some
@given(windows(), st.integers(0, 30))
def test_outputs_are_as_many_as_fit_into_the_padded_input(window, extent):
    fitting = [j for j in range(50) if positions(window, j)[-1] < extent + window.right]
    assert max(0, window.outputs(extent)) == len(fitting)


@some
@given(windows(), interval)
def test_reads_reach_from_the_first_to_the_last_input(window, outputs):
    read = {p for j in range(*outputs) for p in positions(window, j)}
    assert window.span == positions(window, 0)[-1] - positions(window, 0)[0] + 1
    assert window.reads(*outputs) == (min(read), max(read) + 1)


@some
@given(windows(), interval)
def test_readers_are_the_outputs_whose_window_meets_the_inputs(window, inputs):
    first, last = window.readers(*inputs)
    meeting_outputs = [
        j
        for j in range(-40, 40)
        if positions(window, j)[0] < inputs[1] and positions(window, j)[-1] >= inputs[0]
    ]
    assert list(range(first, last)) == meeting_outputs


@some
@given(windows(), interval, interval)
def test_taps_bound_those_by_which_the_outputs_read_the_inputs(window, inputs, outputs):
    used = [
        t for j in range(*outputs) for t, p in enumerate(positions(window, j)) if inputs[0] <= p < inputs[1]
    ]
    low, high = window.taps(*inputs, *outputs)
    assert low <= high
    assert all(low <= t < high for t in used)
    assert low >= 0
    assert high <= window.kernel or low == high
    # Of a single output they are exact.
    output = outputs[0]
    used = [t for t, p in enumerate(positions(window, output)) if inputs[0] <= p < inputs[1]]
    assert list(range(*window.taps(*inputs, output, output + 1))) == used


@some
@given(window_splits())
def test_window_split_reads_what_the_window_reads(split):
    for part in range(split.parts):
        outputs = split.base.interval(part)
        start, stop = split.interval(part)
        if outputs[0] == outputs[1]:
            assert start == stop
        else:
            assert (start, stop) == split.window.reads(*outputs) == split.ends(part)
    assert split.parts == split.base.parts
    ends = [split.ends(part) for part in range(split.parts)]
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(ends))


def meets(split, part, start, stop):
    low, high = split.interval(part)
    return max(low, start) < min(high, stop)


@some
@given(window_splits(), interval)
def test_meeting_finds_exactly_the_parts_that_read_any_of_the_inputs(split, inputs):
    found = meeting(split, *inputs)
    sharing = [part for part in range(split.parts) if meets(split, part, *inputs)]
    not_empty = [part for part in found if split.interval(part)[0] < split.interval(part)[1]]
    assert not_empty == sharing


def test_meeting_through_a_window_asks_for_a_few_parts_only():
    base = Counting(Balanced(100_000, 4096))
    split = WindowSplit(base, Window(7, 1, 2, 6, 6), 100_000)
    found = meeting(split, 50_000, 50_100)
    assert len(base.asked) <= 2 * 13
    assert list(found) == [part for part in range(4096) if meets(split, part, 50_000, 50_100)]


@some
@given(windows(), windows(), interval, interval)
def test_stencil_is_a_window_per_dimension(first, second, a, b):
    stencil, box = Stencil((first, second)), Box((a, b))
    assert stencil.reads(box) == Box((first.reads(*a), second.reads(*b)))
    for found, window, bounds in zip(stencil.readers(box).bounds, stencil.windows, box.bounds, strict=True):
        assert list(range(*found)) == list(range(*window.readers(*bounds)))


def test_stencil_of_parameters_takes_one_entry_per_dimension_and_refuses_what_cannot_be():
    stencil = Stencil.of((3, 2), (1, 2), (1, 3), ((1, 0), (2, 1)))
    assert stencil == Stencil((Window(3, 1, 1, 1, 0), Window(2, 2, 3, 2, 1)))
    assert stencil.outputs((8, 8)) == (7, 4)
    small = Stencil((Window(3), Window(5, dilation=2, left=1, right=1)))
    assert small.outputs((3, 7)) == (1, 1)
    too_small = (
        r"global input \(4, 6\) is too small for kernel \(3, 5\) with dilation \(1, 2\)"
        r" and padding \(\(0, 0\), \(1, 1\)\)$"
    )
    impossible = r"^kernel, stride and dilation must be at least 1, got Window\(kernel="
    for error, words, call in (
        (ValueError, "zip", lambda: Stencil.of((3, 2), (1,), (1, 3), ((1, 0), (2, 1)))),
        (ShapeError, too_small, lambda: small.outputs((4, 6))),
        (ShapeError, impossible, lambda: Window(0)),
        (ShapeError, impossible, lambda: Window(3, 0)),
        (ShapeError, impossible, lambda: Window(3, dilation=-1)),
        (ShapeError, "padding must be at least 0", lambda: Stencil.of((3,), (1,), (1,), ((-1, 0),))),
        (ShapeError, "padding must be at least 0", lambda: Stencil.of((3,), (1,), (1,), ((0, -2),))),
    ):
        with pytest.raises(error, match=words):
            call()


def test_no_outputs_read_nothing():
    stencil = Stencil((Window(3, left=1, right=1), Window(2)))
    assert stencil.reads(Box(((4, 4), (0, 5)))).empty
    assert stencil.reads(Box(((4, 6), (0, 0)))).empty


def test_negative_padding_of_a_window_crops():
    window = Window(1, left=-2, right=1)
    assert window.outputs(5) == 4
    assert window.reads(0, 4) == (2, 6)


@given(st.integers(1, 12), windows())
def test_ceil_mode_adds_one_window_at_most_and_it_begins_before_the_right_padding(n, floor):
    stride, padding = floor.stride, floor.left
    assume(2 * padding <= floor.kernel)
    floor = replace(floor, right=padding)
    ceil = replace(floor, ceil=True)
    begins = [j * stride for j in range(n + 2 * padding) if j * stride < n + padding]
    fits = [b for b in begins if b + floor.span < n + 2 * padding + stride]
    if floor.outputs(n) > 0:
        assert ceil.outputs(n) - floor.outputs(n) in (-1, 0, 1)
        assert ceil.outputs(n) == len(fits)


@given(st.data())
def test_outputs_behind_read_nothing_of_later_parts(data):
    extent = data.draw(st.integers(1, 40))
    window = data.draw(windows())
    cuts = sorted(data.draw(st.lists(st.integers(0, extent), max_size=4)))
    source = Listed(tuple(b - a for a, b in pairwise([0, *cuts, extent])))
    outputs = window.outputs(extent)
    assume(outputs > 0)
    found = outputs_behind(source, outputs, lambda o: window.reads(o, o + 1)[1])
    assert found.extent == outputs and found.parts == source.parts
    for part in range(source.parts):
        (start, stop), (_, end) = found.interval(part), source.interval(part)
        for output in range(start, stop):
            assert window.reads(output, output + 1)[1] <= end or end == extent
        # As many as can be.
        if stop < outputs and end < extent:
            assert window.reads(stop, stop + 1)[1] > end


def test_parts_behind_the_inputs_share_the_outputs_that_are_left():
    source, window = Listed((8, 8, 8, 0, 0)), Window(3, 1, 1, 1, 1)
    for lag in range(1, 16):
        source = outputs_behind(source, 24, lambda o: window.reads(o, o + 1)[1])
        assert [source.interval(part)[1] for part in range(5)] == [
            max(0, min(24, 8 * part - lag)) for part in range(1, 5)
        ] + [24]
