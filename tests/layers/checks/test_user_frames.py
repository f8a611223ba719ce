"""Whose line a warning or a site names."""

import contextlib
import warnings
from inspect import currentframe
from pathlib import Path

import torch

from distdl_rma.layers.checks.user_frames import LibraryFiles, warn_user
from distdl_rma.layers.model import compare
from distdl_rma.layers.split.calls.site import user_place


def test_code_of_torch_and_of_a_folder_is_not_the_users():
    files = LibraryFiles(Path(compare.__file__).parent)
    assert all(files[each.__file__] for each in (torch, torch.nn.functional, compare, contextlib))
    assert not files[__file__]


def test_a_warning_and_a_place_name_the_line_that_leads_there():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        line = currentframe().f_lineno + 1
        warn_user("of this line")
    assert [(each.filename, each.lineno) for each in found] == [(__file__, line)]
    assert user_place().location == f"test_user_frames.py:{currentframe().f_lineno}"
