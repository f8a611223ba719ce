"""The recorder: spans, arrivals in any thread, and the trace that is made of the recordings of all ranks."""

import json
import pickle
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import pytest

from distdl_rma.errors import ProtocolError
from distdl_rma.trace import Counters, Event, Recording, Tracer, chrome_trace


@pytest.fixture
def tracer():
    return Tracer()


def test_nothing_is_recorded_unless_asked_for(tracer):
    with tracer.span("local", "a"):
        tracer.depart("allreduce", "a")()
        assert tracer.watched("allreduce", "a", lambda: True)()
    assert tracer.begin(0).events == []


def test_spans_are_events_in_the_order_in_which_they_end(tracer):
    recording = tracer.begin(3)
    with tracer.span("local", "outer"):
        with tracer.span("remote", "conv", backward=True):
            pass
        with tracer.span("start", "conv"):
            pass
    tracer.end()
    assert recording.rank == 3
    remote, start, outer = recording.events
    assert (remote.kind, remote.name, remote.backward, remote.travels) == ("remote", "conv", True, False)
    assert 0 <= outer.begin <= remote.begin <= remote.end <= start.begin <= start.end <= outer.end
    assert not outer.backward


def test_marks_are_spans_one_after_the_other(tracer):
    tracer.marks("conv")("start")
    recording = tracer.begin(0)
    mark = tracer.marks("conv", backward=True)
    for kind in ("start", "local", "", "wait", ""):
        mark(kind)
    assert [(event.kind, event.name, event.backward) for event in recording.events] == [
        (kind, "conv", True) for kind in ("start", "local", "wait")
    ]
    start, local, wait = recording.events
    assert start.begin <= start.end == local.begin <= local.end <= wait.begin <= wait.end


def test_a_span_that_raises_is_recorded_and_raises(tracer):
    recording = tracer.begin(0)
    with pytest.raises(KeyError), tracer.span("wait", "a"):
        raise KeyError
    assert [event.kind for event in recording.events] == ["wait"]


def test_arrival_is_recorded_once_whoever_notices_it(tracer):
    recording = tracer.begin(0)
    arrive = tracer.depart("allreduce", "gradients")
    together = threading.Barrier(8)

    def notice():
        together.wait()
        arrive()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: notice(), range(8)))
    (event,) = recording.events
    assert event.travels and event.kind == "allreduce" and event.name == "gradients"


def test_watched_poll_arrives_when_it_returns_true(tracer):
    recording = tracer.begin(0)
    answers = iter([False, True, True])
    poll = tracer.watched("exchange", "halo", lambda: next(answers))
    assert not poll() and not recording.events
    assert poll() and len(recording.events) == 1
    assert poll() and len(recording.events) == 1


def test_what_still_travels_ends_with_the_recording(tracer):
    recording = tracer.begin(0)
    arrive = tracer.depart("allreduce", "late")
    tracer.end()
    assert [event.name for event in recording.events] == ["late"]
    later = tracer.begin(0)
    arrive()
    assert len(recording.events) == 1 and not later.events


def test_recordings_do_not_nest(tracer):
    tracer.begin(0)
    with pytest.raises(ProtocolError, match="a recording of this machine is under way"):
        tracer.begin(0)
    tracer.end()
    tracer.end()
    tracer.begin(0)


def test_a_recording_can_be_sent_as_it_is(tracer):
    recording = tracer.begin(1)
    with tracer.span("local", "a"):
        pass
    tracer.end()
    assert pickle.loads(pickle.dumps(recording)) == recording


# ---------------------------------------------------------------------------------------------- the trace


EVENTS = [
    Event("start", "conv", 0.001, 0.002),
    Event("remote", "conv", 0.005, 0.006, backward=True),
    Event("local", "conv", 0.001, 0.006),
    Event("exchange", "conv", 0.0015, 0.004, travels=True),
    Event("allreduce", "gradients 0", 0.003, 0.007, travels=True),
]


def rows_of(*recordings):
    trace = json.loads(chrome_trace(recordings))
    assert trace["displayTimeUnit"] == "ms"
    return trace["traceEvents"]


def test_trace_has_a_process_per_rank_with_its_name():
    rows = rows_of(Recording(1, EVENTS), Recording(0, []))
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    assert [row["pid"] for row in rows] == sorted(row["pid"] for row in rows)
    assert all(row["args"]["name"] == "does" for row in rows if row["name"] == "thread_name")


def test_what_a_rank_does_is_complete_events_that_nest():
    rows = [row for row in rows_of(Recording(0, EVENTS)) if row["ph"] == "X"]
    assert [row["name"] for row in rows] == ["local conv", "start conv", "remote conv"]
    assert rows[0]["ts"] == pytest.approx(1000) and rows[0]["dur"] == pytest.approx(5000)
    assert [row["args"]["backward"] for row in rows] == [False, False, True]
    open_until = []
    for row in rows:
        while open_until and open_until[-1] <= row["ts"]:
            open_until.pop()
        assert not open_until or row["ts"] + row["dur"] <= open_until[-1] + 1e-6
        open_until.append(row["ts"] + row["dur"])


def test_what_travels_begins_and_ends_once_under_a_number_of_its_own():
    rows = [row for row in rows_of(Recording(0, EVENTS), Recording(1, EVENTS)) if row["ph"] in "be"]
    assert Counter(row["id"] for row in rows) == dict.fromkeys(range(1, 5), 2)
    for number in range(1, 5):
        begin, end = (row for row in rows if row["id"] == number)
        assert (begin["ph"], end["ph"]) == ("b", "e")
        assert begin["ts"] <= end["ts"]
        assert all(begin[key] == end[key] for key in ("pid", "name", "cat"))


def test_every_row_has_what_the_format_asks_for():
    for row in rows_of(Recording(0, EVENTS)):
        assert {"ph", "pid", "name"} <= set(row)
        if row["ph"] != "M":
            assert {"ts", "tid", "cat"} <= set(row)
            assert row["ts"] >= 0


def test_counters_begin_at_nothing_and_are_each_ranks_own():
    one, another = Counters(), Counters()
    one.puts += 1
    one.seconds_waited += 0.5
    assert not any(astuple(another)) and (one.puts, one.seconds_waited) == (1, 0.5)
