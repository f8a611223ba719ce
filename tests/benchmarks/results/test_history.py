"""Rows keep a history by machine, and what has become slower is named."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from benchmarks.results import history
from benchmarks.results.history import Entry
from benchmarks.results.run import Run, checked_out, runs_in, slug
from benchmarks.row import Row

ROW = Row("put, 8 B", "Send/Recv", 2.0, 0.1, 4.0, 0.1, 0.9)


def entry(ours: float, day: int, commit: str = "", spread: float = 0.1, what: str = "put, 8 B") -> Entry:
    row = replace(ROW, what=what, ours_us=ours, ours_spread_us=spread)
    return Entry(commit or f"c{day}", f"2026-01-{day:02}T00:00:00Z", "torch 2", 2, row)


def test_what_was_appended_is_read_again(tmp_path):
    entries = [entry(2.0, 1), entry(2.1234567, 2), entry(1.0, 2, what='a "name", with a comma')]
    entries[2] = replace(entries[2], row=replace(entries[2].row, target=None))
    file = tmp_path / "folder" / "machine.csv"
    assert history.append(file, entries[:1]) == 1
    assert history.append(file, entries) == 2
    assert history.append(file, entries) == 0
    assert len(file.read_text().splitlines()) == 4
    again = history.read(file)
    assert [e.key for e in again] == [e.key for e in entries]
    assert again[1].row.ours_us == 2.12346
    assert again[::2] == entries[::2]
    assert history.read(tmp_path / "no such file") == []


@pytest.mark.parametrize(
    ("now", "spread", "found"), [(2.1, 0.1, False), (2.3, 0.1, True), (2.3, 0.5, False), (1.0, 0.1, False)]
)
def test_a_row_is_slower_if_its_ratio_has_grown_by_more_than_both_vary(now, spread, found):
    assert bool(history.slower([entry(2.0, 1), entry(now, 2, spread=spread)])) == found


def test_rows_without_spread_may_differ_a_little():
    exact = replace(ROW, ours_spread_us=0.0, baseline_spread_us=0.0)
    before = Entry("a", "2026-01-01T00:00:00Z", "", 2, exact)
    for factor, count in ((1.01, 0), (1.05, 1)):
        now = Entry("b", "2026-01-02T00:00:00Z", "", 2, replace(exact, ours_us=2.0 * factor))
        assert len(history.slower([before, now])) == count


def test_the_newest_is_compared_with_the_one_before_or_with_a_named_commit():
    entries = [entry(2.0, 1), entry(3.0, 2), entry(3.0, 3)]
    assert history.slower(entries) == []
    (found,) = history.slower(entries, since="c1")
    assert (found.before, found.now) == (entries[0], entries[2])
    assert str(found).startswith("put, 8 B, against Send/Recv: 0.50 ± 0.03 at c1, now 0.75")
    # Rows that the newest commit did not measure are not named.
    others = [entry(2.0, 1, what="other"), entry(4.0, 2, what="other")]
    assert len(history.slower(others)) == 1
    assert history.slower([*others, entry(2.0, 3)]) == history.slower([]) == []


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = Run("abc", "2026-01-01T00:00:00Z", "torch 2, MPICH 5", 2, (ROW, replace(ROW, target=None)))
    run.write(tmp_path / "results.json")
    (tmp_path / "trace.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"rows": 1}')
    later = replace(run, time="2026-01-02T00:00:00Z")
    later.write(tmp_path / "a.json")
    assert list(runs_in(tmp_path)) == [run, later]


def test_a_commit_is_marked_where_files_differ_from_it(tmp_path):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    assert checked_out(tmp_path) == "unknown"
    git("init")
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "benchmarks" / "history").mkdir(parents=True)
    (tmp_path / "benchmarks" / "history" / "machine.csv").write_text("1")
    git("add", ".")
    git("commit", "-m", "First")
    commit = checked_out(tmp_path)
    assert len(commit) == 10
    (tmp_path / "benchmarks" / "history" / "machine.csv").write_text("2")
    assert checked_out(tmp_path) == commit
    (tmp_path / "code.py").write_text("2")
    assert checked_out(tmp_path) == f"{commit}+"


def test_a_machine_is_called_by_its_processor():
    assert slug("AMD EPYC (R) 9B14 CPU @ 2.60GHz 2 cores") == "amd-epyc-r-9b14-cpu-2.60ghz-2-cores"
