"""The page docs/models.md, which keeps what was found of each public model."""

from __future__ import annotations

import importlib.metadata
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch

from tests.zoo.zoo import Found, Tried, models

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
OUTCOMES = ("exact", "refused", "differs", "fails", "fails alone")
CUTS = {"H": "rows", "W": "columns", "N": "samples"}
WIDTH = 139
HEAD = """# Public models that were tried

<!-- search: supported models, transformers, hugging face, monai, timm, torchvision, diffusers -->

Written by `python -m tests.zoo`, in an environment with `pip install -e '.[mpich,test,zoo]'`; names of
packages or models choose rows. Each model runs a training step on 2 ranks, beside the same model alone,
with torch {torch}. [`compare`](convert.md#is-it-right) compares outputs of all modules, the loss, all
gradients and buffers. Rows are cut (`{{"H": -1}}`), and precision is double, where nothing else stands.
Parameters are random, nothing is dropped out. Most models are smaller than the published ones;
`tests/zoo/models.txt` has their arguments and inputs. Not tried are models that draw a number for each
element, since alone they draw [others](convert.md#random-numbers), and detectors, which take lists of
images.

- **exact**: all is equal up to rounding. A number is the largest difference, beside the largest element. A
  tensor that a rounding of the inputs changes by more than `compare` allows may differ by four times that.
- **refused**: all ranks raise the error; [what to do](convert.md#what-is-refused-and-what-to-do).
  **differs**: another number than that of the model alone; **fails**: another error than the library's;
  **fails alone**: the model alone raises the error.
"""


def read() -> dict[str, Found]:
    """What the page has of each model, by its path."""
    found, package = {}, ""
    for paragraph in PAGE.read_text().split("\n\n") if PAGE.exists() else ():
        if begin := re.match(r"\*\*(\S+) \S+\*\*", paragraph):
            package = begin[1]
        if ", exact by " in paragraph.partition(": ")[0]:
            for item in paragraph.replace("\n", " ").rstrip(". ").split("; "):
                name, says = re.search(r"`([^`]+)`: (\S+)$", item).groups()
                found[f"{package}/{name}"] = Found("exact", says)
        for line in paragraph.splitlines():
            if line.startswith("| `"):
                name, *_, outcome, says = (cell.strip() for cell in line.strip("|").split(" | "))
                found[f"{package}/{name.strip('`')}"] = Found(outcome.strip("*"), says)
    return {model.path: found[model.path] for model in models() if model.path in found}


def written(found: Mapping[str, Found]) -> str:
    """The page, with a row for each model of the list that was tried."""
    tables, counts = [], []
    for package, group in groupby(models(), key=lambda model: model.package):
        rows = {model: found[model.path] for model in group if model.path in found}
        counts.append((package, Counter(each.outcome for each in rows.values())))
        title = f"**{package} {_version(package)}**"
        tables += [*_exact(title, rows), *_others(title, rows)]
    counts.append(("together", sum((count for _, count in counts), Counter())))
    tried = "; ".join(
        f"{package}: {', '.join(f'{count[each]} {each}' for each in OUTCOMES if count[each])}"
        for package, count in counts
    )
    summary = textwrap.fill(f"{tried}.", WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([HEAD.format(torch=torch.__version__.partition("+")[0]), summary, *tables, ""])


def _exact(title: str, rows: Mapping[Tried, Found]) -> Iterator[str]:
    # A paragraph for each way in which the models are cut.
    items = defaultdict(list)
    for model, (outcome, says) in rows.items():
        if outcome == "exact":
            items[_cut(model)].append(f"`{model.name}`: {says}")
    for cut, each in items.items():
        text = f"{title}, exact by {cut}: {'; '.join(each)}."
        yield "\n" + textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _others(title: str, rows: Mapping[Tried, Found]) -> Iterator[str]:
    others = {model: found for model, found in rows.items() if found.outcome != "exact"}
    if others:
        yield f"\n{title}, others:\n\n| model | inputs | cut | result | |\n|---|---|---|---|---|"
    for model, (outcome, says) in others.items():
        yield f"| `{model.name}` | {model.shapes} | {_cut(model)} | **{outcome}** | {says} |"


def _cut(model: Tried) -> str:
    return CUTS[model.cut] + ", single precision" * (model.precision == "single")


def _version(package: str) -> str:
    # Of a package that is not installed the one that the page has.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return next(
            line.split()[1].rstrip("*,")
            for line in PAGE.read_text().splitlines()
            if line.startswith(f"**{package} ")
        )
