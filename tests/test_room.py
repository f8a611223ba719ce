"""What ``make room`` checks for a room: its files and tests, and those of the folders that import it."""

from __future__ import annotations

import pytest

from tests.room import ROOT, importing, imports, module_of, sources_for, suite_for


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("written", ["ops/conv", "ops/conv/", "distdl_rma/ops/conv"])
def test_a_room_is_a_folder_however_it_is_written(written):
    assert module_of(written) == "ops.conv"


def test_a_file_beside_the_folders_is_a_room():
    assert module_of("errors.py") == "errors"
    assert "tests/test_errors.py" in names(suite_for("errors"))


@pytest.mark.parametrize("written", ["", "no/such", "../tests"])
def test_what_is_no_room_is_refused(written):
    with pytest.raises(ValueError, match="distdl_rma has no room"):
        module_of(written)


def test_importers_are_folders_outside_of_the_room():
    assert importing("ops.conv") == ["layers", "split.functions.images"]
    assert importing("doctor") == ["__main__"]


def test_a_folder_within_another_is_checked_once():
    assert names(sources_for("split.functions.images")) == ["distdl_rma/split/functions"]


def test_tests_are_those_of_the_room_and_those_of_importers_that_import_it():
    tests = names(suite_for("ops.conv"))
    assert "tests/ops/conv/test_kernels.py" in tests
    assert "tests/layers/conv/test_arguments.py" in tests
    assert "tests/layers/norm/test_base.py" not in tests
    assert len(set(tests)) == len(tests)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("from distdl_rma.ops.conv import kernels", True),
        ("from distdl_rma.ops.conv.kernels import convolution", True),
        ("def test():\n    import distdl_rma.ops.conv.kernels", True),
        ("from distdl_rma.ops import conv, norm", True),
        ("from distdl_rma.ops.convolutions import conv", False),
        ("from distdl_rma.ops.norm import normalisation", False),
        ("# distdl_rma.ops.conv", False),
    ],
)
def test_a_program_imports_a_room(program, expected):
    assert imports(program, "ops.conv") is expected
