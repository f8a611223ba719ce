"""One-sided communication, and PyTorch layers whose tensors are split over the ranks of an MPI job.

Importing the package is cheap and starts nothing: its names are loaded when they are first used, so that
geometry works without MPI and segments without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distdl_rma.errors import (
        ArgumentError,
        ClosedError,
        ConfigurationError,
        DistdlError,
        ExchangeTimeout,
        MismatchError,
        PartitionError,
        PeerFailedError,
        ProtocolError,
        SegmentError,
        ShapeError,
        UnsupportedError,
    )
    from distdl_rma.geometry.distribution import Distribution
    from distdl_rma.geometry.partition import Partition
    from distdl_rma.machine import Machine, MPIPartition
    from distdl_rma.ops.tensors import zero_volume_tensor
    from distdl_rma.state import gather_state_dict, load_global_state_dict, whole_parameters
    from distdl_rma.sync import DistributedGradScaler, GradientSync

__version__ = "0.1.0"

_HOMES = {
    "errors": (
        "ArgumentError",
        "ClosedError",
        "ConfigurationError",
        "DistdlError",
        "ExchangeTimeout",
        "MismatchError",
        "PartitionError",
        "PeerFailedError",
        "ProtocolError",
        "SegmentError",
        "ShapeError",
        "UnsupportedError",
    ),
    "geometry.distribution": ("Distribution",),
    "geometry.partition": ("Partition",),
    "ops.tensors": ("zero_volume_tensor",),
    "machine": ("Machine", "MPIPartition"),
    "state": ("gather_state_dict", "load_global_state_dict", "whole_parameters"),
    "sync": ("DistributedGradScaler", "GradientSync"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ArgumentError",
    "ClosedError",
    "ConfigurationError",
    "DistdlError",
    "DistributedGradScaler",
    "Distribution",
    "ExchangeTimeout",
    "GradientSync",
    "MPIPartition",
    "Machine",
    "MismatchError",
    "Partition",
    "PartitionError",
    "PeerFailedError",
    "ProtocolError",
    "SegmentError",
    "ShapeError",
    "UnsupportedError",
    "__version__",
    "gather_state_dict",
    "load_global_state_dict",
    "whole_parameters",
    "zero_volume_tensor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
