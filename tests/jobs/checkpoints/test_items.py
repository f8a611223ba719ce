"""Where elements lie in the file, and which sums find a change; no ranks, no files."""

import json
from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from distdl_rma.geometry.box import Box
from distdl_rma.jobs.checkpoints.form import NAMED_DTYPES
from distdl_rma.jobs.checkpoints.items import Item, Part, planned
from distdl_rma.jobs.checkpoints.shares import Holding
from distdl_rma.layers.dtypes import flat_bytes


@st.composite
def parts(draw):
    """A part of an item: any box of any shape, elements of any size."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    bounds = []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        bounds.append((start, draw(st.integers(start + 1, extent))))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]))
    return Part(Item("x", dtype, shape, draw(st.integers(0, 50))), Box(tuple(bounds)))


def values(part, seed=0):
    count = prod(part.item.shape) * part.item.dtype.itemsize
    made = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.view(part.item.dtype).view(part.item.shape)


@given(parts(), st.integers(1, 5))
def test_checksums_of_parts_add_up_to_that_of_the_tensor(part, pieces):
    whole = Part(part.item, Box.of_shape(part.item.shape))
    x = values(part)
    wanted = whole.checksum(flat_bytes(x), 0)
    total, at, size = 0, 0, part.item.dtype.itemsize
    for block in x.chunk(pieces, -1) if x.dim() else [x]:
        box = Box.of_shape(x.shape)
        if x.dim():
            box = box.replace(x.dim() - 1, at, at + block.shape[-1])
            at += block.shape[-1]
        holding = Holding((0, 1), [one := Part(part.item, box)])
        for number in range(2):
            for _, first, last in holding.share(number):
                total += one.checksum(flat_bytes(block)[first * size : last * size], first)
    assert total % (1 << 64) == wanted


@given(parts(), st.data())
def test_a_flipped_bit_changes_the_checksum(part, data):
    part = Part(part.item, Box.of_shape(part.item.shape))
    memory = flat_bytes(values(part)).clone()
    before = part.checksum(memory, 0)
    at, bit = data.draw(st.integers(0, memory.numel() - 1)), data.draw(st.integers(0, 7))
    memory[at] ^= 1 << bit
    assert part.checksum(memory, 0) != before


def test_the_safetensors_package_reads_all_dtypes(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    wide = {name: dtype for name, dtype in NAMED_DTYPES.items() if name != "bool"}
    tensors = {name: values(Part(Item("", dtype, (3, 5), 0), Box(()))) for name, dtype in wide.items()}
    tensors["bool"] = torch.tensor([True, False])
    kinds = {name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()}
    head, items = planned(kinds, 3)
    file = tmp_path / "data.safetensors"
    file.write_bytes(head + b"".join(flat_bytes(tensors[item.name]).numpy().tobytes() for item in items))
    assert json.loads(head[8:])["__metadata__"] == {"format": "pt", "step": "3"}
    found = safetensors.load_file(file)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert torch.equal(flat_bytes(found[name]), flat_bytes(x)), name
