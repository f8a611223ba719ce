"""Communicators of some ranks of a machine, made once for each set of ranks and used again."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

_CREATE_TAG = 11


class Communicators:
    """Communicators of some ranks in order, of which several users may need one each at a time.

    Making and freeing one is collective, and users come and go when it suits each rank: so what a user gives
    back is kept for the next one of the same ranks, and freed in ``close``. There are never more than were
    once in use on some rank at the same time. ``ranks`` are the rank ids of the positions of ``comm``, the
    communicator of the machine.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self._comm, self._ranks = comm, ranks
        self._made: dict[tuple[int, ...], list[MPI.Intracomm]] = {}
        self._used: dict[tuple[int, ...], set[int]] = {}

    def proposal(self, ranks: Sequence[int]) -> int:
        """Number from which on no communicator of these ranks is in use here; local.

        The largest proposal of all the ranks is what all of them ``take``.
        """
        return 1 + max(self._used.get(tuple(ranks), ()), default=-1)

    def take(self, ranks: Sequence[int], number: int) -> MPI.Intracomm:
        """Communicator of the ranks with this number, the same on all of them; belongs to the machine.

        Collective over them, blocking without a deadline, if there is none yet: wait for a barrier first.
        """
        key = tuple(ranks)
        made = self._made.setdefault(key, [])
        while len(made) <= number:
            group = self._comm.group.Incl([self._ranks.index(rank) for rank in key])
            try:
                made.append(self._comm.Create_group(group, _CREATE_TAG))
            finally:
                group.Free()
        self._used.setdefault(key, set()).add(number)
        return made[number]

    def give_back(self, ranks: Sequence[int], number: int) -> None:
        """End a use, in which nothing is under way any more; local."""
        self._used[tuple(ranks)].discard(number)

    def close(self) -> None:
        """Free all of them, in the order in which all ranks made them; collective over the machine."""
        for made in self._made.values():
            for comm in made:
                comm.Free()
        self._made.clear()
