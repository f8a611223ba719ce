"""What a process holds of the system, which leaks when somebody forgets to give it back."""

import gc
from pathlib import Path


def handles() -> tuple[int, int]:
    """Open files of this process, and shared memory that it maps, without what nobody refers to."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("/dev/shm" in line for line in maps)


def leak(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether a process holds more than before; less, where something earlier has ended meanwhile."""
    return any(now > then for then, now in zip(before, after, strict=True))
