"""A cable that delays frames: ``delayed_cable.py HOST HOST DEVICE SECONDS``, of two network namespaces.

The kernel delays frames by netem, which not every kernel has. Here each host has a TAP device instead, and
this process carries the frames from one to the other, each as late as it is told. Ends when it is ended.
Needs Linux and root.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

NAMESPACES, _OWN = Path("/run/netns"), Path("/proc/self/ns/net")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TAP, _BARE = 0x0002, 0x1000  # IFF_TAP, IFF_NO_PI: Ethernet frames with nothing before them
_LARGEST_FRAME = 1 << 16
_PRIORITY = -15
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None, use_errno=True)


def plug(host: str, device: str) -> int:
    """Make a TAP device on a host; return the descriptor that its frames come out of."""
    with _OWN.open() as home:
        _enter(NAMESPACES / host)
        try:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH22x", device.encode(), _TAP | _BARE))
        finally:
            # A process of a host would end with what runs there.
            _set_namespace(home.fileno())
    return end


def _enter(namespace: Path) -> None:
    with namespace.open() as file:
        _set_namespace(file.fileno())


def _set_namespace(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


class Direction:
    """Frames that are under way from one descriptor to another."""

    def __init__(self, source: int, target: int, delay: float) -> None:
        self.source, self._target, self._delay = source, target, delay
        self._frames: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float:
        """When the next frame arrives; infinite if there is none."""
        return self._frames[0][0] if self._frames else float("inf")

    def take(self) -> None:
        """Take in what the source has sent."""
        while True:
            try:
                frame = os.read(self.source, _LARGEST_FRAME)
            except BlockingIOError:
                return
            self._frames.append((time.monotonic() + self._delay, frame))

    def deliver(self) -> None:
        """Hand out what has been under way for long enough; lost where the target takes no more."""
        now = time.monotonic()
        while self.due <= now:
            try:
                os.write(self._target, self._frames.popleft()[1])
            except OSError:
                # The device is not up yet, or its queue is full: as on a real cable.
                continue


def main(arguments: Sequence[str]) -> None:
    """Plug in both ends, say so, and carry frames for ever."""
    first, second, device, delay = arguments
    # Who plugged the cable may be killed.
    _LIBC.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    ends = plug(first, device), plug(second, device)
    ways = [Direction(a, b, float(delay)) for a, b in (ends, ends[::-1])]
    # It has little to do, but at once.
    os.nice(_PRIORITY)
    sys.stdout.write("plugged in\n")
    sys.stdout.flush()
    while True:
        wait = min(way.due for way in ways) - time.monotonic()
        select.select(ends, (), (), None if wait == float("inf") else max(0.0, wait))
        for way in ways:
            way.take()
            way.deliver()


if __name__ == "__main__":
    main(sys.argv[1:])
