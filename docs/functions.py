"""The page docs/split-functions.md: every function that split tensors know, written from the table itself.

``python docs/functions.py`` writes it; a test compares.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import distdl_rma.split  # noqa: F401 - fills the table
from distdl_rma.split.calls.table import RULES, WITHOUT_RULE, Handler, name_of

__all__ = ["PAGE", "written"]

PAGE = Path(__file__).with_name("split-functions.md")
KINDS = {
    "pointwise": "Elements: each rank computes its block, nothing moves",
    "window": "Windows: neighbours' elements travel, hidden behind local compute where they can be",
    "norm": "Norms: statistics of the whole, a few numbers for each channel or group travel",
    "reduction": "Reductions: each rank reduces its block, then all ranks their results",
    "loss": "Losses",
    "movement": "Shapes and places: blocks are relabelled where that is exact, and move where it is not",
    "contraction": "Products",
    "random": "Random numbers",
    "creation": "New tensors",
    "query": "Questions: answered of the whole tensor",
    "gradient": "Gradients and hooks",
    "value": "Values",
    "copies": "Others, of tensors that every rank has all of",
    "refused": "Refused",
}
HEAD = """# What split tensors do with each function of torch

Written by `docs/functions.py` from the table in use (`distdl_rma.split.calls.table`). A function that is not
here is refused where a tensor is cut, with its name, the module and your line; of tensors that every rank has
all of, every function of torch is allowed. `distdl_rma.register(function, handler)` adds one. In-place forms
(`add_`) follow the same rules as the function without the underscore. How to convert a model:
[convert.md](convert.md).
"""


def written() -> str:
    """The page, as it should be."""
    groups: dict[str, dict[str, set[str]]] = {kind: {} for kind in KINDS}
    for function, rule in RULES.items():
        if function is not WITHOUT_RULE:
            names = groups[rule.kind].setdefault(rule.says or _first(rule.handler), set())
            names.add(_short(name_of(function)))
    parts = [HEAD]
    for kind, title in KINDS.items():
        if not groups[kind]:
            continue
        parts.append(f"## {title}\n")
        for text, names in sorted(groups[kind].items(), key=lambda each: sorted(each[1])[0]):
            shown = ", ".join(f"`{name}`" for name in sorted(names))
            parts.append(f"{textwrap.fill(text, 110)}\n\n{_filled(shown)}\n")
    return "\n".join(parts)


def _short(name: str) -> str:
    # One name for a function, its method, its operator and its in-place form.
    name = re.sub(r"^torch\._C\._(special|linalg|fft)\.(special|linalg|fft)_", r"torch.\1.", name)
    last = name.rpartition(".")[2]
    home = re.sub(r"^torch\.(nn\.functional\.)?|^Tensor\.", "", name)
    if last.startswith("__"):
        return last
    return home[:-1] if home.endswith("_") else home


def _first(handler: Handler) -> str:
    # What a handler says of itself, without code that only its reader wants.
    paragraphs = inspect.cleandoc(handler.__doc__ or "").split("\n\n")
    return " ".join(paragraphs[0].split())


def _filled(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(written())
