"""What exists once: it can be shared, and neither be doubled nor leave its process."""

from __future__ import annotations

from typing import NoReturn, Self

from distdl_rma.errors import UnsupportedError


class Uncopyable:
    """Cannot be pickled or copied, since other ranks know it by its place, and neither can what holds it."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__} belongs to the processes that run now: layers can be copied and not"
            " pickled, what lies in the segment neither; save state_dict(), or gather_state_dict(model)"
        )


class SharedByCopies(Uncopyable):
    """Its copy is itself: copies of what holds it go on with the same one."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
