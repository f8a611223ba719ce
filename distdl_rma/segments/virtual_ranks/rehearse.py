"""Run a function on virtual ranks, which are threads of this process that take turns.

What a rank of its own process would have for itself is exchanged at each turn (``_states``), or entered once
in the thread of the rank (``_modes``, context variables). Modes are torch's per-thread state, which a new
thread does not inherit; random generators and the default dtype are the process's, so all ranks would share
them. Anything else, such as environment variables and modules, stays shared: a copy would be no longer what
the user's program refers to.
"""

from __future__ import annotations

import contextvars
import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np

from distdl_rma.errors import ArgumentError, PeerFailedError, UnsupportedError
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.segments.virtual_ranks.comm import VirtualComm, virtual_rank
from distdl_rma.segments.virtual_ranks.turns import Keeper, RunAbandoned, Turns

_T = TypeVar("_T")
# 624 words and the place of the next one.
_MT19937_BYTES = 2500


def rehearse(
    ranks: int, function: Callable[..., _T], *args: Any, seed: int = 0, nodes: int | Sequence[int] = 1
) -> list[_T]:
    """Call ``function(comm, *args)`` on virtual ranks in this process; return the results by rank.

    Needs no launcher and no cores: one rank runs at a time, until it waits for another one. All of the
    library works on these ranks but its backend of torch.distributed: machines, segments, layers, split
    tensors and distributed models. They are on one node or on several: between nodes, what a rank puts into
    the memory of another one arrives late, so that a wrong protocol fails. Nothing is learned about the speed
    of networks, and no rank can be killed. Use it in tests and in notebooks, and to try a model on more ranks
    than there are cores.

    Blocking. Machines that a rank has not closed are closed when it ends, collectively.

    Parameters
    ----------
    ranks
        Number of ranks, at least 1.
    function
        What each rank does. ``comm`` is the communicator of all ranks, for ``Machine`` or ``MPIPartition``;
        it has ``rank`` and ``size``. Within the function, ``MPI.COMM_WORLD`` as an argument of the library
        means the same, and so does None.
    *args
        Further arguments of the function: the same objects on all ranks.
    seed
        Determines the order in which ranks run, and when data arrive at other nodes. A run with the same seed
        has the same order, unless waits reach a deadline.
    nodes
        Number of nodes, among which the ranks are distributed evenly, in their order; or the number of ranks
        of each node.

    Returns
    -------
    list
        What each rank returned, the same objects.

    Raises
    ------
    ArgumentError
        If ``ranks`` is not a positive number, ``nodes`` does not fit it, or an argument is a module, which
        each rank has to make.
    UnsupportedError
        If a virtual rank calls this function.
    Exception
        The error of the rank that failed first, with a note that names the rank. The other ranks raise
        ``PeerFailedError`` where they wait for it.

    Notes
    -----
    Each rank has its own state of the default random generators of Python, numpy and torch, which begins as
    that of the caller; the caller's state is restored. So do modes of the caller's thread: torch's gradients,
    inference, autocast, hooks of saved tensors, modes of functions and of dispatch, with them the default
    device, and all context variables. Other state of the process, such as environment variables, is shared.

    Examples
    --------
    >>> def rows_of(comm):
    ...     x = shard({"H": -1}, torch.zeros(1, 1, 10, 8))
    ...     return x.to_local().shape[2]
    >>> rehearse(4, rows_of)
    [3, 3, 2, 2]
    """
    if type(ranks) is not int or ranks < 1:
        raise ArgumentError(f"rehearse: the number of ranks is a positive whole number, got {ranks!r}")
    if virtual_rank() is not None:
        raise UnsupportedError("rehearse: a virtual rank cannot run virtual ranks of its own")
    if (torch := sys.modules.get("torch")) and any(isinstance(each, torch.nn.Module) for each in args):
        raise ArgumentError("rehearse: the ranks would share a module; make it in the function, on each rank")
    return played(ranks, lambda comm: function(comm, *args), seed, _node_of_each(ranks, nodes))


def played(
    ranks: int,
    function: Callable[[VirtualComm], _T],
    seed: int | None,
    nodes: Sequence[int] | None = None,
    keeper: Keeper | None = None,
) -> list[_T]:
    """As :func:`rehearse`, for this package. Without a seed the first rank that can go on runs next.

    The ``keeper`` is told of the waits of ranks.
    """
    turns, modes, variables = (
        Turns(ranks, seed, _states(), nodes, keeper),
        _modes(),
        contextvars.copy_context(),
    )
    results: dict[int, _T] = {}
    errors: list[tuple[int, BaseException]] = []

    def play(comm: VirtualComm) -> None:
        error: BaseException | None = None
        with comm.entered():
            try:
                with modes():
                    results[comm.rank] = variables.copy().run(function, comm)
            except RunAbandoned:
                raise
            except BaseException as raised:  # noqa: BLE001
                # Also SystemExit, and what pytest raises to skip a test.
                error = raised
                errors.append((comm.rank, raised))
            try:
                while comm.at_end:
                    comm.at_end.pop()(error)
            except Exception as raised:  # noqa: BLE001
                errors.append((comm.rank, raised))

    turns.run([lambda comm=comm: play(comm) for comm in VirtualComm.all_of(turns, ranks)])  # type: ignore[misc]
    if errors:
        # Ranks that waited for the rank that failed raise after it.
        rank, error = next((one for one in errors if not isinstance(one[1], PeerFailedError)), errors[0])
        error.add_note(f"on rank {rank} of {ranks} virtual ranks")
        raise error
    return [results[rank] for rank in range(ranks)]


def _node_of_each(ranks: int, nodes: int | Sequence[int]) -> list[int]:
    # The node of each rank.
    if type(nodes) is int and 1 <= nodes <= ranks:
        sizes: Sequence[int] = Balanced(ranks, nodes).lengths
    elif (
        isinstance(nodes, Sequence)
        and all(type(size) is int and size > 0 for size in nodes)
        and sum(nodes) == ranks
    ):
        sizes = nodes
    else:
        raise ArgumentError(
            f"rehearse: nodes is the number of nodes, from 1 to {ranks}, or the numbers of their ranks,"
            f" {ranks} in all; got {nodes!r}"
        )
    return [node for node, size in enumerate(sizes) for _ in range(size)]


class _NumpyState:
    """State of numpy's default generator, which is left alone where nothing was drawn.

    Numpy takes 0.3 ms to get or set it. The words of the generator tell whether something was drawn, but for
    a normal number that was kept from a pair.
    """

    def __init__(self, generator: np.random.MT19937) -> None:
        self._words = (ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address)
        self._now = self._words.raw, self._state()

    def get(self) -> tuple[bytes, Any]:
        """Words of the generator, and its state."""
        if self._words.raw != self._now[0] or _keeps_one(self._now):
            self._now = self._words.raw, self._state()
        return self._now

    def set(self, state: tuple[bytes, Any]) -> None:
        """Set a state that ``get`` returned."""
        now = self.get()
        if state[0] != now[0] or _keeps_one(state) or _keeps_one(now):
            np.random.set_state(state[1])  # noqa: NPY002
        self._now = state

    def _state(self) -> Any:
        return np.random.get_state()  # noqa: NPY002


def _keeps_one(state: tuple[bytes, Any]) -> bool:
    return bool(state[1][3])


def _states() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    # How to get and set what each rank has for itself: the states of the default generators of random numbers
    # that the process may use, and torch's default type.
    pairs: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [(random.getstate, random.setstate)]
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(generator, np.random.MT19937):
        of_numpy = _NumpyState(generator)
        pairs.append((of_numpy.get, of_numpy.set))
    else:
        pairs.append((np.random.get_state, np.random.set_state))
    if torch := sys.modules.get("torch"):
        pairs.append((torch.get_rng_state, torch.set_rng_state))
        pairs.append((torch.get_default_dtype, torch.set_default_dtype))
    return pairs


def _modes() -> Callable[[], ExitStack]:
    # The modes that torch keeps for this thread, as a context for other threads.
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ExitStack
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    device = torch.accelerator.current_accelerator()
    kinds = [each for each in {"cpu", device.type if device else "cpu"} if torch.is_autocast_enabled(each)]
    casts = [(each, torch.get_autocast_dtype(each)) for each in kinds]
    caches, hooks = torch.is_autocast_cache_enabled(), torch._C._autograd
    # With it the number of the device that is meant by "cuda".
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    saved = hooks._top_saved_tensors_default_hooks(True)
    stacks = [
        (torch.overrides, torch.overrides._get_current_function_mode_stack()),
        (torch.utils._python_dispatch, torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    ]

    def entered() -> ExitStack:
        with ExitStack() as stack:
            if stream is not None:
                torch.cuda.set_stream(stream)
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=caches))
            if saved is not None:
                hooks._push_saved_tensors_default_hooks(*saved)
                stack.callback(hooks._pop_saved_tensors_default_hooks)
            for module, modes in stacks:
                for mode in modes:
                    # Without what the mode does when it is entered: that happened once, for all.
                    module._push_mode(mode)
                    stack.callback(module._pop_mode)
            return stack.pop_all()

    return entered
