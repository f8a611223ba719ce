"""``predict``: the result of a model for a source that does not fit into memory, exact, slab by slab.

Who does what, for one sample::

    Plan         how many slabs, in how many passes, from a forward without data and one of a crop
    Prediction   reads a slab, has the model run on it, sends the result to the first process
      Inference    runs the model on virtual ranks, which take turns
      Processes    every n-th virtual rank is one of this process; the mailbox carries messages between them
      Pages        memory of ranks that wait, and messages, as far as they do not fit: on disk
    Results      of the first process: a tensor, a file or a sink; and where a later process would go on
      ResumeLog    messages for slabs that are not written yet

The plan holds for each process: with more processes a prediction takes less time, not less memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from distdl_rma.errors import (
    ArgumentError,
    ConfigurationError,
    DataError,
    DistdlError,
    ProtocolError,
    ShapeError,
    UnsupportedError,
)
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.jobs.data.read_ahead import boxes_ahead
from distdl_rma.jobs.out_of_core.inference import Forward, Inference, Post, check_model, fixed_tensors
from distdl_rma.jobs.out_of_core.pages import Pages
from distdl_rma.jobs.out_of_core.plan import Plan, planned
from distdl_rma.jobs.out_of_core.prepared import Prepared
from distdl_rma.jobs.out_of_core.processes import Processes
from distdl_rma.jobs.out_of_core.results import Begin, Results, digest_of, key_of, made_as, of_disk
from distdl_rma.jobs.out_of_core.scratch import Scratch
from distdl_rma.layers.sources.opening import open_array
from distdl_rma.layers.sources.reading import Slices, label, read_box
from distdl_rma.segments.options import parse_size
from distdl_rma.segments.virtual_ranks.comm import virtual_rank


def predict(
    model: nn.Module,
    source: Any,
    sink: Any = None,
    *,
    memory: int | str = "8GiB",
    post: Post = None,
    grid: Any = None,
    scratch: str | os.PathLike[str] | None = None,
    progress: bool = False,
    comm: Any = None,
    chunks: Sequence[int] | None = None,
) -> torch.Tensor | None:
    """Write what a model makes of a source that need not fit into memory: exact, slab by slab.

    Virtual ranks have a slab each, and those of a process take turns; halos are kept, not computed again. So
    the result is that of the whole at once but for rounding, and what cannot be split exactly is refused
    before anything is written. A model without statistics of the whole takes one pass. Where it has some, as
    in an instance norm, all slabs come to that function before one goes on; what they hold meanwhile is on
    disk, as far as it does not fit.

    Blocking; collective over the processes of ``comm``. Computes without gradients, in the caller's autocast,
    with a copy of the model in ``eval()`` that shares the memory of its parameters.

    Parameters
    ----------
    model
        Any module of torch on one device, with inputs ``(batch, channels, *spatial)``. Slabs are computed on
        its device; what waits is on the host.
    source
        A path for :func:`open_array`, or an array of its kinds: ``(*spatial)``, ``(channels, *spatial)`` or
        ``(batch, channels, *spatial)``, by the spatial dimensions of the model's convolutions. Samples are
        computed one after the other, or together if they depend on each other. Floats are rounded to the type
        of the model's parameters; other elements come as they are if the model takes them, else as floats.
    sink
        A path of a new file, as for :func:`create_array`; or anything of the right shape and dtype that takes
        ``sink[box] = array``, of which that of the first process gets all boxes; None to return a tensor.
    memory
        What each process may need beside the memory that it has already, for slabs, messages, what waits and
        a result that is returned: bytes, or text such as ``"8GiB"``. The number of slabs follows from it. It
        holds for host and device together.
    post
        Called with the result of the model, which it may reduce before it is written:
        ``lambda y: y.argmax(1).to(torch.uint8)``. It gets and returns split tensors.
    grid
        Numbers of blocks, such as ``{"D": 8}``, in place of those that follow from ``memory``.
    scratch
        Folder on a disk for what waits; None for the folder of temporary files.
    progress
        Whether to print the plan and a progress bar to standard error; needs the package ``rich``.
    comm
        Communicator of the processes that predict together, COMM_WORLD if None; COMM_SELF for a process
        alone. All of them make the same call.
    chunks
        Of a new file of Zarr, for its last dimensions, and 1 for others. Where the result has the
        extents of the source, the file also says of its axes what the source does: names, spacing, units.

    Returns
    -------
    torch.Tensor or None
        The result if ``sink`` is None, on the host. It has a batch dimension if the source has one.

    Raises
    ------
    ConfigurationError
        If the memory, the disk or that of the device is too small, or the model is distributed or on two
        devices.
    UnsupportedError
        If a function of the model cannot be split, and in a virtual rank.
    ShapeError, ArgumentError
        If source, sink or grid do not fit the model.
    MismatchError
        If the processes make different calls.
    DataError
        If a file cannot be read or written, or a float cannot hold an integer of the source. An error of one
        process is raised on all.
    PeerFailedError
        If another process is interrupted or has ended.

    Notes
    -----
    A process that is killed leaves ``path.part`` and ``path.progress`` of a sink that is a path. The next
    call with the same model, source and slabs goes on, on any number of processes: in one pass at the first
    slab that was not written, otherwise from the first slab of the sample, without writing again what is
    written. ``post`` is not compared with that of the earlier call, and by its name only between processes;
    of a Zarr array on a server, which is many files, only the shape is.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    >>> np.save("scan.npy", np.ones((400, 100), np.float32))
    >>> predict(model, "scan.npy", "classes.npy", memory="1GiB", post=lambda y: y.argmax(1))
    >>> np.load("classes.npy").shape
    (400, 100)
    """
    processes = Processes(comm)
    with processes.told():
        with processes.together() as facts:
            if progress and find_spec("rich") is None:
                raise ConfigurationError("predict: progress=True needs the package rich: pip install rich")
            job = Prediction(model, source, Predictor(memory, post, grid, scratch), returns=sink is None)
            plan, digest = job.plan, digest_of(model)
            key, made = key_of(plan, digest, job.source), made_as(plan, job.source, sink, chunks)
            facts |= {"the source": [label(job.source), plan.source], "the grid": plan.grid}
            facts |= {"the digest of the model": digest, "the sink": [label(sink), chunks]}
            facts |= {"the type of the device": job.device.type}
            facts |= {"post": getattr(post, "__qualname__", type(post).__name__)}
        y = torch.zeros(plan.result, dtype=plan.dtype) if sink is None else None
        with (
            _opened(processes, sink if y is None else y, job, key, made) as results,
            _shown(plan, results.begin, progress and processes.first) as advance,
        ):
            job.run(processes, results, advance)
        if y is not None:
            processes.share(y)
        return y


def plan_prediction(
    model: nn.Module,
    source: Any,
    *,
    memory: int | str = "8GiB",
    post: Post = None,
    grid: Any = None,
    scratch: str | os.PathLike[str] | None = None,
) -> Plan:
    """What :func:`predict` will do with these arguments: a :class:`Plan`, to be printed; nothing is written.

    Runs the model on a crop of random numbers, to see what it needs. The result is taken to be written, not
    returned. Raises the errors of ``predict``.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    >>> np.save("scan.npy", np.ones((400, 100), np.float32))
    >>> plan = plan_prediction(model, "scan.npy", grid={"H": 4})
    >>> plan.slabs, plan.result  # print(plan) shows also the memory and what waits on disk
    (4, (2, 400, 100))
    """
    return Prediction(model, source, Predictor(memory, post, grid, scratch), returns=False).plan


class Prediction(Inference):
    """A prediction: its checked arguments, its plan, and the forward of each sample.

    Every process has one, with an equal plan, and runs all samples in their order. It writes the blocks of
    its slabs, or sends them to the first process, which also learns that a slab has ended: by
    ``mailbox.tell``, which calls its methods, in the order in which one process has told them. So a slab
    counts as written only after all its blocks are.
    """

    def __init__(self, model: nn.Module, source: Any, options: Predictor, returns: bool) -> None:
        if virtual_rank() is not None:
            raise UnsupportedError("predict: a virtual rank cannot run virtual ranks of its own")
        check_model(model)
        self.source = source if isinstance(source, (torch.Tensor, np.ndarray)) else open_array(source)
        self._folder = Path(tempfile.gettempdir() if options.scratch is None else options.scratch)
        if not self._folder.is_dir():
            raise DataError(
                f"predict: scratch={str(self._folder)!r} is no folder; name an existing one on a disk"
            )
        limit = parse_size(options.memory, "the memory")
        *others, last = _dtypes_of(self.source, model)
        for dtype in (*others, last):
            self.forward = Forward(model, options.post, dtype)
            try:
                self.plan = planned(self.forward, self.source, limit, options.grid, self._folder, returns)
                break
            except Exception as error:
                # Torch's errors: the model alone would not take these elements either.
                of_torch = isinstance(error, ShapeError) or not isinstance(error, DistdlError)
                if dtype != last and isinstance(error, UnsupportedError) and last.is_floating_point:
                    raise UnsupportedError(f"{error}; give the source as floats: astype('float32')") from None
                if dtype == last or not of_torch:
                    raise
        super().__init__(self.forward, self.plan.splits)

    def _converted(self, found: torch.Tensor) -> torch.Tensor:
        # In the model's type. Floats are rounded as all its numbers are; labels may not be.
        if found.dtype == (dtype := self.forward.dtype):
            return found
        block = found.to(dtype)
        floats = found.dtype.is_floating_point or found.dtype.is_complex
        if not (block.isfinite().equal(found.isfinite()) if floats else block.to(found.dtype).equal(found)):
            raise DataError(
                f"predict: {label(self.source)} has elements of {found.dtype} that {dtype}, the type of"
                " the model's parameters, cannot hold; let the model take the elements as they are, as by"
                " x.long(), or give it a longer type, as by model.double()"
            )
        return block

    def run(self, processes: Processes, results: Results, advance: Callable[[int], object]) -> None:
        """Compute all samples, from where the prediction begins; collective over the processes, blocking.

        ``advance`` is called on the first process with the number of passes that a slab has ended.
        """
        self._processes, self._results, self._advance = processes, results, advance
        begin = results.begin
        plan, samples = self.plan, range(begin.sample, self.plan.samples)
        grid = Partition(tuple(range(plan.slabs)), plan.grid, 0)
        layout = Decomposition(grid, plan.splits, tuple(range(grid.dim)))
        places = (
            plan.form.box(layout.slices(rank), sample)
            for sample in samples
            for rank in range(begin.of(sample).slab, plan.slabs)
            if self.plays(rank)
        )
        cut = max(range(grid.dim), key=lambda d: plan.grid[d]) - grid.dim + len(self.source.shape)
        ahead = plan.ahead_nbytes > 0
        with closing(boxes_ahead(self.source, places, ahead, cut, plan.fetched_rows)) as self._boxes:
            for sample in samples:
                self._run_sample(sample, begin.of(sample))

    def _run_sample(self, sample: int, begin: Begin) -> None:
        plan, processes = self.plan, self._processes
        self._sample, self._begin = sample, begin
        # Of the slabs that have not ended, the passes that are left.
        self._left = dict.fromkeys(range(begin.slab, plan.slabs), plan.passes)
        actions: dict[str, Callable[..., Any]] = {
            "write": self._store,
            "ended": self._note_end,
            "waits": self._note_wait,
        }
        if begin.keeps:
            actions["keep"] = partial(self._results.keep, sample)
        with processes.connected(begin.slab, begin.messages, actions) as mailbox:
            pages = Pages(
                plan.resident_nbytes,
                lambda: Scratch(self._folder),
                lambda rank, path: mailbox.tell("waits", rank, path),
                moves=plan.passes > 1,
                idle_nbytes=plan.idle_nbytes,
            )
            self.play(pages, mailbox, plan.freed_above)
        if processes.first and self._left:
            raise ProtocolError(f"predict: {len(self._left)} of {plan.slabs} slabs have not ended")

    def plays(self, rank: int) -> bool:
        """Whether a slab is one of this process."""
        return self._processes.plays(rank)

    def read(self, box: Slices) -> torch.Tensor:
        """The block of a box of the sample, in the model's type."""
        with of_disk(label(self.source)):
            found = next(self._boxes)
        return self._converted(found).view([each.stop - each.start for each in box])

    def write(self, rank: int, box: Slices, block: torch.Tensor) -> None:
        """Write a block of the result, here or on the first process, unless an earlier one has done so."""
        if rank >= self._begin.written and self._results.writes:
            self._store(box, block)
        elif rank >= self._begin.written:
            # A message of a view would have all of its memory.
            self._mailbox.tell("write", box, block.clone())

    def layout_of_result(self, layout: Decomposition) -> Decomposition:
        """Blocks that end where chunks of the sink end."""
        return self._results.aligned(layout, self._sample)

    def ended(self, rank: int, y: torch.Tensor) -> None:
        """Tell the first process that a slab has ended."""
        self._mailbox.tell("ended", rank)

    def _store(self, box: Slices, y: torch.Tensor) -> None:
        # The result may be cut by samples, where these are computed together.
        whole = (slice(self._sample + box[0].start, self._sample + box[0].stop), *box[1:])
        has_batch = self.plan.form.has_batch
        self._results.write(whole if has_batch else box[1:], y if has_batch else y[0])

    def _note_wait(self, rank: int, path: str) -> None:
        # Slabs of several processes wait in other functions as well, and the last one to come in none.
        if path in self.plan.waits and self._left[rank] > 1:
            self._left[rank] -= 1
            self._advance(1)

    def _note_end(self, rank: int) -> None:
        self._advance(self._left.pop(rank))
        # Slabs of several processes may end in another order: those up to the first that is left count.
        count = min(self._left, default=self.plan.slabs)
        if count > self._begin.written:
            self._results.ended(self._sample, count)


def _dtypes_of(source: Any, model: nn.Module) -> list[torch.dtype]:
    # In which the model may take the elements, the first one that it accepts.
    own = read_box(source, [slice(0, 0)] * len(source.shape)).dtype
    known = [x.dtype for x in fixed_tensors(model).values()]
    if own.is_complex:
        return [own, *[each for each in known if each.is_complex and each != own][:1]]
    floats = next((each for each in known if each.is_floating_point), None)
    return [floats or own] if own.is_floating_point else [own, floats or torch.get_default_dtype()]


@contextmanager
def _opened(
    processes: Processes, sink: Any, job: Prediction, key: str, made: dict[str, Any]
) -> Iterator[Results]:
    # Context of results on all processes, which know where they begin. The first one, which makes and ends a
    # file, enters first and leaves last. An error of one process is raised on all.
    entered = ExitStack()
    with processes.together():
        place = job.source.place if isinstance(job.source, Prepared) else None
        results = Results(sink, job.plan, key, made, processes.first, place)
        if processes.first:
            entered.enter_context(results)
    with processes.together(), entered, processes.together(), ExitStack() as others:
        if not processes.first:
            others.enter_context(results)
        results.begin = processes.gathered(lambda: results.begin)[0]
        seen = processes.gathered(results.seen)
        if seen == seen[:1] * processes.size:
            with processes.together():
                results.join(processes.hosts)
        yield results


@contextmanager
def _shown(plan: Plan, begin: Begin, progress: bool) -> Iterator[Callable[[int], object]]:
    # Prints the plan, and shows a bar from where the prediction begins; gives what advances it.
    if not progress:
        yield lambda passes: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    console.print(str(plan), highlight=False, soft_wrap=True)
    if begin.sample or begin.written:
        at = f"sample {begin.sample + 1}, slab {begin.slab + 1}; {begin.written} slabs of it are written"
        console.print(f"{'goes on':10}at {at}", highlight=False)
    with Progress(console=console) as bar:
        task = bar.add_task(
            "predict",
            total=plan.samples * plan.slabs * plan.passes,
            completed=(begin.sample * plan.slabs + begin.slab) * plan.passes,
        )
        yield lambda passes: bar.advance(task, passes)


@dataclass(frozen=True)
class Predictor:
    """An inferer: ``inferer(inputs, network)``, in place of a sliding window, exact and without seams.

    Parameters
    ----------
    memory, post, grid, scratch, progress, comm
        As of :func:`predict`. Inputs and result are in memory beside this.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    >>> inferer = Predictor(memory="1GiB")  # in MONAI: SupervisedEvaluator(..., inferer=inferer)
    >>> inferer(torch.rand(1, 1, 400, 100), model).shape
    torch.Size([1, 2, 400, 100])
    """

    memory: int | str = "8GiB"
    post: Post = None
    grid: Any = None
    scratch: str | os.PathLike[str] | None = None
    progress: bool = False
    comm: Any = None

    def __call__(self, inputs: torch.Tensor, network: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The result of a network for inputs (batch, channels, *spatial), on their device; blocking.

        ``ConfigurationError`` if the network is no module, ``ArgumentError`` if it gets further arguments;
        other errors as :func:`predict`.
        """
        if args or kwargs:
            raise ArgumentError(
                f"Predictor: the network gets one tensor; {len(args) + len(kwargs)} further arguments were"
                " passed: wrap it in a module that has them"
            )
        # Tensors of MONAI have rules of their own.
        source = inputs.detach().as_subclass(torch.Tensor)
        options = {field.name: getattr(self, field.name) for field in fields(Predictor)}
        y = predict(network, source, **options)
        return torch.empty(0) if y is None else y.to(inputs.device)
