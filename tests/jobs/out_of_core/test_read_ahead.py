"""Boxes that a thread reads ahead, and what the plan says of the bytes that are read."""

import threading
import time
from contextlib import closing, suppress
from itertools import product
from math import prod

import numpy as np
import pytest
import torch

from distdl_rma import ConfigurationError, Source, plan_prediction, predict
from distdl_rma.jobs.data.read_ahead import boxes_ahead
from tests.jobs.out_of_core.nets import UNet, seeded, whole


def threads():
    return [each.name for each in threading.enumerate() if each.name.startswith("read ahead")]


class Counting:
    """A source in chunks that are fetched whole, and the bytes and places of all reads."""

    def __init__(self, shape, chunks, seconds=0.0):
        self.array = np.random.default_rng(0).random(shape, np.float32)
        self.fetched, self.seconds, self.boxes = 0, seconds, []
        self.source = Source(shape, np.float32, self.read, chunks)

    def read(self, box):
        time.sleep(self.seconds)
        self.boxes.append(box)
        chunks = self.source.chunks or (1,) * len(box)
        places = [range(each.start // n, -(-each.stop // n)) for each, n in zip(box, chunks, strict=True)]
        for place in product(*places):
            ends = zip(place, chunks, self.source.shape, strict=True)
            self.fetched += 4 * prod(min((at + 1) * n, extent) - at * n for at, n, extent in ends)
        return self.array[box]


def places(count):
    return iter([(slice(n, n + 1),) for n in range(count)])


def test_one_box_is_read_while_another_one_is_used():
    counting = Counting((4,), None)
    with closing(boxes_ahead(counting.source, places(4), ahead=True)) as boxes:
        for n in range(4):
            assert float(next(boxes)) == counting.array[n]
            end = time.monotonic() + 5
            while len(counting.boxes) < min(n + 2, 4) and time.monotonic() < end:
                time.sleep(1e-3)
            time.sleep(0.01)
            assert len(counting.boxes) == min(n + 2, 4)
    assert not threads()


def test_without_a_thread_boxes_are_read_when_they_are_taken():
    counting = Counting((4,), None)
    with closing(boxes_ahead(counting.source, places(4), ahead=False)) as boxes:
        for n in range(4):
            assert len(counting.boxes) == n and not threads()
            next(boxes)


def test_an_error_is_raised_where_the_box_is_used_and_no_thread_stays():
    def read(box):
        if box[0].start == 2:
            raise OSError("bad sector")
        return np.zeros(1, np.float32)

    with closing(boxes_ahead(Source((4,), np.float32, read), places(4), ahead=True)) as boxes:
        next(boxes)
        next(boxes)
        time.sleep(0.05)
        with pytest.raises(OSError, match="bad sector"):
            next(boxes)
    assert not threads()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_prediction_that_is_interrupted_leaves_no_thread(stop):
    counting = Counting((96, 16), None, 0.01)
    model = seeded(lambda: UNet(2, "none"))

    def interrupted(*_):
        if len(counting.boxes) > 3:
            raise stop("now")

    model.last.register_forward_pre_hook(interrupted)
    with pytest.raises(stop, match="now"):
        predict(model, counting.source, grid={"H": 6})
    assert not threads()


@pytest.mark.parametrize("norm", ["none", "instance"])
def test_the_next_slab_is_read_while_a_slab_computes(norm):
    model, counting, ends = seeded(lambda: UNet(2, norm)), Counting((96, 16), None), []

    def computed(*_):
        end = time.monotonic() + 5
        while counting.boxes and len(counting.boxes) < min(len(ends) + 2, 5) and time.monotonic() < end:
            time.sleep(1e-3)
        # Forwards of the plan read nothing.
        ends.extend([len(counting.boxes)] * bool(counting.boxes))

    model.register_forward_pre_hook(computed)
    y = predict(model, counting.source, grid={"H": 6})
    # The last slab has results only.
    assert ends == [2, 3, 4, 5, 5, 5]
    want = whole(model, torch.from_numpy(counting.array)[None, None])[0]
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


CASES = {
    "no chunks": ((160, 40), None, {"H": 4}, 1.0),
    "slabs end with chunks": ((160, 40), (32, 40), {"H": 5}, 1.0),
    "chunks across": ((160, 40), (8, 16), {"H": 4}, 1.0),
    "long chunks": ((160, 40), (80, 40), {"H": 8}, 1.0),
    "chunks as no slab": ((160, 40), (44, 40), {"H": 8}, 1.0),
    "short chunks": ((160, 40), (7, 40), {"H": 5}, 1.0),
    "long chunks of samples": ((2, 1, 160, 40), (1, 1, 50, 40), {"H": 8}, 1.0),
    "a grid": ((160, 40), (80, 40), {"H": 8, "W": 2}, None),
    "samples in a chunk": ((4, 1, 96, 24), (2, 1, 96, 24), {"H": 1}, 2.0),
    "samples": ((3, 1, 96, 24), (1, 1, 16, 24), {"H": 3}, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_which_bytes_are_fetched(name):
    shape, chunks, grid, wanted = CASES[name]
    model, counting = seeded(lambda: UNet(2, "none")), Counting(shape, chunks)
    plan = plan_prediction(model, counting.source, grid=grid)
    counting.fetched = 0
    predict(model, counting.source, grid=grid)
    assert counting.fetched == pytest.approx(plan.reads * counting.array.nbytes)
    assert f"reads     {plan.reads:.2f} x the source, a slab ahead\n" in str(plan)
    assert plan.reads == wanted if wanted else plan.reads > 1.5


def test_the_memory_chooses_slabs_that_end_where_chunks_end():
    model = seeded(lambda: UNet(2, "none"))
    for chunk in (48, 64, 96, 130):
        source = Counting((960, 256), (chunk, 100)).source
        plan = plan_prediction(model, source, memory="32MiB")
        assert plan.slabs > 2 and plan.reads == 1 and plan.ahead_nbytes > 0


def test_a_slab_is_read_ahead_only_within_the_memory():
    model, source = seeded(lambda: UNet(2, "none")), Counting((256, 2048), None).source
    plans = []
    for memory in range(30 << 20, 60 << 20, 1 << 20):
        with suppress(ConfigurationError):
            plans.append(plan_prediction(model, source, memory=memory, grid={"H": 8}))
    ahead = [plan.ahead_nbytes > 0 for plan in plans]
    assert ahead == sorted(ahead) and {*ahead} == {False, True}
    assert all(plan.nbytes <= 0.85 * plan.memory for plan in plans)
    assert plan_prediction(model, np.zeros((256, 2048), np.float32), grid={"H": 8}).ahead_nbytes == 0


def test_tiles_lie_as_a_sliding_window_lays_them():
    model = seeded(lambda: UNet(3, "none"))
    plan = plan_prediction(model, Counting((200, 96, 40), (32, 32, 32)).source, memory="1GiB")
    # Tiles begin at 0, 72 and 104, and touch chunks of 96, 168 - 64 + 24 and 104 rows.
    assert plan.tile == (96, 96, 40) and plan.tile_voxels == pytest.approx(288 / 200)
    assert plan.tile_reads == pytest.approx((96 + 128 + 104) / 200)
    assert "of 96 x 96 x 40, overlap 0.25, would be 1.4 x the voxels, and read 1.6 x the source" in str(plan)
    inferers = pytest.importorskip("monai.inferers")
    tiles = []

    def network(tile):
        tiles.append(tile.numel())
        return tile

    inferers.SlidingWindowInferer((96, 96, 96), overlap=0.25)(torch.zeros(1, 1, 200, 96, 40), network)
    assert sum(tiles) == 288 * 96 * 96  # it fills up what is shorter
