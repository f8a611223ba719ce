"""Blocks of waiting ranks and messages: never more in memory than the limit, and the same bytes later."""

import numpy as np
import pytest
import torch

from distdl_rma.jobs.out_of_core.pages import Pages
from distdl_rma.jobs.out_of_core.scratch import Scratch
from distdl_rma.layers.dtypes import as_words
from distdl_rma.segments.mailbox import Address, Mailbox, Message
from distdl_rma.segments.virtual_ranks.rehearse import played

SIDE = 256
NBYTES = 4 * SIDE**2


class Watched(Pages):
    """Pages that note the most that has waited in memory when a call ended."""

    most = 0

    def _fit(self):
        super()._fit()
        self.most = max(self.most, self.resident_nbytes)


def written(pages):
    return pages._scratch().written_nbytes if pages._scratch.cache_info().currsize else 0


def wait_for_all(comm, arrived):
    arrived.append(comm.rank)
    comm.wait_until(lambda: len(arrived) >= comm.size, "the others")


@pytest.mark.parametrize("limit", [0, NBYTES, 5 * NBYTES // 2, 100 * NBYTES])
def test_ranks_that_wait_have_their_memory_when_they_go_on(tmp_path, limit):
    pages, ranks, first, second = Watched(limit, lambda: Scratch(tmp_path)), 5, [], []

    def play(comm):
        with pages.running(comm.rank):
            x = torch.full((SIDE, SIDE), float(comm.rank))
            # A view, and a tensor in other memory.
            view, other = x[1:, ::2], x + 0.5
            for arrived in (first, second):
                wait_for_all(comm, arrived)
                assert bool((x == comm.rank).all()) and torch.equal(other, x + 0.5)
                assert view.data_ptr() == x[1:].data_ptr() and torch.equal(view, x[1:, ::2])
                x += 0
            del x, view, other

    with pages.watching(Mailbox()):
        played(ranks, play, None, keeper=pages)
    # All but the last one wait at once.
    assert pages.held == dict.fromkeys(range(ranks), 2 * NBYTES) and pages.resident_nbytes == 0
    assert pages.most <= limit and (written(pages) > 0) == (limit < 2 * (ranks - 1) * NBYTES)


@pytest.mark.parametrize("limit", [0, NBYTES, 100 * NBYTES])
def test_messages_wait_within_the_limit_and_arrive(tmp_path, limit):
    pages, mailbox = Watched(limit, lambda: Scratch(tmp_path)), Mailbox()
    with pages.watching(mailbox):
        for receiver in range(4):
            array = np.full((SIDE, SIDE), receiver, np.int32)
            mailbox.put(Address("x", 9, receiver), Message([array, np.arange(3)], (0, "")))
        assert pages.resident_nbytes <= limit and mailbox.nbytes == 4 * (NBYTES + 24)
        for receiver in range(4):
            address = Address("x", 9, receiver)
            large, small = mailbox.messages[address][0].pieces
            assert np.array_equal(large, np.full((SIDE, SIDE), receiver, np.int32))
            assert np.array_equal(small, np.arange(3))
            mailbox.remove(address)
        assert pages.resident_nbytes == mailbox.nbytes == 0
    assert pages.most <= limit
    assert (written(pages) > 0) == (limit < 4 * NBYTES)


def test_messages_of_an_earlier_process_count(tmp_path):
    pages, mailbox = Pages(0, lambda: Scratch(tmp_path)), Mailbox()
    mailbox.put(Address("x", 0, 1), Message([np.ones((SIDE, SIDE))], (0, "")))
    with pages.watching(mailbox):
        assert pages.resident_nbytes == 0 and written(pages) <= 2 * NBYTES
        assert np.array_equal(mailbox.messages[Address("x", 0, 1)][0].pieces[0], np.ones((SIDE, SIDE)))
    assert mailbox.keeper is None


def test_memory_with_an_array_and_memory_of_others_stays_where_it_is(tmp_path):
    pages, outside, arrived = Pages(0, lambda: Scratch(tmp_path)), torch.ones(SIDE, SIDE), []

    def play(comm):
        with pages.running(comm.rank):
            x, moved = torch.zeros(SIDE, SIDE), torch.ones(SIDE, SIDE)
            array, view = as_words(x), outside[1:].view(-1)
            outside.add_(1)
            address = x.data_ptr()
            wait_for_all(comm, arrived)
            assert x.data_ptr() == address and not array.any()
            assert bool((moved == 1).all()) and float(view[0]) == 3

    with pages.watching(Mailbox()):
        played(2, play, None, keeper=pages)
    assert written(pages) == NBYTES
