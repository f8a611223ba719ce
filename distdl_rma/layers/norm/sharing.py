"""Who shares statistics with whom, where the user of a layer says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index as as_int
from typing import Any, NamedTuple

from distdl_rma.errors import ConfigurationError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups

_RANKS, _NBYTES = "get_ranks_synch_norm", "get_sizeof_norm"


class StatisticsAnswer(NamedTuple):
    """What the user of one rank says of its statistics, as it travels with the local shape."""

    ranks: Sequence[int] | None = None  # None where nothing is said
    usable: bool = True  # whether they are different ranks with this one among them
    nbytes: int | None = None  # likewise; below 0 if it is no number

    @property
    def shown(self) -> str:
        """The list of ranks, for a message."""
        ranks = self.ranks or ()
        if not ranks and not self.usable:
            return "no list of ranks"
        more = ["..."] if self.usable and len(ranks) > 2 else []
        return f"[{', '.join([*map(str, ranks[:2]), *more])}]"


_NOTHING_SAID = StatisticsAnswer()


def answer_of_user(callbacks: Mapping[str, Any], rank: int) -> StatisticsAnswer:
    """Ask the user's callbacks, of those that are given; local.

    What is no list of different ranks with this one among them, or no number, is told to the others as such,
    so that all of them refuse it. An empty list stands for a rank that shares with no other.
    """
    found = _NOTHING_SAID
    if _RANKS in callbacks:
        told = _asked(callbacks[_RANKS], lambda ranks: tuple(as_int(rank) for rank in ranks))
        ranks: tuple[int, ...] = told or ()
        fits = told is not None and len(set(ranks)) == len(ranks) and (not ranks or rank in ranks)
        found = StatisticsAnswer(ranks, fits)
    if _NBYTES in callbacks:
        nbytes = _asked(callbacks[_NBYTES], as_int)
        found = found._replace(nbytes=-1 if nbytes is None else max(nbytes, -1))
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
    said: dict[int, tuple[int, ...]] = {}
    together: dict[tuple[int, ...], list[int]] = {}
    for rank in P_x.ranks:
        its = answers[rank].ranks
        said[rank] = tuple(sorted(possible[rank] if its is None else its or [rank]))
        together.setdefault(said[rank], []).append(rank)
    sharing = {rank: tuple(together[said[rank]]) for rank in P_x.ranks}
    # First those who say what cannot be used, last those who say nothing: others do not fit to them then.
    for rank, answer in sorted(answers.items(), key=lambda item: (item[1].usable, item[1].ranks is None)):
        if rank in P_x:
            mutual = tuple(sorted(sharing[rank])) == said[rank]
            _check_list(rank, answer, mutual, sharing[rank], possible[rank])
        elif answer.ranks or not answer.usable:
            raise ConfigurationError(
                f"{_RANKS}() gave {answer.shown} on rank {rank}, which has no part of the tensor: it shares"
                " its statistics with nobody, []"
            )
    for rank, answer in answers.items():
        wanted = StatisticGroups(axes, source, rank, sharing[rank]).nbytes if rank in P_x else 0
        if answer.nbytes not in (None, wanted):
            got = "no number of bytes" if answer.nbytes == -1 else f"{answer.nbytes}"
            raise ConfigurationError(
                f"{_NBYTES}() gave {got} on rank {rank}, one message of its statistics has {wanted} bytes"
            )
    return sharing


def _check_list(
    rank: int, answer: StatisticsAnswer, mutual: bool, said: Sequence[int], possible: Sequence[int]
) -> None:
    gave = f"{_RANKS}() gave {answer.shown} on rank {rank}"
    if answer.ranks is None:
        gave = f"rank {rank} shares its statistics with {list(possible)}, as its user does not say otherwise"
    elif not answer.usable:
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
