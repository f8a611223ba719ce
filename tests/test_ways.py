"""The ways that docs/ways.py shows are those that docs/architecture.md describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distdl_rma import Machine
from ways import entered, ways

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2)]
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def test_layers_and_split_tensors_go_the_ways_of_the_page(P_world):
    found = ways(P_world)
    rooms = {name: {file.rpartition("/")[0] for file in way} for name, way in found.items()}
    for name in found:
        assert {"layers/ops/conv", "segments"} <= rooms[name], name
    assert "layers/partitioned/core" in rooms["a layer"] and "layers/split" not in rooms["a layer"]
    assert "segments/consensus.py" in found["a layer"]
    assert "layers/partitioned/core" not in rooms["a split tensor"]
    way = [*found["a split tensor"]]
    assert way.index("layers/model/entering.py") < way.index("layers/split/functions/convolutions.py")
    for name in ("the backward of a layer", "the backward of a split tensor"):
        assert {"layers/sync/gradients.py", "layers/sync/bucket.py"} <= found[name].keys()
        assert not {"segments/plan_cache.py", "layers/partitioned/core/agreement.py"} & found[name].keys()


def test_a_notification_goes_the_way_of_the_page(P_world, comm):
    buffer = Machine.of(P_world).segments.get_segment_buffer(8, 1, "way")
    remote = buffer.exchange({(comm.rank + 1) % comm.size: (), (comm.rank - 1) % comm.size: ()}, "way")
    sent, _ = entered(lambda: remote[(comm.rank + 1) % comm.size].notify(0))
    comm.Barrier()
    received, _ = entered(buffer.notify_waitsome)
    assert sent.keys() == {"segments/memory/remote_buffer.py"}
    assert received.keys() == {"segments/memory/buffer.py"}
    section = PAGE.read_text().split("\n## A notification's way\n")[1].split("\n## ")[0]
    assert sent.keys() | received.keys() <= set(re.findall(r"`((?:\w+/)*\w+\.py)`", section))
