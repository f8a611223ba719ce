"""What the ranks of a group call, and how they notice that they call different things.

Ranks whose calls differ would hang, or read each other's bytes as something else. So each call has a text
and an identity, and all ranks compare the identities before data of the call are used::

    the first call of a kind      a digest of 32 bytes and the text       all_reduce(sum) of 3 x float32
    later calls of this kind      its number, in the word that announces a round anyway: see Kinds

Between nodes there is no such word, and a call begins with an all-gather of the digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from distdl_rma.errors import MismatchError
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.header import WaitReason, clip

# What a rank shows of a call of a new kind: a digest of its identity, then the text for messages.
DIGEST_BYTES = 32
_TEXT_BYTES = 256
CALL_BYTES = DIGEST_BYTES + _TEXT_BYTES
# So many kinds have numbers at a time.
_KEPT = 1024


class Call:
    """A kind of calls: its text in messages, and its identity, which is the same on all ranks.

    The ``repr`` of ``identity`` is compared; the text if None. A text may be cut where an identity must not
    be, as for a call with hundreds of tensors. ``encoded`` is the digest of the identity, and the text.
    """

    __slots__ = ("digest", "encoded", "text")

    def __init__(self, text: str, identity: object = None) -> None:
        self.text = text
        compared = repr(text if identity is None else identity).encode(errors="backslashreplace")
        self.digest = blake2b(compared, digest_size=DIGEST_BYTES).digest()
        self.encoded = self.digest + clip(text, _TEXT_BYTES - 1) + b"\0"

    @classmethod
    def refused(cls, what: str, error: BaseException) -> Call:
        """Call of a rank that refuses another call, the same for all reasons."""
        return cls(f"nothing, since it refuses {error}", ("refused", what))


def text_of_call(encoded: bytes) -> str:
    """Text of the call that another rank shows."""
    return encoded[DIGEST_BYTES:CALL_BYTES].partition(b"\0")[0].decode(errors="replace")


class Callers:
    """Ranks that make the same calls, this one at the position ``me``, and the ``call`` under way.

    Whoever begins a call sets ``call`` before the call moves data, on every rank.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int], name: str) -> None:
        self.manager, self.ranks, self.name = manager, tuple(ranks), name
        self.size, self.me = len(self.ranks), self.ranks.index(manager.rank)
        self.call = Call("nothing")

    def late(self) -> tuple[int, ...]:
        """Ranks that the call waits for, as far as this one knows."""
        raise NotImplementedError

    def waiting(self) -> WaitReason:
        """Which ranks the call waits for, for messages."""
        what = f"in {self.call.text} of group {self.name!r}"
        return WaitReason(self.late(), what, "did every rank make the same calls?")

    def mismatch(self, position: int, encoded: bytes) -> MismatchError:
        """Error where the rank at a position calls something else."""
        return MismatchError(
            f"group {self.name!r}: rank {self.ranks[self.me]} calls {self.call.text}, but rank"
            f" {self.ranks[position]} calls {text_of_call(encoded)}: all ranks of a group make the same calls"
            " in the same order, with tensors of the same sizes and types"
        )

    def check_pairs(self, sent: Array, wanted: Array) -> None:
        """Raise ``MismatchError`` if a rank has not as many bytes for another one as that expects.

        ``sent`` and ``wanted`` are tables of numbers of bytes, by source and target.
        """
        wrong = np.argwhere(sent != wanted)
        if wrong.size:
            source, target = wrong[0].tolist()
            raise MismatchError(
                f"group {self.name!r}: {self.call.text}: rank {self.ranks[source]} has {sent[source, target]}"
                f" bytes for rank {self.ranks[target]}, which expects {wanted[source, target]}"
            )


class Kinds:
    """Numbers of the kinds of calls that all ranks of a group have made; without communication.

    At a call of a kind without a number, the ranks compare digests and give it the next number. Since all
    ranks have made the same calls, they have the same numbers, and equal numbers mean equal calls. 0 is none.
    A full table is emptied, at the same call on all ranks, rather than freed of its oldest kind: that would
    take an order of use, which every call had to keep.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        # Number of the kind with a digest, or a default: a function of C, since every call needs it.
        self.number_of = self._numbers.get

    def agree(self, call: Call) -> None:
        """Give a number to a kind that all ranks call; at the same call on all ranks."""
        if len(self._numbers) >= _KEPT:
            self._numbers.clear()
        self._numbers.setdefault(call.digest, len(self._numbers) + 1)
