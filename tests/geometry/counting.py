"""A split that counts how often it is asked, to tell arithmetic from a walk over all parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdl_rma.geometry.intervals import Split


@dataclass(frozen=True)
class Counting:
    """A split that notes each part it is asked for."""

    base: Split
    asked: list[int] = field(default_factory=list, compare=False)

    @property
    def parts(self):
        return self.base.parts

    @property
    def extent(self):
        return self.base.extent

    def ends(self, part):
        self.asked.append(part)
        return self.base.ends(part)

    def interval(self, part):
        self.asked.append(part)
        return self.base.interval(part)
