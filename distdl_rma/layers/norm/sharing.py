"""Who shares statistics with whom, where the user of a layer says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index as as_int
from typing import Any, NamedTuple

from distdl_rma.errors import ConfigurationError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups

_RANKS, _NBYTES = "get_ranks_synch_norm", "get_sizeof_norm"
# In the place of a number: the user says nothing, or nothing that can be used.
_SILENT, _STRANGE = -1, -2
_NOBODY = -1
_ORDER = {_STRANGE: 0, _SILENT: 2}


class StatisticsAnswer(NamedTuple):
    """What the user of one rank says of its statistics, in numbers that travel with the local shape.

    Lists travel as numbers that are equal where they name the same ranks: those that share are found by
    that, however many they are. The first two ranks come along for messages.
    """

    listed: int = _SILENT
    number: int = 0
    nbytes: int = _SILENT
    first: int = _NOBODY
    second: int = _NOBODY

    @classmethod
    def last_of(cls, call_arguments: Sequence[int]) -> StatisticsAnswer:
        """The one that a rank tells behind the other numbers of a call."""
        return cls(*call_arguments[-len(cls._fields) :])

    @classmethod
    def before(cls, call_arguments: tuple[int, ...]) -> tuple[int, ...]:
        """The other numbers."""
        return call_arguments[: -len(cls._fields)]

    @property
    def ranks(self) -> str:
        """The list of ranks, for a message."""
        if self.listed == _STRANGE and self.first == _NOBODY:
            return "no list of ranks"
        known = [str(rank) for rank in (self.first, self.second) if rank != _NOBODY]
        more = ["..."] if self.second != _NOBODY and self.listed not in (_STRANGE, len(known)) else []
        return f"[{', '.join([*known, *more])}]"


_NOTHING_SAID = StatisticsAnswer()


def answer_of_user(callbacks: Mapping[str, Any], rank: int) -> StatisticsAnswer:
    """Ask the user's callbacks, of those that are given; local.

    What is no list of different ranks with this one among them, or no number, is told to the others as such,
    so that all of them refuse it. An empty list stands for a rank that shares with no other.
    """
    found = _NOTHING_SAID
    if _RANKS in callbacks:
        told = _asked(callbacks[_RANKS], lambda ranks: [as_int(rank) for rank in ranks])
        ranks: list[int] = [] if told is None else told
        fits = told is not None and len(set(ranks)) == len(ranks) and (not ranks or rank in ranks)
        first, second, *_ = [*ranks, _NOBODY, _NOBODY]
        listed = len(ranks) if fits else _STRANGE
        found = StatisticsAnswer(listed, _number_of(ranks or [rank]), _SILENT, first, second)
    if _NBYTES in callbacks:
        nbytes = _asked(callbacks[_NBYTES], as_int)
        found = found._replace(nbytes=_STRANGE if nbytes is None or nbytes < 0 else nbytes)
    return found


def agreed_sharing(
    axes: NormAxes, source: Decomposition, answers: Mapping[int, StatisticsAnswer]
) -> dict[int, tuple[int, ...]] | None:
    """Ranks that share statistics, per rank of the tensor, as all users say; None where none says anything.

    Where users say nothing, all ranks that hold elements of the same groups.

    Raises
    ------
    ConfigurationError
        Alike on all ranks: if ranks that share do not all name each other and nobody else, or hold no
        elements of the same groups, or a size is not that of a message.
    """
    if all(answer == _NOTHING_SAID for answer in answers.values()):
        return None
    P_x, channels = source.partition, source.splits[axes.weighted[0]]
    possible = {rank: axes.ranks_sharing(P_x, rank, channels) for rank in P_x.ranks}
    numbers = {
        rank: _number_of(possible[rank]) if answers[rank].listed == _SILENT else answers[rank].number
        for rank in P_x.ranks
    }
    together: dict[int, list[int]] = {}
    for rank in P_x.ranks:
        together.setdefault(numbers[rank], []).append(rank)
    sharing = {rank: tuple(together[numbers[rank]]) for rank in P_x.ranks}
    # First those who say what cannot be used, last those who say nothing: others do not fit to them then.
    for rank, answer in sorted(answers.items(), key=lambda item: _ORDER.get(item[1].listed, 1)):
        if rank in P_x:
            mutual = _number_of(sharing[rank]) == numbers[rank]
            _check_list(rank, answer, mutual, sharing[rank], possible[rank])
        elif answer.listed not in (_SILENT, 0):
            raise ConfigurationError(
                f"{_RANKS}() gave {answer.ranks} on rank {rank}, which has no part of the tensor: it shares"
                " its statistics with nobody, []"
            )
    for rank, answer in answers.items():
        wanted = StatisticGroups(axes, source, rank, sharing[rank]).nbytes if rank in P_x else 0
        if answer.nbytes not in (_SILENT, wanted):
            got = "no number of bytes" if answer.nbytes == _STRANGE else f"{answer.nbytes}"
            raise ConfigurationError(
                f"{_NBYTES}() gave {got} on rank {rank}, one message of its statistics has {wanted} bytes"
            )
    return sharing


def _check_list(
    rank: int, answer: StatisticsAnswer, mutual: bool, said: Sequence[int], possible: Sequence[int]
) -> None:
    gave = f"{_RANKS}() gave {answer.ranks} on rank {rank}"
    if answer.listed == _SILENT:
        gave = f"rank {rank} shares its statistics with {list(possible)}, as its user does not say otherwise"
    elif answer.listed == _STRANGE:
        raise ConfigurationError(f"{gave}: a list of different ranks with the caller among them is needed")
    if not mutual:
        raise ConfigurationError(
            f"{gave}, but the ranks that say the same are {list(said)}: ranks that share statistics all name"
            " each other, and nobody else"
        )
    if not set(said) <= set(possible):
        raise ConfigurationError(
            f"{gave}, but only ranks {list(possible)} hold elements that share a mean and a variance"
        )


def _asked(callback: Callable[[], Any], taken: Callable[[Any], Any]) -> Any:
    # Any failure of the user's function is one that all ranks are to hear of.
    try:
        return taken(callback())
    except Exception:  # noqa: BLE001
        return None


def _number_of(ranks: Sequence[int]) -> int:
    return fingerprint(sorted(ranks))
