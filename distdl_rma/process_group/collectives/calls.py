"""What ranks call, and how they see at a glance that all of them call the same."""

from __future__ import annotations

from hashlib import blake2b

from distdl_rma.segments.waiting.header import clip

# What a rank says of a call of a new kind: the digest of all facts, then the text for messages.
DIGEST_BYTES = 32
_TEXT_BYTES = 256
SAID_BYTES = DIGEST_BYTES + _TEXT_BYTES
# How many kinds have numbers at a time.
_KEPT = 1024


class Call:
    """A kind of calls: how it reads in messages, and what all ranks that make it have in common.

    ``identity`` is compared by its ``repr``; the text if None. ``said`` are its digest and the text in bytes.
    """

    __slots__ = ("digest", "said", "text")

    def __init__(self, text: str, identity: object = None) -> None:
        self.text = text
        compared = repr(text if identity is None else identity).encode(errors="backslashreplace")
        self.digest = blake2b(compared, digest_size=DIGEST_BYTES).digest()
        self.said = self.digest + clip(text, _TEXT_BYTES - 1) + b"\0"

    @classmethod
    def refused(cls, what: str, error: BaseException) -> Call:
        """In place of a call that a rank refuses, whatever its reason: the same where all refuse it."""
        return cls(f"nothing, since it refuses {error}", ("refused", what))


def text_said(said: bytes) -> str:
    """What another rank says it calls."""
    return said[DIGEST_BYTES:SAID_BYTES].partition(b"\0")[0].decode(errors="replace")


class Kinds:
    """Numbers of the kinds of calls that all ranks of a group have made together; without communication.

    The ranks compare digests when a call of a kind is made that has no number, and give it the next one. As
    they have made the same calls up to here, all of them have the same numbers, and equal numbers are equal
    calls. 0 is none.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        # Number of the kind with a digest, or else what is given: a call of C on the way of each call.
        self.number_of = self._numbers.get

    def agree(self, call: Call) -> None:
        """Number a kind that all ranks were seen to call; at the same one of their calls on all ranks."""
        if len(self._numbers) >= _KEPT:
            self._numbers.clear()
        self._numbers.setdefault(call.digest, len(self._numbers) + 1)
