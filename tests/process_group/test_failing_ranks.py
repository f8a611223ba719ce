"""Ranks of torch.distributed that die, fail, or were not started by MPI; each in a job of its own."""

import re
import sys

from tests.run_mpi import completed
from tests.test_failures import run

PREAMBLE = """
import os, signal, sys, time
import torch, torch.distributed as dist
import distdl_rma
from distdl_rma.errors import *
dist.init_process_group("rma")
rank = dist.get_rank()
def told(act):
    begin = time.monotonic()
    try:
        act()
    except DistdlError as error:
        took = time.monotonic() - begin
        print(f"{rank} was told after {took:.1f} s: {type(error).__name__}: {error}", flush=True)
dist.barrier()
"""


def test_a_killed_rank_is_named_to_all_others():
    body = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
told(lambda: dist.all_reduce(torch.ones(1000)))
told(lambda: dist.all_gather_object([None] * 3, "more"))
os._exit(0)
"""
    _, out, err = run(3, body, preamble=PREAMBLE, survive=True, DISTDL_RMA_TIMEOUT="20")
    for rank in (0, 2):
        said = re.findall(
            rf"{rank} was told after (\S+) s: PeerFailedError: rank 1 failed: it is silent", out
        )
        assert len(said) == 2 and float(said[0]) < 10, (out, err)


def test_an_error_of_one_rank_reaches_the_others_with_its_words():
    body = """
if rank == 2:
    raise OSError("disk on fire")
told(lambda: dist.all_reduce(torch.ones(1000), async_op=True).wait())
"""
    code, out, _ = run(3, body, preamble=PREAMBLE, DISTDL_RMA_TIMEOUT="20")
    assert code != 0
    for rank in (0, 1):
        assert re.search(
            rf"{rank} was told after [01]\.\d s: PeerFailedError: rank 2 failed: OSError: disk on fire;"
            rf" rank {rank} waited for ranks? ([01], )?2 in all_reduce",
            out,
        ), out


def test_a_killed_rank_ends_the_backward_of_ddp_on_all_others():
    body = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(2):
    loss = model(torch.ones(1, 2)).sum()
    if step and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except RuntimeError as error:
        # The reducer passes on the text.
        print(rank, "was told:", error, flush=True)
os._exit(0)
"""
    _, out, err = run(3, body, preamble=PREAMBLE, survive=True, DISTDL_RMA_TIMEOUT="20")
    for rank in (0, 2):
        assert re.search(rf"{rank} was told: .*PeerFailedError: rank 1 failed: it is silent", out), (out, err)


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
    done = completed([sys.executable, "-c", launcher, script], limit=100)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("ConfigurationError: init_process_group('rma'): 2 rank(s) are asked for") == 2
    assert "start the ranks by MPI, as in 'mpiexec -n 4 python -m mpi4py train.py'" in done.stderr
