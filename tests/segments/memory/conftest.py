"""A peer's buffer, over every transport."""

from __future__ import annotations

import pytest

from distdl_rma.segments.waiting.header import HEADER_BYTES


@pytest.fixture
def unanswered(monkeypatch):
    """Function after which no get of a peer's buffer is answered, but for those of its header.

    A wait that takes long, as any may on a busy machine, reads the header.
    """

    def silence(remote):
        # Without a get where the memory is near, whose header is never asked for.
        get = getattr(remote._link, "get", None)

        def ask(runs, out, **options):
            return get(runs, out, **options) if out.nbytes == HEADER_BYTES else [None]

        monkeypatch.setattr(remote, "_near", None)
        monkeypatch.setattr(remote._link, "get", ask, raising=False)

    return silence


@pytest.fixture(params=["auto", "remote"])
def around(comm, request):
    """Machine, own buffer and the next rank's buffer, zeroed, over both transports."""
    from distdl_rma import Machine

    machine = Machine(comm, segment_size="2MiB", transport=request.param, timeout=15)
    buffer = machine.segments.get_segment_buffer(1 << 10, 2)
    buffer.array[:] = 0
    remotes = buffer.exchange(dict.fromkeys(range(comm.size), ()), "around")
    yield machine, buffer, remotes[(comm.rank + 1) % comm.size]
    comm.Barrier()
    machine.close()
