"""What a rank waits for, as a value: for messages, and to tell when the wait is in vain."""

from dataclasses import dataclass

from distdl_rma.segments.waiting.header import numbered


@dataclass(frozen=True)
class WaitReason:
    """What a rank waits for: ranks, and what they are to do, as in "to send in 'enc1' (epoch 7, ...)".

    ``hint`` ends the message of a wait that reached its deadline. With ``anyone`` the ranks are those that
    may do it, and the wait is in vain only when all of them have left. With ``leavers`` also those that have
    left do it, as long as their processes live.
    """

    ranks: tuple[int, ...]
    what: str
    hint: str = ""
    anyone: bool = False
    leavers: bool = False

    def __str__(self) -> str:
        return f"for {numbered(self.ranks) if self.ranks else 'the other ranks'} {self.what}"
