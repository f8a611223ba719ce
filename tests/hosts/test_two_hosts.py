"""The stand-in for two hosts itself: ranks on both, bytes that cross, and nothing that stays behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.two_hosts import NAMESPACES, PREFIX, TwoHosts, ip, obstacle, remove_forgotten_hosts

SCRIPT = Path(__file__).parents[1] / "two_hosts.py"
PROBLEM = obstacle()
SAY_AND_SEND = """
import socket
from mpi4py import MPI
comm = MPI.COMM_WORLD
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
said = comm.gather(f"{comm.rank} {socket.gethostname()[-1]} {node.size}")
if said:
    print(*said, sep="\\n", flush=True)
if comm.rank in (0, comm.size - 1):
    comm.sendrecv(bytes(3_000_000), comm.size - 1 - comm.rank)
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))]


def launch(*arguments, program=SAY_AND_SEND):
    command = [sys.executable, str(SCRIPT), *arguments, "--", sys.executable, "-m", "mpi4py", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def hosts_of(pid):
    return list(NAMESPACES.glob(f"{PREFIX}{pid}-*"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ranks-per-host", "2"], ["0 a 2", "1 a 2", "2 b 2", "3 b 2"]),
        (["-n", "3"], ["0 a 2", "1 a 2", "2 b 1"]),
    ],
)
def test_ranks_are_on_both_hosts_and_their_messages_cross(arguments, expected):
    done = launch(*arguments, "--least-bytes", "3000000")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[: len(expected)] == expected


def test_too_few_bytes_and_failing_ranks_are_failures():
    done = launch("--least-bytes", "100000000")
    assert done.returncode == 1
    assert "100,000,000 bytes were to cross each way" in done.stdout
    assert launch(program="raise SystemExit(3)").returncode != 0


def test_rate_limits_the_cable():
    # 3 MB at 10 Mbit/s take 2.4 s.
    begin = time.monotonic()
    assert launch("--rate", "10mbit").returncode == 0
    assert time.monotonic() - begin > 2


def test_frames_take_as_long_as_they_are_told_to():
    program = """
import time
from mpi4py import MPI
comm, taken = MPI.COMM_WORLD, []
for _ in range(5):
    begin = time.perf_counter()
    comm.sendrecv(b"", 1 - comm.rank)
    comm.sendrecv(b"", 1 - comm.rank)
    taken.append(time.perf_counter() - begin)
if comm.rank == 0:
    print(min(taken), flush=True)
"""
    done = launch("--delay", "30", program=program)
    assert done.returncode == 0, done.stderr
    # There, and there again: both send at once.
    assert float(done.stdout.splitlines()[0]) > 2 * 0.03 * 0.9


def test_hosts_are_gone_after_a_time_limit():
    with TwoHosts() as hosts:
        assert all((NAMESPACES / name).exists() for name in hosts.names)
        with pytest.raises(subprocess.TimeoutExpired):
            hosts.run((1, 1), ["sleep", "60"], seconds=1)
    assert not any((NAMESPACES / name).exists() for name in hosts.names)


def test_hosts_are_gone_after_a_signal():
    with subprocess.Popen([sys.executable, str(SCRIPT), "--", "sleep", "60"]) as job:
        deadline = time.monotonic() + 60
        while len(hosts_of(job.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(hosts_of(job.pid)) == 2
        job.send_signal(signal.SIGTERM)
        job.wait(timeout=60)
    assert not hosts_of(job.pid)


def test_hosts_of_a_killed_run_are_removed_by_the_next():
    no_process = 1 << 30
    ip("netns", "add", f"{PREFIX}{no_process}-a")
    remove_forgotten_hosts()
    assert not hosts_of(no_process)
