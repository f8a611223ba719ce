"""Who writes which elements: every one once, of parts that several ranks hold; no ranks, no files."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from distdl_rma.geometry.box import Box
from distdl_rma.jobs.checkpoints.items import Item, Part
from distdl_rma.jobs.checkpoints.shares import Holding, holdings
from tests.jobs.checkpoints.test_items import parts


@given(st.lists(parts(), min_size=1, max_size=4), st.integers(1, 5))
def test_shares_have_every_element_once(found, of):
    holding = Holding(tuple(range(of)), sorted(found, key=lambda part: -part.item.dtype.itemsize))
    seen = {id(part): [] for part in holding.parts}
    for number in range(of):
        for part, first, last in holding.share(number):
            seen[id(part)] += range(first, last)
    assert all(seen[id(part)] == list(range(part.box.volume)) for part in holding.parts)


def test_holdings_leave_out_empty_boxes():
    item = Item("x", torch.float32, (4,), 0)
    empty, full = Part(item, Box(((2, 2),))), Part(item, Box(((0, 2),)))
    assert [holding.parts for holding in holdings([(empty, (0, 1)), (full, (0,))])] == [[full]]
