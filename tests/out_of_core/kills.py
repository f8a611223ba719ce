"""A prediction that is killed at any line of the files that write it, and goes on.

``python -m tests.out_of_core.kills JSON`` makes the attempts of one process, each in a fork of this one,
which has imported what takes long and has no thread: MPI, which has one, starts in the forks.
With ``mpiexec`` it is a rank of a single attempt.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import mpi4py
import torch

SLABS, SHAPE = 8, (2, 1, 240, 30)
# A kill is before a line of these.
FILES = tuple(
    f"{each}.py"
    for each in (
        "out_of_core/results", "out_of_core/message_log", "out_of_core/predict", "out_of_core/processes",
        "segments/shared_mailbox", "data/sinks", "sources/raw", "zarr/storage/_local",
    )
)  # fmt: skip


class Killer:
    """Counts the lines that this process executes in ``FILES``, and kills processes before one of them.

    That is the first one for which ``due`` holds, called with whether it is line ``at`` or a later one. There
    are other numbers of lines in each job, since they wait.
    """

    def __init__(self, at, pids, due):
        self.at, self.pids, self.due, self.lines = at, pids, due, 0

    def start(self):
        threading.settrace(self._called)
        sys.settrace(self._called)

    def stop(self):
        threading.settrace(None)
        sys.settrace(None)

    def _called(self, frame, event, _):
        return self._executed if frame.f_code.co_filename.endswith(FILES) else None

    def _executed(self, frame, event, _):
        if event == "line":
            self.lines += 1
            if self.at and self.due(self.at <= self.lines):
                for pid in self.pids():
                    os.kill(pid, signal.SIGKILL)
        return self._executed


def predicted(folder, out, norm, number, at=0, comm=None, victim=0, victims="one rank"):
    """One attempt, which is killed before line ``at`` of rank ``victim``; notes what it reads."""
    from distdl_rma import Source, predict
    from tests.out_of_core.nets import UNet

    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if comm is not None:
        comm.Barrier()

    def pids():
        mine = os.getpid()
        others = (int((folder / f"pid-{each}").read_text()) for each in range(size) if each != rank)
        return [*others, mine] if victims == "all ranks" else [mine]

    torch.manual_seed(0)
    model, x = UNet(2, norm), torch.rand(SHAPE)

    def due(reached):
        if number != 1:
            return reached
        # The first attempt is killed, and such that the next one has something to go on with.
        sample, slab = noted(folder, out) or (0, 0)
        return sample > 0 or (reached and (norm != "none" or slab > 0))

    killer = Killer(at if rank == victim else 0, pids, due)
    with (folder / f"reads-{number}-{rank}").open("w") as reads:

        def read(box):
            reads.write(f"{box[0].start} {box[2].start}\n")
            reads.flush()
            return x[box]

        source = Source(SHAPE, torch.float32, read)
        killer.start()
        predict(model, source, folder / out, grid={"H": SLABS}, comm=comm)
        killer.stop()
    (folder / f"lines-{rank}").write_text(str(killer.lines))


def noted(folder, out):
    """Sample and slab at which the next attempt begins; None where it begins anew."""
    try:
        state = json.loads((folder / f"{out}.progress" / "state.json").read_text())
    except OSError:
        return None
    sample, _, first = state["state"]
    return sample, first


def reads_of(folder, number):
    """Samples and first rows of the slabs that an attempt has read."""
    files = sorted(folder.glob(f"reads-{number}-*"))
    return sorted(tuple(map(int, line.split())) for file in files for line in file.read_text().splitlines())


def _forked(call):
    # The status of a fork of this process that makes a call.
    from mpi4py import MPI

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            call()
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(arguments):
    folder = Path(arguments.pop("folder"))
    if any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
        from mpi4py import MPI

        predicted(folder, comm=MPI.COMM_WORLD, **arguments)
        return
    mpi4py.rc.initialize = False
    for name in filter(find_spec, ("zarr", "h5py", "torch._dynamo", "tests.out_of_core.nets")):
        import_module(name)
    out, kills, draw = arguments["out"], arguments.pop("kills"), random.Random(arguments.pop("seed"))
    statuses, begins = [_forked(lambda: predicted(folder, number=0, **arguments))], [None]
    (folder / out).rename(folder / f"whole-{out}")
    lines = int((folder / "lines-0").read_text())
    for number in range(1, kills + 1):
        at = draw.randint(1, lines // 2 if arguments["norm"] == "none" else lines)
        begins.append(noted(folder, out))
        statuses.append(
            _forked(lambda at=at, number=number: predicted(folder, number=number, at=at, **arguments))
        )
        if statuses[-1] == 0:
            (folder / out).rename(folder / f"{number}-{out}")
    begins.append(noted(folder, out))
    statuses.append(_forked(lambda: predicted(folder, number=kills + 1, **arguments)))
    print(json.dumps({"statuses": statuses, "begins": begins, "lines": lines}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
