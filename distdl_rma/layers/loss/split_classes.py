"""Agreement of the ranks that split classes, on how to gather them and that class indices are the same."""

from __future__ import annotations

from zlib import crc32

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import InputFacts, Planner, ShapeAgreement, common_dtype, source_of
from distdl_rma.ops.core.movement import CallSite, Movement
from distdl_rma.ops.core.tensors import as_words, trouble_with
from distdl_rma.ops.loss.class_loss import gather_classes


class _StayHere:
    def void(self) -> None:
        """Class indices do not move."""


class SplitClasses(Planner[Movement | _StayHere]):
    """Gathers plain tensors whose dimension ``dim``, that of the classes, is split; class indices stay.

    A call is collective over the ranks of P_x, and blocking. It raises ``ShapeError`` on all of them if
    something is wrong on one, shards form no grid or differ in type, or class indices differ where they
    must not.
    """

    def __init__(self, site: CallSite, P_x: Partition, dim: int, what: str) -> None:
        self._site, self._P_x, self._dim = CallSite(site.machine, f"{site.name} ({what})"), P_x, dim
        self._agreement = ShapeAgreement(self, P_x.ranks)

    def __call__(self, x: torch.Tensor, problem: str) -> torch.Tensor:
        """Whole classes on the ranks that come first, a tensor without elements on the others."""
        self._agreement.begin(InputFacts.about((x,), None, _digest(x), problem=problem))
        movement, needs = self._agreement.settle()
        return movement(x, needs.input) if isinstance(movement, Movement) else x

    @property
    def site(self) -> CallSite:
        """Where the calls are."""
        return self._site

    def plan(self, facts: dict[int, InputFacts]) -> Movement | _StayHere:
        """What gathers the classes, or nothing for class indices, which are compared."""
        if common_dtype(facts).is_floating_point:
            source, dtype = source_of(self._P_x, facts)
            return gather_classes(self._site, source, self._dim, dtype)
        for rank, fact in facts.items():
            index = self._P_x.index_of(rank)
            first = self._P_x.slab({d: i for d, i in enumerate(index) if d != self._dim}).ranks[0]
            if (fact.shape, fact.call_arguments) != (facts[first].shape, facts[first].call_arguments):
                raise ShapeError(
                    f"ranks {first} and {rank} have different classes of the same elements, and must have the"
                    " same class indices, but they differ"
                )
        return _StayHere()


def _digest(x: torch.Tensor) -> tuple[int, ...]:
    # Tells class indices apart; nothing of scores, which are not meant to be alike.
    if trouble_with(x) or x.is_floating_point():
        return ()
    return (crc32(as_words(x).tobytes()),)
