"""What a process holds of the system, which leaks when somebody forgets to give it back, and may hold."""

import gc
import resource
from contextlib import contextmanager
from pathlib import Path


def handles() -> tuple[int, int]:
    """Open files of this process, and shared memory that it maps, without what nobody refers to."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("/dev/shm" in line for line in maps)


def leak(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether a process holds more than before; less, where something earlier has ended meanwhile."""
    return any(now > then for then, now in zip(before, after, strict=True))


@contextmanager
def files_up_to(nbytes):
    """Context in which a file that this process writes has so many bytes at most, any number if None."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, before if nbytes is None else (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
