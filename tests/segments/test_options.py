"""What users choose: sizes of segments, timeouts, progress."""

from __future__ import annotations

import numpy as np
import pytest

from distdl_rma.errors import ConfigurationError
from distdl_rma.segments.options import (
    DEFAULT_TIMEOUT,
    SegmentOptions,
    check_timeout,
    chosen_progress,
    chosen_timeout,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(4096, 4096), (np.int64(4096), 4096), ("4096", 4096), ("1B", 1), ("3KiB", 3 << 10),
     ("512 MiB", 512 << 20), ("2GiB", 2 << 30), ("1TiB", 1 << 40), ("  7\tKiB ", 7 << 10), ("007", 7)],
)  # fmt: skip
def test_sizes_are_numbers_of_bytes_with_a_unit_or_without(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "0", 0, "0MiB", -1, "-1", "+1", 1.0, "1.5GiB", "1e9", "1GB", "1gib", "1 G", "1_000",
     "2GiB 3MiB", "1 GiB x", "0x10", True, None],
)  # fmt: skip
def test_anything_else_is_refused_with_what_came(text):
    with pytest.raises(ConfigurationError) as caught:
        parse_size(text)
    assert str(caught.value).startswith("a segment size is a whole number of bytes or one with a unit (")
    assert str(caught.value).endswith(f", got {text!r}")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("text", ["1GB", "", "0"])
def test_an_invalid_size_of_the_environment_is_named_with_its_variable(monkeypatch, text):
    monkeypatch.setenv("DISTDL_RMA_SEGMENT_SIZE", text)
    with pytest.raises(ConfigurationError, match=rf"^DISTDL_RMA_SEGMENT_SIZE is a whole .* got {text!r}$"):
        SegmentOptions().size()
    assert SegmentOptions("1KiB").size() == 1024


def test_a_timeout_comes_from_the_argument_else_the_environment_else_it_is_the_default(monkeypatch):
    monkeypatch.delenv("DISTDL_RMA_TIMEOUT", raising=False)
    assert (
        chosen_timeout(None) == DEFAULT_TIMEOUT
        and chosen_timeout(2) == 2.0
        and check_timeout(None, 3.0) == 3.0
    )
    monkeypatch.setenv("DISTDL_RMA_TIMEOUT", "7.5")
    assert chosen_timeout(None) == 7.5 and chosen_timeout(2) == 2.0
    monkeypatch.setenv("DISTDL_RMA_TIMEOUT", "-7")
    with pytest.raises(ConfigurationError, match="DISTDL_RMA_TIMEOUT is a number of seconds"):
        chosen_timeout(None)


def test_the_engine_is_chosen_by_name_or_by_whether_peers_are_far():
    assert chosen_progress("none", has_remote=True) == "none"
    assert chosen_progress(None, has_remote=False) == "none"


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"transport": "pigeon"}, "transport is one of"),
        *(
            ({"timeout": each}, "a timeout is a number of seconds")
            for each in (-1, "soon", float("nan"), [1])
        ),
        ({"progress": "fibre"}, "progress is one of"),
    ],
)
def test_options_are_checked_together(wrong, what):
    SegmentOptions().check()
    with pytest.raises(ConfigurationError, match=what):
        SegmentOptions(**wrong).check()
