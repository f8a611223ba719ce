"""Ranks of torch.distributed that die, fail, or were not started by MPI; each in a job of its own."""

import re
import sys

import pytest

from tests.run_mpi import completed
from tests.test_failures import run

pytestmark = pytest.mark.slow

# Ranks write what they are told to files: a launcher may close the output of all when one is lost.
PREAMBLE = """
import atexit, os, signal, sys, time
import torch, torch.distributed as dist
import distdl_rma
from distdl_rma.errors import *
dist.init_process_group("rma")
rank = dist.get_rank()
def told(act):
    begin = time.monotonic()
    try:
        act()
    # Some of torch pass on the text alone.
    except RuntimeError as error:
        with open(f"{os.environ['REPORTS']}/{rank}", "a") as file:
            text = f"{time.monotonic() - begin:.1f} {type(error).__name__}: {error}"
            file.write(text.replace(chr(10), " ") + chr(10))
def stay(ranks):
    # Until these were told: with the first rank that ends, the launcher may end all.
    files = [f"{os.environ['REPORTS']}/{each}" for each in ranks]
    while not all(os.path.exists(file) and os.path.getsize(file) for file in files):
        time.sleep(0.02)
dist.barrier()
"""
# Long before the timeout, also on a machine that has other things to do.
SOON, TIMEOUT = 60, "150"


@pytest.fixture
def tell(tmp_path):
    """Run a story on three ranks; status, standard error, and by rank the seconds and errors told."""

    def tell(body, **options):
        code, _, err = run(
            3, body, preamble=PREAMBLE, DISTDL_RMA_TIMEOUT=TIMEOUT, REPORTS=str(tmp_path), **options
        )
        said = {}
        for file in tmp_path.iterdir():
            lines = [line.partition(" ") for line in file.read_text().splitlines()]
            said[int(file.name)] = [(float(seconds), text) for seconds, _, text in lines]
        return code, err, said

    return tell


def test_a_killed_rank_ends_the_backward_of_ddp_on_all_others_and_is_named_ever_after(tell):
    body = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
# Nobody needs rank 1 any more for the first step.
dist.barrier()
loss = model(torch.ones(1, 2)).sum()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
told(loss.backward)
told(lambda: dist.all_reduce(torch.ones(1000)))
told(lambda: dist.all_gather_object([None] * 3, "more"))
os._exit(0)
"""
    _, err, said = tell(body, survive=True)
    assert set(said) == {0, 2}, err
    for lines in said.values():
        assert len(lines) == 3
        for seconds, text in lines:
            assert "PeerFailedError: rank 1 failed: it is silent" in text and seconds < SOON


def test_an_error_of_one_rank_reaches_the_others_with_its_words(tell):
    body = """
atexit.register(stay, [0, 1])
if rank == 2:
    raise OSError("disk on fire")
def wait_for(work):
    (work.get_future().then(lambda done: done.value()) if rank else work).wait()
told(lambda: wait_for(dist.all_reduce(torch.ones(1000), async_op=True)))
"""
    code, err, said = tell(body)
    assert code != 0 and "OSError: disk on fire" in err
    assert set(said) == {0, 1}, err
    for ((seconds, text),) in said.values():
        assert "PeerFailedError: rank 2 failed: OSError: disk on fire" in text and seconds < SOON
    # Before it waits, or in its wait for whoever has not come.
    waited = r"(; rank 0 waited for ranks? [12, ]+ in all_reduce.*)?"
    assert re.fullmatch(f"PeerFailedError: rank 2 failed: OSError: disk on fire{waited}", said[0][0][1])


def test_ranks_that_torchrun_started_without_mpi_are_told_how_to_start():
    # Two ranks, as torchrun starts them.
    script = "import torch.distributed as dist, distdl_rma; dist.init_process_group('rma')"
    launcher = """
import os, socket, subprocess, sys
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
ranks = []
for rank in range(2):
    names = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    env = os.environ | {name: str(value) for name, value in names.items()}
    script = [sys.executable, "-c", sys.argv[1]]
    ranks.append(subprocess.Popen(script, env=env, stderr=subprocess.PIPE, text=True))
# One after the other: two that write to the same pipe cut each other's lines.
sys.stderr.write("".join(rank.communicate()[1] for rank in ranks))
sys.exit(sum(rank.returncode != 0 for rank in ranks))
"""
    done = completed([sys.executable, "-c", launcher, script])
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("ConfigurationError: init_process_group('rma'): 2 rank(s) are asked for") == 2
    assert "start the ranks by MPI, as in 'mpiexec -n 4 python -m mpi4py train.py'" in done.stderr
