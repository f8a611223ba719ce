"""Machines of a process that go on while it waits in another one."""

import gc

from distdl_rma.segments.waiting import open_machines
from distdl_rma.segments.waiting.open_machines import others_go_on, register, unregister


class Counting:
    def __init__(self):
        self.steps = 0

    def go_on(self):
        self.steps += 1


def test_all_but_the_one_that_waits_go_on(monkeypatch):
    monkeypatch.setattr(open_machines, "_open", ())
    first, second = Counting(), Counting()
    register(first)
    others_go_on(first)
    register(second)
    others_go_on(first)
    others_go_on(None)
    assert (first.steps, second.steps) == (1, 2)
    unregister(second)
    unregister(second)
    others_go_on(None)
    assert (first.steps, second.steps) == (2, 2)


def test_to_be_registered_keeps_nothing_alive(monkeypatch):
    monkeypatch.setattr(open_machines, "_open", ())
    gone = Counting()
    register(gone)
    del gone
    gc.collect()
    others_go_on(None)
    register(kept := Counting())
    assert len(open_machines._open) == 1 and open_machines._open[0]() is kept
