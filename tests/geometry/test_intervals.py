"""Intervals of one dimension: consecutive parts, and the parts that meet an interval."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.intervals import Balanced, Listed, Section, meeting
from tests.geometry.counting import Counting

some = settings(max_examples=60)
lengths = st.lists(st.sampled_from([0, 0, 1, 1, 2, 5]), min_size=1, max_size=8).map(tuple)
balanced = st.builds(Balanced, st.integers(0, 20), st.integers(1, 9))
any_split = st.one_of(balanced, lengths.map(Listed))


@st.composite
def sections(draw):
    base = draw(any_split)
    offset = draw(st.integers(0, base.extent))
    return Section(base, offset, draw(st.integers(0, base.extent - offset)))


def intervals(split):
    return [split.interval(part) for part in range(split.parts)]


def sizes(split):
    return [stop - start for start, stop in intervals(split)]


def share_an_element(a, b):
    return max(a[0], b[0]) < min(a[1], b[1])


@some
@given(st.integers(0, 200), st.integers(1, 40))
def test_the_first_parts_of_a_balanced_split_get_one_element_more(extent, parts):
    quotient, longer = divmod(extent, parts)
    assert sizes(Balanced(extent, parts)) == [quotient + 1] * longer + [quotient] * (parts - longer)


@some
@given(lengths)
def test_listed_parts_have_the_listed_lengths(listed):
    assert sizes(Listed(listed)) == list(listed)
    assert Listed(listed).extent == sum(listed)


@some
@given(any_split)
def test_parts_follow_each_other_from_zero_to_the_extent(split):
    bounds = intervals(split)
    assert len(bounds) == split.parts
    assert bounds[0][0] == 0
    assert bounds[-1][1] == split.extent
    assert all(before[1] == behind[0] for before, behind in pairwise(bounds))
    ends = [split.ends(part) for part in range(split.parts)]
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(ends))


@some
@given(sections())
def test_a_section_has_the_elements_of_its_base_in_an_interval(section):
    for part in range(section.parts):
        elements = set(range(*section.base.interval(part)))
        inside = {at - section.offset for at in elements} & set(range(section.extent))
        assert set(range(*section.interval(part))) == inside


@some
@given(sections(), st.integers(-3, 25), st.integers(-3, 25))
def test_the_parts_of_a_section_are_found_and_rise(section, start, stop):
    ends = [section.ends(part) for part in range(section.parts)]
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(ends))
    found = meeting(section, start, stop)
    for part, interval in enumerate(intervals(section)):
        assert part in found or not share_an_element(interval, (start, stop))


def test_a_section_beyond_its_base_is_refused():
    with pytest.raises(PartitionError, match=r"\[3, 9\) is no interval of extent 8"):
        Section(Balanced(8, 3), 3, 6)


@some
@given(any_split, st.integers(-3, 25), st.integers(-3, 25))
def test_meeting_finds_exactly_the_parts_that_share_an_element(split, start, stop):
    found = meeting(split, start, stop)
    sharing = [part for part in range(split.parts) if share_an_element(split.interval(part), (start, stop))]
    assert [part for part in found if sizes(split)[part]] == sharing
    assert found.step == 1
    assert not meeting(split, start, min(start, stop))


@pytest.mark.parametrize("base", [Balanced(100_000, 4096), Listed((24,) * 4096), Balanced(5, 4096)])
@pytest.mark.parametrize("start", [-3, 0, 4, 12_345, 90_000, 200_000])
def test_meeting_asks_for_a_few_parts_only(base, start):
    split = Counting(base)
    meeting(split, start, start + 50)
    # Two bisections of 4096 parts.
    assert len(split.asked) <= 2 * 13


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Balanced(-1, 2), "cannot cut extent -1 into 2 parts"),
        (lambda: Balanced(3, 0), "cannot cut extent 3 into 0 parts"),
        (lambda: Listed(()), "lengths of parts must be at least 0, got ()"),
        (lambda: Listed((2, -1)), "lengths of parts must be at least 0, got (2, -1)"),
    ],
)
def test_impossible_splits_are_refused(build, message):
    with pytest.raises(PartitionError) as caught:
        build()
    assert str(caught.value) == message


def test_splits_compare_by_content():
    assert Balanced(7, 3) == Balanced(7, 3) != Balanced(7, 2)
    assert Listed((2, 3)) == Listed((2, 3)) != Listed((3, 2))
    assert len({Listed((2, 3)), Listed((2, 3)), Balanced(5, 2)}) == 2
