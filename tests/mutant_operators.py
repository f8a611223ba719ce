"""The mutants that operators make of the package, each at one place of one file, and a fixed sample of them.

The operators change comparisons, arithmetic, ``and`` and ``or``, conditions, truth values, small numbers,
``continue`` and ``break``, and drop statements that call something or write into something. Texts, errors,
annotations and decorators stay.
"""

from __future__ import annotations

import ast
import heapq
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any

from tests import room
from tests.mutant_list import Mutant

Change = Callable[[str], str]
Edit = tuple[tuple[int, int], tuple[int, int], Change]

TOKENS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
}  # fmt: skip
# Larger numbers are sizes and times: one more changes nothing.
LARGEST = 9
# Conditions that are changed without a new ``not``.
CHANGED = (ast.Compare, ast.UnaryOp)
# Arguments of these are texts of errors, or for type checkers.
TEXTS = {"refused", "warn", "cast", "TypeVar"}
KEY = attrgetter("key")


def sample(each: int) -> list[Mutant]:
    """``each`` mutants of every file of the package, those of the smallest keys, sorted by key."""
    chosen: list[Mutant] = []
    for path in sorted(room.PACKAGE.rglob("*.py")):
        found = mutants_of(str(path.relative_to(room.ROOT)), path.read_text())
        # Equal changes of equal lines have one key.
        chosen += heapq.nsmallest(each, {one.key: one for one in found}.values(), KEY)
    return sorted(chosen, key=KEY)


@cache
def commands_for(file: str) -> tuple[tuple[str, ...], ...]:
    """Tests of a file, then those of its room: without MPI, on 2 ranks, on 3 where a test needs them."""
    module = ".".join(Path(file).with_suffix("").parts[1:]).removesuffix(".__init__")
    if module == "__init__":
        return (("plain", "tests/test_import.py"),)
    folder = room.folder_of(f"distdl_rma.{module}").removeprefix("distdl_rma.")
    found = []
    for tests in room.suite_of(module), room.suite_for(folder):
        mpi = [test for test in tests if "mark.mpi" in test.read_text()]
        three = [test for test in mpi if re.search(r"sizes\(3|min_size=3", test.read_text())]
        # Of random cases a third, the same every day.
        for run, chosen in (("plain",), tests), (("2", "--day", "0"), mpi), (("3", "--day", "0"), three):
            found += [(*run, *(str(test.relative_to(room.ROOT)) for test in chosen))] if chosen else []
    return tuple(found)


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """All mutants of a file: the lines that an edit touches, and what they become."""
    lines = text.split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node in read(ast.parse(text)):
        for first, last, change in edits(node):
            begin, end = place(*first), place(*last)
            top, bottom = starts[first[0] - 1], starts[last[0]] - 1
            old, new = text[top:bottom], text[top:begin] + change(text[begin:end]) + text[end:bottom]
            yield Mutant(f"{file}:{first[0]}", file, old, new, at=top)


def read(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those below it that operators may change."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.If(test=ast.Name("TYPE_CHECKING")):
            return
        case ast.Assign(targets=[ast.Name("__all__")]) | ast.keyword("strict"):
            return
        case ast.FunctionDef(decorator_list=[ast.Name("overload"), *_]):
            return
        case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)) if name in TEXTS:
            return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in {"annotation", "returns", "decorator_list"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from read(child)


def edits(node: ast.AST) -> Iterator[Edit]:
    """Edits of a node: from where to where, in lines and bytes, and what becomes of the text between."""
    match node:
        case ast.Compare(left, operators, right):
            yield from map(swapped, operators, [left, *right], right)
        case ast.BoolOp(operator, values):
            yield from map(swapped, repeat(operator), values, values[1:])
        case ast.BinOp(left, operator, right) | ast.AugAssign(left, operator, right):
            if type(operator) in TOKENS and not is_text(left) and not is_text(right):
                yield swapped(operator, left, right)
        case ast.UnaryOp(ast.Not()):
            yield whole(node, lambda text: text.removeprefix("not").lstrip())
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if not isinstance(test, CHANGED):
            yield whole(test, "not ({})".format)
        case ast.Constant(bool(value)):
            yield whole(node, lambda _: str(not value))
        case ast.Constant(int(value)) if value <= LARGEST:
            yield whole(node, lambda _: str(value + 1))
            yield whole(node, lambda _: str(value - 1))
        case ast.Continue():
            yield whole(node, lambda _: "break")
        case ast.Break():
            yield whole(node, lambda _: "continue")
    match node:
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Assign([ast.Subscript()]):
            yield whole(node, lambda _: "pass")


def whole(node: Any, change: Change) -> Edit:
    """Change all of a node."""
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), change


def swapped(operator: ast.AST, left: ast.AST, right: ast.AST) -> Edit:
    """Change the operator between two nodes into another."""
    old, new = TOKENS[type(operator)]
    return whole(left, str)[1], whole(right, str)[0], lambda text: text.replace(old, new, 1)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
