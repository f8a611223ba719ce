"""The writer of large files: any runs, with and without direct writes, and its errors."""

import errno
import os
import random

import pytest

from distdl_rma.jobs.checkpoints import behind_writer
from distdl_rma.jobs.checkpoints.behind_writer import BehindWriter


@pytest.fixture
def direct(request, monkeypatch):
    """What the file system does with direct writes."""
    real_open, real_write = os.open, os.pwrite
    opened = []

    def open_one(path, flags):
        if request.param == "refused" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, flags)
        if flags & os.O_DIRECT:
            opened.append(descriptor)
        return descriptor

    def write_some(descriptor, memory, offset):
        if descriptor in opened and request.param == "of larger pages":
            raise OSError(errno.EINVAL, "Invalid argument")
        if descriptor in opened and request.param == "in parts":
            # Whole pages, and once a part of one.
            memory = memory[: random.choice((8192, 5000))]
        return real_write(descriptor, memory, offset)

    monkeypatch.setattr(behind_writer.os, "open", open_one)
    monkeypatch.setattr(behind_writer.os, "pwrite", write_some)


@pytest.mark.parametrize("direct", ["as it is", "refused", "of larger pages", "in parts"], indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_runs_arrive_where_they_belong(tmp_path, direct, seed):
    random.seed(seed)
    nbytes, file = 40_000_000, tmp_path / "file"
    expected = bytearray(nbytes)
    file.write_bytes(expected)
    at = 0
    with BehindWriter(file) as writer:
        while at < nbytes:
            count = min(random.choice((1, 100, 4096, 70_000, 5_000_000)), nbytes - at)
            if random.random() < 0.8:
                run = random.randbytes(count)
                expected[at : at + count] = run
                writer.append(at, memoryview(run))
            at += count
        writer.append(7, memoryview(b"abc"))
        expected[7:10] = b"abc"
    assert file.read_bytes() == expected


def test_an_error_of_the_thread_is_raised(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "file"
    file.write_bytes(b"")
    monkeypatch.setattr(behind_writer.os, "pwrite", full)

    def write_twice():
        with BehindWriter(file) as writer:
            for at in range(2):
                writer.append(at << 23, memoryview(bytes(1 << 23)))

    with pytest.raises(OSError, match="No space left"):
        write_twice()
