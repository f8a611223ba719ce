"""The page docs/models.md, which keeps what was found of each public model."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch

from tests.zoo.zoo import Found, models

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
OUTCOMES = ("exact", "refused", "differs", "fails", "fails alone")
CUTS = {"H": "rows", "W": "columns", "N": "samples"}
HEAD = """# Public models that were tried

Written by `python -m tests.zoo`, in an environment with `pip install -e '.[mpich,test,zoo]'`; with names of
packages or models it writes their rows anew. Each model runs a training step on 2 ranks, distributed by
`{{"H": -1}}`, which cuts rows, or by another letter where that stands, and beside it the same model alone.
[`compare`](convert.md#is-it-right) compares outputs of all modules, the loss, all gradients and buffers, in
double precision where nothing else stands, with torch {torch}. Parameters are random, nothing is dropped out.
Most models are smaller than the published ones; `tests/zoo/models.txt` has their arguments. Not tried are
models that draw a number for each element, since alone they draw [others](convert.md#random-numbers), and
detectors, which take lists of images.

- **exact**: all is equal up to rounding. The number is the largest difference, beside the largest element. A
  tensor that a rounding of the inputs changes by more than `compare` allows may differ by four times that.
- **refused**: all ranks raise the error; [what to do](convert.md#what-is-refused-and-what-to-do).
- **differs**: another number than that of the model alone; **fails**: another error than the library's.
- **fails alone**: the model alone raises the error, so that there is nothing to compare with.
"""


def read() -> dict[str, Found]:
    """What the page has of each model, by its path."""
    found, package = {}, ""
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if line.startswith("## "):
            package = line.split()[1]
        elif line.startswith("| `"):
            name, *_, outcome, says = (cell.strip() for cell in line.strip("|").split(" | "))
            found[f"{package}/{name.strip('`')}"] = Found(outcome.strip("*"), says)
    return found


def written(found: Mapping[str, Found]) -> str:
    """The page, with a row for each model of the list that was tried."""
    tables, counts = [], []
    for package, group in groupby(models(), key=lambda model: model.package):
        rows = {model: found[model.path] for model in group if model.path in found}
        counts.append((package, Counter(each.outcome for each in rows.values())))
        tables += [
            f"\n## {package} {_version(package)}\n",
            "| model | inputs | cut | result | |",
            "|---|---|---|---|---|",
        ]
        for model, (outcome, says) in rows.items():
            sign = outcome if outcome == "exact" else f"**{outcome}**"
            cut = CUTS[model.cut] + ", single precision" * (model.precision == "single")
            tables.append(f"| `{model.name}` | {model.shapes} | {cut} | {sign} | {says} |")
    totals = sum((count for _, count in counts), Counter())
    summary = [
        "| package | tried | " + " | ".join(OUTCOMES) + " |",
        "|---|---:" + "|---:" * len(OUTCOMES) + "|",
    ]
    for package, count in [*counts, ("together", totals)]:
        numbers = (str(count[outcome] or "") for outcome in OUTCOMES)
        summary.append(f"| {package} | {count.total()} | {' | '.join(numbers)} |")
    return "\n".join([HEAD.format(torch=torch.__version__.partition("+")[0]), *summary, *tables, ""])


def _version(package: str) -> str:
    # Of a package that is not installed the one that the page has.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return next(
            line.split()[2] for line in PAGE.read_text().splitlines() if line.startswith(f"## {package} ")
        )
