"""PyTorch layers whose tensors are split over ranks, and models of split tensors.

The public names are layers with explicit partitions. They load at the first use of one: what is below them
in this wing is imported without them.
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
