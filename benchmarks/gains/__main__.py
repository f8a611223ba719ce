"""Keep what was measured, or write it into the pages: ``python -m benchmarks.gains names | keep | docs``.

``names`` are those of the networks, each of which ``make bench-gains`` measures in jobs of its own. ``keep``
takes their runs from ``bench-output/`` into ``benchmarks/history/gains.json``, the only place that pages have
these numbers from; ``docs`` writes them there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gains import store
from benchmarks.gains.networks import NETWORKS
from benchmarks.results.run import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gains", description=__doc__)
    parser.add_argument("what", choices=("names", "keep", "docs"))
    options = parser.parse_args()
    if options.what == "names":
        print(*NETWORKS)
    elif options.what == "keep":
        store.keep()
    else:
        for path, text in documented().items():
            path.write_text(text)
    return 0


def documented() -> dict[Path, str]:
    """The pages as the kept numbers, and the constants of the model of scaling, have them."""
    from benchmarks.gains import page
    from benchmarks.scaling.model import Constants

    blocks = page.blocks(store.Kept.read(), Constants.read())
    return {
        ROOT / name: page.written((ROOT / name).read_text(), contents) for name, contents in blocks.items()
    }


if __name__ == "__main__":
    sys.exit(main())
