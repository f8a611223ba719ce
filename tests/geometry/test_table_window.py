"""Outputs that read by a table: what they read, and who reads what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distdl_rma.geometry.halo import ReadersSplit, TableWindow, WindowSplit
from distdl_rma.geometry.intervals import Balanced, meeting
from tests.geometry.strategies import splits

extents = st.integers(1, 12)


@given(n=extents, m=extents)
def test_adaptive_windows_cover_the_input_in_order(n, m):
    window = TableWindow.adaptive(n, m)
    assert list(window.first) == sorted(window.first) and list(window.last) == sorted(window.last)
    covered = {i for a, b in zip(window.first, window.last, strict=True) for i in range(a, b + 1)}
    assert covered == set(range(n))


@given(n=extents, m=extents, data=st.data())
def test_readers_of_an_interval_are_those_whose_windows_meet_it(n, m, data):
    window = TableWindow.adaptive(n, m)
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    first, last = window.readers(start, stop)
    meeting_ones = [j for j in range(m) if window.first[j] < stop and window.last[j] >= start]
    assert list(range(first, last)) == meeting_ones


@given(n=extents, m=extents, parts=st.integers(1, 4), data=st.data())
def test_parts_have_rising_ends_and_are_empty_where_the_base_is(n, m, parts, data):
    split = data.draw(splits(n, parts))
    for image in (
        WindowSplit(split, TableWindow.adaptive(m, split.extent), m),
        ReadersSplit(split, TableWindow.adaptive(split.extent, m), m),
    ):
        ends = [image.ends(part) for part in range(image.parts)]
        for side in zip(*ends, strict=True):
            assert list(side) == sorted(side)
        for part in range(image.parts):
            a, b = split.interval(part)
            start, stop = image.interval(part)
            assert (start < stop) == (a < b)
        for low in range(image.extent):
            found = meeting(image, low, low + 1)
            wanted = {p for p in range(image.parts) if image.interval(p)[0] <= low < image.interval(p)[1]}
            assert wanted <= set(found)


def test_no_outputs_read_nothing():
    window = TableWindow.adaptive(5, 0)
    assert window.reads(0, 0) == (0, 0)
    assert window.readers(0, 5) == (0, 0)
    assert WindowSplit(Balanced(0, 2), window, 5).interval(1) == (0, 0)
