"""Names in a folder of checkpoints: who goes back loses no run, and what others have put there stays."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from distdl_rma import CheckpointError, Checkpoints, UnsupportedError, load_checkpoint
from distdl_rma.jobs.checkpoints import files
from distdl_rma.jobs.checkpoints.files import DATA, MANIFEST

LEAVES = pytest.mark.filterwarnings("ignore:.*run that was left:RuntimeWarning")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def kept_of(folder, *steps, **options):
    """A job that has saved some steps, each with its own value."""
    kept = Checkpoints(folder, **options)
    for step in steps:
        kept.save({"x": torch.full((3,), float(step)), "branch": "first"}, step)
    kept.wait()
    return kept


@pytest.mark.mpi
@LEAVES
@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_goes_back_goes_on_from_there_and_loses_no_run(comm, folder, asynchronous):
    kept_of(folder, 15, 18, 20).close()
    state = {"x": torch.zeros(3), "branch": ""}
    comm.Barrier()
    with Checkpoints(folder, keep=2, asynchronous=asynchronous) as kept:
        assert kept.restore(state, step=15) == 15
        for step in (16, 17, 19):
            kept.save(state | {"branch": "second"}, step)
        assert kept.restore(state) == 19
        assert state["branch"] == "second"
    assert names(folder) == ["step-17", "step-18.retired", "step-19", "step-20.retired"]
    comm.Barrier()
    if comm.rank == 0:
        (folder / "step-20.retired").rename(folder / "step-20")
    comm.Barrier()
    with Checkpoints(folder) as kept:
        assert kept.restore(state) == 20
    assert state["branch"] == "first"


@pytest.mark.mpi
@pytest.mark.processes
def test_one_rank_tells_once_what_has_another_name(comm, folder):
    kept_of(folder, 1, 2, 3).close()
    comm.Barrier()
    with Checkpoints(folder) as kept, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert kept.restore({}, step=1) == 1
        for step in (2, 3):
            kept.save({}, step)
    told = [str(each.message) for each in said if "run that was left" in str(each.message)]
    assert len(told) == (comm.rank == 0)
    assert all("step-2.retired" in text and "step-3.retired" in text for text in told)


@pytest.mark.mpi
@LEAVES
def test_the_same_step_of_a_run_that_was_left_is_not_replaced(comm, folder):
    kept_of(folder, 15, 20).close()
    comm.Barrier()
    for number in (2, 3):
        with Checkpoints(folder) as kept:
            kept.restore(state := {"branch": ""}, step=15)
            kept.save(state | {"branch": f"run {number}"}, 20)
            # Its own is replaced.
            kept.save(state | {"branch": f"run {number}, again"}, 20)
    assert names(folder) == ["step-15", "step-20", "step-20.retired", "step-20.retired-2"]
    found = [load_checkpoint(each, state) and state["branch"] for each in sorted(folder.iterdir())]
    assert found == ["first", "run 3, again", "first", "run 2, again"]
    comm.Barrier()


class Killed(BaseException):
    pass


def kill_at(monkeypatch, number):
    """The process dies before one of its changes of names in the folder; returns these so far."""
    done = []

    def dying(real):
        def change(path, *args, **options):
            if len(done) == number:
                raise Killed
            done.append((real.__name__, path.name))
            return real(path, *args, **options)

        return change

    for name in ("rename", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    return done


def written(path, branch, beyond, keep=2):
    """One checkpoint, written as by a job of one rank."""
    body = {"branch": branch, "nbytes": 10}
    files.begin(path, b"head", body)
    files.publish(path, body, beyond)
    files.delete_old(path, keep)


def branches(folder):
    """The branch of each directory with a manifest."""
    found = {path.parent.name: json.loads(path.read_text())["body"] for path in folder.glob(f"*/{MANIFEST}")}
    return {name: body["branch"] for name, body in found.items() if not name.endswith(".tmp")}


@pytest.mark.parametrize("step", [16, 18])
@LEAVES
def test_a_kill_at_any_moment_leaves_both_runs(tmp_path, monkeypatch, step):
    number, ended = 0, False
    while not ended:
        folder = tmp_path / f"run-{number}"
        for each in (14, 15, 18, 20):
            written(folder / f"step-{each}", "first", each, None)
        with monkeypatch.context() as patch:
            done = kill_at(patch, number)
            try:
                written(folder / f"step-{step}", "second", 15)
                ended = True
            except Killed:
                pass
        found = branches(folder)
        # Whole: the ends of the run that was left, and where the new one begins or is.
        assert {"first"} == {found.get("step-20", found.get("step-20.retired")), found["step-15"]}
        newest = files.complete(folder)[0]
        assert found[newest.name] == "second" or "second" not in found.values(), (done, found)
        # The next job goes on, and leaves nothing of the killed one.
        files.tidy(folder)
        written(folder / f"step-{step}", "third", 15)
        assert files.complete(folder)[0] == folder / f"step-{step}"
        assert not [name for name in names(folder) if name.endswith((".tmp", ".old"))]
        number += 1
    assert number == 8


def test_a_checkpoint_is_complete_before_the_warning_of_another_run(tmp_path):
    for each in (5, 10):
        written(tmp_path / f"step-{each}", "first", each, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="goes on from an earlier step"):
            written(tmp_path / "step-6", "second", 5)
    assert branches(tmp_path) == {"step-5": "first", "step-10.retired": "first", "step-6": "second"}


def test_files_of_others_in_a_checkpoint_are_in_the_way_of_no_successor(tmp_path):
    path = tmp_path / "step-5"
    for branch in ("first", "second", "third"):
        written(path, branch, 5)
        (path / "notes.txt").write_text(branch)
    written(path, "fourth", 5)
    assert branches(tmp_path) == {"step-5": "fourth"}
    assert sorted(each.read_text() for each in tmp_path.glob("*/notes.txt")) == ["first", "second", "third"]


@pytest.mark.mpi
@pytest.mark.parametrize("step", [5, 6])
def test_a_link_to_a_checkpoint_of_another_run_costs_that_run_nothing(comm, folder, step):
    kept_of(folder, 5).close()
    other = folder.with_name("other")
    if comm.rank == 0:
        other.mkdir()
        (other / "step-5").symlink_to(folder / "step-5")
    comm.Barrier()
    state = {"x": torch.zeros(3), "branch": ""}
    with Checkpoints(other, keep=1) as kept:
        assert kept.restore(state) == 5
        kept.save(state, step)
    assert names(other) == [f"step-{step}"]
    assert not (other / f"step-{step}").is_symlink()
    assert load_checkpoint(folder, state) == 5
    assert names(folder / "step-5") == [DATA, MANIFEST]
    comm.Barrier()


@pytest.mark.mpi
@LEAVES
def test_what_others_have_put_into_the_folder_stays(comm, folder):
    kept = kept_of(folder, 1, keep=1)
    theirs = (
        "step-1/notes.txt",
        "step-6.old/notes.txt",
        "step-6.tmp/notes.txt",
        f"step-7/{MANIFEST}",
        "step-9.tmp/x",
        "step-by-step.tmp/x",
        "step-07/x",
        "step-x",
        "step-12/x",
    )
    if comm.rank == 0:
        for each in theirs:
            (folder / each).parent.mkdir(exist_ok=True)
            (folder / each).write_text("theirs")
        (folder / "step-by-step").mkdir()
        (folder / "step-3.tmp").symlink_to(folder.parent)
        (folder / "step-4").symlink_to("nowhere")
    comm.Barrier()
    with kept:
        kept.save({"x": torch.zeros(3)}, 8)
        kept.wait()
        for step in (1, 6, 7, 9, 12) * 2:
            words = rf"step-{step}\S* is in the way, with files of no checkpoint of this library"
            with pytest.raises(CheckpointError, match=words):
                kept.save({"x": torch.zeros(3)}, step)
        assert kept.restore({"x": torch.zeros(3)}) == 8
    with Checkpoints(folder, keep=1) as again:
        for step in (10, 11):
            again.save({"x": torch.zeros(3)}, step)
    assert all((folder / each).read_text() == "theirs" for each in theirs)
    assert (folder / "step-by-step").is_dir() and (folder / "step-4").is_symlink()
    assert not (folder / "step-1" / MANIFEST).exists()
    assert load_checkpoint(folder, {"x": torch.zeros(3)}) == 11
    comm.Barrier()


@pytest.mark.mpi
def test_a_manifest_has_bounds(comm, folder, monkeypatch):
    with Checkpoints(folder) as kept:
        kept.save({"x": 1}, 1)
        monkeypatch.setattr(files, "_MOST_NBYTES", 1 << 20)
        with pytest.raises(UnsupportedError, match=r"would have 2 MiB, and may have 1 MiB: make tensors"):
            kept.save({"x": "1" * (2 << 20)}, 2)
        assert names(folder) == ["step-1"]
        if comm.rank == 0:
            with (folder / "step-1" / MANIFEST).open("rb+") as file:
                file.truncate(2 << 30)
        comm.Barrier()
        with pytest.raises(CheckpointError, match=r"manifest.json is damaged: it has more than 1 MiB"):
            kept.restore({"x": 0})
