"""Which tests a day has: all of them within three days, those of a case in turn; or within ten, or thirty."""

import pytest

from tests import matrix

DAYS = range(20_000, 20_003)
THIRTY_DAYS = range(20_003, 20_033)
ALL = matrix.ALL


def own_sizes(*each):
    """Parametrize a test over numbers of ranks that it is marked with."""
    return pytest.mark.parametrize("own", [pytest.param(own, marks=pytest.mark.sizes(*own)) for own in each])


def days(item, size):
    return [matrix.runs(item, size, day) for day in DAYS]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.in_turn(1, 2, 4)
@pytest.mark.parametrize("other", "ab")
@pytest.mark.parametrize("case", range(4))
def test_cases_in_turn_run_on_the_marked_sizes_every_third_day(request, case, other):
    assert days(request.node, 1) == [False] * 3
    assert days(request.node, 3) == [True] * 3
    assert [sum(days(request.node, size)) for size in (2, 4)] == [1] * 2
    # The next case has the next place, and so another day.
    neighbours = [item for item in request.session.items if item.originalname == request.node.originalname]
    assert len(neighbours) < 8 or len({matrix.place_among_cases(item) % 3 for item in neighbours}) == 3


@matrix.over_seeds(4)
def test_seeds_run_every_day_on_some_number_of_ranks_and_within_three_on_all(request, seed):
    each = [days(request.node, size) for size in (1, 2, 3, 4)]
    assert [sum(some) for some in each] == [1] * 4
    assert all(any(today) for today in zip(*each, strict=True))
    assert all(days(request.node, 0))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_tests_that_start_jobs_run_every_third_day_without_mpi(request, number):
    assert sum(days(request.node, 0)) == 1


@pytest.mark.parametrize("number", range(6))
@own_sizes([1], [2, 3], [2, 3, 4], [1, 2, 3, 4])
def test_where_tests_run_once_a_day_each_has_all_its_numbers_of_ranks_in_as_many_days(request, own, number):
    chosen = [[n for n in ALL if matrix.runs_once(request.node, n, day)] for day in range(len(own))]
    assert sorted(chosen) == [[n] for n in own]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("number", range(4))
def test_where_tests_run_once_a_day_those_in_turn_rest_on_one_day_of_three(request, number):
    chosen = [[n for n in ALL if matrix.runs_once(request.node, n, day)] for day in DAYS]
    assert sorted(chosen) == [[], [2], [3]]


@matrix.over_seeds(3)
def test_where_tests_run_once_a_day_seeds_are_those_of_the_day(request, seed):
    once, usual = ([run(request.node, n, 20_000) for n in ALL] for run in (matrix.runs_once, matrix.runs))
    assert once == usual


def test_others_run_on_2_and_3_ranks_every_day(request):
    assert [any(days(request.node, size)) for size in (1, 2, 3, 4)] == [False, True, True, False]
    assert all(days(request.node, 2) + days(request.node, 3))


@pytest.mark.parametrize("number", range(20))
@own_sizes([1], [2], [4], [2, 3], [1, 2, 3, 4])
def test_each_has_its_turn_on_one_of_thirty_days_and_on_a_number_of_ranks_that_is_its_own(
    request, own, number
):
    turns = [sum(matrix.runs_seldom(request.node, n, day) for day in THIRTY_DAYS) for n in range(5)]
    assert turns[0] == 3 and sum(turns[size] for size in own) == 1
    assert sum(turns) == 4


@pytest.mark.parametrize("number", range(4))
@own_sizes([1], [2], [2, 3], [1, 2, 3, 4])
def test_on_two_hosts_each_has_its_turn_on_2_and_4_ranks_and_rests_a_day(request, own, number):
    chosen = matrix.runs_among([2, 4])
    shared = {2, 4} & {*own}
    days = [[n for n in ALL if chosen(request.node, n, day)] for day in range(len(shared) + 1)]
    assert sorted(days) == [[], *([n] for n in sorted(shared))]
