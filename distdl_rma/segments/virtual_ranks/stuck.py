"""Finds a virtual rank that has the turn, and waits for a lock that a rank without a turn has.

A program that is correct on processes may hang on virtual ranks::

    rank 0   with lock: machine.group().barrier()     waits for rank 1, and has the lock
    rank 1   with lock: ...                           has the turn, and waits for the lock

On processes each rank has a lock of its own; here both have the same one. No wait of the library is involved
in which a deadline would end it. So the thread that started the ranks looks at them once a second.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType

# System calls that wait for a lock, of x86-64 and arm64; the fifth field of a line is the timeout.
_FUTEX, _TIMEOUT = {"202", "98"}, 4
# Looks, a second apart, at which nothing has changed; and what this process computes meanwhile, at most.
LOOK_SECONDS = 1.0
_LOOKS, _SHARE = 4, 0.2


class Watch:
    """Looks at the thread of the rank that has the turn; ``skipped`` is the file with the waits of ranks.

    Works on Linux. A wait with a timeout, for a file or for a thread of the user's own is none of these.

    A false alarm would end a correct program, so all must hold, for four seconds: the same turn, the same
    instruction, hardly any computation, the system call of a lock without a timeout, and a waiting rank whose
    functions name the same lock.
    """

    def __init__(self, threads: Sequence[threading.Thread], skipped: str) -> None:
        self._threads, self._skipped = threads, skipped
        self._seen: object = None
        self._looks, self._cpu = 0, 0.0

    def problem(self, rank: int, turns: int, others: Callable[[], Sequence[int]]) -> str:
        """What to say of the rank that has the turn, after so many turns; empty if it goes on."""
        frames, cpu = sys._current_frames(), time.process_time()
        # A frame that refers to itself would keep the tensors of all ranks until garbage is collected.
        del frames[threading.get_ident()]
        frame = frames.get(self._threads[rank].ident or 0)
        seen = turns, frame and (id(frame), frame.f_lasti)
        idle = cpu - self._cpu < _SHARE * LOOK_SECONDS
        self._looks = self._looks + 1 if seen == self._seen and idle else 0
        self._seen, self._cpu = seen, cpu
        if frame is None or self._looks < _LOOKS or not self._in_lock(rank):
            return ""
        wanted, found = {*_locks(frame)}, dict[int, FrameType]()
        for other in others():
            stack = frames.get(self._threads[other].ident or 0)
            each = [at for at, _ in traceback.walk_stack(stack) if at.f_code.co_filename != self._skipped]
            if stack is not None and any(wanted.intersection(_locks(at)) for at in each):
                found[other] = stack
        if not found:
            return ""
        stacks = ((each, "".join(traceback.format_stack(at))) for each, at in ({rank: frame} | found).items())
        return (
            f"virtual rank {rank} has the turn and waits for a lock, which rank {next(iter(found))} seems to"
            " have while it waits for other ranks: release the lock before you communicate, or make one on"
            " each rank\n" + "\n".join(f"rank {each} is at\n{text}" for each, text in stacks)
        )

    def _in_lock(self, rank: int) -> bool:
        try:
            fields = Path(f"/proc/self/task/{self._threads[rank].native_id}/syscall").read_text().split()
        except OSError:
            return False
        return len(fields) > _TIMEOUT and fields[0] in _FUTEX and int(fields[_TIMEOUT], 16) == 0


def _locks(frame: FrameType) -> Iterator[int]:
    # Numbers of the locks, conditions and semaphores that a function names, or that are attributes of these.
    names = {name: frame.f_globals.get(name) for name in frame.f_code.co_names} | frame.f_locals
    for value in names.values():
        own = {} if isinstance(value, (type, ModuleType)) else getattr(value, "__dict__", {})
        for each in (value, *own.values()):
            if isinstance(each, threading.Condition) or hasattr(type(each), "acquire"):
                yield id(each)
