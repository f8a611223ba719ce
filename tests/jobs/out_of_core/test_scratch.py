"""The scratch file: bytes come back, space is used again, nothing stays, and a full disk is an error."""

import gc
import os
import resource
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distdl_rma.errors import ClosedError, ConfigurationError, DataError
from distdl_rma.jobs.out_of_core.scratch import Extents, Scratch
from tests.handles import files_up_to
from tests.jobs.out_of_core.nets import said

PAGE = 4096


def length(scratch):
    """Of the file: bytes in use, and holes between them."""
    scratch._collect()
    return scratch._space.end


def at_most_in_flight(monkeypatch, nbytes):
    """Tensors of so many bytes together may wait to be written."""
    monkeypatch.setattr("distdl_rma.jobs.out_of_core.scratch._IN_FLIGHT_NBYTES", nbytes)


def read_back(scratch, region, like):
    into = torch.empty_like(like)
    scratch.read(region, into)
    return into


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60), st.randoms(use_true_random=False))
def test_extents_never_overlap_and_the_file_is_never_longer_than_the_largest_use(calls, draw):
    space, held, most = Extents(), [], 0
    for take, nbytes in calls:
        if take or not held:
            held.append(space.take(nbytes))
            assert sum(length for _, length in held[-1]) == nbytes
        else:
            for extent in held.pop(draw.randrange(len(held))):
                space.give(extent)
        used = sorted(extent for each in held for extent in each)
        most = max(most, sum(length for _, length in used))
        assert all(at + length <= after for (at, length), (after, _) in pairwise(used))
        assert max((sum(extent) for extent in used), default=0) == space.end <= most


def test_an_extent_that_fits_is_taken_whole_and_the_smallest_such_one():
    space = Extents()
    first, second, third, _ = (space.take(n)[0] for n in (5, 1, 3, 1))
    space.give(first)
    space.give(third)
    assert space.take(3) == [third]
    assert space.take(3) == [(0, 3)]
    space.give(second)
    assert space.take(3) == [(3, 3)]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "complex64", "float8_e5m2"])
def test_bytes_of_any_dtype_come_back_before_and_after_they_are_written(tmp_path, name):
    dtype = getattr(torch, name)
    x = torch.randint(0, 255, (3, 5, 1000 * dtype.itemsize), dtype=torch.uint8)
    x = (x % 2 if dtype is torch.bool else x).view(dtype)
    with closing(Scratch(tmp_path)) as scratch:
        region = scratch.write(x)
        assert torch.equal(read_back(scratch, region, x).view(torch.uint8), x.view(torch.uint8))
        scratch.wait(region)
        assert region._source is None
        for _ in range(2):
            assert torch.equal(read_back(scratch, region, x).view(torch.uint8), x.view(torch.uint8))
        assert scratch.written_nbytes == x.nbytes
        assert scratch.read_nbytes in (2 * x.nbytes, 3 * x.nbytes)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (PAGE,), (PAGE + 1,), None])
def test_tensors_of_any_size_come_back_and_views_in_the_order_of_their_elements(tmp_path, shape):
    x = torch.randn(40, 50, dtype=torch.complex64).t()[::2].conj() if shape is None else torch.randn(shape)
    with closing(Scratch(tmp_path)) as scratch:
        region = scratch.write(x)
        scratch.wait(region)
        found = read_back(scratch, region, torch.empty(x.shape, dtype=x.dtype))
        assert torch.equal(found, x.resolve_conj())


class Slow(Scratch):
    """Writes begin when the gate is open."""

    def __init__(self, *args, **options):
        self.gate = threading.Event()
        super().__init__(*args, **options)

    def _put(self, region, source):
        assert self.gate.wait(60)
        super()._put(region, source)


def test_what_waits_is_kept_alive_read_from_memory_and_dropped_when_it_is_written(tmp_path):
    with closing(Slow(tmp_path)) as scratch:
        x = torch.arange(10000.0)
        expected, memory = x.clone(), weakref.ref(x)
        region = scratch.write(x)
        del x
        assert torch.equal(region._source.view(torch.float32), expected)
        assert torch.equal(read_back(scratch, region, expected), expected)
        assert scratch.read_nbytes == 0
        scratch.gate.set()
        scratch.wait(region)
        assert region._source is None
        assert memory() is None


def test_a_region_that_is_freed_before_its_turn_is_never_written(tmp_path):
    with closing(Slow(tmp_path)) as scratch:
        first, second = (scratch.write(torch.ones(PAGE)) for _ in range(2))
        scratch.free(second)
        scratch.free(second)
        last = scratch.write(torch.full((PAGE,), 2.0))
        scratch.gate.set()
        scratch.wait(last)
        assert scratch.written_nbytes == first.nbytes + last.nbytes
        assert scratch.used_nbytes == length(scratch) == first.nbytes + last.nbytes


def test_writes_wait_when_too_much_is_in_flight(tmp_path, monkeypatch):
    x, passed = torch.zeros(PAGE), []
    at_most_in_flight(monkeypatch, 2 * x.nbytes)
    with closing(Slow(tmp_path)) as scratch:
        for _ in range(2):
            scratch.write(x)
        third = threading.Thread(target=lambda: passed.append(scratch.write(x)))
        third.start()
        third.join(0.2)
        assert not passed
        scratch.gate.set()
        third.join(60)
        scratch.wait(passed[0])
        large = scratch.write(torch.zeros(10 * PAGE))
        scratch.wait(large)


@pytest.mark.parametrize("kept", [0, 4 * PAGE])
def test_space_is_used_again_and_the_file_shrinks_from_its_end(tmp_path, monkeypatch, kept):
    monkeypatch.setattr("distdl_rma.jobs.out_of_core.scratch._KEPT_NBYTES", kept)
    with closing(Scratch(tmp_path)) as scratch:
        for _ in range(5):
            regions = [scratch.write(torch.full((PAGE * n,), float(n))) for n in (3, 1, 2)]
            for region in regions:
                scratch.wait(region)
            assert length(scratch) == scratch.used_nbytes == 6 * 4 * PAGE
            scratch.free(regions[1])
            assert length(scratch) == 6 * 4 * PAGE
            held = scratch.write(torch.full((2 * PAGE,), 7.0))
            assert length(scratch) == 7 * 4 * PAGE
            assert torch.equal(read_back(scratch, held, torch.empty(2 * PAGE)), torch.full((2 * PAGE,), 7.0))
            for region in (held, *regions):
                scratch.free(region)
            assert length(scratch) == scratch.used_nbytes == 0
        last = scratch.write(torch.ones(1))
        scratch.wait(last)
        # The thread shortens the file behind what it has written: the next one that it does comes later.
        scratch._thread.submit(int).result()
        assert os.fstat(scratch._file).st_size <= max(kept, PAGE)


def test_a_prefetch_fills_the_tensor_that_read_gets(tmp_path):
    xs = [torch.randn(PAGE) for _ in range(3)]
    with closing(Scratch(tmp_path)) as scratch:
        regions = [scratch.write(x) for x in xs]
        scratch.wait(regions[-1])
        targets = [torch.empty_like(x) for x in xs]
        for region, into in zip(reversed(regions), reversed(targets), strict=True):
            scratch.prefetch(region, into)
        for region, into, x in zip(regions, targets, xs, strict=True):
            scratch.read(region, into)
            assert torch.equal(into, x)
        # Each was read once: by the thread, or by this one.
        assert scratch.read_nbytes == sum(x.nbytes for x in xs)
        assert torch.equal(read_back(scratch, regions[0], xs[0]), xs[0])


def test_many_threads_write_read_and_free(tmp_path, monkeypatch):
    at_most_in_flight(monkeypatch, 8 * PAGE)

    def work(number):
        for turn in range(40):
            x = torch.full((PAGE + 17 * turn,), float(number * 100 + turn))
            region = scratch.write(x)
            if turn % 3 == 0:
                scratch.wait(region)
            into = torch.empty_like(x)
            if turn % 2:
                scratch.prefetch(region, into)
            scratch.read(region, into)
            assert torch.equal(into, x), (number, turn)
            scratch.free(region)

    with closing(Scratch(tmp_path)) as scratch:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert length(scratch) == 0


def test_the_quota_is_refused_before_anything_is_written_and_goes_on_after_a_free(tmp_path):
    with closing(Scratch(tmp_path, quota="64KiB")) as scratch:
        first = scratch.write(torch.zeros(3 * PAGE))
        with pytest.raises(DataError) as caught:
            scratch.write(torch.zeros(2 * PAGE))
        text = str(caught.value)
        assert f"writing {8 * PAGE} bytes in {tmp_path} failed: the quota is used up" in text
        assert f"in use by this rank: {12 * PAGE} bytes, quota: 65536 bytes" in text
        scratch.free(first)
        scratch.wait(scratch.write(torch.zeros(4 * PAGE)))


def test_a_write_that_fails_is_raised_by_the_next_call_and_its_bytes_stay_in_memory(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with closing(Scratch(tmp_path)) as scratch:
        good = scratch.write(torch.ones(PAGE))
        scratch.wait(good)
        monkeypatch.setattr(os, "pwrite", full)
        x = torch.randn(PAGE)
        region = scratch.write(x)
        with pytest.raises(DataError, match=r"writing 16384 bytes in .*: No space left on device; free"):
            scratch.wait(region)
        with pytest.raises(DataError, match="free space there, or name another folder"):
            scratch.write(torch.ones(PAGE))
        assert torch.equal(read_back(scratch, region, x), x)
        assert torch.equal(read_back(scratch, good, x), torch.ones(PAGE))
        scratch.free(region)
        assert length(scratch) == good.nbytes
        assert region._source is None


def test_a_read_that_fails_is_raised_also_after_a_prefetch(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    with closing(Scratch(tmp_path)) as scratch:
        region, into = scratch.write(torch.ones(PAGE)), torch.empty(PAGE)
        scratch.wait(region)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", broken)
            scratch.prefetch(region, into)
            with pytest.raises(DataError, match=r"reading in .* failed: Input/output error"):
                scratch.read(region, into)
        scratch.read(region, into)
        assert torch.equal(into, torch.ones(PAGE))


@pytest.mark.parametrize(("nbytes", "fits"), [(3 << 19, False), (2 << 20, True)])
def test_the_system_s_limit_of_a_file_is_such_an_error(tmp_path, nbytes, fits):
    with closing(Scratch(tmp_path)) as scratch, files_up_to(nbytes):
        regions = [scratch.write(torch.full((1 << 18,), 1.0 * n)) for n in range(2)]
        with nullcontext() if fits else pytest.raises(DataError, match="failed: File too large"):
            for region in regions:
                scratch.wait(region)
        for n, region in enumerate(regions):
            assert read_back(scratch, region, torch.empty(1 << 18)).eq(n).all()


KILLED = """
import os, signal, sys, torch
from distdl_rma import spill
with spill(sys.argv[1], 1024) as disk:
    y = (torch.randn(1 << 20, requires_grad=True) * 2).exp().sum()
    disk._scratch.flush()
    assert disk.written_nbytes > 1 << 20
    print(os.listdir(sys.argv[1]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_file_is_seen_and_none_stays_after_a_kill(tmp_path):
    assert said(KILLED, tmp_path, status=-signal.SIGKILL) == "[]\n"
    assert list(tmp_path.iterdir()) == []


def test_an_unused_file_closes_itself_with_its_thread(tmp_path):
    scratch = Scratch(tmp_path)
    region, number = scratch.write(torch.ones(PAGE)), scratch._file
    (thread,) = scratch._thread._threads
    scratch.wait(region)
    del scratch
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_closed_file_refuses_calls_and_a_blocked_write(tmp_path, monkeypatch):
    at_most_in_flight(monkeypatch, 1)
    with closing(Slow(tmp_path)) as scratch:
        region = scratch.write(torch.ones(PAGE))
        blocked = []

        def write():
            try:
                scratch.write(torch.ones(PAGE))
            except ClosedError as error:
                blocked.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        closes = threading.Thread(target=scratch.close)
        closes.start()
        while not scratch.closed:
            pass
        scratch.gate.set()
        thread.join(60)
        closes.join(60)
        assert len(blocked) == 1
    scratch.close()
    scratch.free(region)
    for call in (lambda: scratch.write(torch.ones(1)), lambda: scratch.read(region, torch.ones(PAGE))):
        with pytest.raises(ClosedError, match=r"scratch: the file in .* is closed"):
            call()


def test_a_quota_that_is_none_and_a_folder_that_is_none_are_refused_by_name(tmp_path):
    words = "the quota is a whole number of bytes or one with a unit"
    for quota in ("many", 0, -1, 1.5):
        with pytest.raises(ConfigurationError, match=words):
            Scratch(tmp_path, quota)
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(DataError, match=rf"no file can be made in {tmp_path / name}: .*directory"):
            Scratch(tmp_path / name)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_process_without_file_numbers_is_told_so_or_does_without(left, tmp_path):
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(held.pop())
        with nullcontext() if left else pytest.raises(DataError, match=r"Too many open files.*ulimit -n"):
            Scratch(tmp_path).close()
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_a_folder_in_memory_is_warned_of():
    with pytest.warns(RuntimeWarning, match="scratch: /dev/shm is a tmpfs, which is memory"):
        Scratch("/dev/shm").close()
