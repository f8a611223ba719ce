"""Sizes of segments as users write them."""

from __future__ import annotations

import numpy as np
import pytest

from distdl_rma.errors import ConfigurationError
from distdl_rma.segments.transport.segment import parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        (np.int64(4096), 4096),
        ("4096", 4096),
        ("1B", 1),
        ("3KiB", 3 << 10),
        ("512 MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("1TiB", 1 << 40),
        ("  7\tKiB ", 7 << 10),
        ("007", 7),
    ],
)
def test_sizes_are_numbers_of_bytes_with_a_unit_or_without(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "0",
        0,
        "0MiB",
        -1,
        "-1",
        "+1",
        1.0,
        "1.5GiB",
        "1e9",
        "1GB",
        "1gib",
        "1 G",
        "1_000",
        "2GiB 3MiB",
        "1 GiB x",
        "0x10",
        True,
        None,
    ],
)
def test_anything_else_is_refused_with_what_came(text):
    with pytest.raises(ConfigurationError) as caught:
        parse_size(text)
    assert str(caught.value).startswith("a segment size is a whole number of bytes or one with a unit (")
    assert str(caught.value).endswith(f", got {text!r}")
    assert isinstance(caught.value, ValueError)
