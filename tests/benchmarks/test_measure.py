"""Variants are timed in turn, and rows say by how much they differ."""

from __future__ import annotations

import time

from benchmarks.measure import WARM_UPS, compare, in_turn, summary


def test_variants_take_turns_and_no_one_always_runs_behind_the_same_other():
    calls = []
    names = ("a", "b", "c")
    variants = {name: (lambda name=name: calls.append(name)) for name in names}
    samples = in_turn(variants, repetitions=4, inner=2)
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys(names, 4)
    rounds = ["".join(calls[at : at + 6 : 2]) for at in range(0, len(calls), 6)]
    assert len(rounds) == 4 + WARM_UPS
    assert rounds == ["cba" if at % 2 == 0 else "abc" for at in range(len(rounds))]


def test_a_row_has_medians_and_half_the_distance_of_the_quartiles():
    assert summary([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == (4.0, 2.0)


def test_what_takes_longer_has_the_higher_ratio():
    how = {"against": "fast", "target": 2.0, "inner": 1, "repetitions": 4}
    row = compare("slow", lambda: time.sleep(0.05), lambda: None, **how)
    assert row.ratio > 1
    assert row.ours_us >= 50_000
    assert (row.what, row.baseline, row.target, row.unit) == ("slow", "fast", 2.0, "us")
