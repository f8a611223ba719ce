"""Who shares statistics with whom, where the user of a layer says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index as as_int
from typing import Any, NamedTuple

from distdl_rma.errors import ConfigurationError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.plan_cache import InputFacts
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups
from distdl_rma.ops.norm.statistics import message_nbytes

_RANKS, _NBYTES = "get_ranks_synch_norm", "get_sizeof_norm"
# In the place of a number: the user says nothing, or nothing that can be used.
_SILENT, _STRANGE = -1, -2
_NOBODY = -1
_ORDER = {_STRANGE: 0, _SILENT: 2}


class Said(NamedTuple):
    """What the user of one rank says of its statistics, in numbers that travel with the local shape.

    Lists travel as numbers that are equal where they name the same ranks: those that share are found by
    that, however many they are. The first two ranks come along for messages.
    """

    listed: int = _SILENT
    group: int = 0
    nbytes: int = _SILENT
    first: int = _NOBODY
    second: int = _NOBODY

    @property
    def ranks(self) -> str:
        """The list of ranks, for a message."""
        if self.listed == _STRANGE and self.first == _NOBODY:
            return "no list of ranks"
        known = [str(rank) for rank in (self.first, self.second) if rank != _NOBODY]
        more = ["..."] if self.second != _NOBODY and self.listed not in (_STRANGE, len(known)) else []
        return f"[{', '.join([*known, *more])}]"


def said(callbacks: Mapping[str, Any], rank: int) -> Said:
    """Ask the user's callbacks, of those that are given; local.

    What is no list of different ranks with this one among them, or no number, is told to the others as such,
    so that all of them refuse it. An empty list stands for a rank that shares with no other.
    """
    found = Said()
    if _RANKS in callbacks:
        told = _asked(callbacks[_RANKS], lambda ranks: [as_int(rank) for rank in ranks])
        ranks: list[int] = [] if told is None else told
        fits = told is not None and len(set(ranks)) == len(ranks) and (not ranks or rank in ranks)
        first, second, *_ = [*ranks, _NOBODY, _NOBODY]
        listed = len(ranks) if fits else _STRANGE
        found = Said(listed, _number(ranks or [rank]), _SILENT, first, second)
    if _NBYTES in callbacks:
        nbytes = _asked(callbacks[_NBYTES], as_int)
        found = found._replace(nbytes=_STRANGE if nbytes is None or nbytes < 0 else nbytes)
    return found


def groups_of(
    P_x: Partition, layout: NormAxes, source: Decomposition, facts: Mapping[int, InputFacts]
) -> dict[int, tuple[int, ...]] | None:
    """Ranks that share statistics, per rank of P_x, as all users say; None where none of them says anything.

    Where users say nothing, all ranks that hold elements of the same cells.

    Parameters
    ----------
    P_x
        Partition of the tensor.
    layout
        Which elements share a cell.
    source
        Who owns what of the tensor.
    facts
        What all ranks of the call say, whose users' words are the last of what they want.

    Raises
    ------
    ConfigurationError
        Alike on all ranks: if ranks that share do not all name each other and nobody else, or hold no
        elements of the same cells, or a size is not that of a message.
    """
    told = {rank: Said(*fact.call_arguments[-len(Said._fields) :]) for rank, fact in facts.items()}
    if all(words == Said() for words in told.values()):
        return None
    channels = source.splits[1] if layout.groups else None
    natural = {rank: layout.sharing(P_x, rank, channels) for rank in P_x.ranks}
    numbers = {
        rank: _number(natural[rank]) if words.listed == _SILENT else words.group
        for rank, words in told.items()
        if rank in P_x
    }
    together: dict[int, list[int]] = {}
    for rank in P_x.ranks:
        together.setdefault(numbers[rank], []).append(rank)
    groups = {rank: tuple(together[numbers[rank]]) for rank in P_x.ranks}
    # First those who say what cannot be used, last those who say nothing: others do not fit to them then.
    for rank, words in sorted(told.items(), key=lambda item: _ORDER.get(item[1].listed, 1)):
        if rank not in P_x:
            _check_idle(rank, words)
            continue
        _check_list(rank, words, _number(groups[rank]) == numbers[rank], groups[rank], natural[rank])
    for rank, words in told.items():
        wanted = (
            message_nbytes(StatisticGroups(layout, P_x, source, rank, groups[rank])) if rank in P_x else 0
        )
        if words.nbytes not in (_SILENT, wanted):
            got = "no number of bytes" if words.nbytes == _STRANGE else f"{words.nbytes}"
            raise ConfigurationError(
                f"{_NBYTES}() gave {got} on rank {rank}, one message of its statistics has {wanted} bytes"
            )
    return groups


def _check_idle(rank: int, words: Said) -> None:
    if words.listed not in (_SILENT, 0):
        raise ConfigurationError(
            f"{_RANKS}() gave {words.ranks} on rank {rank}, which has no part of the tensor: it shares its"
            " statistics with nobody, []"
        )


def _check_list(rank: int, words: Said, mutual: bool, group: Sequence[int], natural: Sequence[int]) -> None:
    gave = f"{_RANKS}() gave {words.ranks} on rank {rank}"
    if words.listed == _SILENT:
        gave = f"rank {rank} shares its statistics with {list(natural)}, as its user does not say otherwise"
    elif words.listed == _STRANGE:
        raise ConfigurationError(f"{gave}: a list of different ranks with the caller among them is needed")
    if not mutual:
        raise ConfigurationError(
            f"{gave}, but the ranks that say the same are {list(group)}: ranks that share statistics all name"
            " each other, and nobody else"
        )
    if not set(group) <= set(natural):
        raise ConfigurationError(
            f"{gave}, but only ranks {list(natural)} hold elements that share a mean and a variance"
        )


def _asked(callback: Callable[[], Any], taken: Callable[[Any], Any]) -> Any:
    # Any failure of the user's function is one that all ranks are to hear of.
    try:
        return taken(callback())
    except Exception:  # noqa: BLE001
        return None


def _number(ranks: Sequence[int]) -> int:
    return fingerprint(sorted(ranks))
