"""The mailbox of several processes: failures reach all of them."""

import time

import numpy as np
import pytest

from distdl_rma import PeerFailedError
from distdl_rma.segments import shared_mailbox
from distdl_rma.segments.mailbox import Address, Message
from distdl_rma.segments.shared_mailbox import SharedMailbox

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.processes]


def poll(mailbox, deadline):
    while time.monotonic() < deadline:
        mailbox.poll()


@pytest.mark.parametrize("nbytes", [8, 1 << 20])
def test_a_process_that_fails_while_its_message_is_under_way_ends_all_with_its_own_error(
    comm, monkeypatch, nbytes
):
    monkeypatch.setattr(shared_mailbox, "_UNDER_WAY_NBYTES", 1 << 10)
    mailbox, last = SharedMailbox(comm.Dup(), 0, {}, list), comm.size - 1
    if comm.rank == last:
        mailbox.put(Address("late", last, 0), Message([np.zeros(nbytes, np.uint8)], (0, "u1")))
        comm.Barrier()
        assert mailbox.finish(ValueError("its own"))
        return
    comm.Barrier()
    with pytest.raises(PeerFailedError, match=f"rank {last} has failed") as caught:
        poll(mailbox, time.monotonic() + 30)
    assert not mailbox.finish(caught.value)
