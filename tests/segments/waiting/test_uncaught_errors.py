"""What an exception that nobody catches does before the process ends."""

import os
import sys
import weakref
from types import SimpleNamespace

import pytest

from distdl_rma.segments.waiting import uncaught_errors


class Manager:
    """As a segment manager that may fail."""

    def __init__(self):
        self.closed, self.told = False, []
        self.notices = SimpleNamespace(noticed=lambda: bool(self.told))

    def fail(self, error):
        self.told.append(error)


@pytest.fixture
def hooked(monkeypatch):
    """Errors that the hook before ours was given."""
    given = []
    monkeypatch.setattr(uncaught_errors, "_managers", weakref.WeakKeyDictionary())
    monkeypatch.setattr(uncaught_errors, "_previous_hooks", [])
    monkeypatch.setattr(uncaught_errors, "_PRINT_SECONDS", 0.0)
    monkeypatch.setattr(sys, "excepthook", lambda *error: given.append(error))
    return given


def test_all_open_machines_of_this_process_are_told_and_the_hook_before_is_called(hooked, monkeypatch):
    made = [Manager() for _ in range(3)]
    for manager in made:
        uncaught_errors.report_uncaught_errors(manager)
    made[1].closed = True
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        uncaught_errors.report_uncaught_errors(elsewhere := Manager())
    error = ValueError("wrong")
    sys.excepthook(ValueError, error, None)
    assert [manager.told for manager in (*made, elsewhere)] == [[error], [], [error], []]
    assert hooked == [(ValueError, error, None)]


def test_a_hook_that_calls_ours_is_not_called_for_ever(hooked):
    uncaught_errors.report_uncaught_errors(first := Manager())
    ours = sys.excepthook

    def theirs(*error):
        ours(*error)

    sys.excepthook = theirs
    uncaught_errors.report_uncaught_errors(second := Manager())
    sys.excepthook(ValueError, ValueError("wrong"), None)
    assert len(hooked) == len(first.told) == len(second.told) == 1


def test_a_line_is_said_once(capsys, monkeypatch):
    monkeypatch.setattr(uncaught_errors, "_written", set())
    for line in ("one", "two", "one"):
        uncaught_errors.write_once(line)
    assert capsys.readouterr().err == "distdl_rma: one\ndistdl_rma: two\n"
