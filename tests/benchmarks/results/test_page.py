"""Rows are shown as Markdown, alone and within the documentation, and as a picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.results import __main__ as command
from benchmarks.results import history, page
from benchmarks.results.history import Entry
from benchmarks.results.run import Run
from benchmarks.row import Row

ROW = Row("sum, 25 MiB", "one copy", 2570.4, 299.0, 5070.2, 284.0, 0.4)
ENTRY = Entry("abc", "2026-01-01T00:00:00Z", "torch 2", 2, ROW)


def test_a_table_has_a_line_per_row_and_bold_ratios_above_their_target():
    small = {"ours_us": 1.234, "ours_spread_us": 0.1, "baseline_us": 10.0, "baseline_spread_us": 0.0}
    met = replace(ENTRY, row=replace(ROW, **small))
    limit = replace(ENTRY, row=Row("time", "150 us", 15.25, 0.5, 150.0, 0.0, None))
    assert page.table([ENTRY, met, limit]).splitlines()[2:] == [
        "| sum, 25 MiB | one copy | **0.51** | 0.4 | 2,570 ± 299 us | 5,070 ± 284 us |",
        "| sum, 25 MiB | one copy | 0.12 | 0.4 | 1.2 ± 0.1 us | 10 us |",
        "| time | 150 us | 0.10 |  | 15.2 ± 0.5 us |  |",
    ]
    assert page.table([]) == page.side_by_side([]) == page.functions([]) == page.NONE


def test_volumes_of_a_function_and_the_memory_of_a_step_stand_beside_their_images_and_times():
    names = "convolution 3x3, 256x256", "convolution 3x3x3, 48x48x48", "convolution 3x3, 16x16, time added"
    rows = [replace(ENTRY, row=replace(ROW, what=f"function {name}", target=1.0)) for name in names]
    cell = "0.51 of 1, 2,570 ± 299 us"
    assert page.functions(rows).splitlines()[2:] == [
        f"| convolution 3x3 | 256x256 | {cell} |  | {cell} | {cell} |  |"
    ]
    whats = "model A, 64x64, training step", "model A, 64x64, peak memory of a rank of 2"
    found = page.side_by_side([replace(ENTRY, row=replace(ROW, what=what, target=1.0)) for what in whats])
    assert found.splitlines() == [
        "| what | one copy | peak memory of a rank of 2, one copy |",
        "|---|---|---|",
        f"| model A, 64x64, training step | {cell} | {cell} |",
    ]


def test_it_is_told_of_which_runs_the_rows_are():
    assert page.where([ENTRY]) == "commit abc, 2026-01-01, torch 2, 2 ranks"
    crowded = replace(ENTRY, ranks=4)
    assert page.where([ENTRY, crowded]) == "commit abc, 2026-01-01, torch 2, 2 and 4 ranks"
    later = replace(ENTRY, commit="def")
    abc, other = (f"commit {name}, 2026-01-01, torch 2, 2 ranks" for name in ("abc", "def"))
    assert page.where([ENTRY, later, later]).startswith(f"{abc}: 1 of the rows; {other}: 2")


def test_only_what_lies_between_the_lines_is_rewritten():
    text = "before\n<!-- a: written by b -->\n\nold\n\n<!-- a: end -->\nafter\n"
    new = page.rewritten(text, "a", "b", "new\n")
    assert new == text.replace("old", "new")
    assert page.rewritten(new, "a", "b", "new") == new
    with pytest.raises(ValueError, match="has no lines"):
        page.rewritten("nothing", "a", "b", "new")


def test_collecting_keeps_history_and_writes_a_page_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "machine.csv"
    history.append(file, [replace(ENTRY, time="2025-01-01T00:00:00Z")])
    Run("abc", ENTRY.time, "torch 2", 2, (ROW,)).write(tmp_path / "out" / "results.json")
    for _ in range(2):
        command.collect(file, tmp_path / "out")
    assert len(history.read(file)) == 2
    assert "| sum, 25 MiB |" in (tmp_path / "out" / "benchmarks.md").read_text()
    drawn = (tmp_path / "out" / "benchmarks.svg").read_text()
    assert "sum, 25 MiB | one copy" in drawn
    assert drawn == command.drawn(history.read(file), "machine")


def test_a_page_says_whose_rows_it_shows():
    name = "some-cpu-2.5ghz-8-cores"
    assert command.shown_machine(f"# Rows\n\nMeasured on {name}: commit a") == name
    with pytest.raises(ValueError, match="name a machine"):
        command.shown_machine("nothing")


def test_sections_may_lack_rows_and_functions_are_not_in_the_picture():
    function = replace(ENTRY, row=replace(ROW, what="function relu, 16x16, time added"))
    text = command.documented(command.PAGE.read_text(), [ENTRY, function], "machine")
    assert text.count(page.NONE) == len(command.SECTIONS) - 3
    assert "| relu | 16x16 |" in text
    assert command.pictured([ENTRY, function]) == [ENTRY]


def test_the_documentation_has_what_the_history_says(request):
    text = command.PAGE.read_text()
    machine = command.shown_machine(text)
    entries = history.read(command.file_of(machine))
    assert command.documented(text, entries, machine) == text, "run make bench-docs"
    request.getfixturevalue("pinned_matplotlib")
    assert command.IMAGE.read_text() == command.drawn(entries, machine), "run make bench-docs"
