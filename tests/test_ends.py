"""What the others learn when a rank ends while all of them close, or does not end with them."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests import test_failures
from tests.test_failures import LIGHT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes cannot be looked at here"),
]
# Python, too, ends as that of a user does.
run = partial(test_failures.run, AS_USERS_START="1")
# The machines' own handlers at exit run before this one, in whose place the end of MPI would wait for those
# that are gone.
APART = f"{LIGHT}import atexit\natexit.register(os._exit, 0)\n"


def test_rank_that_dies_in_close_or_never_closes_is_named_on_its_node():
    body = """
closed, open_to_the_end = (Machine(segment_size="8MiB", timeout=30) for _ in range(2))
closed.group().barrier()
if comm.rank == 1:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
elif comm.rank == 0:
    time.sleep(1)
try:
    closed.close()
except DistdlError as error:
    sys.stdout.write(f"{comm.rank} was told: {type(error).__name__}: {error}" + chr(10))
    sys.stdout.flush()
"""
    _, out, err = run(3, body, preamble=APART, survive=True)
    for rank in (0, 2):
        assert re.search(
            rf"{rank} was told: PeerFailedError: rank 1 failed: it is silent, its process \d+ has ended;"
            rf" rank {rank} waited for (rank 1|ranks 1, \d) to close the machine",
            out,
        ), (out, err)
        assert re.search(
            rf"distdl_rma: rank 1 will not end together with rank {rank}: it is silent, its process \d+ has"
            r" ended; MPI, which ends now, may wait for it for ever",
            err,
        )


@pytest.mark.parametrize("norm", ["", ", torch.nn.InstanceNorm2d(1)"])
def test_rank_that_dies_in_a_prediction_is_named_on_its_node(norm):
    body = f"""
import torch
from distdl_rma import Source, predict
reads = []

def read(box):
    reads.append(box)
    if comm.rank == 1 and len(reads) == 3:
        os._exit(3)
    return np.ones([each.stop - each.start for each in box], np.float32)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3, padding=1){norm})
try:
    predict(model, Source((90, 8), np.float32, read), grid={{"H": 12}})
except DistdlError as error:
    sys.stdout.write(f"{{comm.rank}} was told: {{type(error).__name__}}: {{error}}" + chr(10))
    sys.stdout.flush()
"""
    _, out, err = run(3, body, preamble=APART, survive=True)
    for rank in (0, 2):
        assert re.search(rf"{rank} was told: PeerFailedError: rank 1 failed: it is silent", out), (out, err)


def test_rank_that_ends_long_before_the_others_says_whom_it_waits_for_and_waits_on():
    body = """
machine = Machine(segment_size="8MiB", timeout=30)
machine.group().barrier()
machine.segments.waiter.timeout = 0.5
if comm.rank == 1:
    time.sleep(4)
atexit.unregister(os._exit)
"""
    code, _, err = run(2, body, preamble=APART)
    said = [line for line in err.splitlines() if line.startswith("distdl_rma:")]
    assert code == 0 and len(said) == 1, err
    assert "rank 0 waited 0.5 s for rank 1 to close the machine; rank 1 waits for nobody" in said[0]
    assert said[0].endswith("rank 0 has ended its program and waits on")


def test_rank_that_failed_and_caught_it_does_not_wait_at_exit_for_others_that_are_at_the_end_of_mpi():
    body = """
try:
    with Machine(segment_size="8MiB", timeout=30, transport="remote") as machine:
        machine.group().barrier()
        machine.segments.waiter.timeout = 2
        if comm.rank == 1:
            raise OSError("disk on fire")
        machine.group().barrier()
except (OSError, PeerFailedError):
    if comm.rank == 1:
        time.sleep(1)
"""
    code, _, err = run(3, body, preamble=LIGHT)
    assert code == 0 and "distdl_rma:" not in err, err


def test_rank_that_is_killed_or_stopped_while_it_writes_its_header_holds_nobody_up():
    # The window is some microseconds wide; here both are struck in it on purpose.
    body = """
import subprocess
from distdl_rma.segments.waiting import header as status

class Struck:
    def __init__(self, form, signal):
        self._form, self._signal = form, signal
    def pack(self, checksum):
        # The text is written, the fields and the checksum are not.
        os.kill(os.getpid(), self._signal)
        return self._form.pack(checksum)
    def __getattr__(self, name):
        return getattr(self._form, name)

machine = Machine(segment_size="8MiB", timeout=60)
reader = comm.bcast(os.getpid())
letters = [machine.segments.get_segment_buffer(8, 1, owner=f"letters {rank}") for rank in (1, 2)]
for rank, buffer in zip((1, 2), letters):
    if comm.rank in (0, rank):
        buffer.exchange({rank - comm.rank: ()})
machine.group().barrier()
if comm.rank:
    if comm.rank == 2:
        # Once rank 0 has ended.
        wait = f"while kill -0 {reader}; do sleep 0.2; done; kill -9 {os.getpid()}"
        subprocess.Popen(["sh", "-c", wait], stdout=2, stderr=subprocess.DEVNULL, close_fds=True)
    status._CHECK = Struck(status._CHECK, (signal.SIGKILL, signal.SIGSTOP)[comm.rank - 1])
    # A long wait writes the header.
    letters[comm.rank - 1].notify_wait(0)
for buffer, timeout in zip(reversed(letters), (1.5, 60)):
    try:
        buffer.notify_wait(0, timeout=timeout)
    except DistdlError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}" + chr(10))
        sys.stdout.flush()
os._exit(0)
"""
    _, out, err = run(3, body, preamble=APART, survive=True)
    assert re.search(
        r"ExchangeTimeout: rank 0 waited 1.5 s for rank 2 to set notification 0 of buffer 'letters 2'; rank 2"
        r" waits for nobody",
        out,
    ), (out, err)
    assert re.search(
        r"PeerFailedError: rank 1 failed: it is silent, its process \d+ has ended; rank 0 waited for rank 1"
        r" to set notification 0 of buffer 'letters 1'",
        out,
    ), (out, err)


BY_HAND = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
"""


def test_mpi_that_the_user_starts_and_ends_is_needed_and_takes_open_machines_with_it():
    body = """
from distdl_rma import MPIPartition, print0
def refused(kind, text, *calls):
    for call in calls:
        try:
            call()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(call)
doors = (Machine, Machine.on, lambda: MPIPartition(comm), lambda: print0("a line"))
refused(ProtocolError, "MPI is not initialised", *doors)
MPI.Init_thread()
machine, lost = (Machine(segment_size="1MiB", timeout=20, transport=way) for way in ("auto", "remote"))
buffer = machine.segments.get_segment_buffer(64, 1)
peer = buffer.exchange([1 - comm.rank])[1 - comm.rank]
peer.put(np.ones(8))
lost.group().barrier()
comm.Barrier()
lost.fail(OSError("disk on fire"))
MPI.Finalize()
refused(ProtocolError, "was finalised", *doors)
after = machine.describe, lambda: peer.put(np.ones(8)), lambda: buffer.array, lost.describe
refused(ClosedError, "closed", *after)
machine.close()
lost.close()
sys.stdout.write(f"rank {machine.rank} is at its end" + chr(10))
"""
    code, out, err = run(2, body, preamble=BY_HAND + LIGHT)
    assert code == 0 and all(f"rank {rank} is at its end" in out for rank in range(2)), (out, err)
