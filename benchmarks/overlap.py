"""Exchange between two hosts hidden behind compute: ``python -m benchmarks.overlap`` on one rank per host.

Each rank puts 32 MiB to the other while both convolve for longer than the transfer takes. What counts is the
time that the exchange adds to the compute, as a share of the time of the exchange alone: 0 is all hidden.
Then training steps of a split network, with overlap and without; their traces are written too, which
``examples/overlap_picture.py`` draws.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from benchmarks import step
from benchmarks.measure import COMM, summary, timed
from benchmarks.results.run import Run
from benchmarks.row import Row
from distdl_rma import Machine

NBYTES = 32 << 20
REPETITIONS = 7
# Compute for so many times the transfer.
LONGER = 2.5
# Of the exchange, what may be left in view.
EXPOSED = 0.1
# Puts in a row, and microseconds for each: 50,000 per second.
STREAM, STREAM_US = 1000, 20.0
RESULTS, ROWS = Path("bench-output/overlap.json"), Path("bench-output/overlap-rows.json")


class Sample(NamedTuple):
    """Seconds on the slowest rank; ``added`` are those that the exchange adds to the compute, each time."""

    exchange: float
    compute: float
    both: float
    added: list[float]

    @property
    def exposed(self) -> float:
        """Share of the exchange that the compute did not hide."""
        return (self.both - self.compute) / self.exchange

    def row(self, progress: str) -> Row:
        """The exchange behind compute, against the exchange alone."""
        what = f"exchange of {NBYTES >> 20} MiB each way behind compute, two hosts, progress {progress}"
        ours = summary([1e6 * seconds for seconds in self.added])
        return Row(what, "the exchange alone", *ours, 1e6 * self.exchange, 0.0, EXPOSED)


def measure(progress: str) -> Sample:
    """Medians with or without a progress engine; collective over two ranks."""
    with Machine(COMM, progress=progress, segment_size=NBYTES + (1 << 20), transport="remote") as machine:
        segments, peer = machine.segments, 1 - machine.rank
        buffer = segments.get_segment_buffer(NBYTES, notifications=1)
        remote = buffer.exchange({peer: ()})[peer]
        data, queue = np.ones(NBYTES, np.uint8), segments.queue()

        def start() -> None:
            remote.put_notify(data, 0, queue=queue)

        def wait() -> None:
            buffer.notify_wait(0)
            queue.wait()
            remote.flush()

        x, weight = torch.randn(1, 16, 128, 128), torch.randn(16, 16, 3, 3)

        def convolve(times: int) -> None:
            for _ in range(times):
                torch.nn.functional.conv2d(x, weight, padding=1)

        def exchange() -> None:
            start()
            wait()

        alone = median(exchange)
        one = median(lambda: convolve(100)) / 100
        times = int(COMM.allreduce(LONGER * alone / one, op=MPI.MAX))

        def both() -> None:
            start()
            convolve(times)
            wait()

        compute, together = [], []
        for _ in range(REPETITIONS):
            compute.append(timed(lambda: convolve(times)))
            together.append(timed(both))
        added = [b - a for a, b in zip(compute, together, strict=True)]
        return Sample(alone, statistics.median(compute), statistics.median(together), added)


def stream_row() -> Row:
    """Notified puts of 8 bytes from one host to the other, each seen there; seconds of one, of a budget."""
    with Machine(COMM, segment_size="16MiB", transport="remote") as machine:
        buffer = machine.segments.get_segment_buffer(8 * STREAM, notifications=STREAM)
        peer = 1 - machine.rank
        remote, data = buffer.exchange({peer: ()})[peer], np.ones(8, np.uint8)

        def stream() -> None:
            if machine.rank == 0:
                for at in range(STREAM):
                    remote.put_notify(data, at, offset=8 * at)
                remote.flush()
                buffer.notify_wait(0)
                buffer.notify_reset(0)
            else:
                for at in range(STREAM):
                    buffer.notify_wait(at)
                    buffer.notify_reset(at)
                remote.notify(0)
                remote.flush()

        stream()
        samples = [1e6 * timed(stream) / STREAM for _ in range(REPETITIONS)]
        what = f"stream of {STREAM} notified puts of 8 B, two hosts, one of them"
        return Row(what, f"{STREAM_US:g} us", *summary(samples), STREAM_US, 0.0, 1.0)


def median(call: Callable[[], object]) -> float:
    """Median seconds of a call, after a warm-up."""
    call()
    return statistics.median(timed(call) for _ in range(REPETITIONS))


def main() -> None:
    torch.set_num_threads(1)
    rows: dict[str, object] = {}
    run = Run.now(COMM.size)
    for progress in ("thread", "none"):
        sample = measure(progress)
        rows[progress] = {**sample._asdict(), "exposed": round(sample.exposed, 3)}
        run = replace(run, rows=(*run.rows, sample.row(progress)))
    run = replace(run, rows=(*run.rows, stream_row()))
    steps = step.measure()
    run = replace(run, rows=(*run.rows, *steps.rows()))
    rows["step"] = steps.as_dict()
    if COMM.rank == 0:
        text = json.dumps(rows, indent=2) + "\n"
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        steps.write_traces(RESULTS.parent)
        RESULTS.write_text(text)
        run.write(ROWS)
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
