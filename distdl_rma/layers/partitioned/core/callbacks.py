"""Callbacks of modules: what a module says of its ranks and sizes, and users' functions in their place.

The interface document has programs ask modules for ranks and sizes, and lets a user replace an answer by a
function. A replacement is an attribute of the instance, so that ``module.get_sizeof_tensor()`` finds it
before the method of the class: no caller needs to know which of the two answers. The method stays reachable
through the class, and is what an answer is checked against::

    vars(module)[name]()               what the user says, in ``check_callbacks`` and in calls of the program
    getattr(type(module), name)(module)    what is true
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index as as_int
from typing import Any, TypedDict

from torch import nn

from distdl_rma.errors import ConfigurationError, ProtocolError
from distdl_rma.segments.machine import Machine


class Callbacks(TypedDict, total=False):
    """Callbacks that may be given to a layer's constructor; each replaces the layer's own method.

    Interface document, sections 3.1 and 4.1; requirements A9 to A13.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
    >>> norm = DistributedInstanceNorm1d(P_x, 3, get_ranks_synch_norm=lambda: [0, 1])
    >>> norm.get_ranks_synch_norm(), norm.get_ranks_synch_weights()
    ([0, 1], [])
    """

    get_ranks_synch_weights: Callable[[], Sequence[int]]
    get_sizeof_gradients: Callable[[], int]
    get_ranks_synch_norm: Callable[[], Sequence[int]]
    get_sizeof_norm: Callable[[], int]
    get_sizeof_tensor: Callable[[], int]
    get_sizeof_input_tensor: Callable[[], int]
    get_sizeof_output_tensor: Callable[[], int]


CALLBACKS = frozenset(Callbacks.__annotations__)


class CallbackModule(nn.Module):
    """A module with all callbacks but that for weights; callbacks of its user are attributes.

    The callback for weights is left to subclasses: layers know who holds replicas, and a ``GradientSync``
    knows it of plain modules.
    """

    machine: Machine
    # Bytes of this rank's input and output: of the last call, or as announced before the first.
    shard_nbytes: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """Name for messages."""
        raise NotImplementedError

    def get_sizeof_gradients(self) -> int:
        """Bytes of all parameter gradients of this layer on this rank."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def get_ranks_synch_norm(self) -> list[int]:
        """Rank ids that share statistics with this one, itself included; empty if none is needed."""
        return []

    def get_sizeof_norm(self) -> int:
        """Bytes of one message of statistics; 0 without any."""
        return 0

    def get_sizeof_input_tensor(self) -> int:
        """Bytes of this rank's shard of the input of the last call; 0 on idle ranks.

        ``ProtocolError`` before the first call, unless the layer was built from global parameters.
        """
        return self._known_nbytes()[0]

    def get_sizeof_output_tensor(self) -> int:
        """Bytes of this rank's shard of the output; otherwise as ``get_sizeof_input_tensor``."""
        return self._known_nbytes()[1]

    def get_sizeof_tensor(self) -> int:
        """Bytes of this rank's shard if the output is as large as the input, else a ``ProtocolError``."""
        before, after = self._known_nbytes()
        if before != after:
            raise ProtocolError(
                f"{self.label!r}: takes {before} bytes and returns {after}: ask for get_sizeof_input_tensor()"
                " or get_sizeof_output_tensor()"
            )
        return before

    def _known_nbytes(self) -> tuple[int, int]:
        if self.shard_nbytes is None:
            raise ProtocolError(f"{self.label!r}: sizes of its tensors are not known before the first call")
        return self.shard_nbytes

    def check_callbacks(self, names: Sequence[str], **sizes: int) -> None:
        """Raise ``ConfigurationError``, and fail the machine, if a user's callback and the module differ.

        A true size may be given by its callback's name. Programs reserve memory by these sizes, and sum over
        these ranks: a wrong answer would be noticed far from its cause, if at all.
        """
        for name in (*names, *sizes):
            if name in vars(self):
                true = sizes[name] if name in sizes else plain_answer(getattr(type(self), name)(self))
                if problem := wrong_answer(name, vars(self)[name], true, self.machine.rank):
                    error = ConfigurationError(f"{self.label!r}: {problem}")
                    if not self.machine.closed:
                        self.machine.fail(error)
                    raise error


def wrong_answer(name: str, callback: Callable[[], Any], true: int | list[int], rank: int) -> str:
    """What is wrong with the answer of a user's callback, which may be any code; empty if it is true."""
    try:
        given = plain_answer(callback())
    except Exception as error:  # noqa: BLE001 - the user's function
        return f"{name}() on rank {rank} raised, or returned neither a number nor ranks: {error!r}"
    unit = " bytes" if name.startswith("get_sizeof") else ""
    wrong = f"{name}() gave {given} on rank {rank}, it is {true}{unit}; leave it out, or correct it"
    return "" if given == true else wrong


def wrong_ranks(ranks: Sequence[int], rank: int, holders: Sequence[int]) -> str:
    """What is wrong with this rank's answer of ``get_ranks_synch_weights``; empty if nothing is.

    A user may name fewer ranks than hold a replica, to sum gradients within groups. The replicas of different
    groups then differ, on purpose. A rank that holds no replica could not take part in the sum.
    """
    if set(ranks) <= set(holders) and len(set(ranks)) == len(ranks) and rank in ranks:
        return ""
    return (
        f"get_ranks_synch_weights() gave {[*ranks]} on rank {rank}, the copies are on {[*holders]}: each rank"
        " once, the caller among them"
    )


def set_callbacks(module: nn.Module, who: str, callbacks: Mapping[str, Any]) -> None:
    """Replace methods of a module by the given callbacks; local."""
    for name, callback in callbacks.items():
        if name not in CALLBACKS:
            raise TypeError(f"{who} got an unexpected keyword argument {name!r}")
        if not callable(callback):
            raise ConfigurationError(f"{who}: {name} is a function without arguments, got {callback!r}")
        setattr(module, name, callback)


def plain_answer(result: Any) -> int | list[int]:
    """A number, or rank ids in ascending order: numpy's integers and sets are answers too."""
    return as_int(result) if hasattr(result, "__index__") else sorted(as_int(rank) for rank in result)
