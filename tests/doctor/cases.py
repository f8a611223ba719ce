"""Facts of made-up ranks."""

from distdl_rma.doctor.facts import HYDRA, Job, Launcher, RankFacts, cards_seen

GIB = 1 << 30
VERSIONS = {"distdl_rma": "0.1.0", "Python": "3.11.7", "torch": "2.9.0", "MPI": "MPICH Version: 5.0.2"}


def rank(number=0, size=2, **changes):
    """A rank without fault, on a host of eight cores."""
    given = {
        "host": "node1",
        "launcher": Launcher(HYDRA, size, number),
        "versions": VERSIONS,
        "thread_level": "multiple",
        "cores": tuple(range(8)),
        "threads": 2,
        "shm_free": 30 * GIB,
        "shm_total": 32 * GIB,
        "memory_limit": 64 * GIB,
        "ends_job": True,
        "cards": cards_seen({}, 0),
    }
    return RankFacts(number, size, **(given | changes))


def with_cards(*cards):
    """A job whose ranks see cards: environment variables and the number of each."""
    made = job(len(cards))
    made.ranks = [rank(number, len(cards), cards=cards_seen(*each)) for number, each in enumerate(cards)]
    return made


def job(size=2, **changes):
    """A job of such ranks on one node, all with the same changes."""
    return Job(
        [rank(number, size, **changes) for number in range(size)],
        nodes=[list(range(size))],
        segment_bytes=4 * GIB,
        transports={number: "s" * number + "-" + "s" * (size - 1 - number) for number in range(size)},
    )
