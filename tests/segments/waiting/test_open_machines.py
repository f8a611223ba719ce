"""Machines of a process that go on while it waits in another one."""

import gc

from distdl_rma.segments.waiting import open_machines
from distdl_rma.segments.waiting.open_machines import advance_other_machines, register, unregister


class Counting:
    def __init__(self):
        self.steps = 0

    def advance_quietly(self):
        self.steps += 1


def test_all_but_the_one_that_waits_go_on(monkeypatch):
    monkeypatch.setattr(open_machines, "_open", ())
    first, second = Counting(), Counting()
    register(first)
    advance_other_machines(first)
    register(second)
    advance_other_machines(first)
    advance_other_machines(None)
    assert (first.steps, second.steps) == (1, 2)
    unregister(second)
    unregister(second)
    advance_other_machines(None)
    assert (first.steps, second.steps) == (2, 2)


def test_to_be_registered_keeps_nothing_alive(monkeypatch):
    monkeypatch.setattr(open_machines, "_open", ())
    gone = Counting()
    register(gone)
    del gone
    gc.collect()
    advance_other_machines(None)
    register(kept := Counting())
    assert len(open_machines._open) == 1 and open_machines._open[0]() is kept
