"""Errors: each is one of the library's and a standard one, and travels between processes."""

import pickle

import pytest

from distdl_rma import errors

STANDARD = {
    errors.PartitionError: ValueError,
    errors.ArgumentError: ValueError,
    errors.ShapeError: ValueError,
    errors.UnsupportedError: NotImplementedError,
    errors.ConfigurationError: ValueError,
    errors.CheckpointError: OSError,
    errors.DataError: OSError,
    errors.SegmentError: MemoryError,
    errors.ProtocolError: RuntimeError,
    errors.ClosedError: RuntimeError,
    errors.MismatchError: RuntimeError,
    errors.ExchangeTimeout: TimeoutError,
    errors.PeerFailedError: RuntimeError,
}


def test_every_error_is_one_of_the_library_and_a_standard_one():
    assert {*STANDARD, errors.DistdlError} == {getattr(errors, name) for name in errors.__all__}
    for kind, standard in STANDARD.items():
        assert issubclass(kind, errors.DistdlError) and issubclass(kind, standard)
        assert kind.__doc__


@pytest.mark.parametrize("kind", STANDARD)
def test_errors_come_back_from_a_pickle(kind):
    more = (2, "disk on fire") if kind is errors.PeerFailedError else ()
    error = pickle.loads(pickle.dumps(kind("rank 2 failed", *more)))
    assert type(error) is kind and str(error) == "rank 2 failed"
    assert not more or (error.rank, error.cause) == more
