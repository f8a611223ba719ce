"""Who shares statistics, as users say it; all ranks simulated in one process."""

import json

import pytest

from distdl_rma import ConfigurationError
from distdl_rma.geometry import Decomposition, Partition
from distdl_rma.layers.ops.norm.statistic_groups import NormAxes
from distdl_rma.layers.partitioned.norm import StatisticsAnswer, agreed_sharing, answer_of_user

AXES = NormAxes((2,), (1,))
P_X = Partition((0, 1, 2, 3), (1, 1, 4), 0)
SOURCE = Decomposition.balanced(P_X, (2, 3, 8))


def sharing(*lists):
    """What follows from a list of each rank, None of one that says nothing."""
    answers = {}
    for rank, ranks in enumerate(lists):
        callbacks = {} if ranks is None else {"get_ranks_synch_norm": lambda ranks=ranks: ranks}
        answers[rank] = answer_of_user(callbacks, rank)
    return agreed_sharing(AXES, SOURCE, answers)


def test_ranks_that_name_each_other_share():
    assert sharing([0, 1], [1, 0], [2], []) == {0: (0, 1), 1: (0, 1), 2: (2,), 3: (3,)}
    assert sharing([0, 1, 2, 3], None, None, None) == dict.fromkeys(range(4), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (([0, 1], [1], [2], [3]), r"gave \[0, 1\] on rank 0, but the ranks that say the same are \[0\]"),
        (([0, 1], [0, 1], None, None), r"rank 2 shares its statistics with \[0, 1, 2, 3\], as its user"),
        (([1], [1], [2], [3]), r"on rank 0: a list of different ranks with the caller among them"),
        ((None, 7, None, None), "on rank 1 raised, or returned neither a number nor ranks: TypeError"),
    ],
)
def test_what_does_not_fit_together_is_refused(lists, message):
    with pytest.raises(ConfigurationError, match=message):
        sharing(*lists)


@pytest.mark.parametrize("said", [[], [1, 0], [2, 2], 7])
def test_answers_travel_in_words(said):
    for name, valid in (("get_ranks_synch_norm", said in ([], [1, 0])), ("get_sizeof_norm", said == 7)):
        answer = answer_of_user({name: lambda: said}, 0)
        told = json.dumps(answer)
        assert json.dumps(StatisticsAnswer(*json.loads(told))) == told
        assert bool(answer.problem) != valid and len(answer.problem) < 200
