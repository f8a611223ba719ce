"""Texts of all ranks, once something does not fit."""

import pytest

from distdl_rma import Machine
from distdl_rma.layers.core.error_exchange import ErrorExchange, row_text, text_row


@pytest.mark.parametrize("text", ["", "plain", "two\nlines", "naïve"])
def test_a_text_survives_the_way_as_a_row(text):
    assert row_text(text_row(text, 16)) == text


def test_a_long_text_is_cut_between_letters():
    assert row_text(text_row("aé" * 9, 6)) == "aéaé"
    assert row_text(text_row("aé" * 9, 5)) == "aéa"


@pytest.mark.mpi
def test_all_ranks_get_the_same_error(P_world, comm):
    errors, last = ErrorExchange(Machine.of(P_world), P_world.ranks, "it"), comm.size - 1
    one = str(errors.refuse("is  odd" if comm.rank == last else "", "1 row"))
    assert one == f"'it': rank {last}: is odd"
    every = str(errors.refuse(f"{comm.rank}", ""))
    assert every == "'it': rank 0: 0" + (f" ({comm.size} ranks of {comm.size} complain)" if last else "")
    differ = str(errors.refuse("", "1 row" if comm.rank == last else "2 rows"))
    assert differ == (
        f"'it': rank 0 passes 2 rows but rank {last} 1 row"
        if last
        else "'it': the ranks' inputs do not fit together; each passes 1 row"
    )
