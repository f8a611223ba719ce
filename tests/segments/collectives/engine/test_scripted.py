"""Steps that are generators: advanced until they are over, and broken for good by what interrupts them."""

import threading
from types import SimpleNamespace

import pytest

from distdl_rma.segments.collectives.engine.stepped_algorithm import Scripted


def scripted(script):
    step = Scripted(SimpleNamespace(segment=SimpleNamespace(lock=threading.RLock())))
    step._running = script
    return step


def test_a_step_is_over_when_its_script_is():
    step = scripted(iter([None, None]))
    assert [step.advance() for _ in range(4)] == [False, False, True, True]
    assert not step.broken


def test_an_interrupted_step_counts_as_over_and_says_what_it_was():
    def script():
        yield
        raise KeyError("half done")

    step = scripted(script())
    assert not step.advance()
    with pytest.raises(KeyError):
        step.advance()
    assert step.advance()
    assert step.broken == "KeyError('half done')"
