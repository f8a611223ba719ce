"""What ``make room`` checks for a room: its files and tests, and those of the folders that import it."""

from __future__ import annotations

import pytest

from tests.room import ROOT, importing, imports, module_of, sources_for, suite_for


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("written", ["layers/ops/conv", "layers/ops/conv/", "distdl_rma/layers/ops/conv"])
def test_a_room_is_a_folder_however_it_is_written(written):
    assert module_of(written) == "layers.ops.conv"


def test_a_file_beside_the_folders_is_a_room():
    assert module_of("errors.py") == "errors"
    assert "tests/test_errors.py" in names(suite_for("errors"))


@pytest.mark.parametrize("written", ["", "no/such", "../tests"])
def test_what_is_no_room_is_refused(written):
    with pytest.raises(ValueError, match="distdl_rma has no room"):
        module_of(written)


def test_importers_are_folders_outside_of_the_room():
    assert importing("layers.ops.conv") == ["layers.partitioned", "layers.split.functions"]
    assert importing("doctor") == ["__main__"]


def test_a_folder_within_another_is_checked_once():
    assert names(sources_for("layers.partitioned.loss")) == ["distdl_rma/layers/partitioned"]


def test_tests_are_those_of_the_room_and_those_of_importers_that_import_it():
    tests = names(suite_for("layers.ops.conv"))
    assert "tests/layers/ops/conv/test_kernels.py" in tests
    for name in ("conv/test_arguments.py", "test_random.py"):
        assert f"tests/layers/partitioned/{name}" in tests
    assert "tests/layers/partitioned/norm/test_base.py" not in tests
    assert len(set(tests)) == len(tests)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("from distdl_rma.layers.ops.conv import kernels", True),
        ("from distdl_rma.layers.ops.conv.kernels import convolution", True),
        ("def test():\n    import distdl_rma.layers.ops.conv.kernels", True),
        ("from distdl_rma.layers.ops import conv, norm", True),
        ("from distdl_rma.layers.ops.convolutions import conv", False),
        ("from distdl_rma.layers.ops.norm import normalisation", False),
        ("# distdl_rma.layers.ops.conv", False),
    ],
)
def test_a_program_imports_a_room(program, expected):
    assert imports(program, "layers.ops.conv") is expected
