"""What an exception that nobody catches does before the process ends, and its traceback."""

import contextlib
import runpy
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.partition import Partition
from distdl_rma.segments.waiting import uncaught_errors
from distdl_rma.segments.waiting.uncaught_errors import place_of, short_traceback


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


def test_all_open_machines_of_this_process_are_told_and_the_hook_before_is_called(hooked):
    made = [Manager() for _ in range(3)]
    for manager in made:
        uncaught_errors.report_uncaught_errors(manager)
    made[1].closed = True
    error = ValueError("wrong")
    sys.excepthook(ValueError, error, None)
    assert [manager.told for manager in made] == [[error], [], [error]]
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


def raised(act):
    with pytest.raises(Exception, match=r".") as caught:
        act()
    return caught.value


class Raises(torch.nn.Module):
    def forward(self, x):
        raise ValueError("of the user")


def test_frames_between_those_of_the_user_are_left_out():
    error = raised(lambda: torch.nn.Sequential(Raises())(None))
    whole, text = error.__traceback__, short_traceback(error)
    assert "in forward\n    raise ValueError" in text and text.endswith("ValueError: of the user\n")
    assert "site-packages" not in text and "_call_impl" not in text
    assert error.__traceback__ is whole
    assert place_of(error).startswith("test_uncaught_errors.py:")


def test_frames_behind_the_users_are_left_out_and_a_line_says_so_if_the_error_is_not_of_this_library():
    text = short_traceback(raised(lambda: torch.nn.Conv2d(1, 1, 3)(torch.ones(1))))
    assert "in _conv_forward" not in text and "_call_impl" not in text
    assert "\nRuntimeError: Expected" in text and text.endswith("torch and of distdl_rma as well)\n")
    text = short_traceback(raised(lambda: Partition((0, 1), (3,), 0)))
    assert "distdl_rma/" not in text and "PartitionError: " in text and "FULL_TRACEBACKS" not in text


def test_launchers_are_left_out_and_causes_are_shortened(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise KeyError('of the script')")

    def act():
        try:
            with contextlib.ExitStack():
                runpy.run_path(str(script))
        except KeyError as error:
            raise ShapeError("of that") from error

    text = short_traceback(raised(act))
    assert "_run_code" not in text and "script.py" in text and "direct cause" in text


def test_where_no_frame_is_the_users_all_stay():
    error = raised(lambda: torch.nn.Conv2d(1, 1, 3)(torch.ones(1)))
    while "torch" not in error.__traceback__.tb_frame.f_code.co_filename:
        error.__traceback__ = error.__traceback__.tb_next
    assert "_call_impl" in short_traceback(error) and place_of(error) == ""
