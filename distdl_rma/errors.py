"""Errors of the library; each is also the standard error that it resembles most.

So programs that know nothing of this package catch them as they are used to: a wrong shape as a
``ValueError``, a full disk as an ``OSError``. Classes are few, one for each thing that a program can do::

    arguments       PartitionError  ArgumentError  ShapeError  UnsupportedError  ConfigurationError
    files           DataError  CheckpointError
    memory          SegmentError
    order of calls  ProtocolError  ClosedError
    other ranks     MismatchError  ExchangeTimeout  PeerFailedError

Errors of the first row are raised before any data moves, on all ranks that are concerned. Texts of the last
row end with what may be done with the machine (``segments/waiting/error_texts.py``).
"""

import contextlib
import typing
from collections import abc


class DistdlError(Exception):
    """Base of all errors that the library itself raises.

    Examples
    --------
    >>> try:
    ...     open_array("missing.npy")
    ... except DistdlError as error:
    ...     type(error).__name__
    'DataError'
    """


class PartitionError(DistdlError, ValueError):
    """Ranks, grid or distribution do not fit together.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_world.create_cartesian_topology_partition((3, 3))
    Traceback (most recent call last):
        ...
    distdl_rma.errors.PartitionError: partition has 2 ranks but grid (3, 3) needs 9
    """


class ArgumentError(DistdlError, ValueError):
    """An argument is invalid: unknown, out of range, or in conflict with another one.

    Examples
    --------
    >>> shard({"X": 2}, torch.rand(1, 1, 8, 8))
    Traceback (most recent call last):
        ...
    distdl_rma.errors.ArgumentError: a grid names the dimensions N, C, H, W of a tensor of 4, got 'X'
    """


class ShapeError(DistdlError, ValueError, RuntimeError):
    """The shape or the dtype of a tensor does not fit what it is used with; torch raises either error.

    Examples
    --------
    >>> shard({"H": -1}, torch.rand(1, 1, 8, 8)) + torch.rand(3, 3)
    Traceback (most recent call last):
        ...
    distdl_rma.errors.ShapeError: Tensor.add: shapes (1, 1, 8, 8) and (3, 3) do not go together...
    """


class UnsupportedError(DistdlError, NotImplementedError):
    """A combination that cannot be exact (yet): it is refused, never approximated.

    Examples
    --------
    >>> shard({"H": -1}, torch.rand(1, 1, 8, 8)).numpy()
    Traceback (most recent call last):
        ...
    distdl_rma.errors.UnsupportedError: Tensor.numpy at ...: the values are on many ranks; ...
    """


class ConfigurationError(DistdlError, ValueError):
    """An option or an environment variable has an invalid value, or callbacks contradict each other.

    Examples
    --------
    >>> distribute(nn.Conv2d(1, 1, 3), {"H": -1}, fallback="guess")
    Traceback (most recent call last):
        ...
    distdl_rma.errors.ConfigurationError: distribute: fallback is 'move' or 'error', got 'guess'
    """


class CheckpointError(DistdlError, OSError):
    """A checkpoint cannot be written or read, is damaged, or belongs to another model.

    Examples
    --------
    >>> load_checkpoint("nowhere", nn.Linear(2, 2))
    Traceback (most recent call last):
        ...
    distdl_rma.errors.CheckpointError: load_checkpoint: ...nowhere is no checkpoint, nor has it a complete one
    """


class DataError(DistdlError, OSError):
    """A file cannot be read or written: missing, truncated, without permission, or on a full disk.

    Examples
    --------
    >>> open_array("missing.npy")
    Traceback (most recent call last):
        ...
    distdl_rma.errors.DataError: missing.npy: not found on ...
    """


class SegmentError(DistdlError, MemoryError):
    """The segment is full, or its memory cannot be allocated.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> machine.segments.get_segment_buffer(1 << 50)
    Traceback (most recent call last):
        ...
    distdl_rma.errors.SegmentError: segment exhausted: asked for ...
    """


class ProtocolError(DistdlError, RuntimeError):
    """Calls in an order that the protocol forbids: a third start, a wait without a start.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> machine.group().allreduce(3).wait()
    Traceback (most recent call last):
        ...
    distdl_rma.errors.ProtocolError: 'allreduce': wait without a start
    """


class ClosedError(DistdlError, RuntimeError):
    """A resource was used after its ``close()``.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> machine.close()
    >>> machine.segments.get_segment_buffer(8)
    Traceback (most recent call last):
        ...
    distdl_rma.errors.ClosedError: machine: already closed
    """


class MismatchError(DistdlError, RuntimeError):
    """Two ranks disagree: different layers, plans or sizes meet in one exchange.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> buffer, peer = machine.segments.get_segment_buffer(8), 1 - machine.rank
    >>> buffer.exchange([peer], label=f"of rank {machine.rank}")
    Traceback (most recent call last):
        ...
    distdl_rma.errors.MismatchError: rank 0 connects 'of rank 0' but rank 1 connects 'of rank 1'...
    """


class ExchangeTimeout(DistdlError, TimeoutError):
    """A wait reached its deadline; the message names the peer.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> buffer = machine.segments.get_segment_buffer(8, notifications=1)
    >>> buffer.notify_wait(0, timeout=0.1)
    Traceback (most recent call last):
        ...
    distdl_rma.errors.ExchangeTimeout: rank 0 waited 0.1 s for the other ranks to set notification 0...
    """


class PeerFailedError(DistdlError, RuntimeError):
    """A rank that this rank waits for will not come: it raised an exception, was killed, or left.

    ``rank`` is its rank id, ``cause`` says what happened to it.

    Examples
    --------
    >>> error = PeerFailedError("rank 1 was killed, rank 0 waits for it", rank=1, cause="was killed")
    >>> error.rank, error.cause
    (1, 'was killed')
    """

    def __init__(self, message: str, rank: int, cause: str) -> None:
        super().__init__(message)
        self.rank, self.cause = rank, cause

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.rank, self.cause)


__all__ = [name for name in sorted(globals()) if name[0].isupper()]


@contextlib.contextmanager
def told(
    kind: type[DistdlError], what: str, advice: str = "", of: type[Exception] = Exception
) -> abc.Iterator[dict[str, typing.Any]]:
    """Context in which an error of others becomes one of ``kind``: ``what``, its words, then ``advice``.

    Errors of the library, and others than those ``of`` one class, stay as they are. Gives an empty dict.
    """
    try:
        yield {}
    except DistdlError:
        raise
    except of as error:
        raise kind(f"{what}: {_words(error)}{advice and f'; {advice}'}") from error


def check_integers(who: str, least: int, kind: type[DistdlError] = ArgumentError, **given: object) -> None:
    """Raise an error of ``kind`` unless all ``given`` arguments are integers, ``least`` at least."""
    for name, number in given.items():
        if type(number) is not int or number < least:
            raise kind(f"{who}: {name} is an integer, at least {least}, got {number!r}")


def _words(error: BaseException) -> str:
    # Of an error that a library of servers has translated, the words of the server.
    while isinstance(error.__cause__, Exception) and isinstance(error, (FileNotFoundError, TimeoutError)):
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
