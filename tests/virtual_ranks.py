"""Plugin of pytest that runs MPI tests on virtual ranks, in one process.

``pytest -p no:pytest_mpi -p tests.virtual_ranks --virtual-ranks 5 tests/segments``
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from distdl_rma import rehearse

if TYPE_CHECKING:
    from distdl_rma.segments.transport.virtual_ranks import VirtualComm

# Fixtures that each rank needs for itself: the communicator, and what is made of it.
_WORLD = "comm"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--virtual-ranks", type=int, default=0, metavar="N", help="run MPI tests on N threads of this process"
    )
    # Of pytest-mpi, which is not loaded.
    parser.addoption("--with-mpi", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("mpi(min_size): test of ranks", "mpi_skip: none of them"):
        config.addinivalue_line("markers", mark)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if size := config.getoption("--virtual-ranks"):
        items[:] = [item for item in items if isinstance(item, pytest.Function) and _fits(item, size)]


def _fits(item: pytest.Function, size: int) -> bool:
    # Whether a test is one of MPI for so many ranks on a node.
    mark = item.get_closest_marker("mpi")
    if mark is None or (hasattr(item, "callspec") and "remote" in item.callspec.params.values()):
        return False
    return bool(size >= (mark.args[0] if mark.args else mark.kwargs.get("min_size", 1)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    size = pyfuncitem.config.getoption("--virtual-ranks")
    if not size:
        return None
    rehearse(size, _RankOfTest(pyfuncitem).run)
    return True


class _RankOfTest:
    def __init__(self, item: pytest.Function) -> None:
        self._item = item

    def run(self, comm: VirtualComm) -> None:
        with ExitStack() as stack:
            made: dict[str, Any] = {_WORLD: comm}
            names = self._item._fixtureinfo.argnames
            self._item.obj(**{name: self._value(name, made, stack) for name in names})

    def _value(self, name: str, made: dict[str, Any], stack: ExitStack) -> Any:
        if name not in made:
            definition = self._of_ranks(name)
            made[name] = (
                self._item.funcargs[name] if definition is None else self._made(definition, made, stack)
            )
        return made[name]

    def _of_ranks(self, name: str) -> Any:
        # Definition of a fixture that depends on the ranks; None for others.
        found = self._item._fixtureinfo.name2fixturedefs.get(name)
        if found and any(each == _WORLD or self._of_ranks(each) for each in found[-1].argnames):
            return found[-1]
        return None

    def _made(self, definition: Any, made: dict[str, Any], stack: ExitStack) -> Any:
        given = {}
        for name in definition.argnames:
            given[name] = (
                _Request(self._item, definition.argname)
                if name == "request"
                else self._value(name, made, stack)
            )
        function: Callable[..., Any] = definition.func
        if not inspect.isgeneratorfunction(function):
            return function(**given)
        generator = function(**given)
        value = next(generator)
        stack.callback(next, generator, None)
        return value


class _Request:
    def __init__(self, item: pytest.Function, name: str) -> None:
        self.param = item.callspec.params.get(name) if hasattr(item, "callspec") else None
        self.node, self.config = item, item.config
