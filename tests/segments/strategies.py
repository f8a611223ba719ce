"""Slices of arrays, as hypothesis draws them."""

import hypothesis.strategies as st


@st.composite
def slices(draw, dims=4, extent=5):
    """Shape of an array and a key into it."""
    shape = tuple(draw(st.lists(st.integers(0, extent), max_size=dims)))
    key = []
    for size in shape:
        if size and draw(st.booleans()):
            key.append(draw(st.integers(-size, size - 1)))
        else:
            bounds = st.none() | st.integers(-extent - 2, extent + 2)
            steps = st.none() | st.integers(-3, 3).filter(bool)
            key.append(slice(draw(bounds), draw(bounds), draw(steps)))
    if draw(st.booleans()):
        left = draw(st.integers(0, len(key)))
        right = draw(st.integers(left, len(key)))
        key[left:right] = [...]
    return shape, tuple(key)
