"""What a measurement says."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One line of the result table; in microseconds of the slowest rank, unless ``unit`` says otherwise."""

    what: str
    baseline: str
    ours_us: float
    ours_spread_us: float
    baseline_us: float
    baseline_spread_us: float
    target: float | None
    unit: str = "us"

    @property
    def ratio(self) -> float:
        return self.ours_us / self.baseline_us

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "ratio": round(self.ratio, 3)}
