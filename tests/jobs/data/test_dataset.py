"""Samples of a dataset: every rank of every grid reads its block of what numpy shows of the whole."""

import numpy as np
import pytest
import torch

from distdl_rma import ArgumentError, DataError, ShapeError, ShardDataset, Source
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1)]
# Of images of one, two and three dimensions.
EXTENTS = {1: (23,), 2: (13, 11), 3: (7, 9, 8)}
CROPS = {1: (10,), 2: (7, 9), 3: (5, 6, 7)}
GRIDS = {
    1: [(1, 1, 4), (1, 2, 3)],
    2: [(1, 1, 3, 1), (1, 1, 2, 2), (4, 1, 1, 1)],
    3: [(1, 1, 2, 2, 2), (3, 2, 1, 1, 4)],
}
ALL = [(dims, grid) for dims, grids in GRIDS.items() for grid in grids]


@pytest.fixture(autouse=True)
def alone(comm):
    if comm.size > 1:
        pytest.skip("one process plays all ranks")


class Counting:
    """An array that counts the elements that are read, and keeps the slices."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.read, self.slices = 0, []

    def __getitem__(self, box):
        part = self.values[box]
        self.read += part.size
        self.slices.append(box)
        return part.copy()


def played(dataset, items, grid, epoch=0):
    """The whole tensors of a batch, put together from the blocks of all ranks of a grid."""
    ranks, found = tuple(range(3, 3 + int(np.prod(grid)))), []
    for me in ranks:
        partition = Partition(ranks, grid, me)
        for at, block in enumerate(dataset.batch(epoch, items, partition)):
            layout = block.layout or Decomposition.replicated(partition, block.local.shape)
            if len(found) <= at:
                found.append(torch.full(layout.shape, 99).to(block.local.dtype))
            own = layout.slices()
            assert found[at][own].shape == block.local.shape
            assert block.local.is_contiguous()
            found[at][own] = block.local
    return [each.numpy() for each in found]


def expected(dataset, columns, epoch, items, dims):
    """The same by numpy on whole samples."""
    whole = []
    for column in columns:
        rows = []
        for item in items:
            sample = np.asarray(column[item])
            if sample.ndim >= dims:
                crop, _ = dataset._sample(epoch, item)
                sample = sample[(..., *(slice(*each) for each in crop.bounds))]
            rows.append(sample)
        whole.append(np.stack(rows))
    return whole


@pytest.mark.parametrize(("dims", "grid"), ALL)
@pytest.mark.parametrize("cropped", [False, True])
def test_blocks_are_those_of_numpy_on_the_whole(dims, grid, cropped):
    random, extents = np.random.default_rng(dims), EXTENTS[dims]
    image = random.random((5, 2, *extents), np.float32)
    mask, onehot = image[:, 0] > 0.5, random.integers(0, 9, (5, 3, *extents))
    columns = [image, mask, onehot, np.arange(5, dtype=np.int16)]
    options = {"crop": CROPS[dims]} if cropped else {}
    dataset = ShardDataset(*columns, grid=(1,) * (dims + 2), seed=4, **options)
    for epoch, items in enumerate([[0], [4, 1, 2], [3, 0]]):
        parts, whole = played(dataset, items, grid, epoch), expected(dataset, columns, epoch, items, dims)
        for part, its in zip(parts, whole, strict=True):
            assert part.dtype == its.dtype and np.array_equal(part, its)


def test_a_rank_reads_its_block_once_and_nothing_else():
    values = np.arange(4 * 2 * 12 * 10.0).reshape(4, 2, 12, 10)
    source, extents = Counting(values), (6, 8)
    dataset = ShardDataset(source, grid=(1, 1), crop=extents)
    _ = dataset.dims, dataset._forms
    source.read, source.slices = 0, []
    (block,) = dataset.batch(0, [2, 3], Partition((0, 1, 2, 3), (1, 1, 2, 2), 3))
    assert source.read == block.local.numel() == 2 * 2 * 3 * 4
    assert len(source.slices) == 2
    assert all(each.step in (None, 1) for box in source.slices for each in box)


def item_of(dataset, item, epoch=0):
    """Its tensors, on one rank."""
    blocks = dataset.batch(epoch, [item], Partition((0,), (1,) * dataset.dims, 0))
    return [block.local[0] for block in blocks]


def test_a_list_has_a_source_for_each_sample_and_crops_several_items():
    volumes = [np.random.default_rng(n).random((9 + n, 8, 7)) for n in range(2)]
    dataset = ShardDataset(volumes, [5, 6], grid=(1, 1, 1), crop=(4, 4, 4), crops=30, channels=False)
    items = [item_of(dataset, item) for item in range(60)]
    assert len(dataset) == 60 and items[0][0].shape == (1, 4, 4, 4)
    assert [int(label) for _, label in items] == [5] * 30 + [6] * 30
    assert len({image.numpy().tobytes() for image, _ in items}) > 50
    again = ShardDataset(volumes, [5, 6], grid=(1, 1, 1), crop=(4, 4, 4), crops=30, channels=False)
    assert all(torch.equal(item_of(again, i)[0], image) for i, (image, _) in enumerate(items))
    assert not torch.equal(item_of(dataset, 0, epoch=1)[0], items[0][0])


def test_files_are_opened_when_they_are_needed(tmp_path):
    files = [tmp_path / f"{n}.npy" for n in range(20)]
    for n, file in enumerate(files[:-1]):
        np.save(file, np.full((1, 6, 5), n, ">f4"))
    dataset = ShardDataset(files, grid=(1, 1))
    (found,) = item_of(dataset, 11)
    assert found.dtype == torch.float32 and bool((found == 11).all())
    with pytest.raises(DataError, match=r"sample 19: .*19\.npy: not found"):
        item_of(dataset, 19)
    np.save(files[-1], np.zeros((1, 6, 5), np.float32))
    assert not item_of(dataset, 19)[0].any()
    files[3].write_bytes(files[3].read_bytes()[:-9])
    with pytest.raises(DataError, match=r"sample 3: .*3\.npy: .*truncated"):
        item_of(dataset, 3)


def failing(box):
    raise OSError("the tape is torn")


def zeros(*shapes):
    """A list of samples."""
    return [np.zeros(shape) for shape in shapes]


def wrong(*columns, error=ShapeError, **options):
    return columns, options, error


ONE, BATCH = (1, 6, 5), np.zeros((2, 1, 6, 5))
# By words of the error.
REFUSED = {
    "samples 0 and 1 are in a batch, but": wrong(zeros(ONE, (1, 6, 4))),
    r"sample 1: the image, a numpy.ndarray, has shape \(2, 6, 5\)": wrong(zeros(ONE, (2, 6, 5))),
    "sample 1: a numpy.ndarray: its elements are torch.int64": wrong([*zeros(ONE), np.zeros(ONE, int)]),
    "sample 1: a numpy.ndarray: the crop 4 of dim": wrong(zeros(ONE, (1, 3, 5)), crop=(4, 5)),
    r"label 1, a numpy.ndarray, has shape \(6, 4\)": wrong(BATCH, np.zeros((2, 6, 4))),
    r"label 1, .* has shape \(1, 1, 6, 5\), wanted \(1, 6, 5\)": wrong(BATCH, np.zeros((2, 1, 1, 6, 5))),
    "the same number of samples, got 2, 3": wrong(BATCH, np.zeros(3)),
    "there are no images; at least one": wrong(BATCH[:0]),
    "there are no images; at least": wrong([]),
    "but crop has 2": wrong(np.zeros((2, 1, 1, 6, 5)), error=ArgumentError, crop=(2, 2)),
    r"channels and 1 to 3 spatial dimensions, got a sample of shape \(6,\)": wrong(np.zeros((2, 6))),
    "sample 1: OSError: the tape": wrong([*zeros(ONE), Source(ONE, np.float64, failing)], error=DataError),
    r"cuts dimension 2 of batches of shape \(1, 1, 1, 5\) into 2 blocks": wrong(np.zeros((2, 1, 1, 5))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_samples_that_do_not_fit_are_refused(message):
    columns, options, error = REFUSED[message]
    dataset, partition = ShardDataset(*columns, grid=(1, 1), **options), Partition((0, 1), (1, 1, 2, 1), 1)
    with pytest.raises(error, match=message):
        dataset.facts(partition) and dataset.batch(0, [0, 1], partition)


@pytest.mark.parametrize("options", [{"crops": 0}, {"crops": True}, {"seed": -1}, {"seed": 1.5}])
def test_numbers_of_no_known_form_are_refused(options):
    with pytest.raises(ArgumentError, match=r"ShardDataset: (crops|seed) is an integer"):
        ShardDataset(np.zeros((1, 1, 4)), grid=(1,), **options)
