"""What a rank moved and waited, in numbers."""

from dataclasses import dataclass


@dataclass
class Counters:
    """What this rank moved and waited since the machine started; only grows.

    ``collectives`` are calls of MPI's collectives between nodes, with the bytes handed to them.
    ``notifications`` are those of buffers; ``flushes`` are waits of MPI for all that is under way to a
    peer on another node, of which one serves many puts and notifications. A wait that ends while it still
    spins on a notification, or a flag of a small collective, is not counted.
    """

    puts: int = 0
    bytes_put: int = 0
    gets: int = 0
    bytes_got: int = 0
    collectives: int = 0
    bytes_collective: int = 0
    notifications: int = 0
    flushes: int = 0
    waits: int = 0
    seconds_waited: float = 0.0
