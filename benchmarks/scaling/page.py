"""The tables of the page on scaling, from constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.results import page
from benchmarks.scaling.cases import CASES
from benchmarks.scaling.forecast import ASSUMED, checks, strong, weak, wires
from benchmarks.scaling.model import Constants, Prediction, call_seconds

COMMAND = "python -m benchmarks.scaling docs"
SHOWN = (1, 2, 8, 64, 512, 4096)


def written(text: str, constants: Constants, of: str) -> str:
    """The page with all its tables."""
    tables = wires_table(constants), calls_table(constants), compute_table(constants)
    parts = {
        "constants": "\n\n".join((of, *tables)),
        "checks": checks_table(constants),
        "strong": forecast_table(constants, weakly=False),
        "weak": forecast_table(constants, weakly=True),
    }
    for name, content in parts.items():
        text = page.rewritten(text, name, COMMAND, content)
    return text


def machine_of(of: Mapping[str, Sequence[str]]) -> str:
    """The kind of machine that all constants were measured on; ``ValueError`` if there are several."""
    (machine,) = {each[-1] for each in of.values()}
    return machine


def said_of(of: Mapping[str, Sequence[str]]) -> str:
    """Of which commits the constants are."""
    found = dict.fromkeys(f"commit {commit}, {day}, {software}" for commit, day, software, _ in of.values())
    return f"Measured on {machine_of(of)}: {'; '.join(found)}."


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def wires_table(constants: Constants) -> str:
    """LogGP of all wires."""
    shown = {**constants.wires, **{name: wire for name, wire in wires(constants).items() if name == ASSUMED}}
    return table(
        ("wire", "o, sender", "o, receiver", "L", "in a collective", "G per MiB"),
        [
            (
                name,
                *(f"{1e6 * t:.2f} us" for t in (wire.o_send, wire.o_receive, wire.L, wire.mpi)),
                f"{2**20 * 1e6 * wire.G:,.0f} us",
            )
            for name, wire in shown.items()
        ],
    )


def calls_table(constants: Constants) -> str:
    """What layers cost above their functions, and how often they are called in a step."""
    found = [call_seconds(case, constants) for case in CASES]
    rows = []
    for kind in found[0]:
        each = f"{1e6 * constants.calls[kind]:,.0f} us" if kind in constants.calls else ""
        cells = (f"{calls[kind][0]}: {1e3 * calls[kind][1]:.2f} ms" for calls in found)
        rows.append((kind, each, *cells))
    total = (f"{1e3 * constants.tiny[case.name]:.2f} ms" for case in CASES)
    heads = "layer", "added by one, there and back", *(f"in a step of the {case.name}" for case in CASES)
    return table(heads, [*rows, ("all", "", *total)])


def compute_table(constants: Constants) -> str:
    """Steps of the networks alone."""
    rows = []
    for case in CASES:
        points = constants.compute[case.name]
        rows += [
            (case.name, f"{n:,}", f"{1e3 * seconds:.2f} ms", f"{1e9 * seconds / n:,.0f} ns")
            for n, seconds in (points[0], points[len(points) // 2], points[-1])
        ]
    return table(("network", "elements of a tile", "step", "per element"), rows)


def checks_table(constants: Constants) -> str:
    """Predicted and measured steps."""
    rows = []
    for check in checks(constants):
        predicted = check.predicted
        rows.append(
            (
                f"{check.case.title}, {check.ranks} ranks, {check.where}",
                *(_ms(part) for part in parts_of(predicted)),
                _ms(predicted.seconds),
                _ms(check.measured),
                f"{predicted.seconds / check.measured:.2f}",
            )
        )
    return table(("step, ms", *PARTS, "predicted", "measured", "ratio"), rows)


PARTS = "compute", "calls", "halos", "norms", "gradients"


def parts_of(predicted: Prediction) -> tuple[float, ...]:
    """Seconds of a prediction in the order of ``PARTS``."""
    return predicted.compute, predicted.calls, predicted.halos, predicted.norms, predicted.gradients


def forecast_table(constants: Constants, weakly: bool) -> str:
    """Seconds of steps on up to thousands of ranks, and how well they use them."""
    ahead, rows = weak if weakly else strong, []
    for case in CASES:
        for name, wire in wires(constants).items():
            alone = ahead(case, constants, wire, 1).seconds
            steps = {size: ahead(case, constants, wire, size).seconds for size in SHOWN}
            cells = (
                f"{_ms(seconds)}, {100 * alone / seconds / (1 if weakly else size):.0f} %"
                for size, seconds in steps.items()
            )
            rows.append((f"{case.name}, {name}", *cells))
    return table(("ms per step, efficiency", *(f"{size:,}" for size in SHOWN)), rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
