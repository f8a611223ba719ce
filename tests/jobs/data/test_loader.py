"""Batches of split tensors: whole samples in an order that no number of ranks changes, or an error on all."""

import gc
import threading
import time
import warnings
from itertools import chain

import numpy as np
import pytest
import torch

from distdl_rma import (
    ConfigurationError,
    DataError,
    DistdlError,
    Machine,
    MismatchError,
    PartitionError,
    ShapeError,
    ShardDataset,
    ShardLoader,
    Source,
    SplitTensor,
)

pytestmark = pytest.mark.mpi
SHAPE = (10, 2, 12, 8)
IMAGES = np.random.default_rng(0).random(SHAPE, np.float32)
MASKS = IMAGES.sum(1) > 1
NUMBERS = list(range(10))
ORDERS = [[3, 5, 7, 1, 0, 9, 2, 8, 4, 6], [3, 1, 4, 6, 0, 5, 9, 2, 8, 7]]


def made(**options):
    """A dataset of the images, their masks and their numbers, cut in the height."""
    return ShardDataset(IMAGES, MASKS, NUMBERS, **{"grid": {"H": -1}, "seed": 5} | options)


def numbers(batches):
    """The numbers of the samples in each batch."""
    return [batch[2].tolist() for batch in batches]


def whole(batches):
    """Whole images and their numbers."""
    return [(image.full_tensor(), number.tolist()) for image, _, number in batches]


def order(batches):
    """The numbers of the samples in their order."""
    return list(chain(*numbers(batches)))


def threads():
    """How many threads of loaders live."""
    return sum(each.name.startswith("ShardLoader") for each in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert threads() == 0


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("grid", [{"H": -1}, {"W": -1}, {"N": -1}, "last", {"C": 2, "H": -1}])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_whole_samples_on_every_grid(comm, grid, prefetch):
    if comm.size % 2 and (grid == "last" or "C" in grid):
        return
    grid = (2, comm.size // 2) if grid == "last" else grid
    for batch, (image, mask, number) in enumerate(ShardLoader(made(grid=grid), 3, prefetch=prefetch)):
        own = slice(3 * batch, 3 * batch + 3)
        assert isinstance(image, SplitTensor) and isinstance(mask, SplitTensor)
        assert type(number) is torch.Tensor and number.tolist() == NUMBERS[own]
        assert np.array_equal(image.full_tensor().numpy(), IMAGES[own])
        assert np.array_equal(mask.full_tensor().numpy(), MASKS[own])
        assert mask.dtype == torch.bool and image.decomposition.shape == image.shape


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("own_grid", [False, True])
def test_replicas_have_samples_of_their_own(comm, P_world, own_grid):
    if comm.size % 2:
        return
    half = comm.size // 2
    replica, grid = comm.rank // half, {"H": -1}
    if own_grid:
        grid = P_world.create_partition_inclusive(range(replica * half, (replica + 1) * half))
        grid = grid.create_cartesian_topology_partition((1, 1, half, 1))
    loader = ShardLoader(made(grid=grid, crop=(6, 6)), 2, replicas=2, shuffle=True)
    assert loader.replica == replica and loader.partition.shape == (1, 1, half, 1) and len(loader) == 3
    mine, together = whole(loader), whole(ShardLoader(made(crop=(6, 6)), 4, shuffle=True))
    for (image, number), (all_images, all_numbers) in zip(mine, together, strict=True):
        each = len(all_numbers) // 2
        own = slice(replica * each, (replica + 1) * each)
        assert number == all_numbers[own] and torch.equal(image, all_images[own])
    all_of_them = comm.allgather([n for _, number in mine for n in number])[::half]
    assert sorted(chain(*all_of_them)) == NUMBERS


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_a_last_step_has_as_many_samples_for_each_replica_of_any_shapes(comm):
    if comm.size != 2:
        return
    for batch, drop_last, *sizes in (
        (2, False, 2, 2, 1),
        (2, True, 2, 2),
        (4, False, 4, 1),
        (3, False, 3, 2),
    ):
        loader = ShardLoader(made(grid=(1, 1)), batch, replicas=2, drop_last=drop_last)
        found = [len(number) for _, _, number in loader]
        assert found == sizes and len(loader) == len(found) and comm.allgather(found) == [found] * 2
    images = [IMAGES[0], IMAGES[1][:, :7], IMAGES[2][:, :5, :3], IMAGES[3][:, 2:]]
    seen = [x.full_tensor().numpy() for x in ShardLoader(ShardDataset(images, grid=(1, 1)), replicas=2)]
    for x, image in zip(seen, images[comm.rank :: 2], strict=True):
        assert np.array_equal(x[0], image)


@pytest.mark.sizes(1, 2, 3, 4)
def test_epochs_are_shuffled_alike_on_all_numbers_of_ranks(comm):
    loader = ShardLoader(made(), 3, shuffle=True)
    first, second = (order(loader) for _ in range(2))
    assert first == ORDERS[0] and second == ORDERS[1] and loader.epoch == 2
    loader.set_epoch(0)
    assert order(loader) == first
    assert order(ShardLoader(made(seed=6), 3, shuffle=True)) != first


@pytest.mark.sizes(1, 2, 4)
def test_a_position_goes_on_at_the_right_sample_with_other_replicas(comm):
    options = {"crop": (8, 4)}
    dataset = made(grid=(1, 1) if comm.size < 4 else {"H": 2}, **options)
    if comm.size == 3:
        return
    before = ShardLoader(dataset, 4 // min(comm.size, 2), replicas=min(comm.size, 2), shuffle=True)
    for _epoch in range(2):
        for step, _ in enumerate(before):
            if before.epoch == 1 and step == 0:
                break
    state = before.state_dict()
    assert state == {"epoch": 1, "samples": 4, "seed": 5, "of": 10, "shuffle": True}
    after = ShardLoader(made(**options), 2, shuffle=True, prefetch=3)
    after.load_state_dict(state)
    after.set_epoch(1)
    rest, again = whole(after), ShardLoader(made(**options), 2, shuffle=True)
    again.set_epoch(1)
    wanted = whole(again)[2:]
    assert [number for _, number in rest] == [number for _, number in wanted] != []
    assert all(torch.equal(one, two) for (one, _), (two, _) in zip(rest, wanted, strict=True))
    assert after.state_dict() == {"epoch": 2, "samples": 0, "seed": 5, "of": 10, "shuffle": True}
    before.close()


def test_the_position_is_that_of_the_batches_that_the_loop_has_got(comm):
    loader, seen = ShardLoader(made(), 2, prefetch=3), []
    for _batch in loader:
        seen.append(loader.state_dict()["samples"])
        if len(seen) == 3:
            break
    assert seen == [2, 4, 6] and loader.state_dict()["samples"] == 6
    assert numbers(loader)[0] == [0, 1]
    changes = {"seed": 9}, {"of": 11}, {"shuffle": not loader._shuffle}, {"samples": 11}, {"samples": -1}
    for wrong in ({"epoch": 0}, *({**loader.state_dict(), **change} for change in changes)):
        with pytest.raises(ConfigurationError, match="was it saved with another dataset or seed"):
            loader.load_state_dict(wrong)


@pytest.mark.processes
def test_the_thread_reads_ahead_and_no_further(comm):
    reads = []

    def read(box):
        reads.append(threading.current_thread().name)
        return np.zeros([each.stop - each.start for each in box], np.float32)

    dataset = ShardDataset(Source((9, 1, 8, 8), np.float32, read), grid={"H": -1})
    loop = iter(ShardLoader(dataset, prefetch=2))
    for taken in range(1, 10):
        next(loop)
        until = time.monotonic() + 20
        while len(reads) < min(taken + 2, 9) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.02)
        assert len(reads) == min(taken + 2, 9)
    assert all(name.startswith("ShardLoader") for name in reads) and threads() == 1
    with pytest.raises(StopIteration):
        next(loop)
    assert threads() == 0


class Torn(Exception):
    """Of a user."""


def stop_within(loader):
    for _ in loader:
        assert threads() == 1
        raise Torn


@pytest.mark.parametrize("how", ["exception", "dropped", "closed", "another loop", "loader dropped"])
@pytest.mark.processes
def test_the_thread_ends_with_the_loop(comm, how):
    loader = ShardLoader(made(), prefetch=2)
    if how == "exception":
        with pytest.raises(Torn):
            stop_within(loader)
    else:
        loop = iter(loader)
        next(loop)
        assert threads() == 1
        if how == "another loop":
            assert len(numbers(loader)) == 10
            with pytest.raises(StopIteration):
                next(loop)
        if how == "closed":
            loader.close()
            loader.close()
            assert threads() == 0
        if how == "loader dropped":
            del loader
        del loop
    gc.collect()
    assert threads() == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_failure_on_one_rank_is_an_error_on_all(comm, prefetch, replicas):
    if comm.size % replicas:
        return
    failing = comm.size - 1

    def read(box):
        if comm.rank == failing and box[0].start == 7:
            raise Torn("the tape is torn")
        return IMAGES[box]

    dataset = ShardDataset(Source(SHAPE, np.float32, read), grid={"H": comm.size // replicas})
    loader = ShardLoader(dataset, 1, replicas=replicas, prefetch=prefetch)
    got = []
    with pytest.raises(DataError) as caught:
        got.extend(loader)
    text = str(caught.value)
    assert "sample 7: Torn: the tape is torn" in text
    assert comm.rank == failing or f"rank {failing}" in text
    assert len(got) == (3 if replicas == 2 else 7)
    # The machine stays usable, and the loop can go on behind the sample.
    state = loader.state_dict()
    loader.load_state_dict({**state, "samples": 8})
    assert len(list(loader)) == 2 // replicas


@pytest.mark.mpi(min_size=2)
def test_a_file_that_one_rank_lacks_is_an_error_on_all(comm, tmp_path):
    files = [tmp_path / f"{n}.npy" for n in range(4)]
    for n, file in enumerate(files):
        if n < 3 or comm.rank:
            np.save(file, IMAGES[n])
    with pytest.raises(DataError, match=r"3\.npy: not found"):
        ShardLoader(ShardDataset(files[3], grid={"W": -1}))
    with pytest.raises(DataError, match=r"sample 3: .*3\.npy: not found"):
        list(ShardLoader(ShardDataset(files, grid={"H": -1}), prefetch=1))


def of_images(images):
    return ShardLoader(ShardDataset(images, grid={"H": -1}))


# Loaders that are refused on all ranks, by words of the error; one rank is odd.
REFUSED = {
    "batch is an integer, at least 1, got 0": lambda odd: ShardLoader(made(), int(not odd)),
    "batch is an integer, at least 1, got True": lambda odd: ShardLoader(made(), batch=True),
    "prefetch is an integer, at least 0": lambda odd: ShardLoader(made(), prefetch=-1),
    "cannot be dealt to 5 replicas": lambda odd: ShardLoader(made(), replicas=5),
    "10 samples are too few": lambda odd: ShardLoader(made(), batch=11, drop_last=True),
    "seed: 5 on rank 0, but 6 on rank 1": lambda odd: ShardLoader(made(seed=5 + odd)),
    "the crop 13 of dimension H does not fit": lambda odd: ShardLoader(made(crop=(12 + odd, 4))),
    "of which 1 would be empty": lambda odd: ShardLoader(made(crop=(Machine.on().size - 1, 4))),
    "shapes: ": lambda odd: of_images(IMAGES[:, :, odd:]),
    "dtypes: ": lambda odd: of_images(IMAGES.astype(np.float64) if odd else IMAGES),
    "samples: 10 on rank 0, but 9 on rank 1": lambda odd: of_images(IMAGES[int(odd) :]),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_or_differs_is_refused_on_all_ranks(comm, message):
    with pytest.raises((ConfigurationError, PartitionError, ShapeError), match=message) as caught:
        REFUSED[message](comm.rank == 1)
    text = str(caught.value)
    assert ("arguments and samples are alike on all ranks" in text) == ("on rank 0, but" in text)


@pytest.mark.mpi(min_size=2)
def test_samples_that_differ_between_ranks_are_refused_when_they_come(comm):
    images = [IMAGES[0], IMAGES[1][:, : 12 - 3 * (comm.rank == 1)]]
    loader = ShardLoader(ShardDataset(images, grid={"H": -1}))
    loop = iter(loader)
    next(loop)
    words = r"dtypes and shapes of a batch of replica 0: .* on rank 0, but .* on rank 1"
    with pytest.raises(MismatchError, match=words):
        next(loop)


@pytest.mark.mpi(min_size=2)
def test_positions_that_differ_between_ranks_are_refused(comm):
    loader = ShardLoader(made(), 2)
    loader.set_epoch(comm.rank % 2)
    with pytest.raises(MismatchError, match=r"epoch and end of the step, in samples: \[0, 2\] on rank 0"):
        next(iter(loader))
    loader.set_epoch(0)
    assert len(list(loader)) == 5


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_partitions_that_are_no_replicas_are_refused(comm, P_world):
    if comm.size % 2:
        return
    half = comm.size // 2
    first = P_world.create_partition_inclusive(range(half))
    first = first.create_cartesian_topology_partition((1, 1, half, 1))
    with pytest.raises(DistdlError, match="is not in its grid"):
        ShardLoader(made(grid=first), replicas=2)
    whole = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    with pytest.raises(PartitionError, match="replicas=2 are as many partitions of one shape"):
        ShardLoader(made(grid=whole), replicas=2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("listed", [False, True])
def test_chunks_that_blocks_cut_are_a_warning_on_the_first_rank(comm, listed):
    whole = Source(SHAPE, np.float32, lambda box: IMAGES[box], chunks=(1, 2, 12, 1))
    one = Source(SHAPE[1:], np.float32, lambda box: IMAGES[0][box], chunks=(2, 12, 1))
    source = [one] if listed else whole
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ShardLoader(ShardDataset(source, grid={"H": -1}))
        ShardLoader(ShardDataset(source, grid={"W": -1}))
        ShardLoader(ShardDataset(source, grid={"H": -1}, crop=(6, 6)))
    assert len(caught) == (comm.rank == 0)
    for each in caught:
        assert each.filename == __file__ and "are read whole" in str(each.message)
