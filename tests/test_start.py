"""How a machine starts, and refuses to; every case runs in processes of its own."""

import pytest

from tests.private_memory import run_alone
from tests.test_failures import LIGHT, run

REFUSED = """
try:
    machine = Machine(comm{})
except DistdlError as error:
    sys.stdout.write(f"{{type(error).__name__}}: {{error}}\\n")
else:
    sys.stdout.write(f"reserved {{machine.describe()['segment bytes']}}\\n")
"""


def test_default_segment_in_a_small_container_is_refused_with_both_numbers_and_the_remedy():
    done, _ = run_alone(2, LIGHT + REFUSED.format(""), size="64m")
    told = [line for line in done.stdout.splitlines() if line.startswith("SegmentError")]
    assert done.returncode == 0 and len(told) == 2, done.stderr
    for line in told:
        assert "not enough shared memory: 67108864 bytes (2 ranks x 33554432) wanted" in line
        assert "bytes free in /dev/shm" in line
        assert "DISTDL_RMA_SEGMENT_SIZE" in line and "--shm-size" in line


def test_small_container_is_enough_for_who_asks_for_little():
    done, _ = run_alone(2, LIGHT + REFUSED.format(""), size="64m", DISTDL_RMA_SEGMENT_SIZE="8MiB")
    assert done.stdout.count("reserved 8388608") == 2, done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("transport='pigeon'", "rank 1: transport is one of"),
        ("progress='maybe'", "rank 1: progress is one of"),
        ("timeout='soon'", "rank 1: a timeout is a number of seconds"),
        ("segment_size='2 parsecs'", "rank 1: a segment size is"),
    ],
)
def test_unknown_option_on_one_rank_is_an_error_on_all(argument, message):
    code, out, err = run(
        2, REFUSED.format(f", **(dict({argument}) if comm.rank == 1 else {{}})"), preamble=LIGHT
    )
    assert code == 0, err
    assert out.count("ConfigurationError") == 2 and out.count(message) == 2


@pytest.mark.parametrize("variable", ["DISTDL_RMA_TIMEOUT", "DISTDL_RMA_SEGMENT_SIZE"])
def test_unknown_environment_value_is_an_error(variable):
    code, out, err = run(2, REFUSED.format(""), preamble=LIGHT, **{variable: "plenty"})
    assert code == 0, err
    assert out.count("ConfigurationError: rank 0:") == 2 and "'plenty'" in out


def test_rank_that_does_not_make_the_machine_is_named():
    # Together: the two are to miss the third alone.
    body = "os.environ['DISTDL_RMA_TIMEOUT'] = '2'\ncomm.Barrier()\nif comm.rank != 2:\n"
    body += REFUSED.format("").replace("\n", "\n    ")
    code, out, err = run(3, body, preamble=LIGHT)
    assert code == 0, err
    for rank in (0, 1):
        assert f"ExchangeTimeout: rank {rank} waited 2 s for rank 2 to make the machine" in out
