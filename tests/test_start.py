"""How a machine starts, and refuses to; every case runs in processes of its own."""

from tests.private_memory import run_alone
from tests.test_failures import LIGHT

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
        assert "not enough shared memory: 67108864 bytes (2 ranks x 33554432 bytes) wanted" in line
        assert "bytes free in /dev/shm" in line
        assert "DISTDL_RMA_SEGMENT_SIZE" in line and "--shm-size" in line


def test_small_container_is_enough_for_who_asks_for_little():
    done, _ = run_alone(2, LIGHT + REFUSED.format(""), size="64m", DISTDL_RMA_SEGMENT_SIZE="8MiB")
    assert done.stdout.count("reserved 8388608") == 2, done.stderr
