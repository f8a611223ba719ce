"""The page docs/split-functions.md: every function that split tensors know, written from the table itself.

``python docs/functions.py`` writes it; a test compares.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import distdl_rma.layers.split  # noqa: F401 - fills the table
from distdl_rma.layers.split.calls.table import RULES, WITHOUT_RULE, Handler, Rule, name_of

__all__ = ["DOCNAME", "PAGE", "written"]

PAGE = Path(__file__).with_name("split-functions.md")
DOCNAME = "docs/split-functions"
# Groups of the page by the kind of a rule, or by its kind and the file that has it, which comes first.
GROUPS = {
    "pointwise": ("Elements", "Each rank computes its block, nothing moves."),
    "window/convolutions": ("Convolutions", "Neighbours' elements travel while the rank computes."),
    "window/pooling": ("Pooling", "Neighbours' elements travel while the rank computes, where they can."),
    "window": (
        "Padding, interpolation and windows",
        "Ranks fetch those neighbours' elements that they need.",
    ),
    "norm": ("Norms and normalisation", "A few numbers for each channel or group travel."),
    "reduction": ("Reductions and softmax", "Each rank reduces its block, then all ranks their results."),
    "loss": ("Losses", "Each rank computes its terms, and the ranks sum them."),
    "contraction/sequences": ("Attention and recurrent layers", "Samples, heads and queries stay cut."),
    "contraction": ("Linear algebra", "If a summed dimension is cut, ranks sum the results."),
    "contraction/embedding": ("Embedding", "Indices stay cut."),
    "movement/shapes": ("Shapes", "Blocks are relabelled where that is exact, and move where it is not."),
    "movement/indexing": ("Indexing", "Each rank takes its part."),
    "movement/writing": ("Writing into parts", "Each rank writes into its block."),
    "movement": (
        "Joining, splitting and rearranging",
        "Blocks stay where that is exact, and move where it is not.",
    ),
    "movement/along": ("Sorting, running results, Fourier transforms", "Along dimensions that become whole."),
    "movement/operands": ("Counting", "Every rank computes the same from the whole tensor."),
    "random": ("Random numbers", "An element does not depend on the grid."),
    "creation": ("New tensors", "Tensors of a requested size."),
    "query": ("Questions", "Answered of the whole tensor."),
    "gradient": ("Gradients and hooks", "Gradients are cut as their tensors are."),
    "value": ("Values", "Of tensors that every rank has all of."),
    "copies": ("Others", "Of tensors that every rank has all of."),
    "refused": ("Refused", "All ranks raise `UnsupportedError`."),
}
# Functions of operators that have another name.
OPERATORS = {
    "and": "bitwise_and",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "mod": "remainder",
    "floordiv": "floor_divide",
    "or": "bitwise_or",
    "rshift": "bitwise_right_shift",
    "truediv": "true_divide",
    "xor": "bitwise_xor",
}
HEAD = """# What split tensors do with each function of torch

Written by `docs/functions.py` from the table of rules (`distdl_rma.layers.split.calls.table`). The guide to
split tensors is [convert.md](convert.md).

- A function that is not listed raises an error if a tensor is cut, unless `distdl_rma.register(function,
  handler)` adds a rule. On replicated tensors every function of torch is allowed.
- `add` stands for `add_` and the operator `+` too, and a function for its namesake in `torch.special`.
- *Becomes whole*: if the dimension is cut, another dimension is cut instead, or every rank gets the whole
  tensor.
"""


def written() -> str:
    """The page, as it should be."""
    groups: dict[str, dict[str, set[str]]] = {group: {} for group in GROUPS}
    for function, rule in RULES.items():
        if function is not WITHOUT_RULE:
            name = _short(name_of(function))
            texts = groups[_group(rule, name)]
            texts.setdefault(rule.doc or _first(rule.handler), set()).add(name)
    parts = [HEAD]
    for group, (title, text) in GROUPS.items():
        if not groups[group]:
            continue
        parts.append(f"## {title}\n\n{text}\n")
        for row, names in sorted(groups[group].items(), key=lambda each: sorted(each[1])[0]):
            parts.append(_filled(f"**{row}** {_shown(names)}".replace("``", "`")))
        parts.append("")
    return "\n".join(parts)


def _group(rule: Rule, name: str) -> str:
    # Pools share a file with other windows.
    file = "pooling" if "pool" in name else rule.handler.__module__.rpartition(".")[2]
    near = f"{rule.kind}/{file}"
    return near if near in GROUPS else rule.kind


def _short(name: str) -> str:
    # One name for a function and its method.
    name = re.sub(r"^torch\._C\._(special|linalg|fft)\.(special|linalg|fft)_", r"torch.\1.", name)
    last = name.rpartition(".")[2]
    home = re.sub(r"^torch\.((nn\.)?functional\.|_linalg_utils\.)?|^Tensor\.", "", name)
    return last if last.startswith("__") else home


def _shown(names: set[str]) -> str:
    # Names by their module, those of torch itself first. A form in place, an operator, or a function of
    # torch.special is left out if its plain form is there.
    homes: dict[str, list[str]] = {}
    for name in sorted(names):
        if not any(plain in names for plain in _plain_forms(name)):
            home, last = re.fullmatch(r"(_foreach_|(?:\w+\.)*)(\w+)", name).groups()  # type: ignore[union-attr]
            homes.setdefault(home, []).append(f"`{last}`")
    shown = [", ".join(homes.pop("", []))]
    shown += [f"`{home.removesuffix('.')}`: {', '.join(lasts)}" for home, lasts in homes.items()]
    return "; ".join(each for each in shown if each)


def _plain_forms(name: str) -> Iterator[str]:
    # Names of functions of torch that do the same: of add_, special.exp2, __radd__ and __and__.
    yield from {re.sub(r"(?<=[^_])_$", "", name), name.removeprefix("special.")} - {name}
    if operator := re.fullmatch(r"__([ir]?)(\w+)__", name):
        for base in (operator[2], operator[1] + operator[2]):
            yield from {base, OPERATORS.get(base, base), f"__{base}__"} - {name}


def _first(handler: Handler) -> str:
    # What a handler says of itself, without code that only its reader wants.
    paragraphs = inspect.cleandoc(handler.__doc__ or "").split("\n\n")
    return " ".join(paragraphs[0].split())


def _filled(text: str) -> str:
    # An item of a list.
    indents = {"initial_indent": "- ", "subsequent_indent": "  "}
    return textwrap.fill(text, 140, **indents, break_long_words=False, break_on_hyphens=False)  # type: ignore[arg-type]


if __name__ == "__main__":
    PAGE.write_text(written())
