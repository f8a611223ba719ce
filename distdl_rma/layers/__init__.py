"""PyTorch layers whose tensors are split over ranks, and models of split tensors.

*What* is computed, and *when* data travels meanwhile; needs torch, ``segments`` and ``geometry``. A tensor
is a block on each rank; operations take blocks with known decompositions, and agree on nothing.

Begin with ``ops/core/operation.py``: an operation gathers what it reads, calls torch, and sums what it
wrote. Two doors lead there. ``partitioned`` has layers with explicit partitions, whose plain tensors agree
on their shapes at each call. ``split`` has tensors that know their layout, and a rule for each function of
torch; ``model`` puts unchanged networks on them. Beside these: ``sync`` sums gradients over ranks,
``state`` gives parameters their global shapes, ``sources`` reads boxes of files, ``checks`` compares what
ranks must have in common, ``dtypes`` and ``arithmetic`` are tensors as bytes, and sums in the type that
torch would take.

The public names are the layers of ``partitioned``. They load at the first use of one: whatever is below
them is imported without them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distdl_rma.layers.partitioned import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name[0].isupper() or name == "__all__":
            layers = vars(import_module(f"{__name__}.partitioned"))
            if name == "__all__":
                return sorted(other for other in layers if other[0].isupper())
            if name in layers:
                return layers[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*__getattr__("__all__"), *(name for name in globals() if name.startswith("__"))]
