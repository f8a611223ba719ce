"""Plugin of pytest that runs MPI tests on virtual ranks, in one process.

``pytest -p no:pytest_mpi -p tests.virtual_ranks --virtual-ranks 5 tests/segments``

Time is virtual too: while all ranks only wait, it passes without their waiting for it. So a test of a timeout
takes as long as its turns.
"""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from _pytest.monkeypatch import NOTSET  # type: ignore[attr-defined]
from mpi4py import MPI

from distdl_rma import rehearse
from distdl_rma.segments.virtual_ranks import rehearse as rehearsal
from distdl_rma.segments.virtual_ranks import turns
from distdl_rma.segments.virtual_ranks.comm import VirtualComm, virtual_rank

# Fixtures that each rank needs for itself, as it does those that are made of them.
_OF_RANK = _WORLD, _PATCHES = "comm", "monkeypatch"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--virtual-ranks", type=int, default=0, metavar="N", help="run MPI tests on N threads of this process"
    )
    parser.addoption("--virtual-nodes", type=int, default=1, metavar="N", help="of so many nodes")
    parser.addoption("--virtual-seed", type=int, default=0, metavar="N", help="draws the order of the ranks")
    # Of pytest-mpi, which is not loaded.
    parser.addoption("--with-mpi", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("mpi(min_size): test of ranks", "mpi_skip: none of them"):
        config.addinivalue_line("markers", mark)
    if config.getoption("--virtual-ranks"):
        _Clock().set()
        VirtualComm.hand_over = _hand_over  # type: ignore[assignment,method-assign]
        pytest.MonkeyPatch = PatchesOfRank  # type: ignore[misc]
        MPI.COMM_WORLD = _World(MPI.COMM_WORLD)  # type: ignore[misc,assignment]
        states = rehearsal._states
        rehearsal._states = lambda: [
            *states(),
            (_warnings_of_rank, _set_warnings),
            (_patches_taken_back, _set_patches),
        ]


class _World:
    """COMM_WORLD of the rank that uses it."""

    def __init__(self, of_process: MPI.Intracomm) -> None:
        self._of_process = of_process

    def __getattr__(self, name: str) -> Any:
        return getattr(virtual_rank() or self._of_process, name)


class _Clock:
    """The clocks of ``time``, which go on where virtual ranks would sleep."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._sleep = time.sleep

    def set(self) -> None:
        """Replace the clocks, and what gives a core away."""
        for name in ("monotonic", "perf_counter", "time"):
            real = getattr(time, name)
            setattr(time, name, lambda real=real: real() + self._ahead)
        time.sleep = self.sleep  # type: ignore[assignment]
        os.sched_yield = lambda: self.sleep(0)
        turns.sleep = self._pass  # type: ignore[assignment,attr-defined]

    def _pass(self, seconds: float) -> None:
        self._ahead += 5 * seconds

    def sleep(self, seconds: float) -> None:
        """Let other ranks run for so long; outside of ranks, sleep."""
        comm: Any = virtual_rank()
        if comm is None:
            self._sleep(seconds)
            return
        until, turns = time.monotonic() + seconds, comm._together.turns
        turns.pause(comm._whole)
        while time.monotonic() < until:
            turns.pause(comm._whole)


def _warnings_of_rank() -> tuple[Any, ...]:
    return warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl  # type: ignore[attr-defined]


def _set_warnings(state: tuple[Any, ...]) -> None:
    filters, warnings.showwarning, warnings._showwarnmsg_impl = state  # type: ignore[attr-defined]
    if filters is not warnings.filters:
        warnings.filters = filters
        warnings._filters_mutated()  # type: ignore[attr-defined]


_HAND_OVER = VirtualComm.hand_over
# How to make each patch of the rank that runs, and how to take it back.
_patches: list[tuple[object, Callable[[], object], Callable[[], object]]] = []


def _patches_taken_back() -> list[Any]:
    for *_, take_back in reversed(_patches):
        take_back()
    patches = _patches[:]
    _patches.clear()
    return patches


def _set_patches(patches: list[Any]) -> None:
    for _, make, _ in patches:
        make()
    _patches[:] = patches


def _hand_over(comm: VirtualComm, ready: Callable[[], bool] | None = None) -> bool:
    # Another rank's thread, which would test what a rank with patches waits for, does not see these.
    return _HAND_OVER(comm, None if _patches else ready)


class PatchesOfRank(pytest.MonkeyPatch):  # type: ignore[misc]
    """``monkeypatch`` of one rank, whose patches the other ranks do not see."""

    def setattr(self, *args: Any, **kwargs: Any) -> None:
        super().setattr(*args, **kwargs)
        target, name, before = self._setattr[-1]
        self._note(partial(setattr, target, name, args[-1]), _restored(target, name, before))

    def delattr(self, *args: Any, **kwargs: Any) -> None:
        known = len(self._setattr)
        super().delattr(*args, **kwargs)
        if len(self._setattr) > known:
            target, name, before = self._setattr[-1]
            self._note(partial(delattr, target, name), partial(setattr, target, name, before))

    def setitem(self, dic: Any, name: Any, value: Any) -> None:
        super().setitem(dic, name, value)
        _, _, before = self._setitem[-1]
        take_back = partial(dic.pop, name) if before is NOTSET else partial(dic.__setitem__, name, before)
        self._note(partial(dic.__setitem__, name, value), take_back)

    def delitem(self, dic: Any, name: Any, raising: bool = True) -> None:
        known = len(self._setitem)
        super().delitem(dic, name, raising)
        if len(self._setitem) > known and self._setitem[-1][2] is not NOTSET:
            self._note(partial(dic.pop, name), partial(dic.__setitem__, name, self._setitem[-1][2]))

    def _note(self, make: Callable[[], object], take_back: Callable[[], object]) -> None:
        if virtual_rank() is not None:
            _patches.append((self, make, take_back))

    def undo(self) -> None:
        super().undo()
        _patches[:] = [patch for patch in _patches if patch[0] is not self]


def _restored(target: object, name: str, before: object) -> Callable[[], object]:
    return partial(delattr, target, name) if before is NOTSET else partial(setattr, target, name, before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if size := config.getoption("--virtual-ranks"):
        chosen = [item for item in items if isinstance(item, pytest.Function) and _fits(item, size)]
        config.hook.pytest_deselected(items=[item for item in items if item not in {*chosen}])
        items[:] = chosen
        for item in chosen:
            # Those that depend on ranks are made on each of them.
            item.fixturenames = [name for name in item.fixturenames if _definition(item, name) is None]


def _fits(item: pytest.Function, size: int) -> bool:
    # Whether a test is one of MPI for so many ranks.
    mark = item.get_closest_marker("mpi")
    if mark is None or item.get_closest_marker("processes") is not None:
        return False
    return bool(size >= (mark.args[0] if mark.args else mark.kwargs.get("min_size", 1)))


def _definition(item: pytest.Function, name: str) -> Any:
    # Definition of a fixture that depends on the ranks; None for others.
    found = item._fixtureinfo.name2fixturedefs.get(name)
    if not found:
        return None
    of_rank = name in _OF_RANK or any(_definition(item, each) is not None for each in found[-1].argnames)
    return found[-1] if of_rank else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    options = pyfuncitem.config.option
    if not options.virtual_ranks:
        return None
    nodes = min(options.virtual_nodes, options.virtual_ranks)
    rehearse(options.virtual_ranks, _RankOfTest(pyfuncitem).run, seed=options.virtual_seed, nodes=nodes)
    return True


class _RankOfTest:
    def __init__(self, item: pytest.Function) -> None:
        self._item = item

    def run(self, comm: VirtualComm) -> None:
        with ExitStack() as stack:
            made: dict[str, Any] = {_WORLD: comm, _PATCHES: PatchesOfRank()}
            stack.callback(made[_PATCHES].undo)
            info = self._item._fixtureinfo
            for name in info.initialnames:
                self._value(name, made, stack)
            self._item.obj(**{name: self._value(name, made, stack) for name in info.argnames})

    def _value(self, name: str, made: dict[str, Any], stack: ExitStack) -> Any:
        if name not in made:
            definition = _definition(self._item, name)
            made[name] = (
                self._item.funcargs[name] if definition is None else self._made(definition, made, stack)
            )
            if name == "tmp_path":
                # Each process has one of its own.
                made[name] = made[name] / f"rank-{made[_WORLD].rank}"
                made[name].mkdir(exist_ok=True)
        return made[name]

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
        self.node, self.config, self.module = item, item.config, item.module
