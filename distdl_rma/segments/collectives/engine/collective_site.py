"""Where a collective is carried out: on whose memory, among which ranks, under which name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distdl_rma.segments.collectives.engine.node_layout import NodeLayout
from distdl_rma.segments.manager import SegmentManager


class CollectiveSite(NamedTuple):
    """What every collective is made with; the name is for messages, alike on all ranks."""

    manager: SegmentManager
    layout: NodeLayout
    name: str

    @classmethod
    def checked(cls, manager: SegmentManager, ranks: Sequence[int], name: str) -> CollectiveSite:
        """Of arguments given by a caller; ``PartitionError`` as :meth:`NodeLayout.checked`."""
        layout = NodeLayout.checked(ranks, manager.segment.direct_nodes, manager.rank, name)
        return cls(manager, layout, name)
