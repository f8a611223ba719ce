"""The example that records a training step, run as a user runs it, and the picture that it draws."""

import json
import sys

import pytest
import skimage.io

from tests.examples.launching import EXAMPLES, ended
from tests.run_mpi import completed

pytestmark = pytest.mark.slow

PICTURE = EXAMPLES / "overlap_picture.py"


@pytest.mark.parametrize("ranks", [1, 3])
def test_example_writes_picture_and_trace_of_all_ranks(ranks, tmp_path):
    folder = tmp_path / "not" / "there yet"
    stdout, stderr = ended(0, ranks, EXAMPLES / "overlap.py", "--steps", 2, "--output", folder)
    assert not stderr
    files = f"picture: {folder / 'overlap.png'}", f"trace for ui.perfetto.dev: {folder / 'overlap.json'}"
    assert [line for line in stdout if not line.startswith("status ")] == [*files]
    height, width = skimage.io.imread(folder / "overlap.png").shape[:2]
    assert width > 1000 and height > 100 * ranks
    rows = json.loads((folder / "overlap.json").read_text())["traceEvents"]
    assert {row["pid"] for row in rows} == set(range(ranks))
    for rank in range(ranks):
        kinds = {row["cat"] for row in rows if row["pid"] == rank and row["ph"] != "M"}
        assert {"start", "local", "wait", "fuse", "scale"} <= kinds
        assert ranks == 1 or {"remote", "agree", "exchange", "allreduce"} <= kinds


def test_traces_are_drawn_one_below_the_other(tmp_path):
    for name, end in (("on", 5.0), ("off", 9.0)):
        row = {"pid": 0, "name": "local conv", "cat": "local", "tid": 1, "ts": 1.0}
        rows = [row | {"ph": "X", "dur": end, "args": {"backward": False}}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"traceEvents": rows}))
    picture = tmp_path / "both.png"
    traces = tmp_path / "on.json", tmp_path / "off.json"
    done = completed([sys.executable, *map(str, (PICTURE, *traces, "--output", picture))])
    assert done.returncode == 0, done.stderr
    assert skimage.io.imread(picture).size
