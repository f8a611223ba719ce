"""What the other ranks learn when one fails; every case runs in processes of its own, with a time limit."""

import re
from pathlib import Path

import pytest

from tests.test_failures import CONV, LIGHT, PREAMBLE, run

pytestmark = pytest.mark.slow

# At once, on a machine that has other things to do; a rank that heard nothing would wait for 60 s.
SOON = 20
# Every rank reports how its part of the story ends, and how long after the failure.
REPORT = """
import atexit
begin = time.time()


def told(error):
    text = f"{time.time() - begin:.2f} {type(error).__name__}: {error}" + chr(10)
    # In files: a launcher may close the output of all ranks when one is lost.
    with open(f"{os.environ['REPORTS']}/{comm.rank}", "a") as file:
        file.write(text)


def stay(ranks):
    # Until these were told: with the first rank that ends, the launcher may end all.
    files = [f"{os.environ['REPORTS']}/{rank}" for rank in ranks]
    while not all(os.path.exists(file) and os.path.getsize(file) for file in files):
        time.sleep(0.02)


def finish(*ranks):
    # Without the end of MPI, which would wait for the others.
    stay(ranks or range(comm.size))
    os._exit(0)
"""
# How a step ends on a rank that may have been told, or not.
OUTCOME = """
outcome = None
try:
    step()
except Exception as error:
    outcome = error
# What another rank sent before it gave up may be all that this one needs.
told(outcome)
finish()
"""
LAYER = f"{CONV}machine = Machine.of(P_x)\ncomm.Barrier()\n{REPORT}"
# The same with a sum in the place of the convolution, which needs no torch.
SUMS = f"""
from distdl_rma.segments import Allreduce
machine = Machine(comm, segment_size="8MiB")
sums = Allreduce(machine.segments, range(comm.size), 4, name="enc1.sums")
operation = machine.segments.operation("enc1.sums")
def step():
    machine.segments.begin(operation, 1)
    sums.active[:] = 1
    sums.start()
    sums.wait()
step()
comm.Barrier()
{REPORT}
"""
WAIT = """
try:
    step()
except Exception as error:
    told(error)
    raise
"""


@pytest.fixture
def tell(tmp_path):
    """Run a story on some ranks; status, standard error, and by rank the seconds and the error told.

    It has a sum that has run once, or something else of these.
    """

    def tell(ranks, body, begin=SUMS, **options):
        preamble = PREAMBLE if begin is LAYER else LIGHT
        code, _, err = run(ranks, begin + body, preamble=preamble, REPORTS=str(tmp_path), **options)
        said = {}
        for file in tmp_path.iterdir():
            seconds, _, text = file.read_text().strip().partition(" ")
            said[int(file.name)] = float(seconds), text
        return code, err, said

    return tell


@pytest.mark.parametrize("transport", ["auto", "remote"])
def test_exception_in_user_code_reaches_every_waiting_peer_soon(transport, tell):
    body = f"""
machine = Machine(comm, transport={transport!r}, segment_size="8MiB")
buffer = machine.segments.get_segment_buffer(8, notifications=1)
comm.Barrier()
begin = time.time()
atexit.register(stay, [0, 2, 3])
if comm.rank == 1:
    raise OSError("disk on fire")
try:
    buffer.notify_wait(0)
except Exception as error:
    told(error)
    raise
"""
    code, err, said = tell(4, body, begin=REPORT)
    assert code != 0 and "OSError: disk on fire" in err
    assert set(said) == {0, 2, 3}
    for seconds, text in said.values():
        assert text.startswith("PeerFailedError: rank 1 failed: OSError: disk on fire")
        assert "to set notification 0 of buffer 'user'" in text
        assert seconds < SOON


def test_exception_inside_a_layer_reaches_peers_although_it_is_caught(tell):
    body = """
if comm.rank == 2:
    def broken(*arguments):
        raise MemoryError("no memory for the core")
    from distdl_rma.layers.ops.conv.own_and_halo import Patch
    Patch.convolve = broken
    try:
        layer(x)
    except MemoryError as error:
        told(error)
else:
    try:
        # Rank 2 sent its rows before it failed: the second call is the one that waits in vain.
        layer(x)
        layer(x)
    except PeerFailedError as error:
        told(error)
        assert error.rank == 2 and error.cause == "MemoryError: no memory for the core"
finish()
"""
    _, _err, said = tell(3, body, LAYER)
    assert set(said) == {0, 1, 2}
    for rank in (0, 1):
        assert said[rank][0] < SOON
        assert "PeerFailedError: rank 2 failed: MemoryError: no memory for the core" in said[rank][1]
        assert "in 'enc1.conv" in said[rank][1]


def test_leaving_the_block_of_a_machine_by_an_exception_reaches_peers(tell):
    body = """
try:
    with Machine(comm, segment_size="8MiB") as block:
        buffer = block.segments.get_segment_buffer(8, notifications=1)
        comm.Barrier()
        begin = time.time()
        if comm.rank == 0:
            raise ValueError("bad sample")
        buffer.notify_wait(0)
except Exception as error:
    told(error)
finish()
"""
    _, _err, said = tell(3, body, begin=REPORT)
    assert "PeerFailedError: rank 0 failed: ValueError: bad sample" in said[1][1]
    assert said[1][0] < SOON and said[2][0] < SOON


def test_failure_is_told_without_mpi4py_as_the_main_program(tell):
    body = "atexit.register(stay, [1])\nif comm.rank == 0: raise OSError('gone')\n"
    code, _err, said = tell(2, body + WAIT, main=())
    assert code != 0
    assert "PeerFailedError: rank 0 failed: OSError: gone" in said[1][1]


def test_timeout_follows_those_who_wait_for_each_other_to_the_end(tell):
    # 0 waits for 1, 1 for 2, 2 for nobody; rank 3 has nothing to do with it.
    body = """
buffer = machine.segments.get_segment_buffer(8, notifications=1, owner="ring of letters")
pair = [rank for rank in range(3) if abs(rank - comm.rank) == 1 and comm.rank < 3]
buffer.exchange(dict.fromkeys(pair, ()), "letters")
error = None
while comm.rank == 0 and "rank 1 waits since" not in str(error):
    # Until then, rank 1 has not come to its wait.
    try:
        buffer.notify_wait(0, timeout=1)
    except ExchangeTimeout as late:
        error = late
if comm.rank == 0:
    told(error)
elif comm.rank == 1:
    try:
        buffer.notify_wait(0, timeout=60)
    except PeerFailedError:
        pass
finish(0)
"""
    _, _err, said = tell(4, body)
    text = said[0][1]
    assert re.search(
        r"rank 0 waited 1 s for rank 1 to set notification 0 of buffer 'ring of letters'; "
        r"rank 1 waits since [\d.]+ s for ranks 0, 2 to set notification 0 of buffer 'ring of letters'; "
        r"rank 2 waits for nobody: the last that it began, [\d.]+ s ago, was 'enc1.sums.*$",
        text,
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes cannot be looked at here")
def test_killed_rank_is_reported_as_silent(tell):
    body = "if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + WAIT.replace("raise", "finish(0, 2)")
    _, _err, said = tell(3, body, survive=True)
    assert set(said) == {0, 2}
    for seconds, text in said.values():
        assert re.search(r"PeerFailedError: rank 1 failed: it is silent, its process \d+ has ended", text)
        assert seconds < SOON


def test_stopped_rank_is_a_timeout_that_says_what_it_did_last(tell):
    body = """
import subprocess
machine.segments.waiter.timeout = 2
if comm.rank == 1:
    wait = f"while ! test -e $REPORTS/0; do sleep 0.2; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wait])
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    _, _err, said = tell(2, body + OUTCOME)
    text = said[0][1]
    assert "ExchangeTimeout: rank 0 waited 2 s for rank 1 to " in text and "'enc1.sums" in text
    assert re.search("rank 1 waits for nobody: the last that it began, .* was 'enc1.sums", text)


def test_job_that_is_suspended_goes_on_as_if_nothing_had_been(tell):
    body = """
import subprocess
machine.segments.waiter.timeout = 3
first, second = comm.allgather(os.getpid())
waits, goes_on = (f"{os.environ['REPORTS']}.{name}" for name in ("waits", "goes-on"))
if comm.rank == 0:
    open(waits, "w").close()
else:
    stop = f"while ! test -e '{waits}'; do sleep 0.1; done; sleep 0.3; kill -STOP {first} {second}; sleep 5"
    subprocess.Popen(["sh", "-c", f"{stop}; kill -CONT {first} {second}; sleep 0.3; touch '{goes_on}'"])
    while not os.path.exists(goes_on):
        time.sleep(0.02)
"""
    _, _err, said = tell(2, body + OUTCOME)
    assert [said[rank][1] for rank in range(2)] == ["NoneType: None"] * 2


def test_close_on_one_rank_only_is_an_error_on_both(tell):
    body = """
try:
    while comm.rank == 1:
        try:
            machine.close(timeout=3)
        except ExchangeTimeout:
            # Until rank 0, which may be slow, has seen that this one leaves.
            if os.path.exists(f"{os.environ['REPORTS']}/0"):
                raise
    step()
except Exception as error:
    told(error)
finish()
"""
    _, _err, said = tell(2, body)
    assert "PeerFailedError: rank 1 failed: it left" in said[0][1]
    assert "PeerFailedError" in said[1][1] or "to close the machine" in said[1][1]


def test_buffers_of_other_sizes_meet_and_are_named(tell):
    body = """
from distdl_rma.segments import Allreduce
machine = Machine(comm, segment_size="8MiB")
try:
    job = Allreduce(machine.segments, range(comm.size), 10 + comm.rank // 2, name="grads")
    job.start()
    job.wait(timeout=10)
except Exception as error:
    told(error)
finish()
"""
    _, _err, said = tell(3, body, begin=REPORT)
    assert set(said) == {0, 1, 2}
    assert all(word in said[2][1] for word in ("MismatchError", "'grads"))


LONE_SECONDS = 30
NOTES = f"""
lone = Machine(comm, transport={{!r}}, segment_size="8MiB", timeout={LONE_SECONDS})
board = lone.segments.get_segment_buffer(0, notifications=comm.size)
peers = board.exchange(dict.fromkeys([r for r in range(comm.size) if r != comm.rank], ()), "board")
comm.Barrier()
begin = time.time()
"""


def test_rank_that_leaves_early_does_not_stop_a_wait_for_another_one(tell):
    body = """
if comm.rank == 0:
    for _ in range(2):
        board.notify_reset(board.notify_waitsome())
else:
    time.sleep(2.5 * (comm.rank - 1))
    peers[0].notify(comm.rank)
lone.close()
"""
    code, err, _ = tell(3, NOTES.format("auto") + body, begin=REPORT)
    assert code == 0, err


def test_wait_for_one_of_several_peers_ends_when_that_one_left_though_others_stay(tell):
    body = """
if comm.rank == 1:
    sys.exit(0)
if comm.rank == 0:
    for wait in (board.notify_wait, lambda index, **named: board.notify_waitsome(index, 1, **named)):
        try:
            wait(1, timeout=60, senders=[1])
        except Exception as error:
            told(error)
    peers[2].notify(0)
else:
    # Peers of it are both, and one of them has not left.
    board.notify_wait(0, timeout=60)
"""
    code, err, said = tell(3, NOTES.format("auto") + body, begin=REPORT)
    seconds, text = said[0]
    assert code == 0 and set(said) == {0}, err
    left = "PeerFailedError: rank 1 failed: it left, closing the machine or ending its program"
    assert text.count(left) == 2
    assert text.count("rank 0 waited for rank 1 to set notification 1") == 2
    assert seconds < SOON


def test_rank_that_left_is_reported_where_ranks_share_no_memory(tell):
    body = """
if comm.rank == 1:
    sys.exit(0)
try:
    board.notify_wait(1)
except Exception as error:
    told(error)
"""
    code, err, said = tell(2, NOTES.format("remote") + body, begin=REPORT)
    seconds, text = said[0]
    assert code == 0, err
    assert "PeerFailedError: rank 1 failed: it left" in text and seconds < LONE_SECONDS


def test_program_whose_ranks_end_far_apart_closes_them_together(tell):
    code, err, _ = tell(2, NOTES.format("auto") + "if comm.rank == 0: time.sleep(3)\n", begin=REPORT)
    assert code == 0 and "WARN" not in err, err


def test_failed_machine_is_closed_at_once(tell):
    body = """
lone.fail(OSError("no more disk"))
lone.close()
told(OSError(f"closed: {lone.closed}"))
"""
    _, _, said = tell(2, NOTES.format("remote") + body, begin=REPORT)
    assert len(said) == 2
    for seconds, text in said.values():
        assert "closed: True" in text and seconds < LONE_SECONDS
