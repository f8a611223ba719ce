"""Adaptive windows: which inputs each output reads; the layers compare what they compute with torch's."""

from hypothesis import given
from hypothesis import strategies as st

from distdl_rma.geometry.halo import TableWindow
from distdl_rma.ops.windows import _contributions, _even


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_contributions_of_all_parts_make_every_window(n, m, data):
    window = TableWindow.adaptive(n, m)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    read = []
    for own in zip([0, *cuts], [*cuts, n], strict=True):
        sums = window.readers(*own) if own[0] < own[1] else (0, 0)
        inputs, outputs, count = _contributions(window, own, sums)
        assert count == sums[1] - sums[0]
        read += [(j + sums[0], i + own[0]) for i, j in zip(inputs.tolist(), outputs.tolist(), strict=True)]
    assert sorted(read) == [(j, i) for j in range(m) for i in range(window.first[j], window.last[j] + 1)]


@given(st.integers(1, 12), st.integers(1, 12))
def test_even_windows_repeat_first_inputs_only(n, m):
    window = TableWindow.adaptive(n, m)
    for j, row in enumerate(_even(window, 0, m).tolist()):
        assert sorted(set(row)) == list(range(window.first[j], window.last[j] + 1))
        assert row == sorted(row)
        assert len(set(row[row.count(row[0]) - 1 :])) == len(row) - row.count(row[0]) + 1
