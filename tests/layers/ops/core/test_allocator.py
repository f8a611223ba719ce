"""Memory of freed tensors: within the context it is the system's again."""

import ctypes

import pytest

from distdl_rma.layers.ops.core.allocator import freed_at_once
from distdl_rma.layers.ops.core.result_memory import MAPPED, Mapped
from tests.jobs.out_of_core.nets import said

# A process of its own: what was free in this one before would be used first, and stay.
SCRIPT = """
import threading
from pathlib import Path
import torch
from distdl_rma.layers.ops.core.allocator import freed_at_once

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def held_by_freed():
    tensors = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(100)]
    before = resident()
    del tensors[::2]
    print(200 - (before - resident()))

with freed_at_once(1 << 20):
    held_by_freed()
    with freed_at_once(1 << 30):
        held_by_freed()
    thread = threading.Thread(target=held_by_freed)
    thread.start()
    thread.join()
with freed_at_once():
    held_by_freed()
held_by_freed()
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not that of GNU"
)
def test_freed_tensors_are_the_system_s_on_all_threads_and_contexts_nest():
    *within, outside = map(int, said(SCRIPT).split())
    assert len(within) == 4
    assert max(within) < 30
    assert outside > 100


def test_kernels_choose_pieces_only_by_contexts_that_say_so():
    with freed_at_once(1 << 20, pieces=False):
        assert MAPPED.nbytes == Mapped.nbytes
        with freed_at_once(1 << 21):
            assert MAPPED.nbytes == 1 << 21
    assert MAPPED.nbytes == Mapped.nbytes
