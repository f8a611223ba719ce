"""All pages say the same of what splitting gains: what is kept of one run, and no number beside it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from benchmarks.gains import __main__ as command
from benchmarks.gains import page, store
from benchmarks.gains.networks import NETWORKS
from benchmarks.gains.store import Kept, Training
from benchmarks.results.run import ROOT, Run
from benchmarks.row import Row
from benchmarks.scaling.cases import CASES
from benchmarks.scaling.layers import layers_of
from benchmarks.scaling.model import beside
from benchmarks.scaling.plans import Cluster, planned

WHERE_NUMBERS_MAY_BE = ("README.md", "docs/**/*.md", "examples/*.py", "distdl_rma/**/*.py")
GENERATED = re.compile(r"<!-- ([\w ]+): written by .*?<!-- \1: end -->", re.DOTALL)
NETWORK = re.compile(r"U-Net|ScaFFold|DistConv")
NUMBER = re.compile(r"\d of the (time|memory)|\d (ms|MiB)\b|\d times (as|the)")
# Measured elsewhere, and said to be.
ELSEWHERE = "| DistConv | 1,261 ms |"


def test_the_pages_have_what_is_kept():
    for path, text in command.documented().items():
        assert path.read_text() == text, f"{path}: run make bench-docs"


def test_a_number_that_somebody_edits_is_noticed():
    path = ROOT / "README.md"
    text = path.read_text()
    (ratio,) = re.findall(r"^\| 2-D U-Net, 512 x 512 \| \*\*([\d.]+)\*\*", text, re.MULTILINE)
    edited = text.replace(f"**{ratio}**", "**0.10**")
    assert edited != text
    assert page.written(edited, {"gains": page.in_short(gains())}) == text


def test_no_page_has_numbers_of_these_networks_beside_those_that_are_kept():
    found = [
        f"{path.relative_to(ROOT)}: {paragraph}"
        for pattern in WHERE_NUMBERS_MAY_BE
        for path in ROOT.glob(pattern)
        for paragraph in re.split(r"\n\n|\n- ", GENERATED.sub("", path.read_text()))
        if NETWORK.search(paragraph) and NUMBER.search(paragraph) and ELSEWHERE not in paragraph
    ]
    assert not found


def test_all_networks_are_kept_and_of_one_kind_of_machine():
    kept = Kept.read()
    assert list(kept.networks) == list(NETWORKS)
    assert len({each.machine for each in kept.networks.values()}) == 1
    for name, gain in zip(NETWORKS, gains(), strict=True):
        assert all((gain.time(1), gain.time(2), gain.kernels(2), gain.weak(2))), name
        assert all(gain.memory(size) for size in (1, 2, 4)), name


def test_trainings_of_the_example_are_those_of_one_rank():
    trainings = Kept.read().trainings
    assert [each.ranks for each in trainings] == [1, 2, 4]
    assert {each.epochs for each in trainings} == {trainings[0].epochs}
    assert max(max(each.losses, each.scores) for each in trainings) < 1e-6


def test_a_time_of_more_ranks_than_cores_is_a_dash_and_the_memory_beside_it_is_not():
    (gain, *_) = gains()
    rows = tuple(row for row in gain.measured.rows if "4 ranks" not in row.what)
    without = replace(gain, measured=replace(gain.measured, rows=rows))
    (line,) = (line for line in page.everything([without]).splitlines() if "4 ranks" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:6] == [page.DASH] * 5
    assert re.fullmatch(r"[\d,]+", cells[6])
    trained = replace(Kept.read(), trainings=(Training(4, 9.0, 2, 0.5, 1e-9, 0.0),), cores=2)
    assert "| 4 ranks | - | 2 | 0.5000 | 1.0e-09 | 0.0e+00 |" in page.scaffold(trained)


def test_with_rows_by_the_rule_of_thumb_halos_are_the_parts_that_the_page_says():
    case, ranks = CASES[0], 4
    layers = layers_of(case.network(), (1, 1, 8 * 2**case.depth * ranks, 64))
    cluster = Cluster((1, 1, ranks, 1), 1)
    found = {layer.path: beside(planned(layer, cluster, cluster.middle)) for layer in layers}
    page_of_grids = (ROOT / "docs" / "convert.md").read_text()
    for path, rows in (("first.3", 64), (f"down.{case.depth - 1}.3", 8)):
        assert found[path] == 2 / rows
        assert f"{100 * found[path]:.0f} % at the" in page_of_grids
    # Heights that are multiples of the strides times the ranks: pooling and growing move nothing.
    assert not any(found[path] for path in found if path.startswith(("pools", "grow")))


def test_runs_are_said_once_or_with_the_networks_that_they_are_of():
    found = Kept.read().networks
    one = dict.fromkeys(found, next(iter(found.values())))
    assert page.of(one).count("commit") == 1
    first, *_ = one
    assert f"({NETWORKS[first].shown})" in page.of(one | {first: replace(one[first], commit="abc")})


def test_what_is_measured_again_replaces_a_network_as_a_whole(tmp_path):
    name, row = "unet-128", Row("strong scaling", "one process", 2.0, 0.1, 4.0, 0.1, None)
    output, path = tmp_path / "out", tmp_path / "gains.json"
    run = Run("abc", "2026-01-01T00:00:00Z", "torch 2", 2, (row,))
    run.write(output / f"gains-{name}.json")
    store.keep(output, path)
    run.write(output / f"gains-{name}-memory-2.json")
    store.keep(output, path)
    kept = Kept.read(path)
    assert (list(kept.networks), kept.networks[name].rows, kept.trainings) == ([name], (row, row), ())
    replace(run, commit="def").write(output / f"gains-{name}-memory-4.json")
    with pytest.raises(SystemExit, match="of several commits"):
        store.keep(output, path)


def test_trainings_are_compared_with_that_of_the_fewest_ranks(tmp_path):
    for ranks, loss in ((1, 2.0), (2, 2.002)):
        log = tmp_path / "scaffold" / f"{ranks}-ranks" / "log.json"
        log.parent.mkdir(parents=True)
        log.write_text(json.dumps({"seconds": 1.0, "losses": [1.0, loss], "scores": [0.5]}))
    store.keep(tmp_path, tmp_path / "gains.json")
    one, two = Kept.read(tmp_path / "gains.json").trainings
    assert (one.losses, one.ranks, two.epochs, two.dice) == (0.0, 1, 1, 0.5)
    assert two.losses == pytest.approx(1e-3)


def gains() -> list[page.Gain]:
    return [page.Gain(name, each) for name, each in Kept.read().networks.items()]
