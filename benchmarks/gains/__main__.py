"""Keep what was measured, or write it into the pages: ``python -m benchmarks.gains names | keep | docs``.

``names`` are those of the networks, each of which ``make bench-gains`` measures in jobs of its own. ``keep``
takes their runs from ``bench-output/`` into ``benchmarks/history/gains.json``, the only place that pages have
these numbers from.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.gains import store
from benchmarks.gains.networks import NETWORKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gains", description=__doc__)
    parser.add_argument("what", choices=("names", "keep"))
    options = parser.parse_args()
    if options.what == "names":
        print(*NETWORKS)
    else:
        store.keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
