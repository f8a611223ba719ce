"""Tracebacks without the frames of launchers and libraries."""

import contextlib
import runpy

import pytest
import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.partition import Partition
from distdl_rma.segments.waiting.uncaught_errors import place_of, short_traceback


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
    assert place_of(error).startswith("test_short_tracebacks.py:")


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
