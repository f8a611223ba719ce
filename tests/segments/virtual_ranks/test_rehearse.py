"""Virtual ranks: the library on threads of one process that take turns, compared with whole tensors."""

import copy
import random
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdl_rma import (
    ArgumentError,
    ConfigurationError,
    Machine,
    MPIPartition,
    PeerFailedError,
    ProtocolError,
    SegmentError,
    UnsupportedError,
    distribute,
    print0,
    rehearse,
)
from distdl_rma.segments.transport import node_memory
from distdl_rma.segments.virtual_ranks import stuck, turns

ALL = st.integers(1, 7)
SEEDS = st.integers(0, 1 << 30)


def test_results_are_in_the_order_of_ranks_and_arguments_reach_all():
    assert rehearse(4, lambda comm, a: (comm.rank, comm.size, a), "x") == [(r, 4, "x") for r in range(4)]


def split(comm, model):
    distribute(model, "1x2")


NODES = 0, 4, -1, True, 1.0, "12", (), (1, 1), (3, 0), (2, 2), [4, -1], None
WORDS = "from 1 to 3, or the numbers of their ranks, 3 in all; got"
REFUSED = [
    *((ArgumentError, f"positive whole number, got {n!r}", (n, print), {}) for n in (0, -1, 1.0, True, "2")),
    *((ArgumentError, WORDS, (3, print), {"nodes": nodes}) for nodes in NODES),
    (ArgumentError, "make it in the function", (2, split, nn.Conv2d(1, 1, 1)), {}),
    (UnsupportedError, "cannot run virtual ranks", (2, lambda comm: rehearse(2, print)), {}),
]


@pytest.mark.parametrize(("error", "words", "given", "options"), REFUSED)
def test_what_is_no_rehearsal_is_refused(error, words, given, options):
    with pytest.raises(error, match=words):
        rehearse(*given, **options)


def test_what_a_rank_has_made_is_used_by_no_other():
    shared = []

    def play(comm):
        group = Machine.on().group()
        shared.append(group)
        group.barrier()
        shared[0].barrier()

    with pytest.raises(ProtocolError, match=r"rank \d uses what rank \d has made"):
        rehearse(2, play)
    models = [nn.Conv2d(1, 1, 3, padding=1)]
    with pytest.raises(ProtocolError, match=r"rank \d uses what rank \d has made"):
        rehearse(2, lambda comm: distribute(models[0], {"H": -1})(torch.ones(1, 1, 8, 8)))


def test_the_error_of_the_rank_that_failed_is_raised_and_the_others_learn_of_it():
    learned = {}

    def play(comm):
        group = Machine.on().group()
        group.barrier()
        if comm.rank == 2:
            raise KeyError("on purpose")
        with pytest.raises(PeerFailedError, match="rank 2 failed: KeyError") as found:
            group.barrier()
        learned[comm.rank] = found.value.rank

    with pytest.raises(KeyError, match="on purpose") as raised:
        rehearse(4, play)
    assert raised.value.__notes__ == ["on rank 2 of 4 virtual ranks"]
    assert learned == {0: 2, 1: 2, 3: 2}


@pytest.mark.parametrize("call", ["allgather", "recv"])
def test_calls_of_the_communicator_that_never_end_are_an_error(call):
    def play(comm):
        if comm.rank == 1:
            raise SystemExit("early")
        if call == "recv":
            comm.recv(source=1)
        comm.allgather(None)

    with pytest.raises(SystemExit, match="early"):
        rehearse(3, play)

    def play(comm):
        if comm.rank:
            getattr(comm, call)(**{"value": 0} if call == "allgather" else {"source": 0})

    with pytest.raises(
        ProtocolError, match=r"wait in vain: rank 1 in a .*, rank 2 in a .*; ranks \[0\] have"
    ):
        rehearse(3, play)


def test_a_rank_that_does_not_come_is_named():
    def play(comm):
        group = Machine.on().group()
        if comm.rank:
            with pytest.raises(PeerFailedError, match=r"rank 0 failed: it left"):
                group.barrier()

    rehearse(3, play)


def test_a_seed_determines_the_order():
    def order(seed):
        events = []

        def play(comm):
            group = Machine.on().group()
            for _ in range(3):
                events.append(comm.rank)
                group.barrier()

        rehearse(5, play, seed=seed)
        return events

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_each_rank_has_the_generators_of_the_caller_which_stay_as_they_are():
    def play(comm):
        group = Machine.on().group()
        drawn = []
        for _ in range(3):
            drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))  # noqa: NPY002
            group.barrier()
        return drawn

    before = torch.get_rng_state()
    first, *others = rehearse(3, play)
    assert others == [first, first]
    assert torch.equal(before, torch.get_rng_state())
    assert len({*first}) == 3


def test_each_rank_has_its_own_default_type():
    def play(comm):
        group, before = Machine.on().group(), torch.get_default_dtype()
        torch.set_default_dtype([torch.float64, torch.float16, torch.float32][comm.rank])
        group.barrier()
        found = torch.zeros(1).dtype
        if comm.rank:
            torch.set_default_dtype(before)
        group.barrier()
        return before, found, torch.zeros(1).dtype

    single, half, double = torch.float32, torch.float16, torch.float64
    assert rehearse(3, play) == [(single, double, double), (single, half, single), (single, single, single)]
    assert torch.get_default_dtype() == torch.float32


class Watches(TorchFunctionMode):
    """Notes the functions that are called."""

    def __init__(self):
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


MODES = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "device": lambda: torch.device("meta"),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.double, lambda x: x),
    "errstate": lambda: np.errstate(divide="raise"),
}


def modes():
    """What the modes of this thread do."""
    x = torch.ones(2, 2, requires_grad=True)
    y = x @ x
    saved = getattr(y.grad_fn, "_saved_self", None)
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(), y.dtype, y.device,
        y.requires_grad, saved is not None and saved.dtype, np.geterr()["divide"], torch.get_default_device(),
    )  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_ranks_have_the_modes_of_the_caller_and_change_their_own(name):
    def play(comm):
        found = modes()
        torch.set_grad_enabled(comm.rank == 0)
        comm.Barrier()
        assert torch.is_grad_enabled() == (comm.rank == 0)
        return found

    plain = modes()
    with MODES[name]():
        wanted = modes()
        assert rehearse(2, play) == [wanted, wanted]
        assert modes() == wanted
    assert (wanted == plain) == (name == "none")


def test_ranks_compute_on_the_current_stream_of_the_caller_and_so_on_its_device(monkeypatch):
    mine = []
    for name, does in (
        ("is_initialized", lambda: True),
        ("current_stream", lambda: "stream 3 of cuda:1"),
        ("set_stream", lambda stream: mine.append((stream, threading.get_ident()))),
    ):
        monkeypatch.setattr(torch.cuda, name, does)
    rehearse(2, lambda comm: None)
    assert {stream for stream, _ in mine} == {"stream 3 of cuda:1"}
    assert len({thread for _, thread in mine} - {threading.get_ident()}) == len(mine) == 2


def test_modes_of_functions_and_of_dispatch_see_the_ranks():
    with Watches() as functions, Dispatches() as operators:
        rehearse(3, lambda comm: torch.ones(2).cosh())
    assert functions.seen.count(torch.Tensor.cosh) == operators.seen.count(torch.ops.aten.cosh) == 3
    assert not torch.overrides._get_current_function_mode_stack()


def test_normal_numbers_that_numpy_keeps_from_a_pair_are_those_of_the_rank():
    def drawn():
        return np.random.randn(), np.random.rand()  # noqa: NPY002

    def play(comm):
        found = []
        for step in range(6):
            if step % 3 <= comm.rank:
                found += drawn()
            comm.Barrier()
        return found

    np.random.seed(4)  # noqa: NPY002
    of_ranks = rehearse(3, play)
    wanted = [number for _ in range(6) for number in drawn()]
    assert of_ranks == [wanted[:4], wanted[:8], wanted]


def test_nodes_have_the_ranks_that_they_are_given():
    def play(comm):
        machine = Machine.on()
        assert machine.describe()["progress"] == (
            "none" if len(machine.segments.segment.nodes) == 1 else "thread"
        )
        return machine.segments.segment.nodes

    assert {*rehearse(4, play)} == {((0, 1, 2, 3),)}
    assert {*rehearse(5, play, nodes=2)} == {((0, 1, 2), (3, 4))}
    assert {*rehearse(5, play, nodes=(1, 3, 1))} == {((0,), (1, 2, 3), (4,))}


@pytest.mark.parametrize("nodes", [1, 2, (1, 2)])
def test_a_segment_that_the_process_has_no_memory_for_is_refused_on_all_ranks(nodes):
    def play(comm):
        with pytest.raises(
            SegmentError, match=r"rank 0: no window of 1099511\d+ bytes can be had: .*SEGMENT_SIZE"
        ):
            Machine(comm, segment_size="100TiB")
        return True

    assert rehearse(3, play, nodes=nodes) == [True] * 3


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_loop_that_only_looks_lets_the_others_run(nodes):
    def play(comm):
        machine = Machine.on()
        group = machine.group()
        job = group.allreduce(5, np.int64)
        job.active[:] = comm.rank
        job.start()
        while not job.test():
            pass
        request = comm.Ibarrier()
        while not request.Test():
            pass
        buffer = machine.segments.get_segment_buffer(8, 1)
        remotes = buffer.exchange({(comm.rank - 1) % 3: (), (comm.rank + 1) % 3: ()}, "ring")
        remotes[(comm.rank + 1) % 3].notify(0)
        while buffer.notify_test(0, 1) is None:
            pass
        return job.wait().tolist()

    assert rehearse(3, play, nodes=nodes) == [[3] * 5] * 3


def test_the_machine_of_the_world_is_that_of_virtual_ranks():
    from mpi4py import MPI

    def play(comm):
        machine = Machine.on()
        assert Machine.on(MPI.COMM_WORLD) is Machine.on(comm) is machine
        assert MPIPartition(comm).size == MPIPartition(MPI.COMM_WORLD).size == machine.size == 3
        return machine

    machines = rehearse(3, play)
    assert all(machine.closed for machine in machines)
    assert MPI.COMM_WORLD.size == 1


def test_print0_prints_once(capsys):
    rehearse(3, lambda comm: print0("from", comm.rank))
    assert capsys.readouterr().out == "from 0\n"


def test_machines_of_some_ranks_work_beside_that_of_all():
    def play(comm):
        everyone = Machine.on().group()
        if comm.rank != 1:
            with Machine(comm, ranks=(3, 0, 2), segment_size="1MiB") as some:
                total = some.group().allreduce(1, np.int64)
                total.active[:] = comm.rank
                total.start()
                everyone.barrier()
                return int(total.wait()[0])
        return everyone.barrier()

    assert rehearse(4, play) == [5, None, 5, 5]


@settings(max_examples=10)
@given(ranks=ALL, seed=SEEDS, height=st.integers(1, 19), kernel=st.sampled_from([1, 3, 5]))
def test_a_split_network_equals_the_whole_one_on_any_number_of_ranks(ranks, seed, height, kernel):
    torch.manual_seed(seed)
    first = nn.Conv2d(2, 3, kernel, padding=kernel // 2)
    whole = nn.Sequential(first, nn.GroupNorm(3, 3), nn.ReLU(), nn.Conv2d(3, 1, 1)).double()
    x = torch.randn(2, 2, height, 5, dtype=torch.float64)
    models = [copy.deepcopy(whole) for _ in range(ranks)]
    expected = whole(x)
    expected.square().sum().backward()
    gradients = [each.grad for each in whole.parameters()]

    def play(comm):
        model = models[comm.rank]
        y = distribute(model, {"H": -1})(x)
        y.square().sum().backward()
        torch.testing.assert_close(y.full_tensor(), expected)
        torch.testing.assert_close([each.grad for each in model.parameters()], gradients)

    rehearse(ranks, play, seed=seed)


@pytest.mark.parametrize("problem", [RuntimeError, MemoryError])
def test_threads_that_cannot_be_started_are_an_error_and_none_is_left(monkeypatch, problem):
    start, started = threading.Thread.start, []

    def few(thread):
        if len(started) == 3:
            raise problem("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", few)
        with pytest.raises(ConfigurationError, match=r"each of 5 virtual ranks is a thread.* ulimit"):
            rehearse(5, lambda comm: comm.Barrier())
    for thread in started:
        thread.join(20)
    assert not any(thread.is_alive() for thread in started)
    assert rehearse(2, lambda comm: comm.rank) == [0, 1]


LOCKED = threading.Lock()


def of_module(comm, _):
    with LOCKED:
        comm.Barrier()


def of_argument(comm, lock):
    with lock:
        comm.Barrier()


def of_object(comm, lock):
    holder = SimpleNamespace(lock=lock)
    with holder.lock:
        Machine(comm, segment_size="1MiB").group().barrier(timeout=1)


def of_event(comm, lock, event=threading.Event()):  # noqa: B008
    # The other rank has begun.
    comm.Barrier()
    if comm.rank:
        event.wait()
    comm.Barrier()
    event.set()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="waits of threads cannot be seen here")
@pytest.mark.parametrize("function", [of_module, of_argument, of_object, of_event])
def test_a_lock_of_a_rank_without_a_turn_is_an_error_with_both_places(function):
    with pytest.raises(ProtocolError, match="has the turn and waits for a lock") as caught:
        rehearse(2, function, threading.Lock())
    assert str(caught.value).count(f"in {function.__name__}") == 2
    assert rehearse(2, lambda comm: comm.Barrier()) == [None, None]


def of_thread(comm, _):
    own = threading.Lock()
    own.acquire()
    threading.Timer(0.6, own.release).start()
    with own:
        return comm.rank


def of_arithmetic(comm, lock):
    with lock:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            torch.ones(200, 200) @ torch.ones(200, 200)
        return comm.rank


def of_waiting_rank(comm, lock):
    # The rank without a turn names the lock as well, but a free thread has it, and releases it later.
    if comm.rank == 0:
        lock.acquire()
        threading.Timer(0.6, lock.release).start()
    comm.Barrier()
    if comm.rank:
        lock.acquire(timeout=30)
    comm.Barrier()
    return comm.rank


@pytest.mark.parametrize("function", [of_thread, of_arithmetic, of_waiting_rank])
def test_a_rank_that_computes_or_waits_for_a_free_thread_is_never_called_stuck(function, monkeypatch):
    monkeypatch.setattr(turns, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(stuck, "LOOK_SECONDS", 0.05)
    assert rehearse(2, function, threading.Lock()) == [0, 1]


def test_ranks_that_fail_leave_nothing_that_real_ranks_would_lack():
    before = dict(node_memory._untouched)

    def fail(comm):
        Machine(comm, segment_size="1MiB")
        raise ValueError("now")

    with pytest.raises(ValueError, match="now"):
        rehearse(3, fail)
    assert node_memory._untouched == before
