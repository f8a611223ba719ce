"""What a process holds of the system, which leaks when somebody forgets to give it back."""

from pathlib import Path


def handles() -> tuple[int, int]:
    """Open files of this process, and shared memory that it maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("/dev/shm" in line for line in maps)
