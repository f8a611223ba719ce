"""What a rank moved and waited."""

from dataclasses import astuple

from distdl_rma.segments.counters import Counters


def test_counters_begin_at_nothing_and_are_each_ranks_own():
    one, another = Counters(), Counters()
    one.puts += 1
    one.seconds_waited += 0.5
    assert not any(astuple(another)) and (one.puts, one.seconds_waited) == (1, 0.5)
