"""The mutants still fit the files that they change; ``make mutants`` runs them."""

from pathlib import Path

import pytest

from tests.mutant_list import MUTANTS, Mutant
from tests.mutants import ROOT, judge


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_its_file_once_and_names_tests(mutant: Mutant):
    text = (ROOT / mutant.file).read_text()
    changed = mutant.applied_to(text)
    compile(changed, mutant.file, "exec")
    assert changed != text
    assert all((ROOT / name).is_file() for name in mutant.command[1:])


def test_there_are_thirty_mutants_of_different_names():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30


def test_tests_that_fail_are_told_from_those_that_pass(tmp_path: Path):
    (tmp_path / "test_it.py").write_text("import os\ndef test_it(): assert os.getcwd() == 'elsewhere'\n")
    command = ("plain", "--rootdir=.", "test_it.py")
    assert judge(tmp_path, command).failed
    (tmp_path / "test_it.py").write_text("import os\ndef test_it(): assert os.getcwd() != 'elsewhere'\n")
    assert not judge(tmp_path, command).failed
