"""One-sided communication, and PyTorch layers whose tensors are split over the ranks of an MPI job.

Importing the package is cheap and starts nothing: names are loaded at their first use. So geometry works
without MPI, and segments work without torch.

Examples in docstrings have ``import numpy as np``, ``import torch``, ``from torch import nn``, ``from
torch.nn import functional as F``, ``from mpi4py import MPI`` and the names of this package and of their own
module. All of two ranks run them; they show what the first one prints.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from distdl_rma import errors
from distdl_rma.errors import ArgumentError as ArgumentError
from distdl_rma.errors import CheckpointError as CheckpointError
from distdl_rma.errors import ClosedError as ClosedError
from distdl_rma.errors import ConfigurationError as ConfigurationError
from distdl_rma.errors import DataError as DataError
from distdl_rma.errors import DistdlError as DistdlError
from distdl_rma.errors import ExchangeTimeout as ExchangeTimeout
from distdl_rma.errors import MismatchError as MismatchError
from distdl_rma.errors import PartitionError as PartitionError
from distdl_rma.errors import PeerFailedError as PeerFailedError
from distdl_rma.errors import ProtocolError as ProtocolError
from distdl_rma.errors import SegmentError as SegmentError
from distdl_rma.errors import ShapeError as ShapeError
from distdl_rma.errors import UnsupportedError as UnsupportedError
from distdl_rma.torch_backend import register_with_torch

if TYPE_CHECKING:
    # The same names as in ``_NAMES``, for editors and type checkers.
    from distdl_rma.geometry.distribution import Distribution as Distribution
    from distdl_rma.geometry.partition import Partition as Partition
    from distdl_rma.jobs.checkpoints.job import Checkpoints as Checkpoints
    from distdl_rma.jobs.checkpoints.load import load_checkpoint as load_checkpoint
    from distdl_rma.jobs.data.dataset import ShardDataset as ShardDataset
    from distdl_rma.jobs.data.loader import ShardLoader as ShardLoader
    from distdl_rma.jobs.data.sinks import create_array as create_array
    from distdl_rma.jobs.data.sinks import write_shards as write_shards
    from distdl_rma.jobs.out_of_core.predict import Predictor as Predictor
    from distdl_rma.jobs.out_of_core.predict import plan_prediction as plan_prediction
    from distdl_rma.jobs.out_of_core.predict import predict as predict
    from distdl_rma.jobs.out_of_core.spill import spill as spill
    from distdl_rma.layers.model.compare import compare as compare
    from distdl_rma.layers.model.compiled import capture as capture
    from distdl_rma.layers.model.distribute import distribute as distribute
    from distdl_rma.layers.model.report import report as report
    from distdl_rma.layers.ops.core.tensors import zero_volume_tensor as zero_volume_tensor
    from distdl_rma.layers.sources.opening import open_array as open_array
    from distdl_rma.layers.sources.reading import Sink as Sink
    from distdl_rma.layers.sources.reading import Source as Source
    from distdl_rma.layers.split import SplitTensor as SplitTensor
    from distdl_rma.layers.split.functions.user_rules import register as register
    from distdl_rma.layers.split.shard import shard as shard
    from distdl_rma.layers.state import gather_state_dict as gather_state_dict
    from distdl_rma.layers.state import load_global_state_dict as load_global_state_dict
    from distdl_rma.layers.state import whole_parameters as whole_parameters
    from distdl_rma.layers.sync import DistributedGradScaler as DistributedGradScaler
    from distdl_rma.layers.sync import GradientSync as GradientSync
    from distdl_rma.segments.machine import Machine as Machine
    from distdl_rma.segments.machine import MPIPartition as MPIPartition
    from distdl_rma.segments.machine import print0 as print0
    from distdl_rma.segments.virtual_ranks.rehearse import rehearse as rehearse

__version__ = "0.1.0"

# Public names by their module, which is loaded at the first use of one.
_NAMES = {
    "geometry.distribution": "Distribution",
    "geometry.partition": "Partition",
    "jobs.checkpoints.job": "Checkpoints",
    "jobs.checkpoints.load": "load_checkpoint",
    "jobs.data.dataset": "ShardDataset",
    "jobs.data.loader": "ShardLoader",
    "jobs.data.sinks": "create_array write_shards",
    "jobs.out_of_core.predict": "Predictor plan_prediction predict",
    "jobs.out_of_core.spill": "spill",
    "layers.model.compare": "compare",
    "layers.model.compiled": "capture",
    "layers.model.distribute": "distribute",
    "layers.model.report": "report",
    "layers.ops.core.tensors": "zero_volume_tensor",
    "layers.sources.opening": "open_array",
    "layers.sources.reading": "Sink Source",
    "layers.split": "SplitTensor",
    "layers.split.functions.user_rules": "register",
    "layers.split.shard": "shard",
    "layers.state": "gather_state_dict load_global_state_dict whole_parameters",
    "layers.sync": "DistributedGradScaler GradientSync",
    "segments.machine": "MPIPartition Machine print0",
    "segments.virtual_ranks.rehearse": "rehearse",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__"]
__all__ += errors.__all__
__all__ += list(_HOMES)


# A process that multiprocessing starts in a job, as a worker of a DataLoader, is no rank: starting MPI there
# would end the job. It has no parent yet while it runs the script for functions and classes.
_process = sys.modules.get("multiprocessing.process")
if (
    _process is not None
    and (_process.parent_process() is not None or hasattr(_process.current_process(), "_inheriting"))
    and any(key.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD_")) for key in os.environ)
):
    os.environ.setdefault("MPI4PY_RC_INITIALIZE", "0")

# Makes init_process_group("rma") known to torch, if torch is installed.
register_with_torch()


def __getattr__(name: str) -> Any:
    # opt_einsum looks these up in the package of a tensor's class; its functions for torch are right.
    if name in ("einsum", "tensordot", "transpose") and "opt_einsum.backends.torch" in sys.modules:
        return getattr(sys.modules["opt_einsum.backends.torch"], name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOMES[name]}")
    except AttributeError as error:
        # Python would say that the name is missing, in place of what is: often something of this torch.
        raise ImportError(f"cannot import {name!r} from {__name__!r}: {error}") from error
    return getattr(home, name)


def __dir__() -> list[str]:
    # Public names: the others serve this file.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
