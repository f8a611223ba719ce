"""The mutants still fit the files that they change, and what judges them; ``make mutants`` runs them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import mutants
from tests.mutant_list import HAND_MADE, Mutant
from tests.mutant_operators import commands_for, mutants_of, sample
from tests.mutants import ROOT, Results, Verdict, judge, report, run


@pytest.mark.parametrize("mutant", HAND_MADE, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_its_file_once_and_names_tests(mutant: Mutant):
    text = (ROOT / mutant.file).read_text()
    changed = mutant.applied_to(text)
    compile(changed, mutant.file, "exec")
    assert changed != text
    assert all((ROOT / name).is_file() for command in mutant.commands for name in command[1:])


def test_of_every_file_the_same_mutants_are_made_and_each_is_another_program():
    chosen = sample(1)
    assert len({mutant.file for mutant in chosen}) == len(chosen) >= 150
    for mutant in chosen:
        text = (ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(mutant.applied_to(text))) != ast.dump(ast.parse(text))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("if a < b: pass", ["if a <= b: pass"]),
        ("x = (a) is not None", ["x = (a) is None"]),
        ("x = a and b and c", ["x = a or b and c", "x = a and b or c"]),
        ("x = n // m + k", ["x = n // m - k", "x = n * m + k"]),
        ("n += m", ["n -= m", "pass"]),
        ("x = y if z else u", ["x = y if not (z) else u"]),
        ("x = not y", ["x = y"]),
        ("x = [True, 4, 64]", ["x = [False, 4, 64]", "x = [True, 5, 64]", "x = [True, 3, 64]"]),
        ("while x: break", ["while not (x): break", "while x: continue"]),
        ("é[a] = x", ["pass"]),
        ("self.send(é)", ["pass"]),
        ('"text"', []),
        ('x = f"{n + m}" + y', []),
        ('raise E("text", n + 1)', []),
        ("__all__ = [1]", []),
        ("if TYPE_CHECKING: f()", []),
        ("x: L[1]", []),
        ("@overload\ndef f(x=1): ...", []),
        ("zip(x, strict=True)", ["pass"]),
    ],
)
def test_operators_change_one_place_and_no_texts(line, expected):
    text = f"y = x\n{line}\ny = z\n"
    assert [one.applied_to(text) for one in mutants_of("distdl_rma/trace.py", text)] == [
        f"y = x\n{new}\ny = z\n" for new in expected
    ]


def test_tests_of_the_file_judge_it_then_those_of_its_room():
    plain, mpi, of_room, mpi_of_room = commands_for("distdl_rma/layers/ops/conv/convolution.py")
    assert plain == ("plain", "tests/layers/ops/conv/test_convolution.py")
    assert mpi == ("2", "--day", "0", "tests/layers/ops/conv/test_convolution.py")
    assert "tests/layers/partitioned/conv/test_arguments.py" in of_room
    assert mpi_of_room[:3] == mpi[:3]


def test_a_run_goes_on_where_it_stopped_and_says_what_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands = (("plain", "first"), ("2", "second"))
    asked = []

    def judged(tree, command, limit):
        asked.append((*command, (tmp_path / "distdl_rma/layers/ops/x.py").read_text()))
        return Verdict(asked[-1][1:] == ("second", "x = 2\n"), "", 1.0)

    monkeypatch.setattr(mutants, "judge", judged)
    (tmp_path / "distdl_rma/layers/ops").mkdir(parents=True)
    (tmp_path / "distdl_rma/layers/ops/x.py").write_text("x = 1\n")
    ones = [Mutant(f"x.py:{n}", "distdl_rma/layers/ops/x.py", "1", str(n), commands) for n in (2, 3)]
    for one in ones:
        run(tmp_path, one, Results(tmp_path / "results"))
    programs = ["x = 1\n", "x = 2\n", "x = 1\n", "x = 2\n", "x = 3\n", "x = 3\n"]
    assert [program for *_, program in asked] == programs
    *living, table = report(ones, Results(tmp_path / "results"))
    assert living[0] == "\ndistdl_rma/layers/ops/x.py: x.py:3\n- 1\n+ 3"
    assert table.split() == ["all", "2", "1", "1", "50%"]


def test_tests_that_fail_are_told_from_those_that_pass(tmp_path: Path):
    (tmp_path / "test_it.py").write_text("import os\ndef test_it(): assert os.getcwd() == 'elsewhere'\n")
    command = ("plain", "--rootdir=.", "test_it.py")
    assert judge(tmp_path, command, 60).failed
    (tmp_path / "test_it.py").write_text("import os\ndef test_it(): assert os.getcwd() != 'elsewhere'\n")
    assert not judge(tmp_path, command, 60).failed
    assert not judge(tmp_path, (*command, "-k", "none"), 60).failed
