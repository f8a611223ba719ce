"""Errors of the library; each is also the standard error that it resembles most."""


class DistdlError(Exception):
    """Base of all errors that the library itself raises."""


class PartitionError(DistdlError, ValueError):
    """Ranks, grid or distribution do not fit together."""


class ArgumentError(DistdlError, ValueError):
    """An argument is invalid: unknown, out of range, or in conflict with another one."""


class ShapeError(DistdlError, ValueError, RuntimeError):
    """The shape or the dtype of a tensor does not fit what it is used with; torch raises either error."""


class UnsupportedError(DistdlError, NotImplementedError):
    """A combination that cannot be exact (yet): it is refused, never approximated."""


class ConfigurationError(DistdlError, ValueError):
    """An option or an environment variable has an invalid value, or callbacks contradict each other."""


class CheckpointError(DistdlError, OSError):
    """A checkpoint cannot be written or read, is damaged, or belongs to another model."""


class DataError(DistdlError, OSError):
    """A file cannot be read or written: missing, truncated, without permission, or on a full disk."""


class SegmentError(DistdlError, MemoryError):
    """The segment is full, or its memory cannot be allocated."""


class ProtocolError(DistdlError, RuntimeError):
    """Calls in an order that the protocol forbids: a third start, a wait without a start."""


class ClosedError(DistdlError, RuntimeError):
    """A resource was used after its ``close()``."""


class MismatchError(DistdlError, RuntimeError):
    """Two ranks disagree: different layers, plans or sizes meet in one exchange."""


class ExchangeTimeout(DistdlError, TimeoutError):
    """A wait reached its deadline; the message names the peer."""


class PeerFailedError(DistdlError, RuntimeError):
    """A rank that this rank waits for will not come: it raised an exception, was killed, or left.

    ``rank`` is its rank id, ``cause`` says what happened to it.
    """

    def __init__(self, message: str, rank: int, cause: str) -> None:
        super().__init__(message)
        self.rank, self.cause = rank, cause

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.rank, self.cause)


__all__ = [name for name in sorted(globals()) if name[0].isupper()]
