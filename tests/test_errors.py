"""Errors: each is one of the library's and a standard one, and travels between processes."""

import pickle

import pytest

from distdl_rma import errors
from distdl_rma.errors import DataError, ShapeError, told

GROUPS = {
    ValueError: "PartitionError ArgumentError ShapeError ConfigurationError",
    OSError: "CheckpointError DataError",
    RuntimeError: "ProtocolError ClosedError MismatchError PeerFailedError",
    NotImplementedError: "UnsupportedError",
    MemoryError: "SegmentError",
    TimeoutError: "ExchangeTimeout",
}
STANDARD = {getattr(errors, name): kind for kind, names in GROUPS.items() for name in names.split()}


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


def test_an_error_of_others_is_told_in_its_words_before_the_advice_and_those_of_the_library_as_they_are():
    with (
        pytest.raises(DataError, match=r"^x\.npy: OSError: \[Errno 28\] full; free space$"),
        told(DataError, "x.npy", "free space", OSError),
    ):
        raise OSError(28, "full")
    for error, of in ((ShapeError("as it is"), Exception), (ValueError("as it is"), OSError)):
        with pytest.raises(type(error), match=r"^as it is$"), told(DataError, "x.npy", of=of):
            raise error
    with pytest.raises(DataError, match="x: OSError: refused"), told(DataError, "x"):
        raise FileNotFoundError("x") from OSError("refused")
