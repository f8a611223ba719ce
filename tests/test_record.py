"""What a run of the tests consisted of is summed up by parts, and replaces the table of the page."""

from tests import record
from tests.record import Part

REAL = record.PAGE.read_text()


def test_parts_of_one_name_are_one_and_nothing_is_added_where_no_record_is_wanted(tmp_path, monkeypatch):
    path = tmp_path / "output" / "parts.jsonl"
    monkeypatch.delenv(record.FILE_VARIABLE, raising=False)
    Part("on 2 ranks", 1, 1, 1.0).add()
    monkeypatch.setenv(record.FILE_VARIABLE, str(path))
    Part("without MPI", 3613, 0, 120.5).add()
    Part("on 2 ranks", 1000, 3000, 60.0).add()
    monkeypatch.setenv(record.NAME_VARIABLE, "Open MPI, ")
    Part("on 2 ranks", 7, 0, 1.0).add()
    monkeypatch.delenv(record.NAME_VARIABLE)
    Part("on 2 ranks", 647, 40, 42.0).add()
    parts = record.read(path)
    assert parts == [
        Part("without MPI", 3613, 0, 120.5),
        Part("on 2 ranks", 1647, 3040, 102.0),
        Part("Open MPI, on 2 ranks", 7, 0, 1.0),
    ]
    text = record.summary(parts)
    assert "3,613 without MPI, 1,647 on 2 ranks, 7 Open MPI, on 2 ranks." in text
    assert "3,040 runs wait for another day: DAY=" in text and "make test-rest" not in text
    assert "make test-rest" in record.summary(parts[:1], True)
    assert "another day" not in record.summary(parts[:1])


def test_the_table_of_the_page_is_replaced(tmp_path, monkeypatch, capsys):
    page, path = tmp_path / "contributing.md", tmp_path / "parts.jsonl"
    monkeypatch.setattr(record, "PAGE", page)
    page.write_text(REAL)
    monkeypatch.setenv(record.FILE_VARIABLE, str(path))
    Part("on 5 ranks", 12345, 2, 60.4).add()
    assert record.main("page", str(path)) == 0
    assert "---:|\n| on 5 ranks | 12,345 | 60 |\n\n" in page.read_text()
    assert page.read_text().count("| 12,345 |") == 1 and "| without MPI |" not in page.read_text()
    assert record.main("show", str(path)) == 0
    assert "12,345 on 5 ranks" in capsys.readouterr().out
