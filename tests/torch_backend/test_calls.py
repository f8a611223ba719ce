"""What ranks call, as text and by number."""

import pytest

from distdl_rma.torch_backend import calls
from distdl_rma.torch_backend.calls import Call, Kinds, text_of_call


def test_what_is_said_has_the_whole_identity_and_the_text_as_far_as_there_is_room():
    long = "all_gather of " + "é" * 300
    one, other = Call(long, (long, 1)), Call(long, (long, 2))
    assert len(one.encoded) <= calls.CALL_BYTES
    assert text_of_call(one.encoded) == text_of_call(other.encoded) == one.encoded[32:-1].decode()
    assert long.startswith(text_of_call(one.encoded))
    assert one.digest != other.digest and one.encoded.startswith(one.digest)


def test_the_same_call_that_all_refuse_is_one_kind_whatever_the_reasons():
    first, second = Call.refused("reduce", ValueError("this")), Call.refused("reduce", ValueError("that"))
    assert first.digest == second.digest != Call.refused("gather", ValueError("this")).digest
    assert text_of_call(second.encoded) == "nothing, since it refuses that"


@pytest.mark.parametrize("kept", [2, 1000])
def test_ranks_with_equal_calls_have_equal_numbers_and_different_kinds_never_share_one(monkeypatch, kept):
    monkeypatch.setattr(calls, "_KEPT", kept)
    here, there = Kinds(), Kinds()
    for step in range(200):
        what = step * step % 7
        # One rank keeps what it calls, the other makes it anew.
        mine, theirs = Call(f"call {what}"), Call(f"call {what}")
        assert here.number_of(mine.digest, 0) == there.number_of(theirs.digest, 0)
        if not here.number_of(mine.digest, 0):
            here.agree(mine)
            there.agree(theirs)
        digests = [Call(f"call {other}").digest for other in range(7)]
        given = [number for digest in digests if (number := here.number_of(digest, 0))]
        assert len(set(given)) == len(given) <= kept
        assert here.number_of(mine.digest, 0)
        assert [there.number_of(digest, 0) for digest in digests] == [
            here.number_of(digest, 0) for digest in digests
        ]
